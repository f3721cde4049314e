"""Changes to fields of a job.yaml, as --set makes them: FIELD=VALUE, the value in YAML."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

from k8sjob.errors import Problem, SpecError, field_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.yamldoc import Document, FieldPath

__all__ = ["Change", "changed", "steps", "without_places"]

_STEP: Final = re.compile(r'\["([^"]*)"\]|([\w-]+)')
_FIELD: Final = re.compile(r'[\w-]+(?:\.[\w-]+|\[(?:\d+|"[^"]*")\])*')


def steps(field: str) -> FieldPath:
    """A field as messages name it, `volumes[1].mount`, as the path of a document."""
    found = (key or name for key, name in _STEP.findall(field))
    return tuple(int(step) if step.isdecimal() else step for step in found)


@dataclass(frozen=True, slots=True)
class Change:
    """A new value of one field.

    Attributes:
        path: the field, as ("replicas", "workers").
        value: its data; None: the field is left out, so that it has its default.
        adds: whether a list's items are added to those that are there.
    """

    path: FieldPath
    value: Any
    adds: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """The change that FIELD=VALUE says.

        Raises:
            SpecError: it says none, or the value is not YAML.
        """
        from k8sjob.yamldoc import parse  # noqa: PLC0415 - YAML is not needed for other specs

        field, equals, value = text.partition("=")
        if not equals or not _FIELD.fullmatch(field):
            message = f"{text!r} does not change a field; write FIELD=VALUE, as replicas.workers=3"
            message += """ or 'labels["example.com/team"]=vision'""" if "[" in text else ""
            raise SpecError([Problem("--set", message)])
        return cls(steps(field), parse(value, f"--set {field}").data)


def changed(document: Document, changes: Sequence[Change]) -> Document:
    """The document with the changes made, one after the other.

    Raises:
        SpecError: a change goes into something that is neither a mapping nor a list.
    """
    data = document.data
    for change in changes:
        data = _with(data, change, 0)
    return replace(document, data=data)


def _with(data: Any, change: Change, depth: int) -> Any:
    if depth == len(change.path):
        return [*(data or ()), *change.value] if change.adds else change.value
    step = change.path[depth]
    if isinstance(data, list) and isinstance(step, int) and step <= len(data):
        below = data[step] if step < len(data) else None
        return [*data[:step], _with(below, change, depth + 1), *data[step + 1 :]]
    if not isinstance(data, dict | None):
        whole = field_path(change.path[:depth])
        there = f"a list of {len(data)}" if isinstance(data, list) else repr(data)
        message = f"{whole} is {there} there and has no such part; set {whole} as a whole"
        raise SpecError([Problem(f"--set {field_path(change.path)}", message)])
    made = dict(data or {})
    key = str(step)
    made[key] = _with(made.get(key), change, depth + 1)
    if made[key] is None:
        del made[key]
    return made


def without_places(error: SpecError, changes: Sequence[Change], document: Document) -> SpecError:
    """The error with its problems of changed fields, which have no line, as those of --set."""

    def is_changed(field: FieldPath) -> bool:
        new = field not in document.keys and field not in document.values
        return any(
            field[: len(one.path)] == one.path or (new and one.path[: len(field)] == field)
            for one in changes
        )

    problems = [
        Problem(f"--set {problem.field}", problem.message)
        if problem.field and is_changed(steps(problem.field))
        else problem
        for problem in error.problems
    ]
    return SpecError(problems, error.source)
