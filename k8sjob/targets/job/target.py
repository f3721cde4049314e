"""An Indexed Job as a target: batch/v1, kept by the Job controller of every cluster.

Its Pods' names come from a headless Service of the job's name: NAME-0.NAME is the Master's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from k8sjob.kube.objects import Object
from k8sjob.kube.resources import Controller
from k8sjob.targets.api import Companion, JobState
from k8sjob.targets.indexed import JOB_NAME, Indexed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.kube.objects import Json
    from k8sjob.spec.values import TargetName

_GENERATED: Final = ("controller-uid", "job-name")
"""How labels of the Pod template are called that the apiserver fills in, perhaps with a prefix."""


_SPEC_FIELDS: Final = (
    "activeDeadlineSeconds backoffLimit backoffLimitPerIndex completionMode completions managedBy"
    " manualSelector maxFailedIndexes parallelism podFailurePolicy podReplacementPolicy selector"
    " successPolicy suspend template ttlSecondsAfterFinished"
)
"""Of batch/v1 (k8s.io/api v0.34, batch/v1/types.go, JobSpec)."""


class IndexedJob(Indexed):
    """batch/v1, without any operator; see k8sjob.targets.api.Target."""

    name: TargetName = "job"
    kind = "Job"
    api_version = "batch/v1"
    resource = "jobs"
    job_label = JOB_NAME
    owner_label = ""
    controller = Controller(
        kind="Job",
        name="the Job controller",
        webhooks="",
        deployment="",
        namespace="",
        missing="every cluster has it: look at the apiserver",
        delay=600,  # from 10 s on, doubled for each Pod that has failed
    )
    template = "job.yaml.j2"
    file = "indexed-job.yaml"
    companion: Companion | None = Companion(
        "services", "service.yaml.j2", "its Pods find each other by that name"
    )
    kueue_framework = "batch/job"
    spec_fields = frozenset(_SPEC_FIELDS.split())

    ends: ClassVar[Mapping[str, JobState]] = {
        "Failed": JobState.FAILED,
        "Complete": JobState.SUCCEEDED,
        "Suspended": JobState.SUSPENDED,
    }
    manager = "kubernetes.io/job-controller"
    limits = (*Indexed.limits, "activeDeadlineSeconds", "backoffLimit")

    def written(self, job: Json) -> Json:
        """The spec without the selector and the labels by which the controller finds its Pods."""
        spec = {key: value for key, value in Object(job).spec.items() if key != "selector"}
        template = dict(spec.get("template") or {})
        meta = dict(Object(template).part("metadata"))
        meta["labels"] = {
            key: value
            for key, value in Object(template).labels.items()
            if key.rpartition("/")[2] not in _GENERATED
        }
        return {**spec, "template": {**template, "metadata": meta}}
