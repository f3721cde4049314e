"""A job.yaml as a JobSpec, with the changes of --set."""

from __future__ import annotations

import os
import re
import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.environment import home
from k8sjob.errors import SpecError
from k8sjob.files import leads_out
from k8sjob.findings import invalid
from k8sjob.spec.changes import changed, job_document, without_places
from k8sjob.spec.job import JobSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.spec.changes import Change
    from k8sjob.yamldoc import Document

_SCRIPT: Final = ".py"
_NO_IMAGE: Final = "none"
_NEEDS_IMAGE: Final = invalid(
    ("image",),
    "missing: in a cluster a script runs in an image",
    "add --set image.repository=WHERE-TO-PUSH --set image.base=IMAGE-WITH-TORCH, or write a"
    " job.yaml",
)
_LONGEST_NAME: Final = 40
"""Characters of a name that is made of a script's."""


def load(path: str | Path, changes: Sequence[Change] = (), *, local: bool = False) -> JobSpec:
    """The spec in a file.

    Args:
        path: the file; a folder stands for the job.yaml or job.yml in it, "-" for standard input.
            A Python script stands for a job that is named after it and starts it.
        changes: of its fields.
        local: the job runs on this machine, where a script needs no image.

    Raises:
        SpecError: it cannot be read, or is not a valid spec; with every problem and its place.
    """
    document = _document(path)
    # Only a document that is made of a script has no line.
    if not document.line and local:
        document.data["image"] = _NO_IMAGE
    try:
        document = changed(document, changes)
        return validated(document, changes, folder_of(path))
    except SpecError as caught:
        error = caught
        if not document.line and "image" not in document.data:
            problems = [problem for problem in error.findings if problem.path != ("image",)]
            error = SpecError([_NEEDS_IMAGE, *problems], document.source)
        raise without_places(error, changes, document) from None


def validated(document: Document, changes: Sequence[Change], folder: Path) -> JobSpec:
    """The spec in a document, whose relative paths start from a folder.

    A job.yaml may come from somebody else, and what its image part names is sent to a registry: a
    path that leads out of the folder counts only where the command line has it.

    Raises:
        SpecError: it is not a valid spec, or such a path is in the document alone.
    """
    spec = JobSpec.model_validate(document.data, context=document)
    image = spec.image
    if isinstance(image, str):
        return spec
    paths = [("context", folder, image.context)]
    if image.requirements is not None:
        paths.append(("requirements", folder / image.context, image.requirements))
    for field, base, name in paths:
        confirmed = any(change.path in {("image",), ("image", field)} for change in changes)
        if not confirmed and (path := leads_out(base, name)):
            message = f"{name!r} leads to {path}, outside of {os.path.realpath(base)}"
            step = "correct it, or if it may go into the image, confirm it: --set "
            step += shlex.quote(f"image.{field}={name}")
            raise document.refuse(("image", field), message, step)
    return spec


def _document(path: str | Path) -> Document:
    from k8sjob.yamldoc import content, job_file  # noqa: PLC0415 - YAML is not needed for specs from Python

    if str(path) == "-":
        return job_document(content(path), "<stdin>")
    file = job_file(Path(path))
    try:
        text = content(file)
    except FileNotFoundError:
        noun = "a script" if file.suffix == _SCRIPT else "a job.yaml or a script"
        step = f"name {noun}, or make one with `k8sjob init`"
        raise SpecError([invalid((), "no such file", step)], str(file)) from None
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise SpecError([invalid((), message)], str(file)) from error
    if file.suffix == _SCRIPT:
        return _of_script(file)
    if file.suffix in (".pyw", ".ipynb", ".sh"):
        step = "write `run: {command: [sh, " + file.name + "]}` into a job.yaml"
        if file.suffix == ".ipynb":
            step = f"k8sjob init --from {shlex.quote(str(file))} writes the job.yaml and the script"
        raise SpecError([invalid((), "not a job.yaml", step)], str(file))
    return job_document(text, str(file))


def _of_script(file: Path) -> Document:
    from k8sjob.yamldoc import Document  # noqa: PLC0415 - as in load

    script = _place(file).relative_to(folder_of(file).resolve())
    data = {"name": job_name(file.stem), "run": {"script": script.as_posix()}}
    return Document(data, str(file), line=0)


def _place(file: Path) -> Path:
    """The path of a script; of a link to it, if it is one."""
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
    file, current = Path(path), Path.cwd()
    if str(path) == "-":
        return Path()
    whole = current.parent == current or current == home()
    if file.suffix == _SCRIPT and not whole and _place(file).is_relative_to(current):
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
        problems = [document.placed(fault) if fault.path else fault for fault in error.findings]
        raise without_places(SpecError(problems, document.source), changes, document) from None
