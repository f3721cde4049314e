"""Errors of a spec in plain English: the field, its place, the value seen, the next step."""

from __future__ import annotations

import math
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from k8sjob.contract import did_you_mean
from k8sjob.errors import Problem, RenderError, field_path
from k8sjob.spec.base import UNEXPLAINED, Part, part_types, seen
from k8sjob.spec.run import shell_words
from k8sjob.yamldoc import flow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from k8sjob.spec.base import Loc, Part
    from k8sjob.yamldoc import Document

__all__ = [
    "MAX_PROBLEMS",
    "fits",
    "likely",
    "plain",
    "problems",
]

MAX_PROBLEMS: Final = 100
"""Most problems in one error: nobody reads more, and each takes half a millisecond to explain."""
_KEY: Final = "[key]"  # pydantic's mark for an error in a mapping's key
_BARE: Final = re.compile(r"(?:[0-9]+[A-Za-z]+)+")  # 32Gi, 1h30m: text without quotes, too
_LONGEST: Final = 200  # characters of a value in a hint


def problems(root: type[Part], error: ValidationError, document: Document | None) -> list[Problem]:
    """Everything that is wrong, in the order of the document.

    Args:
        root: the class that was validated.
        error: what pydantic found.
        document: where the data came from; None for data made in Python.
    """
    found = []
    for detail in error.errors(include_url=False):
        at_key = detail["type"] == "extra_forbidden" or _KEY in detail["loc"]
        loc = plain(detail["loc"])
        rules = detail["ctx"]["broken"] if detail["type"] == "rules" else [((), None)]
        for path, message in rules:
            at = (*loc, *path)
            place = document.place(at, key=at_key) if document else (0, 0)
            found.append((place, at, message, detail))
    found.sort(key=lambda one: one[0])
    made = [
        Problem(field_path(at), message or _message(root, at, detail), *place)
        for place, at, message, detail in found[:MAX_PROBLEMS]
    ]
    if len(found) > MAX_PROBLEMS:
        more = f"{len(found) - MAX_PROBLEMS} more problems; correct these first"
        made.append(Problem("", more))
    return made


def _message(root: type[Part], loc: Loc, detail: ErrorDetails) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return _unknown(root, loc)
        case "missing":
            info, below = _field(root, loc)
            example = flow(_example(info, below)) if info else "..."
            return f"missing; write it, as {loc[-1]}: {example}"
        case "k8sjob":
            meant = detail["ctx"]["meant"]
            step = "" if meant is None else _step(root, loc, detail["input"], meant)
            return str(detail["ctx"]["message"]) + step
        case kind:
            say = _PLAIN.get(kind)
            shown = seen(detail["input"])
            message = say(shown, detail.get("ctx", {})) if say else f"{shown}: {detail['msg']}"
            if _KEY in detail["loc"]:
                return f"{message}; quote the key"
            return message + (_step(root, loc, detail["input"]) if kind.endswith("_type") else "")


def _one_of(shown: str, ctx: Mapping[str, Any]) -> str:
    choices = re.findall(r"'([^']*)'", ctx["expected"])
    text = f"{shown} is not one of {', '.join(choices)}"
    if shown == "null" and "None" in choices:
        return f"{text}; did you mean the text None?"
    step = did_you_mean(shown.strip("'"), choices, "write one of them")
    return f"{text}; {step}"


_PLAIN: Final[Mapping[str, Callable[[str, Mapping[str, Any]], str]]] = MappingProxyType(
    {
        "string_type": lambda shown, _: f"{shown} is not text",
        "float_type": lambda shown, _: f"{shown} is not a number",
        "finite_number": lambda shown, _: f"{shown} is not a finite number; write one",
        "int_type": lambda shown, _: f"{shown} is not a whole number",
        "bool_type": lambda shown, _: f"{shown} is neither true nor false",
        "tuple_type": lambda shown, _: f"{shown} is not a list",
        "dict_type": lambda shown, _: f"{shown} is not a mapping",
        "model_type": lambda shown, _: f"{shown} is not a mapping",
        "literal_error": _one_of,
        "greater_than_equal": lambda shown, ctx: f"{shown} is too small; at least {ctx['ge']}",
        "greater_than": lambda shown, ctx: f"{shown} is too small; more than {ctx['gt']:g}",
        "less_than_equal": lambda shown, ctx: f"{shown} is too large; at most {ctx['le']}",
    }
)


def _step(root: type[Part], loc: Loc, wrong: Any, meant: Sequence[Any] = ()) -> str:
    """The next step: the value that was probably meant, if one fits, or else an example."""
    info, below = _field(root, loc)
    if info is None:
        return ""
    field = str(loc[len(loc) - len(below) - 1])
    parts = () if below else part_types(info.annotation)
    key = "" if below else f"{field}: "
    for value in (*meant, *likely(wrong, field, parts)):
        if value in (None, [], {}) or not fits(root, loc, value):
            continue
        text = _written(value)
        if text and len(text) <= _LONGEST:
            return f"; write it as {key}{text}"
    leave_out = "leave the key out, or " if wrong is None and not info.is_required() else ""
    return f"; {leave_out}write, for example, {key}{_written(_example(info, below))}"


def _written(value: Any) -> str:
    """A value in one line of YAML, as one writes it by hand; empty where YAML has none for it."""
    if isinstance(value, str) and _BARE.fullmatch(value):
        return value
    try:
        return flow(value)
    except RenderError:  # infinity, which text may be made of
        return ""


def _example(info: FieldInfo, below: Loc) -> Any:
    """The first example of a field, or of what lies below it: an item, or a mapping's value."""
    example = (info.examples or [None])[0]
    for _ in below:
        example = next(iter(example.values() if isinstance(example, dict) else example))
    return example


def _parts(root: type[Part], loc: Loc) -> list[type[Part]]:
    """The classes that a location can be of."""
    parts = [root]
    for key in loc:
        if isinstance(key, str):
            fields = [part.model_fields[key] for part in parts if key in part.model_fields]
            parts = [found for info in fields for found in part_types(info.annotation)]
    return parts


def _field(root: type[Part], loc: Loc) -> tuple[FieldInfo | None, Loc]:
    """The innermost field that a location is in, and what of the location lies below it."""
    for end in range(len(loc), 0, -1):
        name = loc[end - 1]
        if isinstance(name, str):
            for part in _parts(root, loc[: end - 1]):
                if name in part.model_fields:
                    return part.model_fields[name], loc[end:]
    return None, ()


def _unknown(root: type[Part], loc: Loc) -> str:
    """No such field: the one that was meant, where it belongs, or what there is."""
    name = str(loc[-1])
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    here = [field for part in _parts(root, loc[:-1]) for field in part.model_fields]
    elsewhere = [path for path in _paths(root) if path[-1] == snake]
    if elsewhere and snake not in here:
        places = " or ".join(field_path(path) for path in elsewhere[:3])
        return f"no such field here; it belongs to {places}"
    step = did_you_mean(snake, here, f"valid fields: {', '.join(here)}")
    return f"no such field; {step}"


def _paths(part: type[Part], base: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields of a part, at every depth."""
    for name, info in part.model_fields.items():
        yield (*base, name)
        for nested in part_types(info.annotation):
            yield from _paths(nested, (*base, name))


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
        yield shell_words(text)
    elif not _WHOLE_ITEM & set(text):
        yield [piece for piece in re.split(r"[,\s]+", text) if piece]
    if field not in _SHELL:
        yield [text]


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
