"""A job.yaml, or standard input, as a JobSpec."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.errors import Problem, SpecError
from k8sjob.spec.foreign import refuse_script
from k8sjob.spec.job import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["load", "located"]

_STEP: Final = re.compile(r'\["([^"]*)"\]|([\w-]+)')


def load(path: str | Path) -> JobSpec:
    """The spec in a file.

    Args:
        path: the file; a folder stands for the job.yaml or job.yml in it, "-" for standard input.

    Raises:
        SpecError: it cannot be read, or is not a valid spec; with every problem and its place.
    """
    from k8sjob.document import content, job_file  # noqa: PLC0415 - YAML is not needed for specs from Python

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
    from k8sjob.document import content, job_file, parse  # noqa: PLC0415 - only for what is wrong

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
