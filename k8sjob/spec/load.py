"""A job.yaml as a JobSpec, with the changes of --set, and the JSON Schema."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic.json_schema import GenerateJsonSchema

from k8sjob.errors import Problem, SpecError, field_path
from k8sjob.spec.job import JobSpec
from k8sjob.spec.values import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.yamldoc import Document, FieldPath

_SCRIPT: Final = ".py"
_NO_IMAGE: Final = "none"
_NEEDS_IMAGE: Final = (
    "missing: in a cluster a script runs in an image; add --set image.repository=WHERE-TO-PUSH"
    " --set image.base=IMAGE-WITH-TORCH, or write a job.yaml"
)
_LONGEST_NAME: Final = 40
"""Characters of a name that is made of a script's."""


def load(path: str | Path, changes: Sequence[Change] = (), *, here: bool = False) -> JobSpec:
    """The spec in a file.

    Args:
        path: the file; a folder stands for the job.yaml or job.yml in it, "-" for standard input.
            A Python script stands for a job that is named after it and starts it.
        changes: of its fields.
        here: the job runs on this machine, where a script needs no image.

    Raises:
        SpecError: it cannot be read, or is not a valid spec; with every problem and its place.
    """
    document = _document(path)
    if not document.line and here:
        document.data["image"] = _NO_IMAGE
    try:
        document = changed(document, changes)
        return JobSpec.model_validate(document.data, context=document)
    except SpecError as caught:
        error = caught
        if not document.line and "image" not in document.data:
            missing = Problem("image", _NEEDS_IMAGE)
            others = [problem for problem in error.problems if problem.field != "image"]
            error = SpecError([missing, *others], document.source)
        raise without_places(error, changes, document) from None


def _document(path: str | Path) -> Document:
    from k8sjob.yamldoc import content, job_file  # noqa: PLC0415 - YAML is not needed for specs from Python

    if str(path) == "-":
        return job_document(content(path), "<stdin>")
    file = job_file(Path(path))
    try:
        text = content(file)
    except FileNotFoundError:
        what = "a script" if file.suffix == _SCRIPT else "a job.yaml or a script"
        message = f"no such file; name {what}, or make one with `k8sjob init`"
        raise SpecError([Problem("", message)], str(file)) from None
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise SpecError([Problem("", message)], str(file)) from error
    if file.suffix == _SCRIPT:
        return _of_script(file)
    if file.suffix in (".pyw", ".ipynb", ".sh"):
        message = "a script, not a job.yaml, whose `run` names it; `k8sjob init DIR` writes one"
        raise SpecError([Problem("", message)], str(file))
    return job_document(text, str(file))


def job_document(text: str | bytes, source: str = "") -> Document:
    """The document of a job.yaml, a mapping.

    Raises:
        SpecError: it is none.
    """
    from k8sjob.yamldoc import only, parse_all  # noqa: PLC0415 - as in load

    documents = parse_all(text, source)
    _refuse_manifests(documents)
    document = only(documents, source)
    if document.data is None:
        message = "empty; write at least name, image and run, or start with `k8sjob init`"
        raise SpecError([Problem("", message)], source)
    if not isinstance(document.data, dict):
        message = "not a mapping; write one field a line, beginning with `name: my-job`"
        raise document.refuse((), message)
    return document


def _of_script(file: Path) -> Document:
    from k8sjob.yamldoc import Document  # noqa: PLC0415 - as in load

    script = _place(file).relative_to(folder_of(file).resolve())
    data = {"name": job_name(file.stem), "run": {"script": script.as_posix()}}
    return Document(data, str(file), line=0)


def _place(file: Path) -> Path:
    """Where a script lies; where a link to it does, if it is one."""
    return file.parent.resolve() / file.name


def job_name(text: str) -> str:
    """A job's name that is made of another one: "My_Model" becomes "my-model"."""
    name = re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_NAME].rstrip("-")
    return name if name[:1].isalpha() else f"job-{name}".rstrip("-")


def folder_of(path: str | Path) -> Path:
    """The folder that the relative paths of a job start from.

    Args:
        path: as it is given to load. A script starts in the working folder if it is below that,
            unless it is the home folder or the root: each replica gets a copy of all that is in it.
    """
    file, here = Path(path), Path.cwd()
    if str(path) == "-":
        return Path()
    whole = here.parent == here or here == Path(os.environ.get("HOME", "/"))
    if file.suffix == _SCRIPT and not whole and _place(file).is_relative_to(here):
        return Path()
    return file if file.is_dir() else file.parent


@contextmanager
def located(path: str | Path, changes: Sequence[Change] = ()) -> Iterator[None]:
    """Give the errors about a spec that was loaded the file and the lines of their fields.

    Args:
        path: as it was given to load; standard input is read only once, so its errors stay as they
            are.
        changes: the same.

    Raises:
        SpecError: the one that was raised inside.
    """
    try:
        yield
    except SpecError as error:
        if error.source or str(path) == "-":
            raise
        document = _document(path)
        problems = []
        for problem in error.problems:
            at = steps(problem.field)
            line, column = document.place(at) if at else (0, 0)
            problems.append(replace(problem, line=line, column=column))
        raise without_places(SpecError(problems, document.source), changes, document) from None


def _refuse_manifests(documents: list[Document]) -> None:
    for document in documents:
        kind = document.data.get("kind") if isinstance(document.data, dict) else None
        if isinstance(kind, str):
            file = document.source if document.source not in ("", "<stdin>") else "FILE"
            step = (
                f"`k8sjob adopt {shlex.quote(file)}` prints the job.yaml of the training job in it"
            )
            raise document.refuse(("kind",), f"a manifest of kind {kind}, not a job.yaml; {step}")


# --- changes: FIELD=VALUE of --set, the value in YAML ---------------------------------------------

_STEP: Final = re.compile(r'\["([^"]*)"\]|([\w-]+)')
_FIELD: Final = re.compile(r'[\w-]+(?:\.[\w-]+|\[(?:\d{1,9}|"[^"]*")\]){0,63}')


def steps(field: str) -> FieldPath:
    """A field as messages name it, `volumes[1].mount`, as the path of a document."""
    found = (key or name for key, name in _STEP.findall(field))
    return tuple(int(step) if re.fullmatch(r"\d{1,9}", step) else step for step in found)


@dataclass(frozen=True, slots=True)
class Change:
    """A new value of one field.

    Attributes:
        path: the field, as ("replicas", "workers").
        value: its data; None: the field is left out, so that it has its default, or the item of a
            list.
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
            if "[-" in field:
                message += "; the items of a list count from 0, as in run.args[0]"
            elif "[" in field:
                message += """ or 'labels["example.com/team"]=vision'"""
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
        made = _with(below, change, depth + 1)
        return [*data[:step], *([] if made is None else [made]), *data[step + 1 :]]
    if not isinstance(data, dict | None):
        whole = field_path(change.path[:depth])
        there = f"a list of {len(data)}" if isinstance(data, list) else repr(data)
        message = f"{whole} is {there} there and has no such part; set {whole} as a whole"
        raise SpecError([Problem(f"--set {field_path(change.path)}", message)])
    fields = dict(data or {})
    key = str(step)
    fields[key] = _with(fields.get(key), change, depth + 1)
    if fields[key] is None:
        del fields[key]
    return fields


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


# --- schema ---------------------------------------------------------------------------------------


class _Schema(GenerateJsonSchema):
    """Without titles, which only repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - pydantic's hook
        return False

    def encode_default(self, dft: Any) -> Any:
        # pydantic looks at the exact type, and a frozen mapping is a dict of our own.
        return super().encode_default(dict(dft) if isinstance(dft, dict) else dft)

    def sort(self, value: Any, parent_key: str | None = None) -> Any:  # noqa: ARG002 - see above
        return value  # the order of the fields, and of the keys in their examples, is meant


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a job.yaml.

    Every property has `description` and `examples`, and `unit` where it counts or measures.
    """
    made = JobSpec.model_json_schema(schema_generator=_Schema)
    for part in (made, *made["$defs"].values()):
        part["description"] = part["description"].partition("\n\nArgs:\n")[0]
        for each in part["properties"].values():
            if each.get("unit") == "time" and each.get("default") is not None:
                each["default"] = format_duration(each["default"])
    return {"$schema": GenerateJsonSchema.schema_dialect, **made, "title": "k8sjob job.yaml"}
