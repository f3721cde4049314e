"""The Pods of TrainJobs, which are those of their JobSets, and Trainer's Events."""

from __future__ import annotations

from k8sjob.targets.jobset.pods import JobSetPods


class TrainJobPods(JobSetPods):
    """The Pods of the JobSets that Trainer makes."""

    creations = (
        *JobSetPods.creations,
        ("TrainJobResourcesCreationFailed", "SuccessfulCreate", "Created pod: "),
    )
