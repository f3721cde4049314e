"""The distributions that a script needs, by the names that it imports."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import cache
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
    from importlib import metadata  # noqa: PLC0415 - see installed_version

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
    version = installed_version(distribution).partition("+")[0]
    return f"{distribution}=={version}" if version else distribution


def installed_version(distribution: str) -> str:
    """The version of a distribution that is installed; empty if there is none."""
    # To import torch takes seconds, and importlib.metadata a sixth of a command. Conda writes
    # egg-info.
    name = re.sub(r"[-_.]+", "[-_.]", distribution)
    form = re.compile(rf"{name}-([^-]+)(?:-py[\d.]+)?\.(?:dist|egg)-info", re.IGNORECASE)
    for path in sys.path:
        with suppress(OSError):  # it may be an archive, or not be there
            names = os.listdir(path or ".")  # noqa: PTH208 - hundreds
            if version := next((match[1] for match in map(form.fullmatch, names) if match), ""):
                return version
    return ""
