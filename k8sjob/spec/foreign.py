"""Files that are given for a job.yaml and are something else: manifests, scripts."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import Problem, SpecError
from k8sjob.spec.names import suggested_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import PurePath

    from k8sjob.document import Document

__all__ = ["refuse_manifests", "refuse_script"]

_OURS: Final = "PyTorchJob"
_SCRIPTS: Final = (".py", ".pyw", ".ipynb", ".sh")


def refuse_manifests(documents: Iterable[Document]) -> None:
    """Refuse the manifests of Kubernetes.

    Raises:
        SpecError: one of the documents is a manifest, with the command for a PyTorchJob.
    """
    found = [(document, kind) for document in documents for kind in _kinds(document.data)]
    if not found:
        return
    document, kind = next((one for one in found if one[1] == _OURS), found[0])
    file = document.source if document.source not in ("", "<stdin>") else "FILE"
    step = "k8sjob runs PyTorchJobs alone; start a job.yaml with `k8sjob init`"
    if kind == _OURS:
        step = f"`k8sjob adopt {shlex.quote(file)}` prints the job.yaml that renders it"
    raise document.refuse(("kind",), f"a manifest of kind {kind}, not a job.yaml; {step}")


def _kinds(data: Any) -> list[str]:
    """The kind of a manifest, or the kinds in a List; none for anything else."""
    if not isinstance(data, dict) or not isinstance(kind := data.get("kind"), str):
        return []
    items = data.get("items")
    if kind.endswith("List") and isinstance(items, list):
        return [found for item in items for found in _kinds(item)] or [kind]
    return [kind]


def refuse_script(file: PurePath) -> None:
    """Refuse a script, by its name.

    Raises:
        SpecError: it is one, with the job.yaml that would start it.
    """
    if file.suffix not in _SCRIPTS:
        return
    step = "`k8sjob init DIR` writes one to begin with"
    if file.suffix == ".py":
        from k8sjob.document import flow  # noqa: PLC0415 - YAML is not needed for specs from Python

        job = {
            "name": suggested_name(file.stem) or "my-job",
            "image": "pytorch/pytorch:latest",
            "run": {"script": file.name},
        }
        step = f"write one beside it, as {flow(job)}, or start with `k8sjob init`"
    raise SpecError([Problem("", f"a script, not a job.yaml; {step}")], str(file))
