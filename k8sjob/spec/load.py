"""A job.yaml as a JobSpec, other files refused, and the JSON Schema."""

from __future__ import annotations

import re
import shlex
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic.json_schema import GenerateJsonSchema

from k8sjob.errors import Problem, SpecError
from k8sjob.spec.job import JobSpec
from k8sjob.spec.quantity import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import PurePath

    from k8sjob.yamldoc import Document

__all__ = [
    "load",
    "located",
    "refuse_manifests",
    "refuse_script",
    "schema",
]

_STEP: Final = re.compile(r'\["([^"]*)"\]|([\w-]+)')


def load(path: str | Path) -> JobSpec:
    """The spec in a file.

    Args:
        path: the file; a folder stands for the job.yaml or job.yml in it, "-" for standard input.

    Raises:
        SpecError: it cannot be read, or is not a valid spec; with every problem and its place.
    """
    from k8sjob.yamldoc import content, job_file  # noqa: PLC0415 - YAML is not needed for specs from Python

    if str(path) == "-":
        return JobSpec.from_yaml(content(path), source="<stdin>")
    file = job_file(Path(path))
    try:
        text = content(file)
    except FileNotFoundError:
        message = "no such file; name a job.yaml, or make one with `k8sjob init`"
        raise SpecError([Problem("", message)], str(file)) from None
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise SpecError([Problem("", message)], str(file)) from error
    refuse_script(file)
    return JobSpec.from_yaml(text, source=str(file))


@contextmanager
def located(path: str | Path) -> Iterator[None]:
    """Give the errors about a spec that was loaded the file and the lines of their fields.

    Args:
        path: as it was given to load; standard input is read only once, so its errors stay as they
            are.

    Raises:
        SpecError: the one that was raised inside.
    """
    from k8sjob.yamldoc import content, job_file, parse  # noqa: PLC0415 - only for what is wrong

    try:
        yield
    except SpecError as error:
        if error.source or str(path) == "-":
            raise
        file = job_file(Path(path))
        document = parse(content(file), str(file))
        problems = []
        for problem in error.problems:
            steps = [key or name for key, name in _STEP.findall(problem.field)]
            at = tuple(int(step) if step.isdecimal() else step for step in steps)
            line, column = document.place(at) if at else (0, 0)
            problems.append(replace(problem, line=line, column=column))
        raise SpecError(problems, str(file)) from None


_OURS: Final = "PyTorchJob"
_SCRIPTS: Final = (".py", ".pyw", ".ipynb", ".sh")


def refuse_manifests(documents: list[Document]) -> None:
    """Refuse the manifests of Kubernetes.

    Raises:
        SpecError: one of the documents is a manifest, with the command for a PyTorchJob.
    """
    from k8sjob.yamldoc import objects  # noqa: PLC0415 - as in load

    found = [
        (document, document.data["kind"])
        for document in documents
        if isinstance(document.data, dict) and isinstance(document.data.get("kind"), str)
    ]
    if not found:
        return
    ours = [
        (document, _OURS) for document, _, item in objects(documents) if item.get("kind") == _OURS
    ]
    document, kind = (ours or found)[0]
    file = document.source if document.source not in ("", "<stdin>") else "FILE"
    step = "only PyTorchJobs can be adopted; start a job.yaml with `k8sjob init`"
    if kind == _OURS:
        step = f"`k8sjob adopt {shlex.quote(file)}` prints the job.yaml that renders it"
    raise document.refuse(("kind",), f"a manifest of kind {kind}, not a job.yaml; {step}")


def refuse_script(file: PurePath) -> None:
    """Refuse a script, by its name.

    Raises:
        SpecError: it is one.
    """
    if file.suffix not in _SCRIPTS:
        return
    message = "a script, not a job.yaml, whose `run` names it; `k8sjob init DIR` writes one"
    raise SpecError([Problem("", message)], str(file))


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
        for each in part["properties"].values():
            if each.get("unit") == "time" and each.get("default") is not None:
                each["default"] = format_duration(each["default"])
    return {"$schema": GenerateJsonSchema.schema_dialect, **made, "title": "k8sjob job.yaml"}
