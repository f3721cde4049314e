"""The state folder: one folder for each job, written so that a reader never sees half a file.

STATE/                      0700
lock                      held while a job is being made
jobs/NAME-UID/
state.json              the job, its pods and events; the supervisor alone writes it
launch.json             how to start each replica; no value of a secret is in it
keeper.json             the process that is responsible for the job
requests/               what other terminals ask of the supervisor, one file each
supervisor.log          what the supervisor had to say, if it failed
replicas/REPLICA/       work/ (the working folder), logs/ATTEMPT.log, termination-log
volumes/                folders of volumes that live as long as the job
checkpoints/NAME/ID/      kept until removed by hand, or by `k8sjob delete --checkpoints`
claims/NAME/              folders of persistent volume claims, kept until removed by hand
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.local.identity import Identity
from k8sjob.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["JobFolder", "Store", "read_json", "trouble", "write_json"]

STATE_ENV: Final = "K8SJOB_STATE"
_BALLAST: Final = 256 * 1024
"""Bytes that each job sets aside, so that its end can be written down on a full disk."""
_KEPT_COPIES: Final = 16 * 1024**2
"""Bytes of unchanged copies of the user's files that an ended job keeps."""
_ABANDONED_S: Final = 24 * 3600.0
"""Nobody works so long on a folder that is out of sight."""


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
        """The run's id, by which the runs of one name are told apart: part of the job's uid."""
        return self.path.name.rpartition("-")[2]

    def replica(self, name: str) -> Path:
        """The folder of a replica."""
        return self.path / "replicas" / name

    def keeper(self) -> Identity | None:
        """The process that is responsible for the job; None when the file is gone or unreadable."""
        try:
            return Identity.from_json(read_json(self._keeper))
        except (BackendError, KeyError, TypeError, ValueError, FileNotFoundError):
            return None

    def keep(self, pid: int) -> None:
        """Write down that the process `pid` is responsible for the job from now on."""
        write_json(self._keeper, Identity.of(pid).to_json())

    def ask(self, verb: str, **details: Any) -> None:
        """Leave a request; a newer one of the same verb takes the older one's place."""
        self._requests.mkdir(exist_ok=True)
        write_json(self._requests / verb, details)

    def asked(self) -> dict[str, dict[str, Any]]:
        """The requests that were left; they are taken out."""
        taken = {}
        for file in sorted(self._requests.glob("[!.]*")):
            with suppress(FileNotFoundError, BackendError):
                taken[file.name] = read_json(file)
                file.unlink()
        return taken

    @property
    def has_ballast(self) -> bool:
        """Whether the disk space that is set aside for the job's end is still there."""
        return self._ballast.exists()

    def make_room(self) -> None:
        """Give back the disk space that was set aside, so that the end can be written down."""
        self._ballast.unlink(missing_ok=True)

    def trim(self) -> None:
        """Give back the space of a job that has ended: the ballast, and large copies of its files.

        What a replica has written or changed stays, and of the rest the smallest files, which are
        the code that a traceback points to. launch.json is written after the copies are made, so
        what changed later is not a mere copy.
        """
        self.make_room()
        left = _KEPT_COPIES
        with suppress(FileNotFoundError):
            copied = self.launch.stat().st_mtime_ns
            for size, path in sorted(_unchanged(self.path.glob("replicas/*/work"), copied)):
                left -= size
                if left < 0:
                    path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Take the folder away: out of sight at once, then its files."""
        doomed = self.path.with_name(f".gone-{self.path.name}")
        with suppress(FileNotFoundError):
            self.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


class Store:
    """The state folder of this user.

    Attributes:
        root: its absolute path; made, for this user alone, when it is not there.

    Raises:
        BackendError: it cannot be made, or belongs to somebody else.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or default_root()).absolute()
        self._jobs = self.root / "jobs"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._jobs.mkdir(mode=0o700, exist_ok=True)
            owner = self.root.stat().st_uid
            if owner == os.getuid():
                self.root.chmod(0o700)
        except OSError as error:
            raise BackendError(trouble("use", self.root, error)) from error
        if owner != os.getuid():
            raise BackendError(
                f"state folder {self.root} belongs to user {owner}, not to you ({os.getuid()}); "
                f"set {STATE_ENV} to a folder of your own"
            )

    def folder(self, name: str, uid: str) -> JobFolder:
        """Where the job of that name and uid lives, there or not."""
        return JobFolder(self._jobs / _folder_name(name, uid))

    def folders(self, name: str | None = None) -> list[JobFolder]:
        """The folders of all jobs, or of those of one name, the newest first."""
        found = []
        for path in self._jobs.glob("[!.]*"):
            folder = JobFolder(path)
            if (name is None and not folder.name) or name not in (None, folder.name):
                continue
            with suppress(FileNotFoundError):  # removed meanwhile
                written = folder.launch if folder.launch.exists() else path
                found.append((written.stat().st_mtime_ns, path))
        return [JobFolder(path) for _, path in sorted(found, reverse=True)]

    def checkpoints(self, job: str, identity: str) -> Path:
        """Where the checkpoints of a job, and of those that resume it, lie."""
        return self.root / "checkpoints" / job / identity

    def claim(self, name: str) -> Path:
        """The folder that stands for a persistent volume claim."""
        return self.root / "claims" / name

    @contextmanager
    def draft(self) -> Iterator[JobFolder]:
        """A folder for a new job, out of sight until it is published; gone if it never is."""
        self._sweep()
        try:
            draft = Path(tempfile.mkdtemp(prefix=".new-", dir=self._jobs))
        except OSError as error:
            raise BackendError(trouble("write", self._jobs, error)) from error
        try:
            (draft / "ballast").write_bytes(b"\0" * _BALLAST)
            yield JobFolder(draft)
        except OSError as error:
            raise BackendError(trouble("write", draft, error)) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what killed processes left half made or half removed, when it is surely theirs."""
        for path in self._jobs.glob(".*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)

    def publish(self, draft: JobFolder, name: str, uid: str) -> JobFolder:
        """Make a draft the folder of a job."""
        folder = self.folder(name, uid)
        draft.path.rename(folder.path)
        return folder

    def remove_checkpoints(self, name: str, identity: str) -> None:
        """Remove checkpoints, unless a job uses them, or may do so, as it cannot be read."""
        try:
            used = {read_json(f.launch).get("checkpoints") for f in self.folders(name)}
        except (FileNotFoundError, BackendError):
            return
        if identity and identity not in used:
            shutil.rmtree(self.checkpoints(name, identity), ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among the processes that make jobs: names must not be taken twice."""
        try:
            file = os.open(self.root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BackendError(trouble("write", self.root / "lock", error)) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _unchanged(works: Iterable[Path], since: int) -> Iterator[tuple[int, Path]]:
    """Size and path of each file in some folders that was not changed since a moment, in ns."""
    for work in works:
        for folder, _, names in os.walk(work):
            for path in (Path(folder, name) for name in names):
                with suppress(OSError):
                    seen = path.lstat()
                    if seen.st_ctime_ns <= since:
                        yield seen.st_size, path


def _folder_name(name: str, uid: str) -> str:
    return f"{name}-{uid[:8]}"


def default_root() -> Path:
    """$K8SJOB_STATE, else $XDG_STATE_HOME/k8sjob, else ~/.local/state/k8sjob."""
    if os.environ.get(STATE_ENV):
        return Path(os.environ[STATE_ENV]).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base) / "k8sjob" if base else Path.home() / ".local" / "state" / "k8sjob"


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
        raise BackendError(trouble("read", path, error)) from error
    except (ValueError, RecursionError) as error:
        raise BackendError(f"{path} is damaged: {error}") from error
    if not isinstance(body, dict):
        raise BackendError(f"{path} is damaged: no JSON object")
    return body


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Put a JSON object into a file, whole or not at all, even if the machine loses power.

    Raises:
        BackendError: it cannot be written (the disk is full, the folder is gone).
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w") as file:
            file.write(json.dumps(body, separators=(",", ":")))
            file.flush()
            os.fsync(file.fileno())  # else a file system may keep the new name and lose the content
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise BackendError(trouble("write", path, error)) from error


def trouble(verb: str, path: Path, error: OSError) -> str:
    """What cannot be done with a path, why, and what to do about it."""
    advice = (
        "free some space there"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "check its owner and permissions"
    )
    return f"cannot {verb} {path}: {error.strerror}; {advice}, or set {STATE_ENV} to another folder"
