"""A job.yaml, or standard input, as a JobSpec."""

from __future__ import annotations

from pathlib import Path

from k8sjob.errors import Problem, SpecError
from k8sjob.spec.job import JobSpec

__all__ = ["load"]


def load(path: str | Path) -> JobSpec:
    """The spec in a file.

    Args:
        path: the file; a folder stands for the job.yaml in it, "-" for standard input.

    Raises:
        SpecError: it cannot be read, or is not a valid spec; with every problem and its place.
    """
    from k8sjob.document import content  # noqa: PLC0415 - YAML is not needed for specs from Python

    if str(path) == "-":
        return JobSpec.from_yaml(content(path), source="<stdin>")
    file = Path(path)
    if file.is_dir():
        file /= "job.yaml"
    try:
        text = content(file)
    except FileNotFoundError:
        message = "no such file; name a job.yaml, or make one with `k8sjob init`"
        raise SpecError([Problem("", message)], str(file)) from None
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise SpecError([Problem("", message)], str(file)) from error
    return JobSpec.from_yaml(text, source=str(file))
