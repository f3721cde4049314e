"""The state folder: one folder for each job, written so that a reader never sees half a file.

STATE/                      0700
lock                      held while a job is being made
jobs/NAME-UID/
state.json              the job, its pods and events; the supervisor alone writes it
launch.json             how to start each replica; no value of a secret is in it
keeper.json             the process that is responsible for the job
requests/               what other terminals ask of the supervisor, one file each
supervisor.log          why the supervisor failed, if it did
replicas/REPLICA/       work/ (the working folder), logs/ATTEMPT.log, termination-log
volumes/                folders of volumes that live as long as the job
checkpoints/NAME/ID/      kept until removed by hand, or by `k8sjob delete --checkpoints`
records/NAMESPACE/        records of jobs in clusters, see backends/record.py
claims/NAME/              folders of persistent volume claims, kept until removed by hand
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.environment import STATE, state_folder
from k8sjob.errors import BackendError
from k8sjob.files import whole_file
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_RESERVE_BYTES: Final = 256 * 1024
"""Bytes that each job reserves, so that its end can be written to a full disk."""
_KEPT_COPIES: Final = 16 * 1024**2
"""Bytes of unchanged copies of the user's files that an ended job keeps."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_MADE: Final = ("jobs", "checkpoints", "claims")
_SILENT_S: Final = 600.0
"""Seconds without a sign after which a supervisor of another machine is gone."""
SIGN_S: Final = 60.0
"""Seconds between two signs of a supervisor."""


class JobFolder:
    """The folder of one job.

    Attributes:
        path: absolute path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / "state.json"
        self.launch = path / "launch.json"
        self.log = path / "supervisor.log"
        self._keeper = path / "keeper.json"
        self._ballast = path / "ballast"
        self._requests = path / "requests"

    @property
    def name(self) -> str:
        """The job's name."""
        return self.path.name.rpartition("-")[0]

    @property
    def run(self) -> str:
        """The run's id, which distinguishes the runs of one name: part of the job's uid."""
        return self.path.name.rpartition("-")[2]

    def replica(self, name: str) -> Path:
        """The folder of a replica."""
        return self.path / "replicas" / name

    @property
    def is_gone(self) -> bool:
        """Whether it was removed; false where the file system does not tell."""
        try:
            self.path.stat()
        except OSError as error:
            return error.errno == errno.ENOENT
        return False

    def supervisor(self) -> Identity | None:
        """The process that is responsible for the job; None when it has ended, or is not known.

        Also None for one of another machine that has not shown for long that it runs: the machine
        may have ended, or have had another name.
        """
        try:
            keeper = Identity(**read_json(self._keeper))
        except FileNotFoundError:
            return None
        except BackendError:  # its file server is away for a moment
            keeper = _UNKNOWN
        recent = True  # also where the file server is away
        with suppress(OSError):
            recent = time.time() - self._keeper.lstat().st_mtime < _SILENT_S
        return keeper if (keeper.alive if keeper.here else recent) else None

    def record_supervisor(self, pid: int) -> None:
        """Write down that the process `pid` is responsible for the job from now on."""
        write_json(self._keeper, Identity.of(pid)._asdict())

    def show_alive(self) -> None:
        """Show other machines that the supervisor runs; for the supervisor."""
        with suppress(OSError):
            os.utime(self._keeper)

    def make(self) -> None:
        """Make it, with disk space for its end; OSError where there is no room for it."""
        self.path.mkdir(mode=0o700)
        self._requests.mkdir()
        # Zeros that are written, not a hole, so that the disk's space is taken.
        self._ballast.write_bytes(b"\0" * _RESERVE_BYTES)

    def ask(self, verb: str, **details: Any) -> None:
        """Leave a request; it replaces an older one of the same verb.

        Where the disk is full, it takes the space that was reserved for the job's end.

        Raises:
            BackendError: it cannot be written.
        """
        try:
            write_json(self._requests / verb, details)
        except BackendError as error:
            if getattr(error.__cause__, "errno", None) not in _FULL:
                raise
            self.make_room()
            write_json(self._requests / verb, details)

    def asked(self) -> dict[str, dict[str, Any]]:
        """The requests that were left; they are taken out."""
        taken = {}
        for file in sorted(paths_in(self._requests, "[!.]*")):
            with suppress(OSError, BackendError):
                taken[file.name] = read_json(file)
                file.unlink()
        return taken

    def make_room(self) -> None:
        """Free the disk space that was reserved, so that the end can be written."""
        with suppress(OSError):
            self._ballast.unlink()

    def trim(self) -> None:
        """Free the space of a job that has ended: the ballast, and large copies of its files.

        What a replica has written or changed stays, and of the rest the smallest files, which are
        the code that a traceback points to. launch.json is written after the copies are made, so
        what changed later is no copy.
        """
        self.make_room()
        with suppress(OSError):
            for path, stays in self._copies("replicas/*/work"):
                if not stays:
                    path.unlink(missing_ok=True)

    @property
    def work(self) -> Path:
        """The Master's working folder, where its copy of the code is."""
        return self.path / "replicas" / "master-0" / "work"

    def code(self) -> dict[str, str]:
        """The SHA-256 of each file of the code by its name, except what `trim` removes."""
        digests = {}
        for path, stays in self._copies("replicas/master-0/work"):
            if stays and not path.is_symlink():
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                digests[str(path.relative_to(self.work))] = digest
        return digests

    def _copies(self, folders: str) -> Iterator[tuple[Path, bool]]:
        """Each unchanged copy of a file, the smallest first, and whether `trim` lets it stay."""
        copied, total = self.launch.stat().st_mtime_ns, 0
        files = files_in(self.path.glob(folders))
        copies = ((state.st_size, path) for state, path in files if state.st_ctime_ns <= copied)
        for size, path in sorted(copies):
            total += size
            yield path, total <= _KEPT_COPIES

    def remove(self) -> None:
        """Remove the folder: renamed at once, then deleted."""
        # A reader sees the whole folder or none of it, and what a killed process leaves goes later.
        doomed = self.path.with_name(f".gone-{self.path.name}")
        with suppress(FileNotFoundError):
            self.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


class Store:
    """The state folder of this user.

    Attributes:
        root: its absolute path; reading does not make it.

    Raises:
        BackendError: it cannot be read, or belongs to somebody else.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or state_folder()).absolute()
        self._jobs = self.root / "jobs"
        self._folders: dict[Path, JobFolder] = {}  # as listed last: to make hundreds takes a while
        self._open(make=False)

    def make(self) -> None:
        """Make the folder, for this user alone, where it is not there; before anything is written.

        Raises:
            BackendError: it cannot be made, or belongs to somebody else.
        """
        self._open(make=True)

    def _open(self, *, make: bool) -> None:
        try:
            if make:
                # An existing folder keeps its mode: $K8SJOB_STATE may name one that others use.
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
                for name in _MADE:
                    (self.root / name).mkdir(mode=0o700, exist_ok=True)
            # Where others may write into the folder, those below it may be theirs.
            owners = dict[Path, int]()
            for path in (self.root, *(self.root / name for name in (*_MADE, "records"))):
                with suppress(FileNotFoundError):
                    owners[path] = path.stat().st_uid
        except OSError as error:
            raise BackendError(os_error_message("use", self.root, error)) from error
        for path, owner in owners.items():
            if owner != os.getuid():
                # A volume of a Pod belongs to root; by fsGroup its user may write into it.
                writable = path == self.root and os.access(path, os.W_OK | os.X_OK)
                choice = f"a new folder below it, {path}/k8sjob" if writable else "your own folder"
                raise BackendError(
                    f"state folder {path} belongs to user {owner}, not to you ({os.getuid()}); "
                    f"set {STATE} to {choice}"
                )

    def folder(self, name: str, uid: str) -> JobFolder:
        """The folder of the job of that name and uid, whether it exists or not."""
        return JobFolder(self._jobs / f"{name}-{uid[:8]}")

    def folders(self, name: str | None = None) -> list[JobFolder]:
        """The folders of all jobs, or of those of one name, the newest first."""
        dated = []
        for path in self._jobs.glob("[!.]*"):
            folder = self._folders.get(path) or JobFolder(path)
            if (name is None and not folder.name) or name not in (None, folder.name):
                continue
            with suppress(FileNotFoundError):  # removed meanwhile
                # The folder's own time changes with each state that is written into it.
                try:
                    written = folder.launch.stat()
                except FileNotFoundError:
                    written = path.stat()
                dated.append((written.st_mtime_ns, str(path), folder))
        folders = [folder for *_, folder in sorted(dated, reverse=True, key=itemgetter(0, 1))]
        if name is None:
            self._folders = {folder.path: folder for folder in folders}
        return folders

    def checkpoints(self, job: str, identity: str) -> Path:
        """The folder of the checkpoints of a job, and of those that resume it."""
        return self.root / "checkpoints" / job / identity

    def claim(self, name: str) -> Path:
        """The folder in place of a persistent volume claim."""
        return self.root / "claims" / name

    @contextmanager
    def draft(self) -> Iterator[JobFolder]:
        """A folder for a new job, which is no job yet; removed unless it is published."""
        self.make()
        for removed in paths_in(self._jobs, ".gone-*"):  # by a process that was killed meanwhile
            shutil.rmtree(removed, ignore_errors=True)
        try:
            with temporary_folder("job", str(self.root)) as place:
                draft = JobFolder(place / "job")
                draft.make()
                yield draft
        except OSError as error:
            raise BackendError(os_error_message("write", self.root, error)) from error

    def publish(self, draft: JobFolder, name: str, uid: str) -> JobFolder:
        """Make a draft the folder of a job."""
        folder = self.folder(name, uid)
        # In one step: a reader sees a whole job or none.
        draft.path.rename(folder.path)
        return folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other processes that create jobs: a name must not be used twice."""
        self.make()
        try:
            file = os.open(self.root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BackendError(os_error_message("write", self.root / "lock", error)) from error
        with os.fdopen(file):
            # The kernel frees it when the process ends in any way.
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def paths_in(folder: Path, pattern: str) -> list[Path]:
    """The paths in a folder that match; none where a file server is away for a moment."""
    with suppress(OSError):
        return list(folder.glob(pattern))
    return []


def files_in(folders: Iterable[Path]) -> Iterator[tuple[os.stat_result, Path]]:
    """Each file in some folders, without what Python itself writes there."""
    for folder in folders:
        for parent, below, names in os.walk(folder):
            below[:] = [name for name in below if name != "__pycache__"]
            for path in (Path(parent, name) for name in names):
                with suppress(OSError):
                    yield path.lstat(), path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileNotFoundError: there is no such file.
        BackendError: it cannot be read, or is no JSON object.
    """
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BackendError(os_error_message("read", path, error)) from error
    except (ValueError, RecursionError) as error:
        raise BackendError(f"{path} is damaged: {error}") from error
    if not isinstance(body, dict):
        raise BackendError(f"{path} is damaged: not a JSON object")
    return body


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Put a JSON object into a file, whole or not at all, even if the machine loses power.

    Raises:
        BackendError: it cannot be written (the disk is full, the folder is gone).
    """
    try:
        with whole_file(path) as file:
            file.write(json.dumps(body, separators=(",", ":")).encode())
    except OSError as error:
        raise BackendError(os_error_message("write", path, error)) from error


def os_error_message(verb: str, path: Path, error: OSError) -> str:
    """The message for an OSError: what failed, why, and how to fix it."""
    full = error.errno in _FULL
    advice = "free some space there (k8sjob delete)" if full else "check its owner and permissions"
    return f"cannot {verb} {path}: {error.strerror}; {advice}, or set {STATE} to another folder"


# --- processes ------------------------------------------------------------------------------------


class Identity(NamedTuple):
    """One process, on one machine, since one boot: a pid alone is never trusted.

    A pid is reused after its process has ended, means nothing after a reboot, and means another
    process on another machine that shares the home folder. A signal is sent only while all agree.

    Attributes:
        pid: its process id.
        started: when it was started, as the kernel has it.
        boot: which boot of the machine.
        host: which machine.
    """

    pid: int
    started: str
    boot: str
    host: str

    @classmethod
    def of(cls, pid: int) -> Identity:
        """The process that has this pid now, on this machine; ProcessLookupError if none has."""
        started = _started(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, started, _boot_id(), socket.gethostname())

    @property
    def here(self) -> bool:
        """Whether it is (or was) a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether it runs; a process of another machine counts as running."""
        return not self.here or (self.boot == _boot_id() and _started(self.pid) == self.started)

    def kill(self) -> bool:
        """SIGKILL, if it is of this machine, this boot, and the process; whether it was sent."""
        with suppress(ProcessLookupError):
            return self.here and kill_if(self.pid, lambda: self.alive)
        return False


_UNKNOWN: Final = Identity(0, "", "", "an unknown machine")
"""Whoever a file names that cannot be read."""


def kill_if(pid: int, is_meant: Callable[[], bool]) -> bool:
    """SIGKILL for a process, if it is the one that is meant; whether it was sent.

    On Linux the process is held by a descriptor while it is looked at, so that the pid cannot come
    to mean another process between the look and the signal. OSError if it is gone.
    """
    if sys.platform != "linux":
        if meant := is_meant():
            os.kill(pid, signal.SIGKILL)
        return meant
    held = os.pidfd_open(pid)
    try:
        if meant := is_meant():
            signal.pidfd_send_signal(held, signal.SIGKILL)
        return meant
    finally:
        os.close(held)


def _started(pid: int) -> str | None:
    """The start time of a process; None when there is none, or only its zombie."""
    if sys.platform == "linux":
        fields = stat_fields(pid)
        return None if not fields or fields[0] in "ZX" else fields[19]
    answer = _output("/bin/ps", "-o", "stat=,lstart=", "-p", str(pid))
    state, _, started = answer.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()


def stat_fields(pid: int) -> list[str]:
    """The state, parent and so on of a process of Linux; empty when there is none."""
    with suppress(OSError):  # the name in parentheses may hold anything
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _boot_id() -> str:
    if sys.platform == "linux":
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    answer = _output("/usr/sbin/sysctl", "-n", "kern.boottime")
    return answer.partition("}")[0]  # what follows is a date in the local time zone


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
