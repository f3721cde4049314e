"""A base's Python and its installed packages, as its layers show them.

What is installed on top has to fit: the version, the platform, and the packages that are there.
Layers are large and never change, so each is scanned in one stream, once on a machine; what was
found is cached by its digest.
"""

from __future__ import annotations

import gzip
import io
import posixpath
import re
import tarfile
import threading
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn, cast

from k8sjob.contract import DEPS_HOME
from k8sjob.errors import ImageError
from k8sjob.files import cached_value, keep_value
from k8sjob.image.layer_tar import ZSTD_ERRORS, ZSTD_MAGIC, zstd_reader
from k8sjob.image.registry.blob_content import BLOCK, RemoteContent, counted
from k8sjob.image.registry.manifest import environment
from k8sjob.threads import run_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import IO

    from k8sjob.image.registry.blob_content import Content
    from k8sjob.image.registry.manifest import BaseImage
    from k8sjob.image.registry.repository import Repository

_WIDTH: Final = 4
"""Layers that are read at the same time."""
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH in a container whose image does not set it."""
_VERSION: Final = re.compile(r"python(\d+\.\d+)$")
_VENV_VERSION: Final = re.compile(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", re.MULTILINE)
_SYSTEM_SITES: Final = re.compile(
    r"^include-system-site-packages\s*=\s*true", re.MULTILINE | re.IGNORECASE
)
_NAME: Final = re.compile(
    r"^Name: *([A-Z0-9](?:[A-Z0-9._-]*[A-Z0-9])?)\s*$", re.MULTILINE | re.IGNORECASE | re.ASCII
)
"""A distribution's name; files here are named by it, so it must not be a path."""
_MAX_LINKS: Final = 40
_MAX_PATH: Final = 4096
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_METADATA: Final = re.compile(r"(?:^|/)[^/]+\.(?:dist-info/METADATA|egg-info/PKG-INFO|egg-info)$")
_HEADER: Final = re.compile(
    r"^(?:Name|Version|Provides-Extra|Requires-Dist): .*$", re.MULTILINE | re.IGNORECASE
)
_PYTHON: Final = re.compile(r"(?:^|/)bin/python[\d.]*$|(?:^|/)lib/ld-musl-[^/]+$")
_VENV: Final = re.compile(r"(?:^|/)pyvenv\.cfg$")
_LIBC_FILE: Final = re.compile(r"(?:usr/)?lib(?:64)?/(?:[\w-]+/)?libc(?:\.so\.6|-2\.\d+\.so)$")
_LIBC_VERSION: Final = re.compile(rb"GNU C Library [^\n]{0,200}?release version (\d{1,4}\.\d{1,4})")
"""Of a line that may have any length, without a look at all of it from each of its places."""
_SITE: Final = re.compile(r"(.*/(?:site|dist)-packages)(?:/|$)")
_MAX_FILE: Final = 16 << 20
"""Bytes that are read of one file."""
_MAX_HEADER: Final = 1 << 20
"""Bytes of an extended header, which is a name and a few numbers."""
_MAX_KEPT_OF_ONE: Final = 64 << 20
_MAX_KEPT: Final = 128 << 20
"""Characters that are kept of one layer, and of all: those of large bases are a few millions."""
_MAX_GLOBAL: Final = 1000
"""Keys of pax headers that are for all members."""
_HEADER_TYPES: Final = frozenset(
    {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE}
    | {tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK}
)
_READ_ERRORS: Final[tuple[type[Exception], ...]] = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    OSError,
    ValueError,
    RecursionError,  # headers of headers of headers
    *ZSTD_ERRORS,
)


@dataclass(frozen=True, slots=True)
class Inventory:
    """A base's Python.

    Attributes:
        image: the base's name, for messages.
        python: path of the interpreter that `python` means there.
        version: of the language, as "3.13".
        architecture: as images name it, as "amd64".
        glibc: version of the C library, as (2, 36); None: it is musl.
        site: the last folder of packages that Python searches; without a leading "/".
        distributions: name, version and extras of what is installed, as the headers of its
            metadata, by normalized name.
    """

    image: str
    python: str
    version: str
    architecture: str
    glibc: tuple[int, int] | None
    site: str
    distributions: dict[str, str]


def read_inventory(
    base: BaseImage, repository: Repository, progress: Callable[[int, int], object]
) -> Inventory:
    """Read the base's layers from its repository; each is read once on this machine.

    `progress` is called with the bytes read, and how many there are to read.

    Raises:
        ImageError: a layer cannot be read, or there is no Python that is understood.
    """
    layers = [layer for layer in base.manifest.layers if not layer.elsewhere]
    total, where = sum(layer.size for layer in layers), str(repository.reference)
    received = characters = 0
    lock = threading.Lock()

    def note(size: int) -> None:
        nonlocal received
        with lock:
            received += size
            progress(received, total)

    def scan(number: int) -> LayerScan:
        nonlocal characters
        content = RemoteContent(repository.client, repository.reference, layers[number])
        layer_scan = scan_layer(content, where, note)
        with lock:
            characters += layer_scan.size
        # Each layer has a limit of its own, and an image may have many.
        if characters > _MAX_KEPT:
            raise ImageError(
                f"{where}: its {len(layers)} layers have more names and metadata than any Python"
                " needs; use another base"
            )
        return layer_scan

    work = [lambda number=number: scan(number) for number in range(len(layers))]
    return take_inventory(base, run_parallel(work, _WIDTH))


def take_inventory(base: BaseImage, layers: Iterable[LayerScan]) -> Inventory:
    """Combine the scans of all layers, bottom first.

    Raises:
        ImageError: there is no Python that is understood.
    """
    tree = _Tree()
    for layer in layers:
        tree.add(layer)
    variables = environment(base.config)
    name = str(base.reference)
    # The `python` that a container's command would find, which may be conda's or a venv's.
    python = _python(tree, variables.get("PATH") or DEFAULT_PATH)
    if python is None:
        raise ImageError(
            f"{name} has no Python on its PATH, for which packages could be installed; use a base"
            " with Python and torch"
        )
    python_and_sites = _version_and_sites(tree, *python)
    if python_and_sites is None:
        raise ImageError(
            f"{name}: the version of {python[0]} cannot be determined; use another base, or build"
            " with --builder buildah"
        )
    version, searched = python_and_sites
    sites = [site for site in map(tree.resolve, searched) if site in tree.marks]
    if not sites:
        raise ImageError(
            f"{name}: {python[0]} has no folder for packages (looked for: {', '.join(searched)});"
            " use another base, or build with --builder buildah"
        )
    paths = variables.get("PYTHONPATH", "").split(":")
    # What an earlier build has put on the base is part of it, and is not installed again.
    folders = [*sites, DEPS_HOME, *(path.strip("/") for path in paths)]
    return Inventory(
        image=name,
        python=python[0],
        version=version,
        architecture=base.platform.partition("/")[2],
        glibc=_glibc(tree, name),
        site=sites[-1],
        distributions=dict(_distributions(tree, folders)),
    )


def _is_hidden(path: str, hidden: set[str]) -> bool:
    """Whether the path, or a folder that it lies in, is hidden; "a/" hides what lies in a."""
    ends = [match.start() for match in re.finditer("/", path[:_MAX_PATH])]
    return path in hidden or any(path[: end + more] in hidden for end in ends for more in (0, 1))


class _Tree:
    """The files of interest in all layers together."""

    def __init__(self) -> None:
        self.links: dict[str, str] = {}
        self.marks: dict[str, str] = {}

    def add(self, layer: LayerScan) -> None:
        """Put a layer on top."""
        hidden = set(layer.hidden)
        # Whiteouts are for the layers below, never for files of their own layer, so they come
        # first.
        for paths in (self.links, self.marks) if hidden else ():
            for path in [each for each in paths if _is_hidden(each, hidden)]:
                del paths[path]
        for path, target in layer.links.items():
            # A link in place of a file below, or a file in place of a link.
            self.marks.pop(path, None)
            self.links[path] = target
        for path, text in layer.marks.items():
            self.links.pop(path, None)
            self.marks[path] = text

    def resolve(self, path: str) -> str:
        """A path with all links on its way followed; unchanged where they form a loop."""
        done, steps = "", posixpath.normpath(path).strip("/").split("/")
        # As many links as Linux follows before ELOOP.
        for _ in range(_MAX_LINKS):
            while steps:
                step = posixpath.normpath(posixpath.join(done, steps.pop(0))).lstrip("/")
                if step in self.links:
                    target = posixpath.join("/", done, self.links[step], *steps)
                    done, steps = "", posixpath.normpath(target).strip("/").split("/")
                    break
                done = step
            else:
                return done
        return path


def _python(tree: _Tree, path: str) -> tuple[str, str] | None:
    """The interpreter as it is called, and the file behind all links."""
    for name in ("python", "python3"):
        for folder in path.split(":"):
            called = posixpath.join("/", folder, name)
            real = tree.resolve(called)
            # The name may be that of a program which only starts one of several interpreters.
            is_python = real in tree.marks and posixpath.basename(real).startswith("python")
            if is_python and called.isprintable():  # messages name it
                return called, real
    return None


def _version_and_sites(tree: _Tree, called: str, real: str) -> tuple[str, list[str]] | None:
    """An interpreter's version, and where it searches packages; None: the version is unknown."""
    prefix = posixpath.dirname(posixpath.dirname(real))
    # In a venv bin/python is a link to the system's Python; pyvenv.cfg is beside the folder of the
    # link.
    venv = posixpath.dirname(tree.resolve(posixpath.dirname(called)))
    config = tree.marks.get(f"{venv}/pyvenv.cfg")
    # The version is in the name of the real file (python3.12), or in the venv's configuration.
    version = _VERSION.search(real) or _VENV_VERSION.search(config or "")
    if version is None:
        return None
    prefixes = [prefix]
    if config is not None:
        prefixes = [venv, prefix] if _SYSTEM_SITES.search(config) else [venv]
    return version[1], [site for each in prefixes for site in _sites(each, version[1])]


def _sites(prefix: str, version: str) -> Iterator[str]:
    """A system's own Python has several: Debian's in dist-packages, others' in lib64, too."""
    if not prefix:
        return
    if prefix == "usr":
        for folder in ("local/lib/python" + version, "lib/python" + version, "lib/python3"):
            yield f"usr/{folder}/dist-packages"
    for each in ("usr/local", "usr") if prefix == "usr" else (prefix,):
        yield f"{each}/lib64/python{version}/site-packages"
        yield f"{each}/lib/python{version}/site-packages"


def _glibc(tree: _Tree, name: str) -> tuple[int, int] | None:
    versions = [text for path, text in tree.marks.items() if text and _LIBC_FILE.search(path)]
    if versions:
        major, minor = versions[0].split(".")
        return int(major), int(minor)
    # Alpine has musl in place of glibc.
    if any(posixpath.basename(path).startswith("ld-musl-") for path in tree.marks):
        return None
    raise ImageError(
        f"{name}: there are no packages for its C library; use another base, or build with"
        " --builder buildah"
    )


def _distributions(tree: _Tree, folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    places = {tree.resolve(folder) for folder in folders}
    for path, text in tree.marks.items():
        folder, _, info = path.rpartition("/")
        # .egg-info of distutils is a file; all others are folders with a file in them.
        if info in {"METADATA", "PKG-INFO"}:
            folder = folder.rpartition("/")[0]
        name = _NAME.search(text)
        if name and folder in places:
            yield re.sub(r"[-_.]+", "-", name[1]).lower(), text


@dataclass(frozen=True, slots=True)
class LayerScan:
    """The relevant contents of a layer; paths begin without "/".

    Attributes:
        links: target of each symbolic link.
        marks: a text for each file of interest: headers of a distribution, the version of the C
            library, a pyvenv.cfg; empty for interpreters and folders of packages.
        hidden: paths of lower layers that are removed; with "/" at the end what is below them.
    """

    links: dict[str, str] = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    hidden: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Characters of all names and texts."""
        texts = (self.links, self.links.values(), self.marks, self.marks.values())
        return sum(len(text) for part in (*texts, self.hidden) for text in part)


def scan_layer(content: Content, where: str, note: Callable[[int], object]) -> LayerScan:
    """Scan a layer, compressed by gzip, zstd or not at all, or take what the cache has of it.

    `where` is the image's name, for messages; `note` is called with each number of bytes that came.

    Raises:
        ImageError: it cannot be read, or is no archive.
    """
    # A digest names the same bytes for ever, so the cache is never out of date.
    name = f"layer-{content.digest.replace(':', '-')}.json"
    if fields := cached_value(name, content.digest):
        note(content.size)
        return LayerScan(**fields)
    layer_scan = _scan(content, f"{where}, layer {content.digest[:19]}", note)
    keep_value(name, content.digest, asdict(layer_scan))
    return layer_scan


def _scan(content: Content, where: str, note: Callable[[int], object]) -> LayerScan:
    blocks, layer_scan, failure = counted(content, note), LayerScan(), None
    try:
        _scan_archive(_Stream(blocks), where, layer_scan)
    except _READ_ERRORS as error:
        failure = error
    for _ in blocks:  # the digest is checked at the very end
        pass
    if failure is not None:
        raise ImageError(f"{where}: not an archive ({failure}); the image is broken")
    return layer_scan


class _Stream(io.RawIOBase):
    """Blocks as a file that is read once."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]  # in fact any buffer
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


class _TarInfo(tarfile.TarInfo):
    """A member whose extended headers, which are read whole, have a limit, and which is not sparse.

    A map of a few bytes makes a sparse file of any size; no builder of images writes one.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADER_TYPES and self.size > _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]  # no public form

    def _refuse_sparse(self, *_: object) -> NoReturn:
        raise tarfile.ReadError("a sparse file")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def _scan_archive(stream: io.RawIOBase, where: str, layer_scan: LayerScan) -> None:
    raw = io.BufferedReader(stream, BLOCK)
    # By its first bytes, whatever the media type says.
    start = raw.peek(4)[:4]
    opened: IO[bytes] = raw
    if start[:2] == b"\x1f\x8b":
        opened = cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    elif start == ZSTD_MAGIC:
        opened = zstd_reader(raw, where)
    characters = 0
    # "r|" reads forwards only, as the stream is.
    with tarfile.open(fileobj=opened, mode="r|", bufsize=BLOCK, tarinfo=_TarInfo) as archive:
        for member in archive:
            archive.members = []  # type: ignore[attr-defined]  # it would keep all of them
            characters += _scan_member(archive, member, layer_scan)
            if characters > _MAX_KEPT_OF_ONE or len(archive.pax_headers) > _MAX_GLOBAL:
                raise tarfile.ReadError("it has more names and metadata than any Python needs")


def _scan_member(archive: tarfile.TarFile, member: tarfile.TarInfo, layer_scan: LayerScan) -> int:
    """Keep what is of interest of a member; how many characters were kept."""
    text: str | None = ""
    path = posixpath.normpath(member.name).lstrip("/")
    folder, _, name = path.rpartition("/")
    if name == _OPAQUE:
        layer_scan.hidden.append(f"{folder}/")
    elif name.startswith(_WHITEOUT):
        layer_scan.hidden.append(posixpath.join(folder, name.removeprefix(_WHITEOUT)))
    elif member.issym():
        layer_scan.links[path] = member.linkname
    # A hard link has no content of its own; its target is in the same layer.
    elif member.islnk():
        same = posixpath.normpath(member.linkname).lstrip("/")
        if same in layer_scan.marks or _PYTHON.search(path):
            layer_scan.marks[path] = layer_scan.marks.get(same, "")
    elif member.isfile() and (text := _text(archive, member, path)) is not None:
        layer_scan.marks[path] = text
    texts = [path] if name.startswith(_WHITEOUT) else []
    for names in (layer_scan.links, layer_scan.marks):
        texts += [path, names[path]] if path in names else []
    if (site := _SITE.match(f"/{path}")) and (
        folder := site[1].lstrip("/")
    ) not in layer_scan.marks:
        layer_scan.marks[folder] = ""
        texts.append(folder)
    return sum(map(len, texts))


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> str | None:
    """The part of a file that is kept; None: the file is of no interest."""
    if _PYTHON.search(path):
        return ""
    if not (_METADATA.search(path) or _VENV.search(path) or _LIBC_FILE.match(path)):
        return None
    file = archive.extractfile(member)
    data = file.read(_MAX_FILE) if file else b""
    if _LIBC_FILE.match(path):
        version = _LIBC_VERSION.search(data)
        return version[1].decode() if version else None
    text = data.decode(errors="replace").replace("\r\n", "\n")
    if _VENV.search(path):
        return text
    # The description of a package, after the headers, is the larger part.
    return "\n".join(_HEADER.findall(text.partition("\n\n")[0]))
