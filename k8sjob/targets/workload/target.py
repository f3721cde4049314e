"""The kind of any object that runs Pods, made when the object is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from k8sjob.kube.api_resources import Controller
from k8sjob.targets.api import Target
from k8sjob.targets.workload.job import Workload
from k8sjob.targets.workload.pods import WorkloadPods

if TYPE_CHECKING:
    from k8sjob.kube.objects import Json


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

    def _never(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("an object that is only read is not rendered")

    values = problems = minimal = _never
