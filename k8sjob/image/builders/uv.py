"""Dependency images without a container: wheels for the base's Python, put on it as one layer.

Nothing of the base runs, so it needs neither a daemon nor root nor the base's processor. uv chooses
and unpacks the wheels on this machine. The base's own packages take part in the choice as they are:
each is pinned to an empty wheel of its name and version. So whatever is chosen fits them, or uv
says what does not, and none is installed a second time. Extras of theirs can be asked for.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
import zipfile
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError, install_step
from k8sjob.image.build_context import shown_size
from k8sjob.image.builders import process
from k8sjob.image.builders.pip_settings import as_uv_settings
from k8sjob.image.inventory import DEFAULT_PATH, read_inventory
from k8sjob.image.layers import DEPS_BIN, pack_packages
from k8sjob.image.registry.manifest import environment
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from k8sjob.image.dependencies import BuildRequest, Dependencies
    from k8sjob.image.inventory import Inventory
    from k8sjob.image.registry.manifest import BaseImage

_PROGRESS_SECONDS: Final = 5.0
"""Seconds between messages about a base that is being read."""
_MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_GLIBCS: Final = (17, 28, *range(31, 41))
"""Minor versions of glibc 2 that uv knows platforms of; a newer one runs what is for an older."""
_PUBLIC: Final = re.compile(
    r"(?:\d+!)?\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?(?:\+[a-z0-9.]+)?"
)
"""Versions that a wheel may have. Those that a distribution made up itself are left out."""
_COMPILE_OPTIONS: Final = (
    *("--constraints", "base.txt", "--excludes", "unknown.txt", "-o", "chosen.txt"),
    *("--no-header", "--no-annotate", "--generate-hashes", "--emit-index-url", "--emit-find-links"),
)
"""uv writes down what it has chosen, so that nothing else can come when it is installed."""
_WHEELS_ONLY: Final = ("--only-binary", ":all:", "--no-binary", ":none:")
"""The second one overrules a `no-binary` of any other source."""
_DECORATION: Final = re.compile(r"^\W*(?:error:|cause:|hint:)?\s*")
_DISK_FULL: Final = "No space left on device"


def missing(dependencies: Dependencies) -> str | None:
    """Why uv cannot install this here, with the next step; None: it can."""
    if dependencies.apt:
        return (
            f"Debian packages ({', '.join(dependencies.apt)}) are installed by a builder that runs"
            " the base; use --builder buildah, podman or buildx"
        )
    if find_uv() is None:
        return f"uv is not installed; {install_step('build')}"
    return dependencies.refused_line()


def find_uv() -> str | None:
    """The program, of the package or on PATH; None: not installed."""
    try:
        from uv import find_uv_bin  # noqa: PLC0415 - an extra

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        return shutil.which("uv")


def build(request: BuildRequest) -> None:
    """Install what is wanted, and push the image; see `unpack`."""
    request.say(f"reading the packages of {request.base.reference}")
    inventory = read_inventory(request.base, request.below, _progress(request.say))
    with temporary_folder("build") as folder:
        target = folder / "deps"
        unpack(inventory, request.dependencies, target, request.say, cached=request.cached)
        layer = pack_packages(target, inventory, zstd=request.zstd)
    with closing(layer):
        request.push([layer], {"PATH": _path(request.base)})


def _progress(say: Callable[[str], object]) -> Callable[[int, int], None]:
    """Reports now and then how much of a large base has been read."""
    due = time.monotonic() + _PROGRESS_SECONDS

    def report(received: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _PROGRESS_SECONDS
            say(f"read {shown_size(received)} of {shown_size(total)}")

    return report


def _path(base: BaseImage) -> str:
    """PATH with the installed commands after the base's own."""
    folders = (environment(base.config).get("PATH") or DEFAULT_PATH).split(":")
    return ":".join([*folders, *([] if DEPS_BIN in folders else [DEPS_BIN])])


def unpack(
    inventory: Inventory,
    dependencies: Dependencies,
    folder: Path,
    say: Callable[[str], object],
    *,
    cached: bool = True,
) -> None:
    """Choose what is wanted and all that it needs, and unpack it into an empty or a new folder.

    cached: what an index answered before is used as long as the index allows.

    Raises:
        ImageError: there is no wheel of something for that Python, or it does not fit the base.
    """
    if refused := dependencies.refused_line():
        raise ImageError(refused)
    platform = _platform(inventory)
    # uv wants some interpreter, whose version does not count.
    common = ["--python", sys.executable, "--no-python-downloads", "--python-version"]
    common += [inventory.version, "--python-platform", platform, *_WHEELS_ONLY]
    common += ["--default-index", dependencies.index_url] if dependencies.index_url else []
    common += [] if cached else ["--refresh"]
    with temporary_folder("uv") as work:
        settings, variables = as_uv_settings()
        pinned = _write_inputs(work, inventory, dependencies, settings)
        uv = partial(_run_uv, work=work, variables=variables, inventory=inventory)
        say(
            f"choosing packages for Python {inventory.version} on {platform}, to fit the"
            f" {len(inventory.distributions)} of {inventory.image}"
        )
        left_out = [word for name in pinned for word in ("--no-emit-package", name)]
        # Two steps: what is chosen is written down with its hashes, and exactly that is installed.
        uv(["pip", "compile", "wanted.txt", *_COMPILE_OPTIONS, *left_out, *common])
        text = (work / "chosen.txt").read_text(encoding="utf-8")
        # `name==version` of each line that begins one; no addresses, which may hold a password.
        chosen = re.findall(r"^[A-Za-z0-9][^\s\\;]*", text, re.MULTILINE)
        say(f"unpacking {len(chosen)} package{'' if len(chosen) == 1 else 's'}")
        if chosen:
            # The choice is complete, and a dependency that the base has must not be installed
            # beside it.
            how = ["--no-deps", "--target", str(folder.absolute())]
            uv(["pip", "install", "-r", "chosen.txt", *how, *common])
    folder.mkdir(exist_ok=True)
    say(", ".join(chosen) or f"{inventory.image} already has all of it")


def _platform(inventory: Inventory) -> str:
    machine = _MACHINES.get(inventory.architecture)
    if machine is None:
        raise ImageError(
            f"{inventory.image} is for {inventory.architecture}; --builder uv supports"
            f" {' and '.join(_MACHINES)}: use --builder buildah"
        )
    if inventory.glibc is None:
        return f"{machine}-unknown-linux-musl"
    minors = [minor for minor in _GLIBCS if (2, minor) <= inventory.glibc]
    if not minors:
        raise ImageError(
            f"{inventory.image} has glibc {'.'.join(map(str, inventory.glibc))}, which is too old"
            " for wheels; use a newer base"
        )
    return f"{machine}-manylinux_2_{minors[-1]}"


def _write_inputs(
    work: Path, inventory: Inventory, dependencies: Dependencies, settings: str
) -> list[str]:
    """Write what uv reads; the names of the base's packages that are pinned."""
    # A wheel's name cannot hold every version that a distribution has made up. Such a package is
    # excluded instead: nothing of its name is installed, whatever is wanted.
    pinned, unknown, base = [], [], ""
    try:
        for name, headers in sorted(inventory.distributions.items()):
            version = _header(headers, "Version")
            if _PUBLIC.fullmatch(version):
                pinned.append(name)
                base += f"{name} @ {_write_stub(work, name, version, headers).as_uri()}\n"
            else:
                unknown.append(name)
        for file, text in (
            ("base.txt", base),
            ("wanted.txt", "\n".join([*dependencies.checked_lines(), ""])),
            ("unknown.txt", "\n".join(unknown)),
            ("uv.toml", settings),  # in any case, or one in a folder above would be read
        ):
            (work / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ImageError(f"{work}: cannot be written: {error.strerror}; free some space") from None
    return pinned


def _write_stub(work: Path, name: str, version: str, headers: str) -> Path:
    """A wheel with nothing in it, that needs nothing unless an extra is asked for."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = work / f"{stem}-py3-none-any.whl"
    metadata = "\n".join(["Metadata-Version: 2.1", *_stub_headers(headers), ""])
    wheel = "Wheel-Version: 1.0\nGenerator: k8sjob\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", wheel)
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def _stub_headers(headers: str) -> Iterator[str]:
    for line in headers.splitlines():
        field, _, value = line.partition(":")
        # Requirements without an extra are met by the base as it is, or the base is not consistent;
        # uv must not judge that.
        of_extra = re.search(r"\bextra\s*==", value) and "@" not in value  # no address of theirs
        if field.lower() != "requires-dist" or of_extra:
            yield line


def _header(headers: str, name: str) -> str:
    match = re.search(rf"^{name}: *(.*?) *$", headers, re.MULTILINE | re.IGNORECASE)
    return match[1].lower() if match else ""


def _run_uv(
    arguments: list[str], *, work: Path, variables: Mapping[str, str], inventory: Inventory
) -> None:
    """Run uv in a folder away from any project of the user's."""
    program = find_uv()
    assert program is not None  # noqa: S101 - the builder has looked for it
    # Elsewhere uv would read the pyproject.toml and uv.toml of a project.
    argv = [program, "--directory", str(work), "--quiet", "--color", "never", *arguments]
    try:
        process.run(argv, lambda _line: None, variables=variables)
    except process.BuilderError as failed:
        raise ImageError(_explained(failed.lines, inventory)) from None


def _explained(output: Iterable[str], inventory: Inventory) -> str:
    """The error of uv, with the base's versions of all packages that it names."""
    text = "\n  ".join(_DECORATION.sub("", line.strip()) for line in output)
    if _DISK_FULL in text:
        return f"uv: {text}; free some space, or set TMPDIR and UV_CACHE_DIR to another folder"
    named = [
        f"{name} {_header(headers, 'Version')}"
        for name, headers in sorted(inventory.distributions.items())
        if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text, re.IGNORECASE)
    ]
    base = f"\n{inventory.image} has {', '.join(named)}, which stays as it is" if named else ""
    return (
        f"the packages cannot be installed for {inventory.image}"
        f" (Python {inventory.version}, {_platform(inventory)}):\n  {text}{base}\n"
        "ask for another version, or use --builder buildah, which can compile packages and replace"
        " those of the base"
    )
