"""The kinds of job, each by the reader of manifests that others wrote; only `adopt` needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k8sjob.targets.indexed.adopt import IndexedReader
from k8sjob.targets.jobset.adopt import JobSetReader
from k8sjob.targets.pytorchjob.adopt import PyTorchJobReader
from k8sjob.targets.trainjob.adopt import TrainJobReader

if TYPE_CHECKING:
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import ManifestReader

READERS: Final[list[ManifestReader]] = [
    PyTorchJobReader(),
    TrainJobReader(),
    JobSetReader(),
    IndexedReader(),
]


def reader_of(job: Json) -> ManifestReader:
    """The reader of a job; the first one for an object of no kind of job."""
    return next((reader for reader in READERS if reader.target.kind == job.get("kind")), READERS[0])
