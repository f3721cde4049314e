"""Durations: `60s`, `10m`, `1h30m`, `2d`, or a whole number of seconds."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from k8sjob.spec.base import refuse, seen

__all__ = ["Duration", "format_duration", "parse_duration"]

_UNITS: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_FORM: Final = "(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?"
_WORDS: Final = re.compile(
    r"(\d+(?:\.\d+)?)\s*(d(?:ays?)?|h(?:(?:ou)?rs?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)?|)"
    r"(?![a-z\d.])[\s,]*",
    re.ASCII,
)
_MAX: Final = 2**31 - 1  # Kubernetes keeps seconds in 32 or 64 bits, depending on the field


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
        elif value and (match := re.fullmatch(_FORM, value)):
            parts = zip(match.groups(), _UNITS.values(), strict=True)
            seconds = sum(int(number[:20]) * unit for number, unit in parts if number)
    if not 0 <= seconds <= _MAX:
        message = f"{seen(value)} is not a duration, such as 90s, 10m, 1h30m or 2d"
        refuse(message, [_in_words(value)] if seconds < 0 else [format_duration(_MAX)])
    return seconds


def _in_words(value: Any) -> str | None:
    """The duration that `10 minutes`, `1.5h` or 0.5 mean; None where it is not plain."""
    text = str(value).strip().lower()
    parts = _WORDS.findall(text)
    if isinstance(value, bool | list | dict) or not parts or _WORDS.sub("", text).strip():
        return None
    seconds = sum(float(number) * _UNITS[unit[:1] or "s"] for number, unit in parts)
    return format_duration(round(seconds)) if 1 <= seconds <= _MAX else None


def format_duration(seconds: int) -> str:
    """The shortest text that parse_duration reads back: 90 is "1m30s"."""
    text, rest = "", seconds
    for letter, unit in _UNITS.items():
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
                {"type": "string", "pattern": rf"^(?:[0-9]+|{_FORM})$", "minLength": 1},
                {"type": "integer", "minimum": 0, "maximum": _MAX},
            ]
        }
    ),
]
"""Whole seconds in Python; "10m" in a job.yaml."""
