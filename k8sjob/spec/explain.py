"""What pydantic found, said in plain words: the field, its place, the value seen, the next step."""

from __future__ import annotations

import re
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from k8sjob.document import flow
from k8sjob.errors import Problem, field_path
from k8sjob.spec.base import Part, part_types

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pydantic import ValidationError
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from k8sjob.document import Document
    from k8sjob.spec.base import Loc

__all__ = ["MAX_PROBLEMS", "problems"]

MAX_PROBLEMS: Final = 100
"""Problems that are told; nobody reads more, and each takes half a millisecond to word."""
_INTEGER: Final = re.compile("-?[0-9]{1,18}")

_KEY: Final = "[key]"  # pydantic's mark for an error in a mapping's key
_SHOWN: Final = 80


def problems(root: type[Part], error: ValidationError, document: Document | None) -> list[Problem]:
    """Everything that is wrong, in the order of the document.

    Args:
        root: the class that was validated.
        error: what pydantic found.
        document: where the data came from; None for data made in Python.
    """
    found = []
    for detail in error.errors(include_url=False):
        loc = tuple(part for part in detail["loc"] if not str(part).startswith("<"))
        at_key = detail["type"] == "extra_forbidden" or _KEY in loc
        loc = tuple(part for part in loc if part != _KEY)
        rules = detail["ctx"]["broken"] if detail["type"] == "rules" else [((), None)]
        for path, message in rules:
            at = (*loc, *path)
            place = document.place(at, key=at_key) if document else (0, 0)
            found.append((place, at, message, detail))
    found.sort(key=lambda one: one[0])
    told = [
        Problem(field_path(at), message or _message(root, at, detail), *place)
        for place, at, message, detail in found[:MAX_PROBLEMS]
    ]
    if len(found) > MAX_PROBLEMS:
        more = f"{len(found) - MAX_PROBLEMS} more problems; correct these first"
        told.append(Problem("", more))
    return told


def _message(root: type[Part], loc: Loc, detail: ErrorDetails) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return _unknown(root, loc)
        case "missing":
            return f"missing; write it, as {_example(root, loc)}"
        case "k8sjob":
            return str(detail["ctx"]["message"])
        case kind:
            seen, say = _seen(detail["input"]), _PLAIN.get(kind)
            text = say(seen, detail.get("ctx", {})) if say else f"{seen}: {detail['msg']}"
            return text + _hint(root, loc, detail["input"], kind)


def _one_of(seen: str, ctx: Mapping[str, Any]) -> str:
    choices = re.findall(r"'([^']*)'", ctx["expected"])
    text = f"{seen} is not one of {', '.join(choices)}"
    if seen == "null" and "None" in choices:
        return f"{text}; did you mean the text None?"
    lower = {choice.lower(): choice for choice in choices}
    close = get_close_matches(seen.strip("'").lower(), list(lower), n=1, cutoff=0.6)
    return f"{text}; did you mean {lower[close[0]]!r}?" if close else f"{text}; write one of them"


_PLAIN: Final[Mapping[str, Callable[[str, Mapping[str, Any]], str]]] = MappingProxyType(
    {
        "string_type": lambda seen, _: f"{seen} is not text",
        "float_type": lambda seen, _: f"{seen} is not a number",
        "finite_number": lambda seen, _: f"{seen} is not a finite number; write one",
        "int_type": lambda seen, _: f"{seen} is not a whole number",
        "bool_type": lambda seen, _: f"{seen} is neither true nor false",
        "tuple_type": lambda seen, _: f"{seen} is not a list",
        "dict_type": lambda seen, _: f"{seen} is not a mapping",
        "model_type": lambda seen, _: f"{seen} is not a mapping",
        "literal_error": _one_of,
        "greater_than_equal": lambda seen, ctx: f"{seen} is too small; at least {ctx['ge']}",
        "greater_than": lambda seen, ctx: f"{seen} is too small; more than {ctx['gt']:g}",
        "less_than_equal": lambda seen, ctx: f"{seen} is too large; at most {ctx['le']}",
    }
)


def _hint(root: type[Part], loc: Loc, seen: Any, kind: str) -> str:
    """The next step, for the kinds whose message does not say it."""
    if not kind.endswith("_type"):
        return ""
    info = _field(root, loc)
    if seen is None and info is not None and not info.is_required():
        return f"; leave the key out, or write it as {_example(root, loc)}"
    if kind == "int_type" and isinstance(seen, str) and _INTEGER.fullmatch(seen):
        return f"; write {int(seen)} without quotes"
    if kind == "string_type" and isinstance(seen, bool | int | float):
        return f'; quote it, as "{str(seen).lower()}"'
    if kind == "tuple_type" and isinstance(seen, str | int | float):
        return f"; write [{seen}]"
    return f"; write it as {_example(root, loc)}"


def _seen(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}.get(value) if _flag(value) else ascii(value)
    text = str(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _example(root: type[Part], loc: Loc) -> str:
    """The field's example as it is written in a job.yaml, in one line."""
    info = _field(root, loc)
    name = next((part for part in reversed(loc) if isinstance(part, str)), "value")
    if info is None or not info.examples:
        return f"{name}: ..."
    return f"{name}: {flow(info.examples[0])}"


def _parts(root: type[Part], loc: Loc) -> list[type[Part]]:
    """The classes that a location can be of."""
    parts = [root]
    for key in loc:
        if isinstance(key, str):
            fields = [part.model_fields[key] for part in parts if key in part.model_fields]
            parts = [found for info in fields for found in part_types(info.annotation)]
    return parts


def _field(root: type[Part], loc: Loc) -> FieldInfo | None:
    for end in range(len(loc), 0, -1):
        name = loc[end - 1]
        if isinstance(name, str):
            for part in _parts(root, loc[: end - 1]):
                if name in part.model_fields:
                    return part.model_fields[name]
    return None


def _unknown(root: type[Part], loc: Loc) -> str:
    """No such field: the one that was meant, where it belongs, or what there is."""
    name = str(loc[-1])
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    here = [field for part in _parts(root, loc[:-1]) for field in part.model_fields]
    elsewhere = [path for path in _paths(root) if path[-1] == snake]
    if elsewhere and snake not in here:
        places = " or ".join(field_path(path) for path in elsewhere[:3])
        return f"no such field here; it belongs to {places}"
    close = get_close_matches(snake, here, n=1, cutoff=0.7)
    if close:
        return f"no such field; did you mean {close[0]!r}?"
    return f"no such field; there is {', '.join(here)}"


def _paths(part: type[Part], base: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields of a part, at every depth."""
    for name, info in part.model_fields.items():
        yield (*base, name)
        for nested in part_types(info.annotation):
            yield from _paths(nested, (*base, name))
