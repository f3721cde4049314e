"""The tables in tables.toml: what lint knows of libraries, and the messages of its checks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

TABLES: Final[dict[str, dict[str, str]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def pattern(name: str) -> re.Pattern[str]:
    """A regular expression of the tables."""
    return re.compile(TABLES["patterns"][name])


def message(name: str, /, **seen: object) -> str:
    """The message of that name, which is mostly the id of a check, with what was seen."""
    return TABLES["messages"][name].format(**seen)
