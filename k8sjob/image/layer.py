"""The code as a layer: the context at /app, k8sjob's runtime at /opt/k8sjob.

Equal files give equal bytes, on any machine and at any time: nothing but names, contents and the
executable bit of the user's files is in it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.contract import RUNTIME_HOME, WORKDIR
from k8sjob.errors import ImageError
from k8sjob.image import tar
from k8sjob.image.archive import Layer, write_layer
from k8sjob.image.content import BLOCK
from k8sjob.image.secrets import Scanner
from k8sjob.rendering.context import runtime_files
from k8sjob.rendering.dockerfile import HOME
from k8sjob.rendering.manifest import IMAGE_UID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k8sjob.image.context import Context, File
    from k8sjob.image.secrets import Finding

__all__ = ["CodeLayer", "pack"]

_OPAQUE: Final = ".wh..wh..opq"
"""In a folder: nothing of it in the layers below is there any more."""
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class CodeLayer(Layer):
    """The code, ready to be sent.

    Attributes:
        findings: contents that look like credentials.
    """

    findings: tuple[Finding, ...]


def pack(
    context: Context,
    *,
    alone: bool = False,
    progress: Callable[[int, int], object] = lambda _packed, _total: None,
) -> CodeLayer:
    """Make the layer.

    Args:
        context: the user's code.
        alone: hide what the layers below have at /app and /opt/k8sjob.
        progress: is called with the bytes of code that are packed, and how many there are.

    Returns:
        The layer, to be closed by the caller.

    Raises:
        ImageError: a file cannot be read or changes meanwhile, or there is no space for the layer.
    """
    findings: list[Finding] = []
    packed = 0

    def note(size: int) -> None:
        nonlocal packed
        packed += size
        progress(packed, context.size)

    members = (
        (member, () if source is None else _blocks(source, member.size, findings, note))
        for member, source in _members(context, alone=alone)
    )
    layer = write_layer(members)
    return CodeLayer(layer.content, layer.diff_id, tuple(findings))


def _members(context: Context, *, alone: bool) -> Iterator[tuple[tar.Member, _Source | None]]:
    """All that stands in the archive, and where its contents are."""
    home, runtime, app = (path.strip("/") for path in (HOME, RUNTIME_HOME, WORKDIR))
    for folder, owner in ((home, IMAGE_UID), (runtime, 0)):
        yield tar.Member(folder.partition("/")[0], "5", 0o755), None
        yield tar.Member(folder, "5", 0o755, owner), None
    if alone:
        yield tar.Member(f"{runtime}/{_OPAQUE}", "0", 0o644), None
    folders = set()
    for name, path in runtime_files():
        folder = name.rpartition("/")[0]
        if folder not in folders:
            folders.add(folder)
            yield tar.Member(f"{runtime}/{folder}", "5", 0o755), None
        source = _Source(name, os.fsencode(path), path.stat(), ours=True)
        yield tar.Member(f"{runtime}/{name}", "0", 0o644, size=source.state.st_size), source
    yield tar.Member(app, "5", 0o755, IMAGE_UID), None
    if alone:
        yield tar.Member(f"{app}/{_OPAQUE}", "0", 0o644), None
    for entry in context.entries:
        yield _member(f"{app}/{entry.name}", entry)


def _member(name: str, entry: File) -> tuple[tar.Member, _Source | None]:
    if entry.is_folder:
        return tar.Member(name, "5", 0o755, IMAGE_UID), None
    if entry.is_link:
        return tar.Member(name, "2", 0o777, IMAGE_UID, link=_target(entry)), None
    mode = 0o755 if entry.state.st_mode & stat.S_IXUSR else 0o644
    source = _Source(entry.name, entry.path, entry.state)
    return tar.Member(name, "0", mode, IMAGE_UID, entry.state.st_size), source


def _target(entry: File) -> str:
    try:
        return os.readlink(entry.path).decode()  # noqa: PTH115 - names are bytes
    except UnicodeDecodeError:
        raise ImageError(
            f"{entry.name}: the link leads to a name that is not UTF-8, which an image needs; make"
            " it anew, or leave it out by .dockerignore"
        ) from None
    except OSError:
        raise _changed(entry.name) from None


@dataclass(frozen=True, slots=True)
class _Source:
    """A file to be copied; ours are not looked through for credentials."""

    name: str
    path: bytes
    state: os.stat_result
    ours: bool = False


def _blocks(
    source: _Source, size: int, findings: list[Finding], note: Callable[[int], object]
) -> Iterator[bytes]:
    """A file that stays as it is meanwhile; what in it looks like a credential is noted."""
    try:
        file = os.open(source.path, _OPEN)
    except OSError as error:
        raise ImageError(
            f"{os.fsdecode(source.path)}: cannot be read: {error.strerror}; make it readable, or"
            " leave it out by .dockerignore"
        ) from None
    scanner = Scanner(source.name)
    left = size
    try:
        while left > 0 and (block := _read(file, min(left, BLOCK), source)):
            left -= len(block)
            if not source.ours:
                scanner.feed(block)
                note(len(block))
            yield block
        after = os.fstat(file)
    finally:
        os.close(file)
    if left or _version(after) != _version(source.state):
        raise _changed(source.name)
    findings += sorted(scanner.findings)


def _read(file: int, size: int, source: _Source) -> bytes:
    try:
        return os.read(file, size)
    except OSError as error:
        raise ImageError(
            f"{os.fsdecode(source.path)}: cannot be read: {error.strerror}; is the disk in order?"
        ) from None


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _changed(name: str) -> ImageError:
    return ImageError(
        f"{name} changed while it was packed; push again when nothing writes to it, or leave it out"
        " by .dockerignore"
    )
