"""The two layers that are put on a base, the job's code and the packages that it installs.

The code lies at /app and k8sjob's runtime at /opt/k8sjob; packages lie at /opt/deps, found by the
base's Python after its own. Equal files give equal bytes, on any machine and at any time: nothing
but names, contents and the executable bit of files is in a layer.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections import deque
from typing import TYPE_CHECKING, Final

from k8sjob.contract import DEPS_HOME, RUNTIME_HOME, WORKDIR
from k8sjob.errors import ImageError
from k8sjob.image.build_context import OPEN_FLAGS, File, unreadable
from k8sjob.image.layer_tar import entry, write_layer
from k8sjob.image.registry.blob_content import BLOCK
from k8sjob.image.secrets import SecretScanner
from k8sjob.rendering.image_files import HOME, IMAGE_UID, runtime_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from k8sjob.image.appending import Layer
    from k8sjob.image.build_context import Context
    from k8sjob.image.inventory import Inventory
    from k8sjob.image.secrets import Secret

_OPAQUE: Final = ".wh..wh..opq"
"""In a folder: nothing of it in the layers below is there any more."""
DEPS_BIN: Final = f"{DEPS_HOME}/bin"
"""The commands of installed packages."""
_PTH_FILE: Final = "zz-k8sjob-deps.pth"
"""In the last of the base's own folders of packages, so that nothing of the base is shadowed."""
_PTH_TEXT: Final = f"import site; site.addsitedir({DEPS_HOME!r})\n".encode()
_LEFT_OUT: Final = frozenset({"__pycache__", ".lock", "uv_cache.json", "direct_url.json"})
"""Files about the machine that unpacked the packages."""
_RECORDED: Final = re.compile(
    rb"^[^\n]*/(?:uv_cache|direct_url)\.json,[^\n]*\n|^(bin/[^\n,]*),[^\n]*$", re.MULTILINE
)
_SHEBANG: Final = re.compile(
    rb"#!(?=[^\n]*+\n)[^\n]*python[^\n]*\n|#!/bin/sh\n'''exec' [^\n]*\n' '''\n"
)
"""How a command names the Python that it was unpacked by."""


def pack_code(
    context: Context,
    *,
    alone: bool = False,
    progress: Callable[[int, int], object] = lambda _packed, _total: None,
) -> Layer:
    """Make the layer with the code, to be closed by the caller.

    alone: hide what the layers below have at /app and /opt/k8sjob. `progress` is called with the
    bytes of code that are packed, and how many there are.

    Raises:
        ImageError: a file cannot be read or changes meanwhile, or there is no space for the layer.
    """
    findings: list[Secret] = []
    packed = 0

    def counted(file: File) -> Iterator[bytes]:
        nonlocal packed
        for block in _scanned(file, findings):
            packed += len(block)
            progress(packed, context.size)
            yield block

    def members() -> Iterator[tuple[tarfile.TarInfo, Iterable[bytes]]]:
        yield from _runtime_members(alone=alone)
        app = WORKDIR.strip("/")
        yield _folder(app, IMAGE_UID), ()
        if alone:
            yield entry(f"{app}/{_OPAQUE}", 0o644), ()
        for file in context.entries:
            has_content = stat.S_ISREG(file.state.st_mode)
            yield _member(f"{app}/{file.name}", file), counted(file) if has_content else ()

    return write_layer(members())._replace(findings=tuple(findings))


def find_secrets(context: Context) -> list[Secret]:
    """What looks like a credential in code that is not packed here."""
    findings: list[Secret] = []
    for file in context.entries:
        if stat.S_ISREG(file.state.st_mode):
            deque(_scanned(file, findings), 0)
    return findings


def _scanned(file: File, findings: list[Secret]) -> Iterator[bytes]:
    """The content of a file; at its end what looks like a credential in it is found."""
    scanner = SecretScanner(file.name)
    for block in _blocks(file):
        scanner.feed(block)
        yield block
    findings.extend(scanner.finish())


def _runtime_members(*, alone: bool) -> Iterator[tuple[tarfile.TarInfo, Iterable[bytes]]]:
    """The user's home, and k8sjob's own files, which are not scanned for credentials."""
    home, runtime = HOME.strip("/"), RUNTIME_HOME.strip("/")
    for folder, owner in ((home, IMAGE_UID), (runtime, 0)):
        yield _folder(folder.partition("/")[0]), ()
        yield _folder(folder, owner), ()
    if alone:
        yield entry(f"{runtime}/{_OPAQUE}", 0o644), ()
    folders = set()
    for name, path in runtime_files():
        folder = name.rpartition("/")[0]
        if folder not in folders:
            folders.add(folder)
            yield _folder(f"{runtime}/{folder}"), ()
        file = File(name, os.fsencode(path), path.stat())
        yield entry(f"{runtime}/{name}", 0o644, size=file.state.st_size), _blocks(file)


def _folder(name: str, owner: int = 0) -> tarfile.TarInfo:
    # A user whose number the cluster chooses, as OpenShift does, is in group 0.
    return entry(name, 0o775 if owner else 0o755, owner, kind=tarfile.DIRTYPE)


def _member(name: str, file: File, owner: int = IMAGE_UID) -> tarfile.TarInfo:
    if file.is_folder:
        return _folder(name, owner)
    if file.is_link:
        link = entry(name, 0o777, owner, kind=tarfile.SYMTYPE)
        link.linkname = _link_target(file)
        return link
    # The other bits depend on the umask of whoever has checked the code out.
    mode = 0o755 if file.state.st_mode & stat.S_IXUSR else 0o644
    return entry(name, mode, owner, size=file.state.st_size)


def _link_target(file: File) -> str:
    try:
        return os.readlink(file.path).decode()  # noqa: PTH115 - names are bytes
    except UnicodeDecodeError:
        raise ImageError(
            f"{file.name}: the link leads to a name that is not UTF-8, which an image needs;"
            " rename its target, or exclude it in .dockerignore"
        ) from None
    except OSError:
        raise _changed(file) from None


def _blocks(file: File) -> Iterator[bytes]:
    """The content of a file that must not change meanwhile."""
    remaining = file.state.st_size
    try:
        with open(os.open(file.path, OPEN_FLAGS), "rb", buffering=0) as opened:  # noqa: PTH123 - a descriptor
            while remaining > 0 and (block := opened.read(min(remaining, BLOCK))):
                remaining -= len(block)
                yield block
            # The header with the size is written already, so a file that changes cannot be packed
            # right.
            after = os.fstat(opened.fileno())
    except OSError as error:
        raise unreadable(file.path, error) from None
    if remaining or _version(after) != _version(file.state):
        raise _changed(file)


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _changed(file: File) -> ImageError:
    return ImageError(
        f"{file.name} changed while it was packed; push again when nothing writes to it, or exclude"
        " it in .dockerignore"
    )


def pack_packages(folder: Path, inventory: Inventory, *, zstd: bool = False) -> Layer:
    """Make the layer with packages as `pip install --target` unpacks them; see write_layer."""
    return write_layer(_package_members(folder, inventory), zstd=zstd)


def _package_members(
    folder: Path, inventory: Inventory
) -> Iterator[tuple[tarfile.TarInfo, Iterable[bytes]]]:
    home = DEPS_HOME.strip("/")
    yield _folder(home.partition("/")[0]), ()
    yield _folder(home), ()
    for file in _installed(os.fsencode(folder), ""):
        member = _member(f"{home}/{file.name}", file, 0)
        if file.is_folder:
            yield member, ()
        elif (data := _rewritten(file, inventory.python)) is not None:
            member.size = len(data)
            yield member, (data,)
        else:
            yield member, _blocks(file)
    # A .pth file adds /opt/deps after the base's own packages, in any interpreter of the base.
    yield entry(f"{inventory.site}/{_PTH_FILE}", 0o644, size=len(_PTH_TEXT)), (_PTH_TEXT,)


def _installed(folder: bytes, base: str) -> Iterator[File]:
    """Folders and files, sorted by their names; each folder before what is in it."""
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda file: file.name)
    for file in entries:
        if os.fsdecode(file.name) in _LEFT_OUT:
            continue
        try:
            name = base + file.name.decode()
        except UnicodeDecodeError:
            raise ImageError(
                f"{file.name!r}: a package has a name that is not UTF-8, which an image needs;"
                " leave it out, or use --builder buildah"
            ) from None
        # uv may be set up to link to the files in its cache
        yield File(name, os.path.realpath(file.path), file.stat())
        if file.is_dir():
            yield from _installed(file.path, f"{name}/")


def _rewritten(file: File, python: str) -> bytes | None:
    """A list of files, or a script for the base's Python; None: the file is packed as it is."""
    if file.name.endswith(".dist-info/RECORD"):
        data = b"".join(_blocks(file))
        # RECORD lists files that are left out, and has the hashes of scripts that are rewritten
        # below.
        return _RECORDED.sub(lambda row: row[1] + b",," if row[1] else b"", data)
    # Scripts name the Python of this machine.
    if file.name.startswith("bin/") and next(_blocks(file), b"").startswith(b"#!"):
        data = b"".join(_blocks(file))
        shebang = _SHEBANG.match(data)
        return f"#!{python}\n".encode() + data[shebang.end() :] if shebang else data
    return None
