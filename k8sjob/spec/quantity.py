"""Quantities and durations as fields of a job spec.

A duration is `60s`, `10m`, `1h30m`, `2d`, or a whole number of seconds.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from k8sjob.kube.capacity import MAX, canonical, parse
from k8sjob.spec.base import refuse, seen


def _quantity(value: Any) -> str:
    text = value
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = getattr(value, "text", None) or repr(value)
    try:
        number = parse(text) if isinstance(text, str) else None
    except ValueError:
        number = None
    if number is None:
        refuse(f"{seen(value)} is not a quantity", [])
    if number < 0:
        refuse(f"{seen(value)} is negative", [text.lstrip("-")])
    if number >= MAX:
        refuse(f"{seen(value)} is more than any node has", [])
    return canonical(text)


def _cpu(value: Any) -> str:
    text = _quantity(value)
    cores = parse(text)
    if not cores:
        refuse(f"{seen(value)} asks for no CPU; leave cpu out for no limit, or write at least 1m")
    if cores % Decimal("0.001"):
        whole = f"{int(cores * 1000) + 1}m"
        refuse(f"{seen(value)} is finer than a thousandth of a core", [whole])
    return text


def _memory(value: Any) -> str:
    text = _quantity(value)
    size = parse(text)
    if size % 1:
        meant = f"{(size * 1000).normalize():f}Mi"
        refuse(
            f"{seen(value)} is {size.normalize():f} bytes, since 'm' means a thousandth", [meant]
        )
    if 0 < size < 10**6:
        refuse(f"{seen(value)} is {size:f} bytes, less than 1M; write {size:f}Mi or {size:f}Gi")
    return text


_SCHEMA: Final = WithJsonSchema(
    {
        "anyOf": [
            {
                "type": "string",
                "pattern": r"^[+]?([0-9]+\.?[0-9]*|\.[0-9]+)"
                r"([KMGTPE]i|[eE][+-]?[0-9]+|[numkMGTPE])?$",
            },
            {"type": "number", "minimum": 0},
        ]
    }
)

Quantity = Annotated[str, BeforeValidator(_quantity), _SCHEMA]
"""Canonical text of any quantity that is not negative."""
Cpu = Annotated[str, BeforeValidator(_cpu), _SCHEMA]
"""Canonical text of a number of cores, at least 1m."""
Memory = Annotated[str, BeforeValidator(_memory), _SCHEMA]
"""Canonical text of a number of bytes: 0, or at least 1M."""


_SECONDS: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION: Final = "(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?"
_MAX_SECONDS: Final = 2**31 - 1  # Kubernetes keeps seconds in 32 or 64 bits, depending on the field


def parse_duration(value: Any) -> int:
    """Whole seconds.

    Args:
        value: "90s", "1m30s", "2d", or an int of seconds.

    Raises:
        PydanticCustomError: anything else.
    """
    seconds = -1
    if isinstance(value, int) and not isinstance(value, bool):
        seconds = value
    elif isinstance(value, str) and value.isascii():
        if value.isdigit():
            seconds = int(value[:20])
        elif value and (match := re.fullmatch(_DURATION, value)):
            parts = zip(match.groups(), _SECONDS.values(), strict=True)
            seconds = sum(int(number[:20]) * unit for number, unit in parts if number)
    if not 0 <= seconds <= _MAX_SECONDS:
        message = f"{seen(value)} is not a duration, such as 90s, 10m, 1h30m or 2d"
        refuse(f"{message}; at most {_MAX_SECONDS}s" if seconds > 0 else message, [])
    return seconds


def format_duration(seconds: int) -> str:
    """The shortest text that parse_duration reads back: 90 is "1m30s"."""
    text, rest = "", seconds
    for letter, unit in _SECONDS.items():
        count, rest = divmod(rest, unit)
        text += f"{count}{letter}" if count else ""
    return text or "0s"


Duration = Annotated[
    int,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": rf"^(?:[0-9]+|{_DURATION})$", "minLength": 1},
                {"type": "integer", "minimum": 0, "maximum": _MAX_SECONDS},
            ]
        }
    ),
]
"""Whole seconds in Python; "10m" in a job.yaml."""
