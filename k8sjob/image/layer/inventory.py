"""A base's Python and its installed packages, as its layers show them.

What is installed on top has to fit: the version, the platform, and the packages that are there.
"""

from __future__ import annotations

import posixpath
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError
from k8sjob.image.layer.scan import scan_layer
from k8sjob.image.registry.blobs import RemoteContent
from k8sjob.image.registry.manifest import environment
from k8sjob.image.registry.transfer import run_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from k8sjob.image.layer.scan import LayerScan
    from k8sjob.image.registry.manifest import Base
    from k8sjob.image.registry.repository import Repository

__all__ = ["DEFAULT_PATH", "DEPS_HOME", "Inventory", "read_inventory", "take_inventory"]

DEPS_HOME: Final = "/opt/deps"
"""Where packages lie that were put on a base without running it."""
_WIDTH: Final = 4
"""Layers that are read at the same time."""
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH in a container whose image does not set it."""
_NAMES: Final = ("python", "python3")
_VERSION: Final = re.compile(r"python(\d+\.\d+)$")
_VENV_VERSION: Final = re.compile(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", re.MULTILINE)
_SYSTEM_SITES: Final = re.compile(
    r"^include-system-site-packages\s*=\s*true", re.MULTILINE | re.IGNORECASE
)
_NAME: Final = re.compile(
    r"^Name: *([A-Z0-9](?:[A-Z0-9._-]*[A-Z0-9])?)\s*$", re.MULTILINE | re.IGNORECASE | re.ASCII
)
"""Of a distribution; files here are named by it, so it must not be a path."""
_LIBC: Final = re.compile(r"/libc(?:\.so\.6|-2\.\d+\.so)$")
_MUSL: Final = re.compile(r"/ld-musl-[^/]+$")
_MAX_LINKS: Final = 40
_MAX_KEPT: Final = 128 << 20
"""Characters that are kept of all layers together: those of large bases are a few millions."""


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
    base: Base, repository: Repository, progress: Callable[[int, int], object]
) -> Inventory:
    """Read the base's layers from its repository; each is read once on this machine.

    `progress` is called with the bytes read, and how many there are to read.

    Raises:
        ImageError: a layer cannot be read, or there is no Python that is understood.
    """
    layers = [layer for layer in base.manifest.layers if not layer.elsewhere]
    total, where = sum(layer.size for layer in layers), str(repository.reference)
    received = kept = 0
    lock = threading.Lock()

    def note(size: int) -> None:
        nonlocal received
        with lock:
            received += size
            progress(received, total)

    def scan(number: int) -> LayerScan:
        nonlocal kept
        content = RemoteContent(repository.client, repository.reference, layers[number])
        found = scan_layer(content, where, note)
        with lock:
            kept += found.size
        if kept > _MAX_KEPT:
            raise ImageError(
                f"{where}: its {len(layers)} layers have more names and metadata than any Python"
                " needs; take another base"
            )
        return found

    work = [lambda number=number: scan(number) for number in range(len(layers))]
    return take_inventory(base, run_parallel(work, _WIDTH))


def take_inventory(base: Base, layers: Iterable[LayerScan]) -> Inventory:
    """Combine the scans of all layers, bottom first.

    Raises:
        ImageError: there is no Python that is understood.
    """
    tree = _Tree()
    for layer in layers:
        tree.add(layer)
    variables = environment(base.config)
    name = str(base.reference)
    python = _python(tree, variables.get("PATH") or DEFAULT_PATH)
    if python is None:
        raise ImageError(
            f"{name} has no Python on its PATH, for which packages could be installed; take a base"
            " with Python and torch"
        )
    found = _version_and_sites(tree, *python)
    if found is None:
        raise ImageError(
            f"{name}: the version of {python[0]} cannot be found out; take another base, or build"
            " with --builder buildah"
        )
    version, searched = found
    sites = [site for site in map(tree.resolve, searched) if site in tree.marks]
    if not sites:
        raise ImageError(
            f"{name}: {python[0]} has no folder for packages (looked for: {', '.join(searched)});"
            " take another base, or build with --builder buildah"
        )
    paths = variables.get("PYTHONPATH", "").split(":")
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


class _Tree:
    """The files of interest in all layers together."""

    def __init__(self) -> None:
        self.links: dict[str, str] = {}
        self.marks: dict[str, str] = {}

    def add(self, layer: LayerScan) -> None:
        """Put a layer on top."""
        for hidden in layer.hidden:
            folder = f"{hidden.rstrip('/')}/"
            for paths in (self.links, self.marks):
                for path in [each for each in paths if each == hidden or each.startswith(folder)]:
                    del paths[path]
        for path, target in layer.links.items():
            self.marks.pop(path, None)
            self.links[path] = target
        for path, text in layer.marks.items():
            self.links.pop(path, None)
            self.marks[path] = text

    def resolve(self, path: str) -> str:
        """A path with all links on its way followed; unchanged where they form a circle."""
        done, rest = "", posixpath.normpath(path).strip("/").split("/")
        for _ in range(_MAX_LINKS):
            while rest:
                step = posixpath.normpath(posixpath.join(done, rest.pop(0))).lstrip("/")
                if step in self.links:
                    target = posixpath.join("/", done, self.links[step], *rest)
                    done, rest = "", posixpath.normpath(target).strip("/").split("/")
                    break
                done = step
            else:
                return done
        return path


def _python(tree: _Tree, path: str) -> tuple[str, str] | None:
    """The interpreter as it is called, and the file behind all links."""
    for name in _NAMES:
        for folder in path.split(":"):
            called = posixpath.join("/", folder, name)
            real = tree.resolve(called)
            if real in tree.marks and posixpath.basename(real).startswith("python"):
                return called, real
    return None


def _version_and_sites(tree: _Tree, called: str, real: str) -> tuple[str, list[str]] | None:
    """An interpreter's version, and where it searches packages; None: the version is unknown."""
    prefix = posixpath.dirname(posixpath.dirname(real))
    venv = posixpath.dirname(tree.resolve(posixpath.dirname(called)))
    config = tree.marks.get(f"{venv}/pyvenv.cfg")
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
        yield f"usr/local/lib/python{version}/dist-packages"
        yield f"usr/lib/python{version}/dist-packages"
        yield "usr/lib/python3/dist-packages"
        yield f"usr/local/lib64/python{version}/site-packages"
        yield f"usr/local/lib/python{version}/site-packages"
    yield f"{prefix}/lib64/python{version}/site-packages"
    yield f"{prefix}/lib/python{version}/site-packages"


def _glibc(tree: _Tree, name: str) -> tuple[int, int] | None:
    found = [text for path, text in tree.marks.items() if text and _LIBC.search(f"/{path}")]
    if found:
        major, minor = found[0].split(".")
        return int(major), int(minor)
    if any(_MUSL.search(f"/{path}") for path in tree.marks):
        return None
    raise ImageError(
        f"{name}: packages are not made for its C library; take another base, or build with"
        " --builder buildah"
    )


def _distributions(tree: _Tree, folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    places = {tree.resolve(folder) for folder in folders}
    for path, text in tree.marks.items():
        folder, _, info = path.rpartition("/")
        if info in {"METADATA", "PKG-INFO"}:
            folder = folder.rpartition("/")[0]
        name = _NAME.search(text)
        if name and folder in places:
            yield re.sub(r"[-_.]+", "-", name[1]).lower(), text
