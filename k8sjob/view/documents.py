"""A job as data: the JSON of `-o json`, and what `why` finds of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.kube.objects import IMAGE_ORIGIN, training
from k8sjob.observe.diagnose import Finding, diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import job_status
from k8sjob.provenance import Provenance
from k8sjob.targets.jobs import pod_specs

if TYPE_CHECKING:
    from datetime import datetime

    from k8sjob.backends.api import Backend, Snapshot
    from k8sjob.kube.objects import Json
    from k8sjob.view.progress import JobProgress

_DIGEST: Final = re.compile(r"@(sha256:[0-9a-f]{64})$")


def findings(backend: Backend, snapshot: Snapshot) -> list[Finding]:
    """What `why` and `status` find, from all that can be read of a job."""
    return diagnose(snapshot, last_lines(backend, snapshot), backend.related(snapshot))


def job_document(snapshot: Snapshot, progress: JobProgress | None = None) -> dict[str, Any]:
    """A job's status as JSON; docs/reference/json.md describes each field."""
    status = job_status(snapshot)
    return {
        "name": status.ref.name,
        "namespace": status.ref.namespace,
        "uid": status.ref.uid,
        "state": str(status.state),
        "reason": status.reason,
        "message": status.message,
        "exit_code": status.exit_code,
        "created": stamp(status.created),
        "started": stamp(status.started),
        "finished": stamp(status.finished),
        "image": image(snapshot.job),
        "origin": made_of.as_dict() if (made_of := provenance(snapshot.job)) else None,
        "counts": dict(status.counts),
        "progress": progress.as_dict() if progress else None,
        "replicas": [
            {
                "name": replica.name,
                "phase": replica.phase,
                "node": replica.node,
                "restarts": replica.restarts,
                "reason": replica.reason,
                "exit_code": replica.exit_code,
                "message": replica.message,
                "digest": running_digest(pod),
            }
            for replica, pod in zip(status.replicas, snapshot.pods, strict=True)
        ],
    }


def image(job: Json) -> str | None:
    """The image that the manifest gives the job's first replica."""
    for _, _, spec in pod_specs(job):
        return training(spec.get("containers")).get("image")
    return None


def provenance(job: Json) -> Provenance | None:
    """What the image was made of, if the job says so and still runs that image."""
    annotations = (job.get("metadata") or {}).get("annotations") or {}
    found = Provenance.decode(annotations.get(IMAGE_ORIGIN))
    return found if found and found.image == image(job) else None


def running_digest(pod: Json) -> str | None:
    """The digest of the image that a pod really runs, as its node reports it."""
    status = training((pod.get("status") or {}).get("containerStatuses"))
    found = _DIGEST.search(status.get("imageID") or "")
    return found[1] if found else None


def stamp(moment: datetime | None) -> str | None:
    """A time in UTC as `2026-01-31T12:00:00Z`."""
    return moment.isoformat().replace("+00:00", "Z") if moment else None
