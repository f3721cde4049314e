"""The distributions that a script needs, by the names that it imports."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@cache
def table(kind: str) -> dict[str, str]:
    """The rows of distributions.tsv: "import" of a module, or "use" of what needs another one."""
    text = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()]
    return {row[1]: row[2] for row in rows if row[0] == kind}


def distribution_of(name: str, installed: Mapping[str, Sequence[str]]) -> str:
    """The distribution of a module, or of the module that has this attribute."""
    parts, modules = name.split("."), table("import")
    candidates = dict.fromkeys(installed.get(parts[0], ()))
    if len(candidates) == 1 and not any(key.startswith(f"{parts[0]}.") for key in modules):
        return next(iter(candidates))
    # Several distributions share a namespace such as google: the one with the file counts.
    for length in range(len(parts), 0, -1):
        module, path = ".".join(parts[:length]), "/".join(parts[:length])
        starts = f"{path}.", f"{path}/" if module == name else f"{path}/__init__."
        for candidate in candidates:
            if any(str(file).startswith(starts) for file in metadata.files(candidate) or ()):
                return candidate
        if module != name and (form := modules.get(f"{module}.*")):
            return form.replace("*", parts[length].replace("_", "-"))
        if module in modules:
            return modules[module]
    return next(iter(candidates), parts[0])


def pinned(distribution: str) -> str:
    """A distribution in the version that is installed."""
    try:
        return f"{distribution}=={metadata.version(distribution).partition('+')[0]}"
    except metadata.PackageNotFoundError:
        return distribution
