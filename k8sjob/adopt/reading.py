"""The one PyTorchJob in a file, without what the apiserver and its controllers fill in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from k8sjob.adopt.shape import shape_problems
from k8sjob.document import Document, parse_all
from k8sjob.errors import Problem, SpecError
from k8sjob.rendering.webhook import API_VERSION, KIND, webhook_problems

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["read"]

Json = dict[str, Any]

_SERVERS: Final = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "selfLink",
    "ownerReferences",
)
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def read(text: str | bytes, source: str) -> tuple[Json, list[str]]:
    """The job as its author wrote it, and notes on what was left out.

    Raises:
        SpecError: not YAML, not exactly one PyTorchJob, or one that the operator refuses.
    """
    document, job, others = _only_job(parse_all(text, source), source)
    notes = [f"{other} is not part of the job; keep it in a file of its own" for other in others]
    job, dropped = _authors_part(job)
    if dropped:
        notes.insert(0, f"left out, since the apiserver fills it in: {', '.join(dropped)}")
    problems = webhook_problems(job) or shape_problems(job)
    if problems:
        line = document.line
        raise SpecError([Problem(p.field, p.message, line, 1) for p in problems], source)
    return job, notes


def _only_job(documents: list[Document], source: str) -> tuple[Document, Json, list[str]]:
    jobs, others = [], []
    for document, item in _objects(documents):
        if item.get("kind") == KIND and str(item.get("apiVersion")).startswith("kubeflow.org/"):
            jobs.append((document, item))
        else:
            others.append(_called(item))
    if len(jobs) == 1:
        document, job = jobs[0]
        return document, job, others
    if not jobs:
        seen = ", ".join(others) or "nothing"
        message = f"{seen} is no {KIND} of {API_VERSION}; name a file with one"
        raise SpecError([Problem("", message)], source)
    names = ", ".join(_called(job) for _, job in jobs)
    message = f"{names} are several jobs; a job.yaml is one, so adopt them from files of their own"
    raise SpecError([Problem("", message, jobs[1][0].line, 1)], source)


def _objects(documents: list[Document]) -> Iterator[tuple[Document, Json]]:
    """Every object, those inside a List (as `kubectl get -o yaml` writes it) too."""
    for document in documents:
        data = document.data if isinstance(document.data, dict) else {}
        items = data.get("items")
        inside = items if str(data.get("kind")).endswith("List") and isinstance(items, list) else ()
        for item in inside or (data,):
            yield document, item if isinstance(item, dict) else {}


def _called(item: Json) -> str:
    metadata = item.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return " ".join(
        str(part) for part in (item.get("kind", "a document without a kind"), name) if part
    )


def _authors_part(job: Json) -> tuple[Json, list[str]]:
    """The job without what others wrote into it, and the names of that."""
    metadata = dict(job["metadata"]) if isinstance(job.get("metadata"), dict) else {}
    dropped = [f"metadata.{key}" for key in _SERVERS if key in metadata]
    for key in _SERVERS:
        metadata.pop(key, None)
    annotations = metadata.get("annotations")
    if isinstance(annotations, dict) and _LAST_APPLIED in annotations:
        dropped.append(f'metadata.annotations["{_LAST_APPLIED}"]')
        metadata["annotations"] = {k: v for k, v in annotations.items() if k != _LAST_APPLIED}
    if "status" in job:
        dropped.append("status")
    return {**{k: v for k, v in job.items() if k != "status"}, "metadata": metadata}, dropped
