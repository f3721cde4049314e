"""A JobSet as a target: jobset.x-k8s.io/v1alpha2, one replicated Job `node` of one replica.

Its controller makes the Job NAME-node-0 of it and the headless Service NAME, so NAME-node-0-0.NAME
is the Master's address. A JobSet knows no time of its start, and of its Job only whether all Pods
are ready: the Job tells the rest. There is no failurePolicy: the Job counts the restarts of its
Pods, and once it has failed, the set fails with it.

Behaviour: JobSet 0.12, pkg/controllers and pkg/webhooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from k8sjob.kube.resources import Controller
from k8sjob.targets.api import JobState, Made
from k8sjob.targets.indexed import JOB_SHAPE, Indexed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.kube.objects import Json
    from k8sjob.spec.values import TargetName

JOBSET_NAME: Final = "jobset.sigs.k8s.io/jobset-name"
"""A label of the Pods, as JobSetNameKey in api/jobset/v1alpha2/jobset_types.go; so is the next."""
JOBSET_UID: Final = "jobset.sigs.k8s.io/jobset-uid"
NODE: Final = "node"
"""What the replicated Job is called; Kubeflow Trainer calls it so."""
_SPEC_FIELDS: Final = (
    "coordinator failurePolicy managedBy network replicatedJobs startupPolicy successPolicy suspend"
    " ttlSecondsAfterFinished volumeClaimPolicies"
)
CHILD_NAME: Final = f"-{NODE}-0"
"""What follows the set's name in that of its Job: the replicated Job and the replica's index."""
JOBSET_SHAPE: Final = {
    "failurePolicy": {"maxRestarts": int, "rules": [{"targetReplicatedJobs": [str]}]},
    "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB_SHAPE}}],
    "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
    "suspend": bool,
    "ttlSecondsAfterFinished": int,
}
"""Of a JobSet's spec, see k8sjob.targets.schema."""


class JobSet(Indexed):
    """jobset.x-k8s.io/v1alpha2, kept by the JobSet controller; see k8sjob.targets.api.Target."""

    name: TargetName = "jobset"
    kind = "JobSet"
    api_version = "jobset.x-k8s.io/v1alpha2"
    resource = "jobsets"
    job_label = JOBSET_NAME
    owner_label = JOBSET_UID
    controller = Controller(
        kind="JobSet",
        name="the JobSet controller",
        webhooks="jobset.kb.io",
        deployment="app.kubernetes.io/name=jobset",
        namespace="jobset-system",
        missing="ask for it (v0.12)",
        delay=600,  # of the Job controller, which replaces the Pods
    )
    creations: tuple[tuple[str, str, str], ...] = (
        *Indexed.creations,
        ("JobCreationFailed", "SuccessfulCreate", "Created pod: "),
        ("HeadlessServiceCreationFailed", "SuccessfulCreate", "Created pod: "),
    )
    template = "jobset.yaml.j2"
    file = "jobset.yaml"
    made: tuple[Made, ...] = (Made("Job", "jobs", "batch/v1", CHILD_NAME),)
    kueue_framework = "jobset.x-k8s.io/jobset"
    spec_fields = frozenset(_SPEC_FIELDS.split())

    shapes: ClassVar[Json] = {"spec": JOBSET_SHAPE}
    job_at = ("spec", "replicatedJobs", 0, "template", "spec")
    ends: ClassVar[Mapping[str, JobState]] = {
        "Failed": JobState.FAILED,
        "Completed": JobState.SUCCEEDED,
        "Suspended": JobState.SUSPENDED,
    }
    manager = "jobset.sigs.k8s.io/jobset-controller"

    def around(self, job: Json) -> Json:
        """The Job as the one replica of a replicated Job."""
        return {"replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}]}
