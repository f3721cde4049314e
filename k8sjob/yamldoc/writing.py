"""YAML out, so that any reader gets back what was put in.

A string stays bare only where every version of YAML agrees that it is one; all else is JSON's
quoted form, in ASCII, which is YAML too except half surrogate pairs and characters beyond the
basic plane.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import RenderError

if TYPE_CHECKING:
    from collections.abc import Iterator

_BARE: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_WORDS: Final = frozenset(
    ["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf", "infinity"]
)
_ESCAPED: Final = re.compile(r"[^\x20-\x7e]|(?<=#)#")  # `##[` is a command to some CIs
_MAX_KEY: Final = 1000  # YAML reads `key:` only within 1024 characters; longer ones need `? key`


def scalar(value: Any) -> str:
    """A string, number, boolean or None as YAML that every reader takes for exactly that.

    Raises:
        RenderError: half a surrogate pair, nan, infinity, or no scalar at all.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return _float(value)
    if not isinstance(value, str):
        raise RenderError(f"{value!r} is a {type(value).__name__}, which YAML has no scalar for")
    if _BARE.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return _ESCAPED.sub(_escape, json.dumps(value, ensure_ascii=False))


def _float(value: float) -> str:
    if not math.isfinite(value):
        raise RenderError(f"{value!r} is not a number that JSON and Kubernetes can represent")
    text = repr(float(value))
    mantissa, exponent, power = text.partition("e")
    # YAML 1.1 takes 1e+16 for text: it wants the dot.
    return f"{mantissa}.0e{power}" if exponent and "." not in mantissa else text


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xD800 <= code <= 0xDFFF:
        raise RenderError(f"{match.string!a} has half a surrogate pair, which is not text")
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"


def dump(data: Any) -> str:
    """JSON data as block-style YAML, keys in their order; ends with a newline.

    Raises:
        RenderError: see scalar; or a key that is not a string.
    """
    return "\n".join(_lines(data)) + "\n"


def flow(data: Any) -> str:
    """JSON data as YAML in one line, for examples in messages and pages.

    Raises:
        RenderError: see dump.
    """
    if isinstance(data, dict):
        return "{" + ", ".join(f"{_key(key)}: {flow(value)}" for key, value in data.items()) + "}"
    if isinstance(data, list | tuple):
        return "[" + ", ".join(flow(item) for item in data) + "]"
    return scalar(data)


def _lines(data: Any) -> Iterator[str]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            name = _key(key)
            if name.startswith("? "):
                yield from (name, f": {flow(value)}")
            elif isinstance(value, dict | list | tuple) and value:
                yield f"{name}:"
                yield from (f"  {line}" for line in _lines(value))
            else:
                yield f"{name}: {flow(value)}"
    elif isinstance(data, list | tuple) and data:
        for item in data:
            first, *continuation = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in continuation)
    else:
        yield flow(data)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise RenderError(f"the key {key!r} is not text")
    text = scalar(key)
    return f"? {text}" if len(text) > _MAX_KEY else text
