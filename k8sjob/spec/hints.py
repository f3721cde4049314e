"""What a wrong value was probably meant to be, so that an error can show how to write it."""

from __future__ import annotations

import math
import re
import shlex
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from k8sjob.spec.base import UNEXPLAINED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.spec.base import Loc, Part

__all__ = ["fits", "likely", "plain"]

_WHOLE: Final = re.compile(r"[-+]?[0-9][0-9_]{0,30}(?:\.0*)?", re.ASCII)
_NUMBER: Final = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_FLAGS: Final = {
    **dict.fromkeys(("true", "yes", "on", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "n", "0"), False),
}
_SHELL: Final = ("args", "command")  # fields whose text is a command line, in quotes and all
_WHOLE_ITEM: Final = set(";{")  # a requirement's marker, a regular expression: never split


def plain(loc: Loc) -> Loc:
    """Pydantic's location without the tags of unions and its mark for keys."""
    return tuple(part for part in loc if not str(part).startswith("<") and part != "[key]")


def fits(root: type[Part], loc: Loc, value: Any) -> bool:
    """Whether a field takes the value, by everything that holds for the field alone.

    The value is validated at its place in a document that has nothing else.
    """
    data = value
    for key in reversed(loc):
        data = [data] if isinstance(key, int) else {key: data}
    at = tuple(0 if isinstance(key, int) else key for key in loc)
    try:
        root.model_validate(data, context=UNEXPLAINED)
    except ValidationError as error:
        return all(place[: len(at)] != at for place in _places(error))
    return True


def _places(error: ValidationError) -> Iterator[Loc]:
    """Every field that an error is about."""
    for found in error.errors():
        loc = plain(found["loc"])
        broken = found["ctx"]["broken"] if found["type"] == "rules" else [((), "")]
        yield from ((*loc, *path) for path, _ in broken)


def likely(seen: Any, field: str, parts: Iterable[type[Part]]) -> Iterator[Any]:
    """Values that may have been meant, the likeliest first; not all of them fit the field.

    Args:
        seen: the wrong value.
        field: the name of the field.
        parts: the classes that the field can hold.
    """
    for part in parts:
        yield from part.likely(seen)
    if isinstance(seen, str):
        yield from _of_text(seen.strip(), field)
    elif isinstance(seen, list | tuple):
        yield _pairs(seen)
        yield from seen if len(seen) == 1 else ()
    elif isinstance(seen, dict):
        yield [seen]
    elif isinstance(seen, int | float) and not isinstance(seen, bool):
        yield from _of_number(seen)


def _of_number(seen: float) -> Iterator[Any]:
    if math.isfinite(seen) and seen == int(seen):
        yield int(seen)
    yield getattr(seen, "text", None) or str(seen)
    yield [seen]
    if seen in (0, 1):
        yield bool(seen)


def _of_text(text: str, field: str) -> Iterator[Any]:
    if _WHOLE.fullmatch(text):
        yield int(text.partition(".")[0])
    if _NUMBER.fullmatch(text):
        yield float(text)
    if text.lower() in _FLAGS:
        yield _FLAGS[text.lower()]
    yield text
    yield _pairs(re.split(r"[,\s]+", text))
    if field in _SHELL:
        yield words(text)
    elif not _WHOLE_ITEM & set(text):
        yield [piece for piece in re.split(r"[,\s]+", text) if piece]
    if field not in _SHELL:
        yield [text]


def words(text: str) -> list[str] | None:
    """A command line as a shell splits it; None where a quote is never closed."""
    try:
        return shlex.split(text)
    except ValueError:
        return None


def _pairs(items: Iterable[Any]) -> dict[Any, Any] | None:
    """`A=1` and `{name: A, value: 1}`, as docker and Kubernetes write a mapping."""
    found = {}
    for item in items:
        match item:
            case str() if "=" in item:
                key, _, found[key] = item.partition("=")
            case {"name": str(key), "value": value, **rest} if not rest:
                found[key] = value
            case _:
                return None
    return found
