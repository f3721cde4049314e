"""Records: one file with all that was known about a job, read like a back end.

A record is a zip archive. `record.json` has the Snapshot, the related objects and the moment of
both; `logs/REPLICA` has a line of JSON for each line of output. It may come from somebody else:
nothing is unpacked, sizes are limited, and what it contains is data alone.

Of jobs in clusters records are kept in the state folder when their end is seen, so that a job can
be explained when it is deleted.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import stat
import zipfile
import zlib
from collections import Counter, deque
from contextlib import contextmanager, suppress
from functools import cache
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn, Unpack, cast

from k8sjob.backends.api import JobRef, Launched, LogLine, Snapshot
from k8sjob.backends.local import LocalBackend
from k8sjob.backends.local.state_folder import Store
from k8sjob.contract import EVENT_MARK, __version__
from k8sjob.errors import BackendError, JobTooLarge, K8sJobError
from k8sjob.files import whole_file
from k8sjob.findings import field_path
from k8sjob.kube.gangs import POD_GROUP
from k8sjob.kube.json_text import OversizeError, check_size, parsed
from k8sjob.kube.objects import Object, Pod, moment, odd_name
from k8sjob.targets.field_types import fit
from k8sjob.targets.jobs import excess, job_of, replica_names
from k8sjob.targets.object_types import typed_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime
    from threading import Event

    from k8sjob.backends.api import Backend, LogOptions
    from k8sjob.kube.objects import Json

    Findings = Sequence[Json]
    Judge = Callable[[Backend, Snapshot, Sequence[Json], Callable[[], Findings]], Findings]
    """Gives the findings of a job and its related objects; it may ask for those before."""

SUFFIX: Final = ".k8sjob"
UNSENT: Final = ".unsent"
"""The folder of messages that wait to be sent; no namespace has such a name."""
_FORMAT: Final = 1
_OBJECTS: Final = "record.json"
_MOST_OBJECTS: Final = 1 << 28
"""Bytes of record.json; a job of 10,000 Pods has about a tenth."""
_MOST_OUTPUT: Final = 1 << 30
"""Bytes of one replica's output, as JSON, that are written or read."""
_MOST_LINE: Final = 1 << 24
_MOST_TAIL: Final = 1 << 24
"""Bytes of the last lines of much output; they are in memory while a record is written."""
_KEPT_OUTPUT: Final = 1 << 25
"""Bytes of one replica's output in a record that is kept without being asked for."""
_KEPT_REPLICAS: Final = 32
"""Replicas whose output is in such a record, failed ones first."""
_KEPT_RECORDS: Final = 200
_KEPT_BYTES: Final = 1 << 30
"""Records that are kept, and their total bytes; the oldest are removed."""
_FINDING: Final = {
    **dict.fromkeys(("cause", "message", "next_step", "replica"), str), "replicas": [str]
}  # fmt: skip
"""The shape of a finding; see fit."""
DAMAGE: Final = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def write_record(
    backend: Backend,
    ref: JobRef,
    file: IO[bytes],
    unread: Callable[[str, str], object] = lambda *_: None,
    *,
    brief: bool = False,
    snapshot: Snapshot | None = None,
    earlier: Callable[[JobRef], RecordBackend] | None = None,
    judge: Judge | None = None,
) -> None:
    """Write the record of a job.

    `earlier` opens its record before this one, which may have the output of Pods that are gone.
    `judge` finds what is wrong with the job, for a time when less of it can be seen.
    The file can seek. `unread` is called with a replica and the reason where its output cannot be
    read. A `brief` record has the output of few replicas of a large job, and less of the middle of
    much output.

    Raises:
        BackendError: the job cannot be read.
        OSError: the file cannot be written.
    """
    snapshot = snapshot or backend.snapshot(ref)

    @cache  # opened only where output is missing: of a bucket it is a download
    def before() -> RecordBackend | None:
        with suppress(BackendError):
            return earlier and earlier(ref)
        return None

    related = list(backend.related(snapshot))
    objects = {
        "format": _FORMAT,
        "k8sjob": __version__,
        "at": snapshot.now.isoformat(),
        "job": snapshot.job.document,
        "pods": list(snapshot.pods),
        "events": list(snapshot.events),
        "related": related,
    }
    if judge:
        objects["findings"] = judge(
            backend, snapshot, related, lambda: record.findings if (record := before()) else ()
        )
    with suppress(BackendError):
        if isinstance(backend, LocalBackend | RecordBackend):
            launched = backend.launched(ref)
            objects["launched"] = {
                "spec": launched.spec,
                "folder": str(launched.folder),
                "code": dict(launched.code),
                "commit": launched.commit,
            }
    # Checked before it is written: a record that cannot be read back is worth nothing.
    text = json.dumps(objects).encode()
    try:
        check_size(text)
    except OversizeError as error:
        raise JobTooLarge(f"{ref} is too large for a record: {error}") from None
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_OBJECTS, text)
        replicas: Sequence[str] = replica_names(snapshot.job)
        if brief:
            # The cause is in the output of a replica that has failed, so it comes before the limit
            # of replicas.
            failed_pods = (pod for pod in snapshot.pods if Pod(pod).phase == "Failed")
            failed = [snapshot.job.replica_of(pod) for pod in failed_pods]
            if len(replicas) > _KEPT_REPLICAS and (record := before()):
                # What it has may be gone from the cluster: the output of failed Pods.
                failed += record.with_output
            replicas = list(dict.fromkeys([*failed, *replicas]))[:_KEPT_REPLICAS]
        most = _KEPT_OUTPUT if brief else _MOST_OUTPUT
        for replica in replicas:
            # The size is not known before the output has ended; without zip64 4 GiB would be an
            # error.
            with (
                archive.open(f"logs/{replica}", "w", force_zip64=True) as file_in_archive,
                io.BufferedWriter(cast("io.RawIOBase", file_in_archive), 1 << 16) as out,
            ):
                try:
                    # Not by the Pods of the snapshot: at the end of a job its controller removes
                    # them, and a gap in the output is to say so.
                    lines = _or_earlier(backend.logs(ref, replica), before, replica)
                    _write_lines(lines, out, most)
                except BackendError as error:
                    unread(replica, str(error))


def _read(objects: Json) -> tuple[Snapshot, list[Json], list[Json]]:
    """The job, what is related to it, and what was found to be wrong.

    Raises:
        ValueError: a part does not have the form that Kubernetes gives it.
    """
    at = _moment(objects["at"])
    of = job_of(objects["job"]).replica_of
    if len(set(map(of, objects["pods"]))) < len(objects["pods"]):
        raise ValueError("it has several Pods of one replica")
    # The same check as of an apiserver's answers, so whatever was read live can be read back.
    document = _typed(job_of(objects["job"]).target.kind, objects["job"])
    job = job_of(document)
    pods = [_typed("Pod", pod) for pod in objects["pods"]]
    events = [_typed("Event", event) for event in objects["events"]]
    related = [_typed(raw.get("kind"), raw) for raw in objects["related"]]
    judged, wrong = fit({"findings": objects.get("findings") or []}, {"findings": [_FINDING]})
    if wrong:
        raise ValueError(f"{field_path(wrong[0].path)} is not {wrong[0].expected}")
    findings = [{key: finding[key] for key in _FINDING} for finding in judged["findings"]]
    # Names from a record become parts of file names and of commands to paste, as those of a cluster
    # do.
    for raw in (document, *pods, *events, *related):
        if name := odd_name(raw):
            raise ValueError(f"{name} is not a valid name in Kubernetes")
    if problem := excess(job):
        raise ValueError(f"its job {problem}")
    groups = [raw for raw in related if raw.get("kind") == POD_GROUP]
    return Snapshot(job, pods, events, at, groups=groups), related, findings


def _typed(kind: str, raw: Json) -> Json:
    raw, problem = typed_object(kind, raw)
    if problem:
        raise ValueError(f"of its {kind} {Object(raw).name} {problem}")
    return raw


def _write_lines(lines: Iterator[LogLine], out: IO[bytes], most: int) -> None:
    """Write the first and the last lines of an output, and how much is left out between them.

    A program that fails says why at the end. That is also kept where the rest cannot be read.
    """
    tail: deque[tuple[bytes, int]] = deque()
    tail_room = min(most // 2, _MOST_TAIL)
    head_room = most - tail_room
    count, size, middle = 0, 0, None
    try:
        for line in lines:
            row = _row(line)
            if len(row) > _MOST_LINE:
                note = f"a line of {len(line.text)} characters is too long for the record"
                row = _row(line._replace(text=note, gap=True, raw=b""))
            if len(row) <= head_room:
                head_room -= len(row)
                out.write(row)
                continue
            head_room = 0  # a shorter line must not overtake this one
            middle = middle or line
            tail.append((row, len(line.raw or line.text.encode(errors="replace"))))
            tail_room -= len(row)
            while tail_room < 0:
                row, length = tail.popleft()
                tail_room, count, size = tail_room + len(row), count + 1, size + length
    finally:
        if middle and count:
            text = f"{count:,} lines ({size / (1 << 20):,.1f} MiB) of it are not in the record"
            out.write(_row(middle._replace(text=text, gap=True, raw=b"")))
        out.writelines(row for row, _ in tail)


def _or_earlier(
    lines: Iterator[LogLine], before: Callable[[], RecordBackend | None], replica: str
) -> Iterator[LogLine]:
    """The output of a replica; where nothing is left of it, that of the record before."""
    gaps = list[LogLine]()
    for line in lines:
        # One line of real output is enough to take the replica's own output; a mere gap says that
        # the Pod is gone.
        if not line.gap:
            yield from (*gaps, line)
            yield from lines
            return
        gaps.append(line)
    last = None
    with suppress(K8sJobError):  # it may lack this output, or be damaged
        for last in record.logs(JobRef("", ""), replica) if (record := before()) else ():
            yield last
    yield from () if last and last.gap else gaps  # else each record would add them again


def _row(line: LogLine) -> bytes:
    # json.dumps() of the whole makes an encoder for each line, which takes six times as long.
    stamp, text = encode_basestring_ascii(line.timestamp), encode_basestring_ascii(line.text)
    raw = f', "{base64.b64encode(line.raw).decode()}"' if line.raw else ""
    return f"[{line.attempt}, {stamp}, {text}, {'true' if line.gap else 'false'}{raw}]\n".encode()


def _moment(text: str) -> datetime:
    if not (time := moment(text)):
        raise ValueError(f"{text!a} is no time, or has no time zone")
    return time


def _decoded(replica: str, text: bytes) -> LogLine:
    attempt, stamp, shown, gap, raw = [*json.loads(text.decode()), ""][:5]
    _moment(stamp)
    if type(attempt) is not int or not isinstance(shown, str):
        raise ValueError("not a line of a log")
    return LogLine(replica, attempt, stamp, shown, bool(gap), base64.b64decode(raw))


def _rows(replica: str, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines of a replica's output as they are in the record, and where each begins."""
    at = file.tell()
    while text := file.readline(_MOST_LINE + 1):
        if len(text) > _MOST_LINE:
            raise ValueError(f"a line of the output of {replica} has over {_MOST_LINE} bytes")
        yield at, text
        at += len(text)
        if at > _MOST_OUTPUT + _MOST_LINE:
            raise ValueError(f"the output of {replica} has over {_MOST_OUTPUT} bytes")


class Records:
    """The records that are kept in the state folder: records/NAMESPACE/NAME@RUN.k8sjob.

    Raises:
        BackendError: there is no state folder, and it cannot be made.
    """

    def __init__(self, most: int = _KEPT_RECORDS, most_bytes: int = _KEPT_BYTES) -> None:
        self._store = Store()
        self._root = self._store.root / "records"
        self._most, self._most_bytes = most, most_bytes

    def path(self, ref: JobRef) -> Path:
        """The path of a job's record, whether it exists or not."""
        return self._root / ref.namespace / f"{ref.name}@{ref.uid[:8]}{SUFFIX}"

    def open(self, ref: JobRef) -> RecordBackend:
        """The record of a job.

        Raises:
            BackendError: there is none that can be read.
        """
        return RecordBackend(self.path(ref))

    def mark(self, ref: JobRef, word: str) -> bool:
        """Note something about a job; False where it was noted before."""
        try:
            # The file system decides between two collectors that note the same at once.
            self._with_folder(self.path(ref).with_suffix(f".{word}")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def messages(self) -> dict[str, str]:
        """The messages that wait to be sent, by their names."""
        # Drafts of whole_file begin with a dot.
        waiting = sorted((self._root / UNSENT).glob("[!.]*"))
        return {path.name: path.read_text(errors="replace") for path in waiting}

    def keep_message(self, name: str, text: str) -> None:
        """Keep a message that waits to be sent."""
        with whole_file(self._with_folder(self._root / UNSENT / name)) as out:
            out.write(text.encode(errors="replace"))

    def drop_message(self, name: str) -> None:
        """Forget a message."""
        (self._root / UNSENT / name).unlink(missing_ok=True)

    def keep(
        self,
        backend: Backend,
        ref: JobRef,
        snapshot: Snapshot | None = None,
        judge: Judge | None = None,
    ) -> Path:
        """Keep a brief record of a job, as write_record does; older ones give way.

        The namespace that has most gives way first, so that no team removes another's records.
        """
        path = self._with_folder(self.path(ref))
        with whole_file(path) as out:
            write_record(
                backend, ref, out, brief=True, snapshot=snapshot, earlier=self.open, judge=judge
            )
        sizes: dict[Path, int] = {}
        for record in reversed(self.newest()):
            with suppress(FileNotFoundError):
                sizes[record] = record.stat().st_size
        while surplus := self._surplus(sizes, path):
            del sizes[surplus]
            for file in surplus.parent.glob(f"{surplus.stem}.*"):  # and its marks
                file.unlink(missing_ok=True)
        return path

    def _surplus(self, sizes: Mapping[Path, int], new: Path) -> Path | None:
        """The record to remove next, which is never the new one; None while there is room.

        `sizes` has the records with their bytes, the oldest first.
        """
        too_many = len(sizes) > self._most
        if not (too_many or sum(sizes.values()) > self._most_bytes):
            return None
        weights = Counter[Path]()
        for record, size in sizes.items():
            weights[record.parent] += 1 if too_many else size
        most, older = max(weights.values()), [record for record in sizes if record != new]
        heaviest = (record for record in older if weights[record.parent] == most)
        return next(heaviest, next(iter(older), None))

    def _with_folder(self, path: Path) -> Path:
        """The path, once its folder exists, which only this user may read."""
        self._store.make()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def find(self, name: str, namespace: str = "*") -> Path | None:
        """The newest record of a job of that name, in a namespace or in any."""
        return next(iter(self.newest(namespace, name)), None)

    def newest(self, namespace: str = "*", name: str = "*") -> list[Path]:
        """The records of these names, the newest first."""
        records = []
        for path in self._root.glob(f"{namespace}/{name}@*{SUFFIX}"):
            with suppress(FileNotFoundError):
                records.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(records, reverse=True)]


class RecordBackend:
    """The job of a record, as a back end that changes nothing."""

    recorded = True

    def __init__(self, path: Path | str) -> None:
        """Open a record; a subclass has files elsewhere, and another name for them.

        Raises:
            BackendError: it cannot be read, or is no record, or one of another k8sjob.
        """
        self.path = path
        try:
            with self._opened() as archive, archive.open(_OBJECTS) as file:
                text = file.read(_MOST_OBJECTS + 1)
            if len(text) > _MOST_OBJECTS:
                raise ValueError(f"its objects have over {_MOST_OBJECTS} bytes")
            objects = parsed(text)
            if (version := objects["format"]) != _FORMAT:
                raise ValueError(f"it has format {version!r}, and {__version__} reads {_FORMAT}")
            snapshot, self._related, self.findings = _read(objects)
            self._snapshot = snapshot._replace(record=shlex.quote(str(path)))
            self._launched: Launched | None = None
            if (launched := objects.get("launched")) is not None:
                code = {str(name): str(digest) for name, digest in launched["code"].items()}
                spec, folder = str(launched["spec"]), Path(launched["folder"])
                commit = str(launched.get("commit", ""))
                self._launched = Launched(spec, folder, code, commit=commit)
        except DAMAGE as error:
            raise BackendError(self._damage(error)) from error

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        with self._file() as file, zipfile.ZipFile(file) as archive:
            # Python's decompressors of bzip2 and LZMA cannot be bounded through zipfile as deflate
            # can.
            methods = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
            if not methods.issuperset(member.compress_type for member in archive.infolist()):
                raise ValueError("it is not compressed like a record")
            yield archive

    def _file(self) -> IO[bytes]:
        """The file. It may be any: a FIFO or a device would not end."""
        file = open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: PTH123, SIM115 - by its number
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise ValueError("it is not a file")
        return file

    def _damage(self, error: Exception, part: str = "") -> str:
        """The message about a record, or a part of one, that cannot be read."""
        match error:
            case OSError(strerror=str(detail)):
                pass
            case KeyError(args=(str(name),)) if " " not in name:
                detail = f"{name!r} is missing from {_OBJECTS}"
            case TypeError() | AttributeError():
                detail = "it does not have the format of a record"
            case _:
                detail = str(error.args[0] if error.args else error)
        return (
            f"{self.path} cannot be read as a record of a job: {part}{detail}; copy it again, or"
            " write another one with `k8sjob archive NAME`"
        )

    @property
    def with_output(self) -> list[str]:
        """The replicas whose output it has, in their order."""
        with self._opened() as archive:
            names = [name for name in archive.namelist() if archive.getinfo(name).file_size]
        return [name.removeprefix("logs/") for name in names if name.startswith("logs/")]

    def find(self, name: str) -> JobRef:  # noqa: ARG002 - the Protocol's
        """The job that the record is of, whatever its name."""
        return JobRef.of(self._snapshot.job)

    def jobs(self) -> Sequence[Snapshot]:
        """The one job."""
        return [self._snapshot]

    def snapshot(self, ref: JobRef) -> Snapshot:  # noqa: ARG002 - the Protocol's
        """The job when the record was written."""
        return self._snapshot

    def watch(self, ref: JobRef, *, stop: Event | None = None) -> Iterator[Snapshot]:  # noqa: ARG002 - the Protocol's
        """The same, once.

        Raises:
            BackendError: it had not ended then, so there is no end to wait for.
        """
        yield self.snapshot(ref)
        job = self._snapshot.job
        if not job.state()[0].finished:
            raise BackendError(f"{self.path} is the record of a job that had not ended")

    def logs(self, ref: JobRef, replica: str, **how: Unpack[LogOptions]) -> Iterator[LogLine]:  # noqa: ARG002 - the Protocol's
        """The recorded output of a replica; see Backend. K8sJobError where it is damaged."""
        if not how.get("previous"):
            return self._lines(replica, how.get("tail"))
        attempts = sorted({line.attempt for line in self._lines(replica)})
        if len(attempts) < 2:
            raise BackendError(f"{replica} was started only once; omit --previous")
        return (line for line in self._lines(replica) if line.attempt == attempts[-2])

    def reports(self, replica: str) -> Iterator[LogLine]:
        """The lines of a replica that may be reports of the runtime: few of them are decoded."""
        return self._lines(replica, part=EVENT_MARK.encode())

    def _lines(self, replica: str, tail: int | None = None, part: bytes = b"") -> Iterator[LogLine]:
        try:
            with self._opened() as archive:
                if f"logs/{replica}" not in archive.namelist():
                    raise BackendError(f"{self.path} has no output of {replica}")
                # The archive's own lines take ten times as long as those of a buffer.
                source: Any = archive.open(f"logs/{replica}")
                with io.BufferedReader(source, 1 << 20) as file:
                    if tail is not None:  # to find the lines takes a tenth of decoding them
                        begins = deque((at for at, _ in _rows(replica, file)), max(tail, 1))
                        file.seek(begins[0] if begins else 0)
                    for _, text in _rows(replica, file):
                        if part in text:
                            yield _decoded(replica, text)
        except DAMAGE as error:
            # No BackendError: it would pass for output that is not there.
            raise K8sJobError(self._damage(error, f"logs/{replica}: ")) from error

    def launched(self, ref: JobRef) -> Launched:  # noqa: ARG002 - the Protocol's
        """The spec, the folder and the code that a job was started from.

        Raises:
            BackendError: it is the record of a job in a cluster.
        """
        if self._launched is None:
            raise BackendError(f"{self.path} does not record what the job was started from")
        return self._launched

    def related(self, snapshot: Snapshot) -> Sequence[Json]:  # noqa: ARG002 - the Protocol's
        """The related objects when the record was written."""
        return self._related

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        """Refuse to change the job of a record."""
        raise BackendError(f"{self.path} is the record of a job, which this command cannot change")

    create = suspend = delete = _refuse
