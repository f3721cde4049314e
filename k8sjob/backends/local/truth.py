"""What is true of a job, read from its folder, even if its supervisor left no last word."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import LOCAL, JobRef, Snapshot
from k8sjob.backends.conditions import finished
from k8sjob.backends.local import pods
from k8sjob.backends.local.conditions import fail, stamp
from k8sjob.backends.local.store import read_json
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.labels import replica_of

if TYPE_CHECKING:
    from k8sjob.backends.api import Json
    from k8sjob.backends.local.store import JobFolder

__all__ = ["LOOK_SECONDS", "Silence", "has_keeper", "not_found", "read_state", "version"]

LOOK_SECONDS: Final = 0.5
"""So often it is looked whether the supervisor still lives: its death changes no file."""
_SUPERVISOR_GONE: Final = "PyTorchJobSupervisorGone"
_STATE_DAMAGED: Final = "PyTorchJobStateDamaged"
_CANNOT_BE_LOCATED: Final = "The container could not be located when the pod was terminated"


def read_state(folder: JobFolder) -> Snapshot:
    """The state as it is, or as it must be if the supervisor is gone without a last word.

    A damaged state becomes a failed job, so that it hides no other job and can be deleted.

    Raises:
        JobNotFound: there is no such job.
    """
    try:
        state = _whole(folder)
        if not (_has_ended(state) or has_keeper(folder)):
            state = _whole(folder)  # it may have ended well in between
            if not _has_ended(state):
                state = _lost(state, folder)
    except (BackendError, FileNotFoundError) as error:
        if not folder.path.is_dir():
            raise not_found(JobRef(folder.name, LOCAL, folder.run)) from None
        state = _damaged(folder, error)
    return Snapshot(state["job"], tuple(state["pods"]), tuple(state["events"]))


def _whole(folder: JobFolder) -> Json:
    """The state as it was written.

    Raises:
        BackendError: it is not the state of this job.
        FileNotFoundError: there is none.
    """
    state = read_json(folder.state)
    try:
        job, lists = state["job"], (state["pods"], state["events"])
        meta = job["metadata"]
        own = meta["name"] == folder.name and meta["uid"].startswith(folder.run)
        replicas = job["spec"]["pytorchReplicaSpecs"]
        parts = [replicas, job.get("status") or {}, *lists[0], *lists[1]]
        if own and all(isinstance(part, dict) for part in parts):
            return state
    except (KeyError, TypeError, AttributeError):
        pass
    raise BackendError(f"{folder.state} is damaged: it is not the state of this job")


def _damaged(folder: JobFolder, error: Exception) -> Json:
    """The state of a job of which nothing is known; it has failed, unless it has a supervisor."""
    when, status = _last_sign(folder), {}
    if not has_keeper(folder):
        message = f"{error}; `k8sjob delete local/{folder.name}@{folder.run}` removes the job"
        status = fail({}, _STATE_DAMAGED, message, when)
    meta = {"name": folder.name, "namespace": LOCAL, "uid": folder.run, "labels": {}}
    meta["creationTimestamp"] = stamp(when)
    job = {"kind": "PyTorchJob", "metadata": meta, "spec": {"pytorchReplicaSpecs": {}}}
    job["status"] = status
    return {"job": job, "pods": [], "events": []}


def has_keeper(folder: JobFolder) -> bool:
    """Whether a process is responsible for the job."""
    keeper = folder.keeper()
    return keeper is not None and keeper.alive


def version(folder: JobFolder) -> object:
    """Differs when the state was written anew; None when it is gone."""
    try:
        stat = folder.state.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def not_found(ref: JobRef) -> JobNotFound:
    """The error for a job that is gone."""
    return JobNotFound(f"{ref} is gone; `k8sjob list` names the jobs that are there")


class Silence:
    """Whether a replica will write nothing more, asked as a function; cheap to ask often."""

    def __init__(self, folder: JobFolder, replica: str) -> None:
        self._folder, self._replica = folder, replica
        self._version: object = ()
        self._look_at = 0.0
        self._answer = False

    def __call__(self) -> bool:
        """The answer, by the newest state."""
        now = version(self._folder)
        if now != self._version or time.monotonic() >= self._look_at:
            self._version, self._look_at = now, time.monotonic() + LOOK_SECONDS
            self._answer = self._look()
        return self._answer

    def _look(self) -> bool:
        try:
            snapshot = read_state(self._folder)
        except JobNotFound:
            return True
        if not finished(snapshot.job.get("status") or {}):
            return False
        of_replica = [pod for pod in snapshot.pods if replica_of(pod) == self._replica]
        return not any(map(pods.is_live, of_replica))


def _has_ended(state: Json) -> bool:
    return finished(state["job"].get("status") or {})


def _lost(state: Json, folder: JobFolder) -> Json:
    """The state with the job failed, and each Pod that had not ended lost, as of its last sign.

    The replicas hang on the supervisor's lifeline, so they have ended, or will within seconds.
    """
    when, job = _last_sign(folder), state["job"]
    message = (
        f"PyTorchJob {job['metadata']['name']} was lost: its supervisor is gone (killed, or the"
        f" machine was restarted){_last_line(folder)}"
    )
    job = {**job, "status": fail(job.get("status") or {}, _SUPERVISOR_GONE, message, when)}
    for pod in filter(pods.is_live, state["pods"]):
        containers = pod["status"].get("containerStatuses") or [{}]
        end = pods.End(137, "ContainerStatusUnknown", _CANNOT_BE_LOCATED, when, when)
        pods.ended(pod, containers[0].get("restartCount", 0), end, final=True)
    return {**state, "job": job}


def _last_sign(folder: JobFolder) -> datetime:
    """When the supervisor last wrote something: the state, or a line of output."""
    times = [0.0]
    for file in (folder.state, *folder.path.glob("replicas/*/logs/*.log")):
        with suppress(FileNotFoundError):
            times.append(file.stat().st_mtime)
    return datetime.fromtimestamp(max(times), UTC)


def _last_line(folder: JobFolder) -> str:
    """What it said last, where it failed by itself."""
    with suppress(OSError):
        lines = folder.log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""
