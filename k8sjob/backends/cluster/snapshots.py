"""A job with its pods and events, out of four collections: once, or as they change."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import Snapshot
from k8sjob.backends.cluster.belongings import in_time, is_of_pods, own_pods
from k8sjob.backends.cluster.listing import listing
from k8sjob.backends.cluster.mirror import Mirror, Source
from k8sjob.backends.paths import JOBS, path
from k8sjob.backends.transport import ApiError
from k8sjob.labels import JOB_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from threading import Event

    from k8sjob.backends.api import JobRef, Json
    from k8sjob.backends.cluster.mirror import Notice
    from k8sjob.backends.transport import Transport

__all__ = ["snapshot", "snapshots"]

LEAST_SECONDS: Final = 0.1
"""The time between two snapshots, however much happens."""
LOOK_SECONDS: Final = 0.2


def snapshot(transport: Transport, job: Json) -> Snapshot:
    """A job now, with all events; without those that the user may not read.

    Args:
        transport: carries the requests.
        job: as it was just read.
    """
    meta = job["metadata"]
    pods_path, of_job = (
        path("pods", meta["namespace"]),
        {"labelSelector": f"{JOB_NAME}={meta['name']}"},
    )
    own_uid = f"involvedObject.uid={meta['uid']}"
    with ThreadPoolExecutor(3) as pool:
        pods = pool.submit(listing, transport, pods_path, of_job)
        own = pool.submit(_events, transport, meta["namespace"], own_uid)
        theirs = pool.submit(_events, transport, meta["namespace"], "involvedObject.kind=Pod")
    events = [*own.result(), *(e for e in theirs.result() if is_of_pods(job, e))]
    return Snapshot(job, own_pods(job, pods.result().items), in_time(events))


def snapshots(transport: Transport, ref: JobRef, stop: Event | None = None) -> Iterator[Snapshot]:
    """A job now and after each change, until it is gone or `stop` is set.

    Of the pods' events only warnings are followed: the others are four a pod, and nobody waits for
    them.

    Args:
        transport: carries the requests.
        ref: the job, with its uid.
        stop: set from another thread.
    """
    with Mirror(transport, _sources(ref)) as mirror:
        while not (stop and stop.is_set()):
            if not mirror.changed(within=LOOK_SECONDS):
                continue
            now = _of_mirror(ref, mirror)
            if now is None:
                return
            yield now
            time.sleep(LEAST_SECONDS)


def _sources(ref: JobRef) -> dict[str, Source]:
    job = {"metadata": {"name": ref.name}}
    own_events = {"fieldSelector": f"involvedObject.uid={ref.uid}"}
    warnings = {"fieldSelector": "involvedObject.kind=Pod,type=Warning"}
    events = path("events", ref.namespace)
    return {
        "job": Source(path(JOBS, ref.namespace), {"fieldSelector": f"metadata.name={ref.name}"}),
        "pods": Source(path("pods", ref.namespace), {"labelSelector": f"{JOB_NAME}={ref.name}"}),
        "the job's events": Source(events, own_events, spare=True),
        "the pods' events": Source(
            events, warnings, keep=lambda event: is_of_pods(job, event), spare=True
        ),
    }


def _of_mirror(ref: JobRef, mirror: Mirror) -> Snapshot | None:
    """The job as the mirror shows it; None: it is gone."""
    job = next((j for j in mirror.objects("job") if j["metadata"]["uid"] == ref.uid), None)
    if job is None:
        return None
    pods = own_pods(job, mirror.objects("pods"))
    theirs = (e for e in mirror.objects("the pods' events") if is_of_pods(job, e))
    events = in_time([*mirror.objects("the job's events"), *theirs])
    return Snapshot(job, pods, (*events, *(_event(job, n) for n in mirror.notices())))


def _event(job: Json, notice: Notice) -> Json:
    """A notice as an Event of the job, as an apiserver would return it."""
    moment = datetime.fromtimestamp(notice.time, UTC).isoformat().replace("+00:00", "Z")
    meta, mark = job["metadata"], f"{notice.reason}.{notice.time:.6f}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": mark, "namespace": meta["namespace"], "uid": mark},
        "involvedObject": {"kind": "PyTorchJob", "name": meta["name"], "uid": meta["uid"]},
        "type": "Warning",
        "reason": notice.reason,
        "message": notice.message,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }


def _events(transport: Transport, namespace: str, selector: str) -> Sequence[Json]:
    try:
        return listing(transport, path("events", namespace), {"fieldSelector": selector}).items
    except ApiError as error:
        if error.code == 403:  # a job is worth showing without them
            return ()
        raise
