"""The Python of a base and what is installed for it, read from the base's layers.

What is installed on top has to fit it: its version, its platform, and the packages that are there.
"""

from __future__ import annotations

import posixpath
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError
from k8sjob.image.content import RemoteContent
from k8sjob.image.parallel import at_once
from k8sjob.image.traces import read_traces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from k8sjob.image.append import Base
    from k8sjob.image.repository import Repository
    from k8sjob.image.traces import Traces

__all__ = ["DEFAULT_PATH", "HOME", "Inventory", "environment", "read_inventory", "take_inventory"]

HOME: Final = "/opt/deps"
"""Where packages are that were put on a base without running it."""
_AT_ONCE: Final = 4
"""Layers that are read at the same time."""
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where commands are looked for in a container whose image does not say."""
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
_MOST_LINKS: Final = 40
_MOST_KEPT: Final = 128 << 20
"""Characters that are kept of all layers together: those of large bases are a few millions."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the base's Python is.

    Attributes:
        image: the base's name, for messages.
        python: path of the interpreter that `python` means there.
        version: of the language, as "3.13".
        architecture: as images name it, as "amd64".
        glibc: version of the C library, as (2, 36); None: it is musl.
        site: the folder of packages that Python looks into last; without "/" at its beginning.
        distributions: name, version and extras of what is installed, as the headers of its
            metadata, by normalised name.
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
    """Read the base's layers; each is read once on this machine.

    Args:
        base: of one platform.
        repository: where its layers are.
        progress: is called with the bytes read, and how many there are to read.

    Raises:
        ImageError: a layer cannot be read, or there is no Python that can be understood.
    """
    layers = [layer for layer in base.manifest.layers if not layer.elsewhere]
    count = _Count(sum(layer.size for layer in layers), progress)
    where = str(repository.reference)

    def read(number: int) -> Traces:
        content = RemoteContent(repository.session, repository.reference, layers[number])
        found = read_traces(content, where, count)
        if count.keep(found.size) > _MOST_KEPT:
            raise ImageError(
                f"{where}: its {len(layers)} layers have more names and metadata than any Python"
                " needs; take another base"
            )
        return found

    work = [lambda number=number: read(number) for number in range(len(layers))]
    return take_inventory(base, at_once(work, _AT_ONCE))


class _Count:
    """Adds up what several threads have read, and kept of it."""

    def __init__(self, total: int, progress: Callable[[int, int], object]) -> None:
        self._read, self._kept, self._total = 0, 0, total
        self._progress = progress
        self._lock = threading.Lock()

    def __call__(self, size: int) -> None:
        with self._lock:
            self._read += size
            self._progress(self._read, self._total)

    def keep(self, size: int) -> int:
        """Add the size of what is kept of a layer; the sum over the layers so far."""
        with self._lock:
            self._kept += size
            return self._kept


def take_inventory(base: Base, layers: Iterable[Traces]) -> Inventory:
    """What the traces of all layers, bottom first, amount to.

    Raises:
        ImageError: there is no Python that can be understood.
    """
    tree = _Tree()
    for layer in layers:
        tree.add(layer)
    environ = environment(base)
    name = str(base.reference)
    python = _python(tree, environ.get("PATH") or DEFAULT_PATH)
    if python is None:
        raise ImageError(
            f"{name} has no Python on its PATH, for which packages could be installed; take a base"
            " with Python and torch"
        )
    home = _Home.of(tree, *python)
    if home is None:
        raise ImageError(
            f"{name}: {python[0]} is a Python whose version cannot be told; take another base, or"
            " build with --builder buildah"
        )
    sites = _sites_there(tree, home, f"{name}: {python[0]}")
    folders = [
        *sites,
        HOME,
        *(path.strip("/") for path in environ.get("PYTHONPATH", "").split(":")),
    ]
    return Inventory(
        image=name,
        python=python[0],
        version=home.version,
        architecture=base.platform.partition("/")[2],
        glibc=_glibc(tree, name),
        site=sites[-1],
        distributions=dict(_distributions(tree, folders)),
    )


class _Tree:
    """What matters of the files that all layers together make."""

    def __init__(self) -> None:
        self.links: dict[str, str] = {}
        self.marks: dict[str, str] = {}

    def add(self, layer: Traces) -> None:
        """Put a layer on top."""
        for path in layer.hidden:
            self._drop(f"{path}/")
            self.links.pop(path, None)
            self.marks.pop(path, None)
        for path in layer.emptied:
            self._drop(f"{path}/")
        for path, target in layer.links.items():
            self.marks.pop(path, None)
            self.links[path] = target
        for path, text in layer.marks.items():
            self.links.pop(path, None)
            self.marks[path] = text

    def _drop(self, beginning: str) -> None:
        for paths in (self.links, self.marks):
            for path in [path for path in paths if path.startswith(beginning)]:
                del paths[path]

    def resolve(self, path: str) -> str:
        """Where a path leads in the end, by all links on its way; itself where that is a circle."""
        done, rest = "", posixpath.normpath(path).strip("/").split("/")
        for _ in range(_MOST_LINKS):
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


def environment(base: Base) -> dict[str, str]:
    """The variables that a container of the base starts with."""
    run = base.config.get("config")
    variables = run.get("Env") if isinstance(run, dict) else None
    return dict(str(item).partition("=")[::2] for item in variables or [])


def _python(tree: _Tree, path: str) -> tuple[str, str] | None:
    """The interpreter as it is called, and the file that this is in the end."""
    for name in _NAMES:
        for folder in path.split(":"):
            called = posixpath.join("/", folder, name)
            real = tree.resolve(called)
            if real in tree.marks and posixpath.basename(real).startswith("python"):
                return called, real
    return None


@dataclass(frozen=True, slots=True)
class _Home:
    """Where an interpreter looks for packages.

    Attributes:
        prefix: of the installation, or of the virtual environment.
        version: of the language.
        below: the prefix that a virtual environment takes packages from, too; else empty.
    """

    prefix: str
    version: str
    below: str = ""

    @classmethod
    def of(cls, tree: _Tree, called: str, real: str) -> _Home | None:
        """What follows from an interpreter; None where its version does not."""
        installed = posixpath.dirname(posixpath.dirname(real))
        environment = posixpath.dirname(tree.resolve(posixpath.dirname(called)))
        config = tree.marks.get(f"{environment}/pyvenv.cfg")
        said = _VERSION.search(real) or _VENV_VERSION.search(config or "")
        if said is None:
            return None
        if config is None:
            return cls(installed, said[1])
        return cls(environment, said[1], installed if _SYSTEM_SITES.search(config) else "")

    def sites(self) -> list[str]:
        """The folders, in about the order in which they are looked into."""
        return [*_sites(self.prefix, self.version), *_sites(self.below, self.version)]


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


def _sites_there(tree: _Tree, home: _Home, what: str) -> list[str]:
    sites = [site for site in map(tree.resolve, home.sites()) if site in tree.marks]
    if not sites:
        looked = ", ".join(home.sites())
        raise ImageError(
            f"{what} has no folder for packages (looked for: {looked}); take another base, or build"
            " with --builder buildah"
        )
    return sites


def _glibc(tree: _Tree, name: str) -> tuple[int, int] | None:
    found = [text for path, text in tree.marks.items() if text and _LIBC.search(f"/{path}")]
    if found:
        major, minor = found[0].split(".")
        return int(major), int(minor)
    if any(_MUSL.search(f"/{path}") for path in tree.marks):
        return None
    raise ImageError(
        f"{name}: its C library is none that packages are made for; take another base, or build"
        " with --builder buildah"
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
