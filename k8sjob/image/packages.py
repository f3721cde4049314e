"""Unpacked Python packages as a layer at /opt/deps, found by the base's Python behind its own.

Equal packages give equal bytes: what the machine that unpacked them has left in them is taken out.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError
from k8sjob.image.archive import write_layer
from k8sjob.image.content import BLOCK
from k8sjob.image.inventory import HOME
from k8sjob.image.tar import Member

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from k8sjob.image.archive import Layer
    from k8sjob.image.inventory import Inventory

__all__ = ["BIN", "pack_packages"]

BIN: Final = f"{HOME}/bin"
"""Where their commands are."""
_LINK: Final = "zz-k8sjob-deps.pth"
"""In the last of the base's own folders of packages, so that nothing of the base is shadowed."""
_LINK_TEXT: Final = f"import site; site.addsitedir({HOME!r})\n".encode()
_LEFT_OUT: Final = frozenset({"__pycache__", ".lock", "uv_cache.json", "direct_url.json"})
"""What tells of this machine alone."""
_RECORDED: Final = re.compile(
    rb"^[^\n]*/(?:uv_cache|direct_url)\.json,[^\n]*\n|^(bin/[^\n,]*),[^\n]*$", re.MULTILINE
)
_FOREIGN: Final = re.compile(rb"#![^\n]*python[^\n]*\n|#!/bin/sh\n'''exec' [^\n]*\n' '''\n")
"""How a command names the Python that it was unpacked by."""


def pack_packages(folder: Path, inventory: Inventory, *, zstd: bool = False) -> Layer:
    """Make the layer.

    Args:
        folder: in which packages are unpacked, as `pip install --target` does.
        inventory: of the base.
        zstd: compress by it; else by gzip.

    Returns:
        The layer, to be closed by the caller.

    Raises:
        ImageError: there is no space for it, or a file cannot be read.
    """
    return write_layer(_members(folder, inventory), zstd=zstd)


def _members(folder: Path, inventory: Inventory) -> Iterator[tuple[Member, Iterable[bytes]]]:
    home = HOME.strip("/")
    yield Member(home.partition("/")[0], "5", 0o755), ()
    yield Member(home, "5", 0o755), ()
    root = os.fsencode(folder)
    for name, state in _walk(root, b""):
        path = os.path.join(root, name)  # noqa: PTH118 - names are bytes
        place = f"{home}/{_text(name)}"
        mode = 0o755 if state.st_mode & stat.S_IXUSR else 0o644
        if stat.S_ISDIR(state.st_mode):
            yield Member(place, "5", 0o755), ()
        elif name.startswith(b"bin/") and _is_script(path):
            data = _command(_read(path), inventory.python)
            yield Member(place, "0", mode, size=len(data)), (data,)
        elif name.endswith(b".dist-info/RECORD"):
            data = _record(_read(path))
            yield Member(place, "0", mode, size=len(data)), (data,)
        else:
            yield Member(place, "0", mode, size=state.st_size), _blocks(path, state.st_size)
    link = f"{inventory.site}/{_LINK}"
    yield Member(link, "0", 0o644, size=len(_LINK_TEXT)), (_LINK_TEXT,)


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise ImageError(
            f"{name!r}: a package has a name that is not UTF-8, which an image needs; leave it out,"
            " or take --builder buildah"
        ) from None


def _walk(root: bytes, base: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """Folders and files by their relative names, sorted; each folder before what is in it."""
    with os.scandir(os.path.join(root, base)) as entries:  # noqa: PTH118 - names are bytes
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if os.fsdecode(entry.name) in _LEFT_OUT:
            continue
        name = base + entry.name
        yield name, entry.stat()
        if entry.is_dir():
            yield from _walk(root, name + b"/")


def _is_script(path: bytes) -> bool:
    with open(path, "rb") as file:  # noqa: PTH123 - names are bytes
        return file.read(2) == b"#!"


def _command(data: bytes, python: str) -> bytes:
    """A command that is run by the base's Python."""
    found = _FOREIGN.match(data)
    return f"#!{python}\n".encode() + data[found.end() :] if found else data


def _record(data: bytes) -> bytes:
    """The list of a package's files, without those left out and without digests of commands."""
    return _RECORDED.sub(lambda found: found[1] + b",," if found[1] else b"", data)


def _read(path: bytes) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - names are bytes
        return file.read()


def _blocks(path: bytes, size: int) -> Iterator[bytes]:
    with open(path, "rb") as file:  # noqa: PTH123 - names are bytes
        while size > 0 and (block := file.read(min(BLOCK, size))):
            size -= len(block)
            yield block
    if size:
        raise ImageError(f"{os.fsdecode(path)} was changed while it was packed; build again")
