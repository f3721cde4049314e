"""How each kind of job is read that others wrote, for `adopt`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k8sjob.targets.indexed_reader import IndexedReader
from k8sjob.targets.job.target import IndexedJob
from k8sjob.targets.jobset.reader import JobSetReader
from k8sjob.targets.pytorchjob.reader import PyTorchJobReader
from k8sjob.targets.trainjob.reader import TrainJobReader

if TYPE_CHECKING:
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Reader

READERS: Final[tuple[Reader, ...]] = (
    PyTorchJobReader(),
    TrainJobReader(),
    JobSetReader(),
    IndexedReader(IndexedJob()),
)


def reader_of(job: Json) -> Reader:
    """The reader of a job; the first one for an object of no kind of job."""
    return next((one for one in READERS if one.target.kind == job.get("kind")), READERS[0])


def is_job(item: Json) -> bool:
    """Whether an object is a job, in whatever version of its API."""
    target = reader_of(item).target
    group = target.api_version.partition("/")[0]
    return item.get("kind") == target.kind and str(item.get("apiVersion")).startswith(f"{group}/")
