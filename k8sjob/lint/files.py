"""Lint of a file, whatever it is: a manifest, a script, or a job.yaml with all that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.document import parse_all
from k8sjob.document.reading import content, job_file
from k8sjob.errors import Problem, SpecError
from k8sjob.lint.job_yaml import lint_job
from k8sjob.lint.manifest import invalid, lint_manifest
from k8sjob.lint.script import SYNTAX, decoded, lint_script, read

if TYPE_CHECKING:
    from k8sjob.lint.finding import Finding

__all__ = ["lint"]

_SHEBANG: Final = re.compile(r"#!.*python")
_DOCKERFILE: Final = re.compile(r"^\s*FROM\s+\S+", re.MULTILINE | re.IGNORECASE)


def lint(path: str | Path) -> list[Finding]:
    """What will hang, be rejected or go wrong silently.

    Args:
        path: a PyTorchJob manifest, a job.yaml (its script is read too), a Python script, a folder
            with a job.yaml, or "-" for any of these on standard input.

    Raises:
        SpecError: the file cannot be read.
    """
    if str(path) == "-":
        return _lint_text(decoded(content("-"), "<stdin>"), "<stdin>", Path())
    file = job_file(Path(path))
    return _lint_text(read(file), str(file), file.parent)


def _lint_text(text: str, source: str, folder: Path) -> list[Finding]:
    if source.endswith((".py", ".pyw")) or _SHEBANG.match(text):
        return lint_script(text, source, roots=[folder])
    is_yaml = source.endswith((".yaml", ".yml", ".json"))
    try:
        documents = parse_all(text, source)
    except SpecError as error:
        return invalid(error, source) if is_yaml else _lint_unnamed(text, source, folder)
    first: Any = documents[0].data if documents else None
    if isinstance(first, dict) and "kind" not in first and {"run", "image"} & first.keys():
        return lint_job(text, source, folder)
    if not isinstance(first, dict) and not is_yaml:
        return _lint_unnamed(text, source, folder)
    return lint_manifest(text, source)


def _lint_unnamed(text: str, source: str, folder: Path) -> list[Finding]:
    """A file whose name says nothing and that is no YAML: a script, if Python can parse it."""
    found = lint_script(text, source, roots=[folder])
    if [one.id for one in found] != [SYNTAX.id]:
        return found
    what = "is a Dockerfile" if _DOCKERFILE.search(text) else "is neither YAML nor Python"
    step = "name a PyTorchJob manifest, a job.yaml or a script"
    raise SpecError([Problem("", f"{what}, and lint does not read that; {step}")], source)
