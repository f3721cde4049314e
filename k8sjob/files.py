"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, Final

from k8sjob.environment import cache_folder
from k8sjob.errors import K8sJobError
from k8sjob.temporary import DRAFT, create_draft

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_MOST_VALUES: Final = 200
"""Values of a kind that the cache keeps."""


def own_cache_folder() -> Path | None:
    """The folder for caches, made where it is missing; None: there is none that can be trusted.

    What lies in there is executed or pushed, so a folder that anybody else can write is not used.
    """
    try:
        folder = cache_folder()
        if not folder.is_absolute():  # it might be in a checkout of somebody else's
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError:
        return None
    foreign = info.st_uid != os.geteuid() or not stat.S_ISDIR(info.st_mode)
    return None if foreign or info.st_mode & 0o022 else folder


def leads_out(folder: Path, name: str) -> str | None:
    """The path that a name in a folder means, where `..` or a link leads out of the folder."""
    root, path = os.path.realpath(folder), os.path.realpath(folder / name)
    return path if os.path.commonpath([root, path]) != root else None


@contextmanager
def whole_file(path: Path, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """A file to write, which gets its name once it is complete.

    Args:
        path: its name; an existing file is replaced.
        mode: its permissions, less the umask.

    Raises:
        OSError: it cannot be written.
    """
    draft, file = create_draft(path, mode)
    try:
        with os.fdopen(file, "w+b") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())  # else a file system may keep the new name and lose the content
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def cached_value(name: str, key: str) -> Any:
    """The value that was kept under a name for this key; None: there is none, or it is damaged."""
    folder = own_cache_folder()
    with suppress(OSError, ValueError):
        digest, _, content = (folder / name).read_bytes().partition(b"\n") if folder else (b"",) * 3
        if digest == _digest(name, key, content):
            return json.loads(content)
    return None


def keep_value(name: str, key: str, value: Any) -> None:
    """Keep a value, as JSON, in place of the one of that name, KIND-NAME.json, if possible.

    The oldest of the kind are forgotten. Other processes may keep values at the same time.
    """
    if (folder := own_cache_folder()) is None:
        return
    content = json.dumps(value).encode()
    with suppress(OSError):
        with whole_file(folder / name) as out:
            out.write(_digest(name, key, content) + b"\n" + content)
        values = folder.glob(f"{name.partition('-')[0]}-*.json")
        for oldest in sorted(values, key=lambda path: -path.stat().st_mtime)[_MOST_VALUES:]:
            oldest.unlink(missing_ok=True)


def _digest(name: str, key: str, content: bytes) -> bytes:
    """What a kept value begins with; one that is damaged, or of another key, has another."""
    return hashlib.sha256(f"{name}\n{key}\n".encode() + content).hexdigest().encode()


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, whose content replaces that of `path` once it is complete.

    It lies in `path`, which may be a mount point or have a parent that cannot be written.

    Raises:
        K8sJobError: it cannot be written.
    """
    import shutil  # noqa: PLC0415 - with modules for archives, which other files do not need

    is_new, draft = not path.exists(), path / f"{DRAFT}{os.urandom(6).hex()}"
    untouched = "nothing was changed; "
    try:
        draft.mkdir(parents=True)
        yield draft
        untouched = ""
        for old in path.iterdir():
            if old.is_symlink() or not old.is_dir():
                old.unlink()
            elif old != draft:
                shutil.rmtree(old)
        for new in draft.iterdir():
            new.rename(path / new.name)
    except OSError as error:
        raise K8sJobError(
            f"{path} cannot be written: {error.strerror or error} ({error.filename});"
            f" {untouched}free some space, make the file readable, or use another folder"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # it is complete, or was never there
                path.rmdir()


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts to files of a folder, all of them or none; the folder is made.

    Raises:
        K8sJobError: they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as drafts:
            for name, text in files.items():
                out = drafts.enter_context(whole_file(folder / name, 0o666))
                out.write(text.encode())
                out.flush()
    except OSError as error:
        raise K8sJobError(
            f"{', '.join(files)} cannot be written to {folder}: {error.strerror or error}; nothing"
            " was written; free some space, or use another folder"
        ) from error
