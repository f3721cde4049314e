"""Labels and annotations of a job's objects, and who sets them."""

from __future__ import annotations

from typing import Any, Final

__all__ = [
    "IMAGE_ORIGIN",
    "ISTIO",
    "JOB_NAME",
    "JOB_ROLE",
    "MANAGED_BY",
    "MANIFEST_DIGEST",
    "OF_THE_OPERATOR",
    "OPERATOR_NAME",
    "QUEUE",
    "REPLICA_INDEX",
    "REPLICA_TYPE",
    "replica_of",
    "same_manifest",
]

# --- set by the training operator on the pods and services that it creates

OF_THE_OPERATOR: Final = "training.kubeflow.org/"
"""Their common prefix."""
JOB_NAME: Final = "training.kubeflow.org/job-name"
JOB_ROLE: Final = "training.kubeflow.org/job-role"
"""On one pod only, with the value "master": the Master, or worker-0 where there is none."""
OPERATOR_NAME: Final = "training.kubeflow.org/operator-name"
REPLICA_TYPE: Final = "training.kubeflow.org/replica-type"
"""The role in lower case: "master", "worker"."""
REPLICA_INDEX: Final = "training.kubeflow.org/replica-index"
"""The number within the role, from 0."""

# --- set by k8sjob

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
"""A label with the value "k8sjob" on every job and on its pods."""
MANIFEST_DIGEST: Final = "k8sjob/manifest-sha256"
"""An annotation of the job, the hash of all that was rendered; equal hashes are equal jobs."""
IMAGE_ORIGIN: Final = "k8sjob/image-origin"
"""An annotation of the job: what its image was made of, see k8sjob.provenance."""
ISTIO: Final = "sidecar.istio.io/inject"
"""An annotation of pods: "false" keeps a service mesh out of the ranks' connections."""
QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""A label of the job, for Kueue: the queue in which it waits."""


def replica_of(pod: dict[str, Any]) -> str:
    """The replica that a pod is, "worker-2"; empty for one without the operator's labels."""
    labels = pod["metadata"].get("labels") or {}
    role, index = labels.get(REPLICA_TYPE), labels.get(REPLICA_INDEX)
    return f"{role}-{index}" if role else ""


def same_manifest(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two PyTorchJobs were rendered from the same; false for one without the hash."""
    hashes = [
        (job["metadata"].get("annotations") or {}).get(MANIFEST_DIGEST) for job in (one, other)
    ]
    return hashes[0] is not None and hashes[0] == hashes[1]
