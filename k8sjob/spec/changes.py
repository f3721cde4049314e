"""A job.yaml as data: one mapping, and the changes that --set makes in it."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from k8sjob.errors import SpecError
from k8sjob.findings import field_path, invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.findings import FieldPath, Finding
    from k8sjob.yamldoc import Document


def job_document(text: str | bytes, source: str = "") -> Document:
    """The document of a job.yaml, a mapping.

    Raises:
        SpecError: it is none.
    """
    from k8sjob.yamldoc import only, parse_all  # noqa: PLC0415 - YAML is not needed for specs from Python

    documents = parse_all(text, source)
    _refuse_manifests(documents)
    document = only(documents, source)
    if document.data is None:
        step = "write at least name, image and run, or start with `k8sjob init`"
        raise SpecError([invalid((), "empty", step)], source)
    if not isinstance(document.data, dict):
        step = "write one field per line, starting with `name: my-job`"
        raise document.refuse((), "not a mapping", step)
    return document


def _refuse_manifests(documents: list[Document]) -> None:
    for document in documents:
        kind = document.data.get("kind") if isinstance(document.data, dict) else None
        if isinstance(kind, str):
            from k8sjob.kube.api_resources import foreign_kind  # noqa: PLC0415 - only for manifests

            file = document.source if document.source not in ("", "<stdin>") else "FILE"
            step = foreign_kind(document.data) or (
                f"`k8sjob adopt {shlex.quote(file)}` prints the job.yaml of the training job in it"
            )
            raise document.refuse(("kind",), f"a manifest of kind {kind}, not a job.yaml", step)


# --- changes: FIELD=VALUE of --set, the value in YAML ---------------------------------------------

_FIELD: Final = re.compile(r'[\w-]+(?:\.[\w-]+|\[(?:\d{1,9}|"[^"]*")\]){0,63}')


class Change(NamedTuple):
    """A new value of one field.

    Attributes:
        path: the field, as ("replicas", "workers").
        value: its data; None: the field is left out, so that it has its default, or the item of a
            list.
        adds: whether a list's items are added to those that are there.
        option: the option by which it was given, if it is not --set.
    """

    path: FieldPath
    value: Any
    adds: bool = False
    option: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse FIELD=VALUE.

        Raises:
            SpecError: it says none, or the value is not YAML.
        """
        from k8sjob.yamldoc import parse  # noqa: PLC0415 - YAML is not needed for other specs

        field, equals, value = text.partition("=")
        if not equals or not _FIELD.fullmatch(field):
            step = "write FIELD=VALUE, such as replicas.workers=3"
            if "[-" in field:
                step += "; the items of a list count from 0, as in run.args[0]"
            elif "[" in field:
                step += """ or 'labels["example.com/team"]=vision'"""
            problem = invalid((), f"{text!r} does not change a field", step)
            raise SpecError([problem._replace(option="--set")])
        return cls(path_of(field), parse(value, f"--set {field}").data)


def path_of(field: str) -> FieldPath:
    """The path that a user writes as `volumes[1].mount`; the inverse of field_path."""
    names = (key or name for key, name in re.findall(r'\["([^"]*)"\]|([\w-]+)', field))
    return tuple(int(name) if re.fullmatch(r"\d{1,9}", name) else name for name in names)


def changed(document: Document, changes: Sequence[Change]) -> Document:
    """The document with the changes made, one after the other.

    Raises:
        SpecError: a change goes into something that is neither a mapping nor a list.
    """
    data = document.data
    for change in changes:
        data = _apply(data, change, 0)
    return replace(document, data=data)


def _apply(data: Any, change: Change, depth: int) -> Any:
    if depth == len(change.path):
        return [*(data or ()), *change.value] if change.adds else change.value
    step = change.path[depth]
    # The index after the last item adds one; a larger one would leave a gap.
    if isinstance(data, list) and isinstance(step, int) and step <= len(data):
        below = data[step] if step < len(data) else None
        changed = _apply(below, change, depth + 1)
        return [*data[:step], *([] if changed is None else [changed]), *data[step + 1 :]]
    if not isinstance(data, dict | None):
        whole = field_path(change.path[:depth])
        present = f"a list of {len(data)}" if isinstance(data, list) else repr(data)
        message = f"{whole} is {present} there and has no such part"
        problem = invalid(change.path, message, f"set {whole} as a whole")
        raise SpecError([problem._replace(option="--set")])
    fields = dict(data or {})
    key = str(step)
    fields[key] = _apply(fields.get(key), change, depth + 1)
    if fields[key] is None:
        del fields[key]
    return fields


def without_places(error: SpecError, changes: Sequence[Change], document: Document) -> SpecError:
    """The error with its problems of changed fields, which have no line, as those of options."""

    def at_option(problem: Finding) -> Finding:
        path, names = problem.path, [str(step) for step in problem.path]
        # A field that the document lacks may be missing in a change of what is around it.
        new = path not in document.keys and path not in document.values
        for change in changes if path else ():
            field = [str(step) for step in change.path]  # a key of digits is an index there
            if names[: len(field)] == field or (new and field[: len(names)] == names):
                # An option of its own name, as --image, stands for the whole path.
                named = () if change.option else path
                option = change.option or "--set"
                return problem._replace(path=named, option=option, line=0, column=0)
        return problem

    return SpecError([at_option(problem) for problem in error.findings], error.source)
