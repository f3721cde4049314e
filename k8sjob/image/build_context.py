"""The files of a build context that go into the image.

Names are walked as bytes, so that the result is the same under any locale.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.errors import ImageError
from k8sjob.rendering.dockerignore import Ignore, dockerignore, own_patterns, private_patterns
from k8sjob.rendering.image_files import COPY_MARK, MADE_HERE, OWN_IGNORE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

LARGEST: Final = 10 << 30
"""Bytes of a context at most: registries take no larger layer, and nodes should not pull one."""
_MUCH: Final = 500_000_000
"""Bytes above which a context gets a warning: code by itself is never this large."""
_SHOWN: Final = 5
OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class File(NamedTuple):
    """A file, a link or a folder of the context; its state is that of lstat when it was found."""

    name: str
    path: bytes
    state: os.stat_result

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return stat.S_ISLNK(self.state.st_mode)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return stat.S_ISDIR(self.state.st_mode)


class Context(NamedTuple):
    """The code that goes into an image.

    Attributes:
        entries: files and links, and the folders that they lie in; sorted, folders first.
        size: bytes of all files.
        private: what was left out because of its name, and could have been meant to go along.
    """

    entries: tuple[File, ...]
    size: int
    private: tuple[str, ...]

    @property
    def files(self) -> int:
        """How many files and links there are."""
        return sum(not entry.is_folder for entry in self.entries)

    @property
    def remark(self) -> str | None:
        """A remark on a context that is too large to be only code, before it is packed."""
        if self.size < _MUCH:
            return None
        return (
            f"{shown_size(self.size)} of code, which the nodes pull again after each change;"
            f" {_advice(self.entries)}"
        )


def read_context(folder: Path) -> Context:
    """Find what goes into the image.

    What the .dockerignore leaves out is not in it (without one: version control, environments and
    caches), nor are files that often hold credentials, unless a pattern with `!` takes them back.

    Raises:
        ImageError: it cannot be read, has a name that no image can hold, or is too large.
    """
    if not folder.is_dir():
        raise ImageError(f"image.context: {folder} is not a folder; specify the one with your code")
    walk = _Walk(folder)
    files = {file.name: file for file in walk.below(os.fsencode(folder), "")}
    packed = [file for file in files.values() if not file.is_folder]
    # Folders without a file in them are left out, as git leaves them out.
    parents = {parent for file in packed for parent in _parents(file.name)}
    size = sum(file.state.st_size for file in packed if not file.is_link)
    if size > LARGEST:
        raise ImageError(
            f"{folder}: {shown_size(size)} is too much for an image (at most"
            f" {shown_size(LARGEST)}); {_advice(packed)}"
        )
    # By the bytes of their UTF-8: a folder comes before what is in it.
    names = sorted([*parents, *(file.name for file in packed)], key=str.encode)
    return Context(tuple(files[name] for name in names), size, tuple(sorted(walk.private)))


def _advice(files: Iterable[File]) -> str:
    """Advice on what to leave out of a large context."""
    contents = [file for file in files if stat.S_ISREG(file.state.st_mode)]
    largest = sorted(contents, key=lambda file: -file.state.st_size)[:_SHOWN]
    shown = ", ".join(f"{file.name} ({shown_size(file.state.st_size)})" for file in largest)
    return f"the largest: {shown}; exclude data in {OWN_IGNORE} and mount it as a volume"


def shown_size(size: float) -> str:
    """Bytes for people: 12 kB, 1.5 GB."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1000
    return f"{size:.3g} GB" if size < 1000 else f"{size:,.0f} GB"


def _parents(name: str) -> Iterator[str]:
    parts = name.split("/")
    return ("/".join(parts[:end]) for end in range(1, len(parts)))


class _Walk:
    """One way through a context."""

    def __init__(self, folder: Path) -> None:
        user_patterns = own_patterns(folder / OWN_IGNORE)
        named = private_patterns()
        self._ignored = Ignore(dockerignore() if user_patterns is None else user_patterns)
        self._private = Ignore(named)
        # The user's own patterns come last, so that a `!` of theirs takes back.
        self._decided = Ignore(f"{named}\n{user_patterns}") if user_patterns else self._private
        self._own = Ignore(user_patterns or "")
        self.private: list[str] = []

    def below(self, folder: bytes, base: str) -> Iterator[File]:
        """All that is kept under a folder, and the folders on the way."""
        for file in _files(folder, base):
            # What `render -d` writes here must not change the digest of the code.
            if base == "" and file.name in MADE_HERE:
                continue
            if file.is_folder:
                if not self._is_hidden(file.name) and not _is_copy(file.path):
                    yield file
                    yield from self.below(file.path, f"{file.name}/")
            elif self._is_kept(file.name) and self._is_content(file):
                yield file

    def _is_hidden(self, name: str) -> bool:
        """Whether a folder is left out with all that is in it."""
        # Noted only where the user's own patterns do not leave it out anyway.
        if self._private(name) and not self._own(name) and self._decided.hides(name):
            self._note(f"{name}/")
            return True
        return self._ignored.hides(name)

    def _is_kept(self, name: str) -> bool:
        if self._private(name) and self._decided(name):
            if not self._own(name):
                self._note(name)
            return False
        return not self._ignored(name)

    def _note(self, name: str) -> None:
        if not name.rstrip("/").endswith(".git"):  # nobody wonders where that is
            self.private.append(name)

    def _is_content(self, file: File) -> bool:
        """Whether an image can hold it; builds pass over what is neither file nor link, too."""
        # What is left are sockets, FIFOs and devices.
        if not (file.is_link or stat.S_ISREG(file.state.st_mode)):
            return False
        try:
            file.name.encode()
        except UnicodeEncodeError:
            raise ImageError(
                f"{file.path!r}: the name is not UTF-8, which an image needs; rename it, or exclude"
                f" it in {OWN_IGNORE}"
            ) from None
        if file.is_link:
            _check_link(file.path)
        return True


def _files(folder: bytes, base: str) -> list[File]:
    """What a folder has in it, kept or not."""
    files = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                # Not by the locale's encoding: under LC_ALL=POSIX a name would be another one, and
                # so the digest.
                name = base + entry.name.decode("utf-8", "surrogateescape")
                files.append(File(name, entry.path, entry.stat(follow_symlinks=False)))
    except OSError as error:
        raise unreadable(error.filename or folder, error) from None
    return files


def _is_copy(folder: bytes) -> bool:
    """Whether `k8sjob render -d` has made the folder: it has the code a second time."""
    return os.path.exists(os.path.join(folder, COPY_MARK.encode()))  # noqa: PTH110, PTH118 - names are bytes


def _check_link(path: bytes) -> None:
    try:
        os.stat(path)  # noqa: PTH116 - names are bytes
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # it may lead somewhere in the image
    except OSError as error:
        raise ImageError(
            f"{os.fsdecode(path)}: the symbolic links form a loop ({error.strerror}); remove one,"
            f" or exclude it in {OWN_IGNORE}"
        ) from None


def unreadable(path: bytes, error: OSError) -> ImageError:
    """The error for a file or a folder of the context."""
    return ImageError(
        f"{os.fsdecode(path)}: cannot be read: {error.strerror}; make it readable, or exclude it"
        f" in {OWN_IGNORE}"
    )
