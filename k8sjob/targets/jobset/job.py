"""JobSets as an apiserver has them.

A JobSet knows no time of its start, and of its Job only whether all Pods are ready: the Job tells
the rest. Others' have one replicated Job or several.
"""

from __future__ import annotations

from k8sjob.targets.indexed.job import Indexed


class JobSet(Indexed):
    """A JobSet of jobset.x-k8s.io/v1alpha2."""

    job_at = ("spec", "replicatedJobs", 0, "template", "spec")
    complete = "Completed"
