"""The kind of any object that runs Pods, made when the object is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from k8sjob.kube.api_resources import Controller
from k8sjob.targets.api import Target
from k8sjob.targets.workload.job import Workload
from k8sjob.targets.workload.pods import WorkloadPods

if TYPE_CHECKING:
    from k8sjob.findings import Finding
    from k8sjob.kube.objects import Json
    from k8sjob.spec import JobSpec
    from k8sjob.targets.api import Job


class WorkloadTarget(Target):
    """A kind that is no kind of job: it can be read, and nothing else."""

    name = "job"
    job_type = Workload
    manager = ""
    file = ""
    shapes: Json = {}  # noqa: RUF012 - as in Target

    def __init__(self, kind: str, api_version: str, resource: str, selector: str) -> None:
        self.kind, self.api_version, self.resource = kind, api_version, resource
        self.pods = WorkloadPods(selector)
        # The Job controller waits the longest before it replaces a Pod that failed.
        self.controller = Controller(kind, f"the controller of {kind}s", missing="", delay=600)

    def values(self, spec: JobSpec) -> dict[str, Any]:
        """Never: no job.yaml becomes such an object."""
        return _never(spec)

    def problems(self, manifest: Json) -> list[Finding]:
        """Never, as above."""
        return _never(manifest)

    def minimal(self, name: str, pod: Json) -> Job:
        """Never, as above."""
        return _never(name, pod)


def _never(*_: object) -> NoReturn:
    raise NotImplementedError("an object that is only read is not rendered")
