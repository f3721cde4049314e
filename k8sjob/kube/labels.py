"""Labels and annotations of a job's objects that k8sjob sets."""

from __future__ import annotations

from typing import Any, Final

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
"""A label with the value "k8sjob" on every job and on its pods."""
MANIFEST_DIGEST: Final = "k8sjob/manifest-sha256"
"""An annotation of the job, the hash of all that was rendered; equal hashes are equal jobs."""
IMAGE_ORIGIN: Final = "k8sjob/image-origin"
"""An annotation of the job: what its image was made of, see k8sjob.provenance."""
NOTIFY: Final = "k8sjob/notify"
"""An annotation of the job: what `k8sjob collect` sends messages about, as "failed,stalled"."""
ISTIO: Final = "sidecar.istio.io/inject"
"""An annotation of pods: "false" keeps a service mesh out of the ranks' connections."""
QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""A label of the job, for Kueue: the queue in which it waits."""

PRIORITY: Final = "kueue.x-k8s.io/priority-class"
"""A label of the job, for Kueue: its WorkloadPriorityClass."""
TOPOLOGY: Final = "kueue.x-k8s.io/podset-{}-topology"
"""An annotation of pods, for Kueue: the level, which is required or preferred."""

RESERVED: Final = (
    "training.kubeflow.org/",
    "batch.kubernetes.io/",
    "jobset.sigs.k8s.io/",
    "trainer.kubeflow.org/",
)
"""How labels begin that controllers set on the pods of a job."""


def is_ours(item: dict[str, Any]) -> bool:
    """Whether k8sjob has made an object."""
    return (item["metadata"].get("labels") or {}).get(MANAGED_BY) == "k8sjob"


def same_manifest(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two jobs were rendered from the same; false for one without the hash."""
    hashes = [
        (job["metadata"].get("annotations") or {}).get(MANIFEST_DIGEST) for job in (one, other)
    ]
    return hashes[0] is not None and hashes[0] == hashes[1]
