"""Quantities as Kubernetes' apimachinery parses and writes them (resource.Quantity).

A quantity is `number[suffix]`: decimal suffixes n u m k M G T P E, binary ones Ki Mi Gi Ti Pi Ei,
or an exponent. Note that `400m` of memory is 0.4 bytes, and that `1E` is an exa while `1E3` is an
exponent.
"""

from __future__ import annotations

import re
from decimal import ROUND_UP, Context, Decimal
from typing import Final

_SUFFIXES: Final = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")
_DECIMAL: Final = {suffix: 3 * power for power, suffix in enumerate(_SUFFIXES, -3)}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
"""The powers of ten, and of two, that suffixes stand for."""
_FORM: Final = r"([+-]?)(\d++(?:\.\d*+)?|\.\d++)(?:([KMGTPE]i)|([eE][+-]?\d+)|([numkMGTPE]?))"
_NANO: Final = -9
_LONGEST: Final = 100
MAX: Final = Decimal(2**63 - 1)
"""Largest quantity that Kubernetes can add up."""
_EXACT: Final = Context(prec=200)


def _split(text: str) -> tuple[Decimal, str]:
    """The value and its family ("binary", "exponent", "decimal"); ValueError for no quantity."""
    # Decimal would compute with any number of digits.
    match = re.fullmatch(_FORM, text, re.ASCII) if len(text) <= _LONGEST else None
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
        # 1E999999999 is short, and its digits fill the memory.
        if abs(power) > _LONGEST:
            raise ValueError(f"{text!r} is not a quantity")
        value = number.scaleb(power, _EXACT)
    if value.as_tuple()[2] < _NANO:  # type: ignore[operator]  # neither NaN nor infinite here
        value = value.quantize(Decimal(1).scaleb(_NANO), ROUND_UP, _EXACT)
    # The apiserver writes 0.5Ki as 512: below 1024, and with a fraction, suffixes are decimal ones.
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
        # The largest suffix without a remainder.
        number, suffix = int(value), ""
        for name in _BINARY:
            if number % 1024:
                break
            number, suffix = number // 1024, name
        return f"{number}{suffix}"
    sign, digits, exponent = value.normalize(_EXACT).as_tuple()
    assert isinstance(exponent, int)  # noqa: S101 - neither NaN nor infinite here
    # Suffixes stand for powers of a thousand.
    power = exponent - exponent % 3
    if family == "decimal":
        power = min(power, max(_DECIMAL.values()))
    number = int("".join(map(str, digits))) * 10 ** (exponent - power) * (-1 if sign else 1)
    if family == "exponent":
        return f"{number}e{power}" if power else str(number)
    return str(number) + next(name for name, each in _DECIMAL.items() if each == power)
