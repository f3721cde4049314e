"""How a spec becomes a JobSet, jobset.x-k8s.io/v1alpha2.

k8sjob's have one replicated Job `node` of one replica. The controller makes the Job NAME-node-0 of
it and the headless Service NAME, so NAME-node-0-0.NAME is the Master's address. There is no
failurePolicy: the Job counts the restarts of its Pods, and once it has failed, the set fails with
it.

Behavior: JobSet 0.12, pkg/controllers and pkg/webhooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k8sjob.kube.api_resources import Controller
from k8sjob.targets.api import Level
from k8sjob.targets.indexed.pods import CHILD_NAME, NODE
from k8sjob.targets.indexed.target import IndexedTarget
from k8sjob.targets.jobset.job import JobSet
from k8sjob.targets.jobset.pods import JobSetPods
from k8sjob.targets.shapes import ABOUT, JOB_SPEC

if TYPE_CHECKING:
    from k8sjob.kube.objects import Json

JOB_SET_SPEC: Final[Json] = {
    "coordinator": None,
    "failurePolicy": {"maxRestarts": int, "rules": [{"targetReplicatedJobs": [str]}]},
    "managedBy": None,
    "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB_SPEC}}],
    "startupPolicy": None,
    "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
    "suspend": bool,
    "ttlSecondsAfterFinished": int,
    "volumeClaimPolicies": None,
}
"""All of its fields."""


class JobSetTarget(IndexedTarget):
    """jobset.x-k8s.io/v1alpha2, kept by the JobSet controller."""

    name = "jobset"
    kind = "JobSet"
    api_version = "jobset.x-k8s.io/v1alpha2"
    resource = "jobsets"
    job_type = JobSet
    pods = JobSetPods()
    controller = Controller(
        kind="JobSet",
        name="the JobSet controller",
        webhooks="jobset.kb.io",
        deployment="app.kubernetes.io/name=jobset",
        namespace="jobset-system",
        missing="ask for it (v0.12)",
        delay=600,  # of the Job controller, which replaces the Pods
        target="jobset",
    )
    file = "jobset.yaml"
    shapes = {**ABOUT, "spec": JOB_SET_SPEC}  # noqa: RUF012 - as in Target
    levels = (Level("Job", "jobs", "batch/v1", CHILD_NAME),)
    manager = "jobset.sigs.k8s.io/jobset-controller"

    def around(self, job: Json) -> Json:
        """The Job as the one replica of a replicated Job."""
        return {"replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}]}


JOBSET: Final = JobSetTarget()
