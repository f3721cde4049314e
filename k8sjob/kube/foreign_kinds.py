"""Kinds of object that run programs and are no job for k8sjob."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from k8sjob.kube.objects import at_path


def foreign_kind(item: Any) -> str:
    """What an object of such a kind is, and the next command; empty for any other."""
    group = str(at_path(item, "apiVersion")).partition("/")[0]
    text = _table()["kinds"].get(f"{at_path(item, 'kind')} {group}", "")
    return text.format(**_table()["steps"])


@cache
def _table() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
