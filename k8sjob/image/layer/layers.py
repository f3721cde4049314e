"""The two layers that are put on a base: the job's code, and the packages that it installs.

The code lies at /app and k8sjob's runtime at /opt/k8sjob; packages lie at /opt/deps, found by the
base's Python after its own. Equal files give equal bytes, on any machine and at any time: nothing
but names, contents and the executable bit of files is in a layer.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.contract import RUNTIME_HOME, WORKDIR
from k8sjob.errors import ImageError
from k8sjob.image.layer.archive import Layer, Member, write_layer
from k8sjob.image.layer.inventory import DEPS_HOME
from k8sjob.image.registry.blobs import BLOCK
from k8sjob.rendering.context import runtime_files
from k8sjob.rendering.dockerfile import HOME
from k8sjob.rendering.manifest import IMAGE_UID

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from k8sjob.image.layer.context import Context, File
    from k8sjob.image.layer.inventory import Inventory

__all__ = ["DEPS_BIN", "CodeLayer", "Secret", "pack_code", "pack_packages"]

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

    def note(size: int) -> None:
        nonlocal packed
        packed += size
        progress(packed, context.size)

    members = (
        (member, () if source is None else _code_blocks(source, member.size, findings, note))
        for member, source in _code_members(context, alone=alone)
    )
    layer = write_layer(members)
    return CodeLayer(layer.content, layer.diff_id, tuple(findings))


@dataclass(frozen=True, slots=True)
class _Source:
    """A file to be packed; k8sjob's own are not scanned for credentials."""

    name: str
    path: bytes
    state: os.stat_result
    is_own: bool = False


def _code_members(context: Context, *, alone: bool) -> Iterator[tuple[Member, _Source | None]]:
    home, runtime, app = (path.strip("/") for path in (HOME, RUNTIME_HOME, WORKDIR))
    for folder, owner in ((home, IMAGE_UID), (runtime, 0)):
        yield Member(folder.partition("/")[0], "5", 0o755), None
        yield Member(folder, "5", 0o755, owner), None
    if alone:
        yield Member(f"{runtime}/{_OPAQUE}", "0", 0o644), None
    folders = set()
    for name, path in runtime_files():
        folder = name.rpartition("/")[0]
        if folder not in folders:
            folders.add(folder)
            yield Member(f"{runtime}/{folder}", "5", 0o755), None
        source = _Source(name, os.fsencode(path), path.stat(), is_own=True)
        yield Member(f"{runtime}/{name}", "0", 0o644, size=source.state.st_size), source
    yield Member(app, "5", 0o755, IMAGE_UID), None
    if alone:
        yield Member(f"{app}/{_OPAQUE}", "0", 0o644), None
    for entry in context.entries:
        yield _code_member(f"{app}/{entry.name}", entry)


def _code_member(name: str, entry: File) -> tuple[Member, _Source | None]:
    if entry.is_folder:
        return Member(name, "5", 0o755, IMAGE_UID), None
    if entry.is_link:
        return Member(name, "2", 0o777, IMAGE_UID, link=_link_target(entry)), None
    source = _Source(entry.name, entry.path, entry.state)
    return Member(name, "0", _mode(entry.state), IMAGE_UID, entry.state.st_size), source


def _mode(state: os.stat_result) -> int:
    return 0o755 if state.st_mode & stat.S_IXUSR else 0o644


def _link_target(entry: File) -> str:
    try:
        return os.readlink(entry.path).decode()  # noqa: PTH115 - names are bytes
    except UnicodeDecodeError:
        raise ImageError(
            f"{entry.name}: the link leads to a name that is not UTF-8, which an image needs;"
            " rename its target, or exclude it by .dockerignore"
        ) from None
    except OSError:
        raise _changed(entry.name) from None


def _code_blocks(
    source: _Source, size: int, findings: list[Secret], note: Callable[[int], object]
) -> Iterator[bytes]:
    """A file that must not change meanwhile; what looks like a credential is noted."""
    scanner = SecretScanner(source.name)
    left = size
    file = None
    try:
        file = os.open(source.path, _OPEN_FLAGS)
        while left > 0 and (block := os.read(file, min(left, BLOCK))):
            left -= len(block)
            if not source.is_own:
                scanner.feed(block)
                note(len(block))
            yield block
        after = os.fstat(file)
    except OSError as error:
        raise ImageError(
            f"{os.fsdecode(source.path)}: cannot be read: {error.strerror}; make it readable, or"
            " leave it out by .dockerignore"
        ) from None
    finally:
        if file is not None:
            os.close(file)
    if left or _version(after) != _version(source.state):
        raise _changed(source.name)
    findings += sorted(scanner.findings)


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _changed(name: str) -> ImageError:
    return ImageError(
        f"{name} changed while it was packed; push again when nothing writes to it, or leave it out"
        " by .dockerignore"
    )


def pack_packages(folder: Path, inventory: Inventory, *, zstd: bool = False) -> Layer:
    """Make the layer with installed packages, to be closed by the caller.

    Args:
        folder: in which packages are unpacked, as `pip install --target` does.
        inventory: of the base.
        zstd: compress by zstd; else by gzip.

    Raises:
        ImageError: there is no space for it, or a file cannot be read.
    """
    return write_layer(_package_members(folder, inventory), zstd=zstd)


def _package_members(
    folder: Path, inventory: Inventory
) -> Iterator[tuple[Member, Iterable[bytes]]]:
    home = DEPS_HOME.strip("/")
    yield Member(home.partition("/")[0], "5", 0o755), ()
    yield Member(home, "5", 0o755), ()
    root = os.fsencode(folder)
    for name, state in _walk(root, b""):
        path = os.path.join(root, name)  # noqa: PTH118 - names are bytes
        place = f"{home}/{_decoded(name)}"
        if stat.S_ISDIR(state.st_mode):
            yield Member(place, "5", 0o755), ()
        elif (data := _rewritten(name, path, inventory.python)) is not None:
            yield Member(place, "0", _mode(state), size=len(data)), (data,)
        else:
            yield Member(place, "0", _mode(state), size=state.st_size), _blocks(path, state.st_size)
    link = f"{inventory.site}/{_PTH_FILE}"
    yield Member(link, "0", 0o644, size=len(_PTH_TEXT)), (_PTH_TEXT,)


def _decoded(name: bytes) -> str:
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


def _rewritten(name: bytes, path: bytes, python: str) -> bytes | None:
    """A file that would name this machine, without that; None: it is packed as it is.

    Scripts are run by the base's Python; lists of files lack those left out, and scripts' digests.
    """
    is_record = name.endswith(b".dist-info/RECORD")
    if not (is_record or name.startswith(b"bin/")):
        return None
    with open(path, "rb") as file:  # noqa: PTH123 - names are bytes
        start = file.read(2)
        if is_record:
            data = start + file.read()
            return _RECORDED.sub(lambda found: found[1] + b",," if found[1] else b"", data)
        if start != b"#!":
            return None
        data = start + file.read()
    found = _SHEBANG.match(data)
    return f"#!{python}\n".encode() + data[found.end() :] if found else data


def _blocks(path: bytes, size: int) -> Iterator[bytes]:
    with open(path, "rb") as file:  # noqa: PTH123 - names are bytes
        while size > 0 and (block := file.read(min(BLOCK, size))):
            size -= len(block)
            yield block
    if size:
        raise ImageError(f"{os.fsdecode(path)} was changed while it was packed; build again")
