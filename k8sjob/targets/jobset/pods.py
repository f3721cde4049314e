"""The Pods of JobSets, and the JobSet controller's Events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k8sjob.targets.indexed.pods import IndexedPods

if TYPE_CHECKING:
    from k8sjob.kube.objects import Json


class JobSetPods(IndexedPods):
    """The Pods of the Jobs that the JobSet controller makes."""

    job_label = "jobset.sigs.k8s.io/jobset-name"  # api/jobset/v1alpha2/jobset_types.go
    owner_label = "jobset.sigs.k8s.io/jobset-uid"
    creations = (
        *IndexedPods.creations,
        ("JobCreationFailed", "SuccessfulCreate", "Created pod: "),
        ("HeadlessServiceCreationFailed", "SuccessfulCreate", "Created pod: "),
    )

    def restarts_all(self, event: Json) -> bool:
        """RestartJobSet and the like, as the JobSet controller's failure policies call them."""
        reason = str(event.get("reason", ""))
        return reason.startswith("Restart") and reason.endswith("FailurePolicyAction")
