"""Wheels for the Python of a base, chosen and unpacked by uv on this machine.

The base's own packages take part in the choice as they are: each is pinned to an empty wheel of its
name and version. So whatever is chosen fits them, or uv says what does not, and none is installed a
second time. Extras of theirs can be asked for.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError
from k8sjob.image.builders import child
from k8sjob.image.builders.indexes import as_uv_settings
from k8sjob.image.requirements import checked_lines, refused_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from k8sjob.image.dependencies import Dependencies
    from k8sjob.image.inventory import Inventory

__all__ = ["find_uv", "unpack"]

_MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_GLIBCS: Final = (17, 28, *range(31, 41))
"""Minor versions of glibc 2 that uv knows platforms of; a newer one runs what is for an older."""
_PUBLIC: Final = re.compile(
    r"(?:\d+!)?\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?(?:\.dev\d+)?(?:\+[a-z0-9.]+)?"
)
"""Versions that a wheel may have. Those that a distribution made up itself are left out."""
_CHOICE: Final = (
    *("--constraints", "base.txt", "--excludes", "unknown.txt", "-o", "chosen.txt"),
    *("--no-header", "--no-annotate", "--generate-hashes", "--emit-index-url", "--emit-find-links"),
)
"""How uv writes down what it has chosen, so that nothing else can come when it is installed."""
_WHEELS_ALONE: Final = ("--only-binary", ":all:", "--no-binary", ":none:")
"""The second one overrules a `no-binary` of any other source."""
_DECORATION: Final = re.compile(r"^\W*(?:error:|cause:|hint:)?\s*")
_FULL: Final = "No space left on device"


def find_uv() -> str | None:
    """The program, of the package or on PATH; None: it is not here."""
    try:
        from uv import find_uv_bin  # noqa: PLC0415 - an extra

        return find_uv_bin()
    except (ImportError, FileNotFoundError):
        return shutil.which("uv")


def unpack(
    inventory: Inventory,
    wanted: Dependencies,
    folder: Path,
    say: Callable[[str], object],
    *,
    cached: bool = True,
) -> None:
    """Choose what is wanted and all that it needs, and unpack it.

    Args:
        inventory: of the base.
        wanted: no Debian packages.
        folder: where to; must be empty or not there.
        say: is called with a line on each step.
        cached: what an index said before is believed as long as it allows.

    Raises:
        ImageError: something cannot be had as a wheel for that Python, or does not fit the base.
    """
    if refused := refused_line(wanted):
        raise ImageError(refused)
    platform = _platform(inventory)
    common = ["--python", sys.executable, "--no-python-downloads", "--python-version"]
    common += [inventory.version, "--python-platform", platform, *_WHEELS_ALONE]
    common += ["--default-index", wanted.index_url] if wanted.index_url else []
    common += [] if cached else ["--refresh"]
    with tempfile.TemporaryDirectory(prefix="k8sjob-") as name:
        desk = Path(name)
        settings, variables = as_uv_settings()
        pinned = _prepare(desk, inventory, wanted, settings)
        uv = partial(_uv, desk=desk, variables=variables, inventory=inventory)
        say(
            f"choosing packages for Python {inventory.version} on {platform}, to fit the"
            f" {len(inventory.distributions)} of {inventory.image}"
        )
        uv(["pip", "compile", "wanted.txt", *_CHOICE, *_left_out(pinned), *common])
        chosen = _names((desk / "chosen.txt").read_text(encoding="utf-8"))
        say(f"unpacking {len(chosen)} package{'' if len(chosen) == 1 else 's'}")
        if chosen:
            how = ["--no-deps", "--target", str(folder.absolute())]
            uv(["pip", "install", "-r", "chosen.txt", *how, *common])
    folder.mkdir(exist_ok=True)
    say(", ".join(chosen) or f"{inventory.image} has all of it already")


def _prepare(desk: Path, inventory: Inventory, wanted: Dependencies, settings: str) -> list[str]:
    """Write what uv reads; the names of the base's packages that are pinned."""
    try:
        pinned, unknown = _write_stubs(inventory, desk)
        for name, text in (
            ("wanted.txt", "\n".join([*checked_lines(wanted), ""])),
            ("unknown.txt", "\n".join(unknown)),
            ("uv.toml", settings),  # in any case, or one in a folder above would have a say
        ):
            (desk / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ImageError(f"{desk}: cannot be written: {error.strerror}; make space") from None
    return pinned


def _platform(inventory: Inventory) -> str:
    machine = _MACHINES.get(inventory.architecture)
    if machine is None:
        raise ImageError(
            f"{inventory.image} is for {inventory.architecture}; --builder uv knows"
            f" {' and '.join(_MACHINES)}: take --builder buildah"
        )
    if inventory.glibc is None:
        return f"{machine}-unknown-linux-musl"
    known = [minor for minor in _GLIBCS if (2, minor) <= inventory.glibc]
    if not known:
        raise ImageError(
            f"{inventory.image} has glibc {'.'.join(map(str, inventory.glibc))}, which is too old"
            " for wheels; take a newer base"
        )
    return f"{machine}-manylinux_2_{known[-1]}"


def _write_stubs(inventory: Inventory, desk: Path) -> tuple[list[str], list[str]]:
    """Pin the base's packages; the names that are, and those whose version says nothing."""
    pinned, unknown, lines = [], [], []
    for name, headers in sorted(inventory.distributions.items()):
        version = _header(headers, "Version")
        if not _PUBLIC.fullmatch(version):
            unknown.append(name)
            continue
        pinned.append(name)
        path = _write_stub(desk, name, version, headers)
        lines.append(f"{name} @ {path.as_uri()}\n")
    (desk / "base.txt").write_text("".join(lines), encoding="utf-8")
    return pinned, unknown


def _write_stub(desk: Path, name: str, version: str, headers: str) -> Path:
    """A wheel with nothing in it, that needs nothing unless an extra is asked for."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = desk / f"{stem}-py3-none-any.whl"
    metadata = "\n".join(["Metadata-Version: 2.1", *_of_extras(headers), ""])
    wheel = "Wheel-Version: 1.0\nGenerator: k8sjob\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", wheel)
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def _of_extras(headers: str) -> Iterator[str]:
    for line in headers.splitlines():
        field, _, value = line.partition(":")
        of_extra = re.search(r"\bextra\s*==", value) and "@" not in value  # no address of theirs
        if field.lower() != "requires-dist" or of_extra:
            yield line


def _header(headers: str, name: str) -> str:
    found = re.search(rf"^{name}: *(.*?) *$", headers, re.MULTILINE | re.IGNORECASE)
    return found[1].lower() if found else ""


def _left_out(names: Iterable[str]) -> list[str]:
    return [word for name in names for word in ("--no-emit-package", name)]


def _names(chosen: str) -> list[str]:
    """`name==version` of each line that begins one; no addresses, which may hold a password."""
    return re.findall(r"^[A-Za-z0-9][^\s\\;]*", chosen, re.MULTILINE)


def _uv(
    arguments: list[str], *, desk: Path, variables: Mapping[str, str], inventory: Inventory
) -> None:
    """Run uv where no project of the user's has a say."""
    program = find_uv()
    assert program is not None  # noqa: S101 - the builder has looked for it
    argv = [program, "--directory", str(desk), "--quiet", "--color", "never", *arguments]
    try:
        child.run(argv, lambda _line: None, variables=variables)
    except child.Failed as failed:
        raise ImageError(_in_words(failed.words, inventory)) from None


def _in_words(words: Iterable[str], inventory: Inventory) -> str:
    """What uv could not do, and what the base has of all that it names."""
    lines = [_DECORATION.sub("", line.strip()) for line in words]
    text = "\n  ".join(lines)
    if _FULL in text:
        return f"uv: {text}; make space, or name another folder by TMPDIR and UV_CACHE_DIR"
    there = [
        f"{name} {_header(headers, 'Version')}"
        for name, headers in sorted(inventory.distributions.items())
        if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text, re.IGNORECASE)
    ]
    base = f"\n{inventory.image} has {', '.join(there)}, which stays as it is" if there else ""
    return (
        f"what is to be installed cannot be had for {inventory.image}"
        f" (Python {inventory.version}, {_platform(inventory)}):\n  {text}{base}\n"
        "ask for another version, or take --builder buildah, which can compile packages and replace"
        " those of the base"
    )
