"""The Pods of Indexed Jobs, and the Job controller's Events about their creation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Role
from k8sjob.kube.objects import Object
from k8sjob.targets.api import Pods

if TYPE_CHECKING:
    from collections.abc import Collection

    from k8sjob.kube.objects import Json

NODE: Final = "node"
"""The name of the replicated Job in a JobSet, as in Kubeflow Trainer."""
CHILD_NAME: Final = f"-{NODE}-0"
"""The suffix of the Job's name after the set's: the replicated Job and the replica's index."""
JOB_NAME: Final = "batch.kubernetes.io/job-name"
NUMBER: Final = r"[0-9]{1,9}"
INDEX: Final = "batch.kubernetes.io/job-completion-index"
"""A label of the Pod since Kubernetes 1.28, and an annotation."""
_GROUP: Final = "jobset.sigs.k8s.io/replicatedjob-name"
_JOB_INDEX: Final = "jobset.sigs.k8s.io/job-index"
_ALL_JOBS: Final = "jobset.sigs.k8s.io/global-replicas"
"""Labels of the Pods of JobSets (constants.go): the replicated Job, the number of its Job, and how
many Jobs the set has."""


class IndexedPods(Pods):
    """The Pods that the Job controller creates."""

    job_label = JOB_NAME
    ended_stay = True
    creations: tuple[tuple[str, str, str], ...] = (
        ("FailedCreate", "SuccessfulCreate", "Created pod: "),
    )

    def replica_of(self, pod: Json) -> str:
        """The replica by the Job controller's labels, which Pods of all these kinds have."""
        labels = Object(pod).labels
        index = labels.get(INDEX) or Object(pod).part("metadata", "annotations").get(INDEX, "")
        if JOB_NAME not in labels or not re.fullmatch(NUMBER, index):
            return ""
        group = labels.get(_GROUP)
        suffix = f"-{group}-{labels.get(_JOB_INDEX)}" if group else ""
        ranked = suffix in {"", CHILD_NAME} or labels.get(_ALL_JOBS) == "1"
        return replica_at(int(index)) if ranked else f"{suffix[1:]}-{int(index)}"

    def selector(self, name: str, replicas: Collection[str] = ()) -> str:
        """The selector by the controllers' labels."""
        ranks = sorted(
            {
                int(index) + (role == Role.WORKER.lower())
                for role, _, index in (replica.rpartition("-") for replica in replicas)
            }
        )
        more = f",{INDEX} in ({','.join(map(str, ranks))})" if ranks else ""
        return f"{self.job_label}={name}{more}"


def replica_at(index: int) -> str:
    """The replica of a completion index."""
    return f"worker-{index - 1}" if index else "master-0"
