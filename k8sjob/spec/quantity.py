"""Quantities as Kubernetes' apimachinery parses and writes them (resource.Quantity); durations.

A quantity is `number[suffix]`: decimal suffixes n u m k M G T P E, binary ones Ki Mi Gi Ti Pi Ei,
or an exponent. Note that `400m` of memory is 0.4 bytes, and that `1E` is an exa while `1E3` is an
exponent. A duration is `60s`, `10m`, `1h30m`, `2d`, or a whole number of seconds.
"""

from __future__ import annotations

import re
from decimal import ROUND_UP, Context, Decimal
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

from k8sjob.spec.base import refuse, seen

__all__ = [
    "Cpu",
    "Duration",
    "Memory",
    "Quantity",
    "canonical",
    "format_duration",
    "parse",
    "parse_duration",
]

_DECIMAL: Final = {
    "n": -9,
    "u": -6,
    "m": -3,
    "": 0,
    "k": 3,
    "M": 6,
    "G": 9,
    "T": 12,
    "P": 15,
    "E": 18,
}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_FORM: Final = re.compile(
    r"([+-]?)(\d+\.?\d*|\.\d+)(?:([KMGTPE]i)|([eE][+-]?\d+)|([numkMGTPE]?))", re.ASCII
)
_UNITS: Final = {name.lower(): name for name in (*_DECIMAL, *_BINARY) if name not in ("n", "u")}
"""Suffixes by what people write: `gb` and `G` are both 10^9, `gib` and `Gi` 2^30."""
_WORDS: Final = re.compile(
    rf"\s*(\d+(?:\.\d+)?)\s*((?:{'|'.join(_UNITS)})b?)\s*(?:bytes?|cores?|cpus?)?\s*",
    re.IGNORECASE | re.ASCII,
)
_NANO: Final = -9
_LONGEST: Final = 100
MAX: Final = Decimal(2**63 - 1)
"""Largest quantity that Kubernetes can add up."""
_EXACT: Final = Context(prec=200)


def _split(text: str) -> tuple[Decimal, str]:
    """The value and its family ("binary", "exponent", "decimal"); ValueError for no quantity."""
    match = _FORM.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    sign, digits, binary, exponent, suffix = match.groups()
    number = Decimal(sign + digits)
    if binary:
        # Upstream caps binary quantities alone; decimal ones may go beyond.
        value = min(_EXACT.multiply(number.copy_abs(), Decimal(2 ** _BINARY[binary])), MAX)
        family, value = "binary", value.copy_sign(number)
    else:
        family = "exponent" if exponent else "decimal"
        power = int(exponent[1:]) if exponent else _DECIMAL[suffix]
        if abs(power) > _LONGEST:
            raise ValueError(f"{text!r} is not a quantity")
        value = number.scaleb(power, _EXACT)
    if value.as_tuple()[2] < _NANO:  # type: ignore[operator]  # neither NaN nor infinite here
        value = value.quantize(Decimal(1).scaleb(_NANO), ROUND_UP, _EXACT)
    if family == "binary" and (abs(value) < 1024 or value != value.to_integral_value()):
        family = "decimal"
    return value, family


def parse(text: str) -> Decimal:
    """The quantity's value: bytes, cores, pieces. Finer than a nano is rounded up, as upstream.

    Raises:
        ValueError: the text is not a quantity.
    """
    return _split(text)[0]


def canonical(text: str) -> str:
    """The quantity as the apiserver writes it: "1024Mi" is "1Gi", "0.5" is "500m", "1000" is "1k".

    Raises:
        ValueError: the text is not a quantity.
    """
    value, family = _split(text)
    if not value:
        return "0"
    if family == "binary":
        number, suffix = int(value), ""
        for name in _BINARY:
            if number % 1024:
                break
            number, suffix = number // 1024, name
        return f"{number}{suffix}"
    sign, digits, exponent = value.normalize(_EXACT).as_tuple()
    assert isinstance(exponent, int)  # noqa: S101 - neither NaN nor infinite here
    power = exponent - exponent % 3
    if family == "decimal":
        power = min(power, max(_DECIMAL.values()))
    number = int("".join(map(str, digits))) * 10 ** (exponent - power) * (-1 if sign else 1)
    if family == "exponent":
        return f"{number}e{power}" if power else str(number)
    return str(number) + next(name for name, each in _DECIMAL.items() if each == power)


def _quantity(value: Any) -> str:
    text = value
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = getattr(value, "text", None) or repr(value)
    try:
        number = parse(text) if isinstance(text, str) else None
    except ValueError:
        number = None
    if number is None:
        refuse(f"{seen(value)} is not a quantity", _in_words(value))
    if number < 0:
        refuse(f"{seen(value)} is negative", [text.lstrip("-")])
    if number >= MAX:
        refuse(f"{seen(value)} is more than any node has", [])
    return canonical(text)


def _in_words(value: Any) -> list[str]:
    """The quantity that `32GB`, `32 gib` or `4 cores` mean; none where it is not plain."""
    match = _WORDS.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return []
    number, unit = match.groups()
    return [number + (unit if unit in _DECIMAL else _UNITS[unit.lower().removesuffix("b")])]


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
_DURATION_WORDS: Final = re.compile(
    r"(\d+(?:\.\d+)?)\s*(d(?:ays?)?|h(?:(?:ou)?rs?)?|m(?:in(?:ute)?s?)?|s(?:ec(?:ond)?s?)?|)"
    r"(?![a-z\d.])[\s,]*",
    re.ASCII,
)
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
        refuse(
            message, [_duration_in_words(value)] if seconds < 0 else [format_duration(_MAX_SECONDS)]
        )
    return seconds


def _duration_in_words(value: Any) -> str | None:
    """The duration that `10 minutes`, `1.5h` or 0.5 mean; None where it is not plain."""
    text = str(value).strip().lower()
    parts = _DURATION_WORDS.findall(text)
    if isinstance(value, bool | list | dict) or not parts or _DURATION_WORDS.sub("", text).strip():
        return None
    seconds = sum(float(number) * _SECONDS[unit[:1] or "s"] for number, unit in parts)
    return format_duration(round(seconds)) if 1 <= seconds <= _MAX_SECONDS else None


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
