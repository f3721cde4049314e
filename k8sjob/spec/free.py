"""Free JSON: the parts of a spec that are Kubernetes' own and have no fields here."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from k8sjob.errors import field_path
from k8sjob.spec.base import refuse
from k8sjob.spec.names import check_text

__all__ = ["FreeJson"]

_MAX_DEPTH: Final = 32


def _mapping(value: dict[str, Any]) -> dict[str, Any]:
    """A copy that is JSON through and through, so that no one else can change it."""
    made = _copy(value, ())
    assert isinstance(made, dict)  # noqa: S101 - a copy of one
    return made


def _copy(value: Any, at: tuple[str | int, ...]) -> Any:
    if len(at) > _MAX_DEPTH:
        refuse(f"nested more than {_MAX_DEPTH} deep, which Kubernetes never is")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                refuse(f"the key {key!r}{_where(at)} is not text; quote it")
            check_text(key)
        return {key: _copy(item, (*at, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item, (*at, index)) for index, item in enumerate(value)]
    if isinstance(value, str):
        return check_text(value)
    if value is None or isinstance(value, bool | int):
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        refuse(f"{value!r}{_where(at)} is not JSON; write text, numbers, booleans, lists, mappings")
    return float(value)


def _where(at: tuple[str | int, ...]) -> str:
    return f" in {field_path(at)}" if at else ""


FreeJson = Annotated[dict[str, Any], AfterValidator(_mapping)]
"""A JSON object in Kubernetes' own form."""
