"""The two layers that are put on a base: the job's code, and the packages that it installs.

The code lies at /app and k8sjob's runtime at /opt/k8sjob; packages lie at /opt/deps, found by the
base's Python after its own. Equal files give equal bytes, on any machine and at any time: nothing
but names, contents and the executable bit of files is in a layer.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.contract import RUNTIME_HOME, WORKDIR
from k8sjob.errors import ImageError
from k8sjob.image.layer.archive import Layer, entry, write_layer
from k8sjob.image.layer.context import File
from k8sjob.image.layer.inventory import DEPS_HOME
from k8sjob.image.registry.blobs import BLOCK
from k8sjob.rendering.context import HOME, runtime_files
from k8sjob.rendering.manifest import IMAGE_UID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from k8sjob.image.layer.context import Context
    from k8sjob.image.layer.inventory import Inventory

_OPAQUE: Final = ".wh..wh..opq"
"""In a folder: nothing of it in the layers below is there any more."""
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

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
_SHEBANG: Final = re.compile(rb"#![^\n]*python[^\n]*\n|#!/bin/sh\n'''exec' [^\n]*\n' '''\n")
"""How a command names the Python that it was unpacked by."""

_OVERLAP: Final = 4096
"""Bytes of the previous block that are scanned again: a secret may lie across two blocks."""
_SECRETS: Final = tuple(
    (begin.encode(), what, pattern.encode())  # compiled when it is needed: most pushes need none
    for begin, what, pattern in (
        ("AKIA", "an AWS access key", r"\bAKIA[0-9A-Z]{16}\b"),
        ("aws_secret", "an AWS secret key", r"(?i:aws_secret_access_key)\W{1,6}[\w/+]{40}\b"),
        ("ghp_", "a GitHub token", r"\bghp_[A-Za-z0-9]{36}"),
        ("gho_", "a GitHub token", r"\bgho_[A-Za-z0-9]{36}"),
        ("ghs_", "a GitHub token", r"\bghs_[A-Za-z0-9]{36}"),
        ("github_pat_", "a GitHub token", r"\bgithub_pat_[A-Za-z0-9_]{40,}"),
        ("glpat-", "a GitLab token", r"\bglpat-[A-Za-z0-9_-]{20}"),
        ("hf_", "a Hugging Face token", r"\bhf_[A-Za-z0-9]{34}\b"),
        ("sk-", "an API key", r"\bsk-(?:[a-z]{1,12}[0-9]{0,2}-){0,2}(?=\w*\d)[A-Za-z0-9_]{32,}"),
        ("sk_live_", "a Stripe key", r"\bsk_live_[A-Za-z0-9]{24,}"),
        ("xox", "a Slack token", r"\bxox[abeoprs]-[A-Za-z0-9-]{20,}"),
        ("AIza", "a Google API key", r"\bAIza[A-Za-z0-9_-]{35}"),
        ("npm_", "an npm token", r"\bnpm_[A-Za-z0-9]{36}\b"),
        ("pypi-AgE", "a PyPI token", r"\bpypi-AgE[A-Za-z0-9_-]{50,}"),
        ("dckr_pat_", "a registry token", r"\bdckr_pat_[A-Za-z0-9_-]{20,}"),
        ("AccountKey=", "an Azure storage key", r"\bAccountKey=[A-Za-z0-9+/]{86}=="),
        ("WANDB_API_KEY", "a W&B key", r"\bWANDB_API_KEY\W{1,6}[0-9a-f]{40}\b"),
        ("PRIVATE KEY-----", "a private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
        ("client-key-data", "a client key", r"\bclient-key-data:\s*[A-Za-z0-9+/=]{64}"),
        ('"auth"', "a registry login", r'"auth"\s*:\s*"[A-Za-z0-9+/]{8,}={0,2}"'),
        ("password", "a netrc entry", r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+\S"),
        ("eyJ", "a JSON web token", r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
    )
)
"""Well-known credentials: their literal beginning, which is cheap to look for, and their form."""


class Secret(NamedTuple):
    """Content that looks like a credential; its value is never shown.

    Attributes:
        path: the file, relative to the context.
        line: counted from 1.
        what: which form it has.
    """

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(slots=True)
class SecretScanner:
    """Looks through one file, block by block; one finding for each form and line."""

    path: str
    findings: set[Secret] = field(default_factory=set)
    _before: bytes = b""
    _lines: int = 1

    def feed(self, block: bytes) -> None:
        """Look through the next block."""
        data = self._before + block if self._before else block
        for begin, what, pattern in _SECRETS:
            if begin in data:
                for match in re.finditer(pattern, data):
                    line = self._lines + data.count(b"\n", 0, match.start())
                    self.findings.add(Secret(self.path, line, what))
        self._before = data[-_OVERLAP:]
        self._lines += data.count(b"\n", 0, len(data) - len(self._before))


@dataclass(frozen=True, slots=True)
class CodeLayer(Layer):
    """The code, ready to be uploaded.

    Attributes:
        findings: contents that look like credentials.
    """

    findings: tuple[Secret, ...]


def pack_code(
    context: Context,
    *,
    alone: bool = False,
    progress: Callable[[int, int], object] = lambda _packed, _total: None,
) -> CodeLayer:
    """Make the layer with the code, to be closed by the caller.

    Args:
        context: the user's code.
        alone: hide what the layers below have at /app and /opt/k8sjob.
        progress: is called with the bytes of code that are packed, and how many there are.

    Raises:
        ImageError: a file cannot be read or changes meanwhile, or there is no space for the layer.
    """
    findings: list[Secret] = []
    packed = 0

    def scanned(file: File) -> Iterator[bytes]:
        nonlocal packed
        scanner = SecretScanner(file.name)
        for block in _blocks(file):
            scanner.feed(block)
            packed += len(block)
            progress(packed, context.size)
            yield block
        findings.extend(sorted(scanner.findings))

    def members() -> Iterator[tuple[tarfile.TarInfo, Iterable[bytes]]]:
        yield from _runtime_members(alone=alone)
        app = WORKDIR.strip("/")
        yield _folder(app, IMAGE_UID), ()
        if alone:
            yield entry(f"{app}/{_OPAQUE}", 0o644), ()
        for file in context.entries:
            has_content = stat.S_ISREG(file.state.st_mode)
            yield _member(f"{app}/{file.name}", file), scanned(file) if has_content else ()

    layer = write_layer(members())
    return CodeLayer(layer.content, layer.diff_id, tuple(findings))


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
    return entry(name, 0o755, owner, kind=tarfile.DIRTYPE)


def _member(name: str, file: File, owner: int = IMAGE_UID) -> tarfile.TarInfo:
    if file.is_folder:
        return _folder(name, owner)
    if file.is_link:
        link = entry(name, 0o777, owner, kind=tarfile.SYMTYPE)
        link.linkname = _link_target(file)
        return link
    mode = 0o755 if file.state.st_mode & stat.S_IXUSR else 0o644
    return entry(name, mode, owner, size=file.state.st_size)


def _link_target(file: File) -> str:
    try:
        return os.readlink(file.path).decode()  # noqa: PTH115 - names are bytes
    except UnicodeDecodeError:
        raise ImageError(
            f"{file.name}: the link leads to a name that is not UTF-8, which an image needs;"
            " rename its target, or exclude it by .dockerignore"
        ) from None
    except OSError:
        raise _changed(file) from None


def _blocks(file: File) -> Iterator[bytes]:
    """The content of a file that must not change meanwhile."""
    left = file.state.st_size
    try:
        with open(os.open(file.path, _OPEN_FLAGS), "rb", buffering=0) as opened:  # noqa: PTH123 - a descriptor
            while left > 0 and (block := opened.read(min(left, BLOCK))):
                left -= len(block)
                yield block
            after = os.fstat(opened.fileno())
    except OSError as error:
        raise ImageError(
            f"{os.fsdecode(file.path)}: cannot be read: {error.strerror}; make it readable, or"
            " leave it out by .dockerignore"
        ) from None
    if left or _version(after) != _version(file.state):
        raise _changed(file)


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _changed(file: File) -> ImageError:
    return ImageError(
        f"{file.name} changed while it was packed; push again when nothing writes to it, or leave"
        " it out by .dockerignore"
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
    yield entry(f"{inventory.site}/{_PTH_FILE}", 0o644, size=len(_PTH_TEXT)), (_PTH_TEXT,)


def _installed(folder: bytes, base: str) -> Iterator[File]:
    """Folders and files, sorted by their names; each folder before what is in it."""
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda each: each.name)
    for each in found:
        if os.fsdecode(each.name) in _LEFT_OUT:
            continue
        try:
            name = base + each.name.decode()
        except UnicodeDecodeError:
            raise ImageError(
                f"{each.name!r}: a package has a name that is not UTF-8, which an image needs;"
                " leave it out, or take --builder buildah"
            ) from None
        # uv may be set up to link to the files in its cache
        yield File(name, os.path.realpath(each.path), each.stat())
        if each.is_dir():
            yield from _installed(each.path, f"{name}/")


def _rewritten(file: File, python: str) -> bytes | None:
    """A list of files, or a script for the base's Python; None: the file is packed as it is."""
    if file.name.endswith(".dist-info/RECORD"):
        data = b"".join(_blocks(file))
        return _RECORDED.sub(lambda found: found[1] + b",," if found[1] else b"", data)
    if file.name.startswith("bin/") and next(_blocks(file), b"").startswith(b"#!"):
        data = b"".join(_blocks(file))
        found = _SHEBANG.match(data)
        return f"#!{python}\n".encode() + data[found.end() :] if found else data
    return None
