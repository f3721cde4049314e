"""Errors of a spec in plain English: the field, its place, the value seen, the next step."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import ValidationError

from k8sjob.contract import did_you_mean
from k8sjob.errors import RenderError
from k8sjob.findings import field_path, first_findings, invalid
from k8sjob.spec.base import (
    UNEXPLAINED,
    Part,
    field_at,
    field_paths,
    part_types,
    parts_at,
    seen,
)
from k8sjob.spec.run import Run, shell_words, started_by
from k8sjob.yamldoc import Document, flow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

    from k8sjob.findings import FieldPath, Finding


_KEY: Final = "[key]"  # pydantic's mark for an error in a mapping's key
_BARE: Final = re.compile(r"(?:[0-9]+[A-Za-z]+)+")  # 32Gi, 1h30m: text without quotes, too
_LONGEST: Final = 200  # characters of a value in a hint


def problems(root: type[Part], error: ValidationError, document: Document | None) -> list[Finding]:
    """Everything that is wrong, in the order of the document.

    Args:
        root: the class that was validated.
        error: what pydantic found.
        document: where the data came from; None for data made in Python.
    """
    faults = []
    for detail in error.errors(include_url=False):
        # An unknown field is wrong by its name, whatever its value is.
        at_key = detail["type"] == "extra_forbidden" or _KEY in detail["loc"]
        for at, rule in _faults(detail):
            place = document.place(at, key=at_key) if document else (0, 0)
            faults.append((place, at, rule, detail))

    def explain(fault: tuple[tuple[int, int], FieldPath, Finding | None, ErrorDetails]) -> Finding:
        (line, column), at, rule, detail = fault
        message, step = (rule.message, rule.next_step) if rule else _texts(root, at, detail)
        return invalid(at, message, step, line=line, column=column)

    # pydantic goes by the order of the classes' fields, a reader from the top of the file.
    return first_findings(sorted(faults, key=lambda fault: fault[0]), explain)


def _texts(root: type[Part], loc: FieldPath, detail: ErrorDetails) -> tuple[str, str]:
    """What is wrong with a value, and the next step."""
    match detail["type"]:
        case "extra_forbidden":
            return _unknown(root, loc)
        case "missing":
            info, below = field_at(root, loc)
            example = flow(_example(info, below)) if info else "..."
            return "missing", f"write, for example, {loc[-1]}: {example}"
        case "k8sjob":
            reason = detail["ctx"]
            step = reason["next_step"]
            if reason["meant"] is not None:
                likely = _step(root, loc, detail["input"], reason["meant"])
                step = "; ".join(part for part in (step, likely) if part)
            return reason["message"], step
        case "literal_error":
            return _one_of(seen(detail["input"]), detail["ctx"]["expected"])
        case kind:
            form, step = _PLAIN.get(kind, ("{}: {msg}", ""))
            context = {**detail.get("ctx", {}), "msg": detail["msg"]}
            if _KEY in detail["loc"]:
                step = "quote the key"
            elif kind.endswith("_type"):
                step = _step(root, loc, detail["input"])
            else:
                step = step.format(**context)
            return form.format(seen(detail["input"]), **context), step


def _one_of(shown: str, expected: str) -> tuple[str, str]:
    choices = re.findall(r"'([^']*)'", expected)
    text = f"{shown} is not one of {', '.join(choices)}"
    if shown == "null" and "None" in choices:
        return text, "did you mean the text None?"
    return text, did_you_mean(shown.strip("'"), choices, "write one of them")


_PLAIN: Final = {
    "string_type": ("{} is not text", ""),
    "float_type": ("{} is not a number", ""),
    "finite_number": ("{} is not a finite number", "write one"),
    "int_type": ("{} is not a whole number", ""),
    "bool_type": ("{} is neither true nor false", ""),
    "tuple_type": ("{} is not a list", ""),
    "dict_type": ("{} is not a mapping", ""),
    "model_type": ("{} is not a mapping", ""),
    "greater_than_equal": ("{} is too small", "the minimum is {ge}"),
    "greater_than": ("{} is too small", "it must be more than {gt:g}"),
    "less_than_equal": ("{} is too large", "the maximum is {le}"),
}
"""pydantic's type of an error -> the message, of the value, and the next step, of its context;
the next step for a wrong type is an example."""


def _step(root: type[Part], loc: FieldPath, wrong: Any, meant: Sequence[Any] = ()) -> str:
    """The next step: the value that was probably meant, if one fits, or else an example."""
    info, below = field_at(root, loc)
    if info is None:
        return ""
    field = str(loc[len(loc) - len(below) - 1])
    parts = () if below else tuple(part_types(info.annotation))
    key = "" if below else f"{field}: "
    for value in (*meant, *_likely(wrong, field, parts)):
        if value in (None, [], {}) or not _fits(root, loc, value):
            continue
        text = _written(value)
        if text and len(text) <= _LONGEST:
            return f"write it as {key}{text}"
    leave_out = "remove the key, or " if wrong is None and not info.is_required() else ""
    return f"{leave_out}write, for example, {key}{_written(_example(info, below))}"


def _written(value: Any) -> str:
    """A value in one line of YAML, as one writes it by hand; empty where YAML has none for it."""
    if isinstance(value, str) and _BARE.fullmatch(value):
        return value
    try:
        return flow(value)
    except RenderError:  # infinity, which text may be made of
        return ""


def _example(info: FieldInfo, below: FieldPath) -> Any:
    """The first example of a field, or of what lies below it: an item, or a mapping's value."""
    example = (info.examples or [None])[0]
    for _ in below:
        example = next(iter(example.values() if isinstance(example, dict) else example))
    return example


def _unknown(root: type[Part], loc: FieldPath) -> tuple[str, str]:
    """The texts for an unknown field: the one that was meant, its place, or the valid ones."""
    name = str(loc[-1])
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    fields = [field for part in parts_at(root, loc[:-1]) for field in part.model_fields]
    elsewhere = [path for path in field_paths(root) if path[-1] == snake]
    if elsewhere and snake not in fields:
        places = " or ".join(field_path(path) for path in elsewhere[:3])
        return "no such field here", f"it belongs to {places}"
    step = did_you_mean(snake, fields, f"valid fields: {', '.join(fields)}")
    if snake == "limits" and "gpus" in fields:  # as in a manifest of Kubernetes
        step = "write the limits themselves here: gpus: 1, cpu: 4, memory: 16Gi"
    return "no such field", step


def field_values(part: type[Part], path: Sequence[str | int]) -> Iterator[str]:
    """The values of a field that has only a few, at any depth, in YAML."""
    name, *below = path
    info = part.model_fields.get(str(name))
    if info is None:
        return
    for nested in part_types(info.annotation) if below else ():
        yield from field_values(nested, below)
    if not below:
        yield from _values(info.annotation)


def _values(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    for argument in get_args(annotation):
        yield from [argument] if isinstance(argument, str) else _values(argument)


def _fits(root: type[Part], loc: FieldPath, value: Any) -> bool:
    """Whether a field takes the value, by all rules of the field itself.

    The value is validated at its place in a document that has nothing else.
    """
    data = value
    for key in reversed(loc):
        data = [data] if isinstance(key, int) else {key: data}
    at = tuple(0 if isinstance(key, int) else key for key in loc)
    try:
        root.model_validate(data, context=UNEXPLAINED)
    except ValidationError as error:
        places = (place for detail in error.errors() for place, _ in _faults(detail))
        return all(place[: len(at)] != at for place in places)
    return True


def _faults(detail: ErrorDetails) -> Iterator[tuple[FieldPath, Finding | None]]:
    """Every field that one of pydantic's errors is about; with the broken rule, if it is one."""
    # Pydantic's location has tags of unions and a mark for keys.
    loc = tuple(part for part in detail["loc"] if not str(part).startswith("<") and part != _KEY)
    if detail["type"] == "rules":
        yield from (((*loc, *rule.path), rule) for rule in detail["ctx"]["broken"])
    else:
        yield loc, None


_FLAGS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""Words that people write for a boolean: an example of the opposite would mislead them."""


def _likely(wrong: Any, field: str, parts: Sequence[type[Part]]) -> Iterator[Any]:
    """Values that may have been meant, the likeliest first; not all of them fit the field.

    `parts` are the classes that the field can hold.
    """
    if isinstance(wrong, str):
        yield started_by(wrong) if Run in parts else None
        yield from ({part.shorthand: wrong} for part in parts if part.shorthand)
        yield from ({part.shorthand: wrong.lower()} for part in parts if part.shorthand)
        for number in (int, float):
            with suppress(ValueError):
                yield number(wrong)  # a number in quotes
        yield _FLAGS.get(wrong.lower())
        yield _pairs([wrong])
        if field in {"args", "command"}:
            yield shell_words(wrong)
        elif not re.search(r"[\s,]", wrong):
            yield [wrong]
    elif isinstance(wrong, list | tuple):
        yield _pairs(wrong)
        yield from wrong if len(wrong) == 1 else ()
    elif isinstance(wrong, float) and wrong.is_integer():
        yield int(wrong)
    else:
        yield [wrong]
        yield bool(wrong) if wrong in (0, 1) else None


def _pairs(items: Iterable[Any]) -> dict[Any, Any] | None:
    """`A=1` and `{name: A, value: 1}`, as docker and Kubernetes write a mapping."""
    pairs = {}
    for item in items:
        match item:
            case str() if "=" in item:
                key, _, pairs[key] = item.partition("=")
            case {"name": str(key), "value": value, **rest} if not rest:
                pairs[key] = value
            case _:
                return None
    return pairs
