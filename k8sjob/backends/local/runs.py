"""The runs of this machine: their state, which one a name means, whose checkpoints are resumed.

A run's id is the first eight characters of its uid: `digits@1a2b3c4d`. Checkpoints are resumed only
by a run from the folder that wrote them: two projects may use one name.
"""

from __future__ import annotations

import math
import shutil
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import LOCAL, Snapshot
from k8sjob.backends.local.state_folder import paths_in, read_json
from k8sjob.contract import CHECKPOINT_DIR_ENV, CONTAINER_NAME
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.kube.objects import Object, Pod, at_path, stamp
from k8sjob.targets.api import LocalReason
from k8sjob.targets.jobs import DEFAULT, has_ended, job_of
from k8sjob.targets.lifecycle import fail

if TYPE_CHECKING:
    from k8sjob.backends.local.state_folder import JobFolder, Store
    from k8sjob.kube.objects import Json

LOOK_SECONDS: Final = 0.5
"""How often to look whether the supervisor is alive: its death changes no file."""
_INFERRED: Final = frozenset({LocalReason.SUPERVISOR_GONE, LocalReason.STATE_DAMAGED})
"""Reasons of an end that no file says: on a shared disk both may pass."""

# --- the state of a run ---------------------------------------------------------------------------


def read_state(folder: JobFolder) -> Snapshot:
    """The state as it is, or as it must be if the supervisor is gone before the job's end.

    A damaged state becomes a failed job, so that it hides no other job and can be deleted.

    Raises:
        JobNotFound: there is no such job.
    """
    try:
        state = _read_own_state(folder)
        if not (has_ended(job_of(state["job"])) or folder.supervisor()):
            state = _read_own_state(folder)  # it may have ended in between
            if not has_ended(job_of(state["job"])):
                state = _mark_lost(state, folder)
    except (BackendError, FileNotFoundError) as error:
        if folder.is_gone:
            raise JobNotFound(
                f"{LOCAL}/{folder.name} is gone; `k8sjob list` shows the existing jobs"
            ) from None
        state = _damaged(folder, error)
    return Snapshot(job_of(state["job"]), tuple(state["pods"]), tuple(state["events"]))


def _read_own_state(folder: JobFolder) -> Json:
    """The state; BackendError if it is damaged, or not the state of this job."""
    state = read_json(folder.state)
    job = Object(at_path(state, "job") or {})
    # A folder that was copied or renamed by hand has another job's state.
    if job.name == folder.name and job.uid.startswith(folder.run):
        return state
    raise BackendError(f"{folder.state} is damaged: it is not the state of this job")


def _damaged(folder: JobFolder, error: Exception) -> Json:
    """The state of a job about which nothing is known: failed, unless it has a supervisor."""
    when, status = _last_written(folder), {}
    if not folder.supervisor():
        message = f"{error}; `k8sjob delete local/{folder.name}@{folder.run}` removes the job"
        status = fail({}, LocalReason.STATE_DAMAGED, message, when)
    meta = {"name": folder.name, "namespace": LOCAL, "uid": folder.run, "labels": {}}
    meta["creationTimestamp"] = stamp(when)
    job = {"kind": DEFAULT.kind, "metadata": meta, "spec": {}, "status": status}
    return {"job": job, "pods": [], "events": []}


def _mark_lost(state: Json, folder: JobFolder) -> Json:
    """The state with the job failed, and each Pod that had not ended lost.

    The replicas hold the supervisor's lifeline, so they have ended, or will within seconds.
    """
    when, job = _last_written(folder), state["job"]
    message = (
        f"{DEFAULT.kind} {Object(job).name} was lost: its supervisor is gone (killed, or the"
        f" machine was restarted){_last_line(folder)}"
    )
    status = fail(Object(job).status, LocalReason.SUPERVISOR_GONE, message, when)
    pods = [_lost_pod(pod, when) if Pod(pod).live else pod for pod in state["pods"]]
    return {**state, "job": {**job, "status": status}, "pods": pods}


def _lost_pod(pod: Json, when: datetime) -> Json:
    """A Pod that had not ended, as a kubelet shows one whose container it no longer knows."""
    end = {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        "message": "The container could not be located when the pod was terminated",
        "startedAt": stamp(when),
        "finishedAt": stamp(when),
    }
    container = {"name": CONTAINER_NAME, **Pod(pod).container.raw, "ready": False}
    container["state"] = {"terminated": end}
    return {**pod, "status": {"phase": "Failed", "containerStatuses": [container]}}


def _last_written(folder: JobFolder) -> datetime:
    """When the supervisor last wrote something: the state, or a line of output."""
    times = [0.0]
    for file in (folder.state, *paths_in(folder.path, "replicas/*/logs/*.log")):
        with suppress(OSError):
            times.append(file.lstat().st_mtime)
    return datetime.fromtimestamp(max(times), UTC)


def _last_line(folder: JobFolder) -> str:
    """The last line of the supervisor's log, where it failed by itself."""
    with suppress(OSError):
        lines = folder.log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""


class LatestState:
    """The state of a job; cheap to ask for often."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._version: object = ()
        self._look_at = 0.0  # time.monotonic() at which it is read again, changed or not
        self._snapshot: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """The newest state: the same object until it was written again; JobNotFound if it is gone.

        Until the supervisor has written the end it is also read again now and then, as the death
        of the supervisor changes no file.
        """
        version: object = None
        with suppress(OSError):
            stat = self._folder.state.stat()
            # A new state is a new file, also where two are written within one tick of the clock.
            version = stat.st_ino, stat.st_mtime_ns
        late = time.monotonic() >= self._look_at
        if self._snapshot is None or late or version != self._version:
            self._version, self._look_at = version, time.monotonic() + LOOK_SECONDS
            before, self._snapshot = self._snapshot, None  # None stays if the job is gone
            now = read_state(self._folder)
            # The same object tells watch that nothing has changed.
            self._snapshot = before if now == before else now
            state, condition = now.job.state()
            if state.finished and condition.get("reason") not in _INFERRED:
                self._look_at = math.inf
        return self._snapshot

    def is_silent(self, replica: str) -> bool:
        """Whether a replica will write nothing more."""
        try:
            snapshot = self.snapshot()
        except JobNotFound:
            return True
        pods = (Pod(pod) for pod in snapshot.pods if snapshot.job.replica_of(pod) == replica)
        return has_ended(snapshot.job) and not any(pod.live for pod in pods)


# --- how a run was started ------------------------------------------------------------------------


def launch_of(folder: JobFolder) -> dict[str, Any]:
    """The launch data of a run's replicas; empty if it cannot be read."""
    with suppress(BackendError, FileNotFoundError):
        return read_json(folder.launch)
    return {}


def source_of(folder: JobFolder) -> str:
    """The folder that a run's job.yaml was in; empty if that is not known."""
    return str(launch_of(folder).get("source", ""))


def identity_of(folder: JobFolder) -> str:
    """The name of a run's checkpoints in checkpoints/NAME/; empty if that is not known."""
    return str(launch_of(folder).get("checkpoints", ""))


def checkpoints_of(folder: JobFolder) -> Path | None:
    """The folder of a run's checkpoints; None if it has written none."""
    launches: dict[str, dict[str, Any]] = launch_of(folder).get("replicas") or {}
    env = next(iter(launches.values()), {}).get("env") or {}
    path = env.get(CHECKPOINT_DIR_ENV)
    return Path(path) if path and _has_some(Path(path)) else None


def remove_checkpoints(store: Store, name: str, identity: str) -> None:
    """Remove checkpoints, unless a run uses them, or may do so, as it cannot be read."""
    # An empty identity stands for a run that cannot be read, and may use any of them.
    used = {identity_of(folder) for folder in store.folders(name)}
    if identity and not used & {identity, ""}:
        shutil.rmtree(store.checkpoints(name, identity), ignore_errors=True)


# --- which run is meant ---------------------------------------------------------------------------


def find_run(store: Store, name: str) -> JobFolder:
    """The run that NAME or NAME@RUN means: the newest one, of this folder where folders differ.

    Raises:
        JobNotFound: there is none.
        BackendError: runs from several folders have the name, and none is from this one.
    """
    name, at, run = name.partition("@")
    folders = store.folders(name)
    if at:
        folders = [folder for folder in folders if run and folder.run.startswith(run[:8])]
    if not folders:
        raise JobNotFound(
            f"no job {name + at + run!r} on this machine; `k8sjob list` shows the existing ones"
        )
    sources = {folder: source_of(folder) for folder in folders}
    if len({source for source in sources.values() if source}) < 2:
        return folders[0]
    with suppress(FileNotFoundError, StopIteration):  # the working folder was removed
        return next(folder for folder in folders if sources[folder] == str(Path.cwd()))
    newest: dict[str, str] = {}
    for folder, source in sources.items():
        newest.setdefault(source, f"local/{name}@{folder.run} of {source or 'a lost folder'}")
    raise BackendError(f"{name!r} is ambiguous; specify one of {', '.join(newest.values())}")


def resumed_checkpoints(
    store: Store, name: str, source: str, uid: str, *, run: str = ""
) -> tuple[str, str]:
    """The checkpoints that a new run uses: those of its folder's last run, unless that succeeded.

    Args:
        store: the state folder.
        name: of the job.
        source: the folder that its job.yaml is in, resolved.
        uid: of the new run, which names checkpoints of its own.
        run: the id of the run, or of kept checkpoints, that the user wants to resume; empty: none.

    Returns:
        The name of the checkpoints' folder in checkpoints/NAME/, and what the user should know
        about those that are not used; may be empty.

    Raises:
        JobNotFound: there is no such run, and no such checkpoints.
    """
    if run:
        return _chosen(store, name, run), ""
    notice = ""
    for folder in store.folders(name):
        theirs, checkpoints = source_of(folder), identity_of(folder)
        if not (theirs and checkpoints):
            continue  # damaged: its checkpoints are found by --resume alone
        succeeded = _succeeded(folder)
        if theirs == source:
            return uid if succeeded else checkpoints, ""
        if not (notice or succeeded) and _has_some(store.checkpoints(name, checkpoints)):
            notice = (
                f"the checkpoints of local/{name}@{folder.run} are not used, since it ran in"
                f" {theirs}; resume them with `--resume {folder.run}`"
            )
    return uid, notice


def _chosen(store: Store, name: str, run: str) -> str:
    """The checkpoints of a run, or those that a deleted run left."""
    run_id = run.rpartition("@")[2][:8]
    of_runs = {folder.run: identity_of(folder) for folder in store.folders(name)}
    on_disk = {path.name[:8]: path.name for path in store.checkpoints(name, "").glob("*")}
    checkpoints = of_runs.get(run_id) or on_disk.get(run_id)
    if checkpoints is None or not _has_some(store.checkpoints(name, checkpoints)):
        raise JobNotFound(
            f"no checkpoints of a run {run!r} of {name!r} on this machine; `k8sjob list -o wide`"
            " lists the runs"
        )
    return checkpoints


def _succeeded(folder: JobFolder) -> bool:
    with suppress(JobNotFound):
        return read_state(folder).job.condition("Succeeded").true
    return False


def _has_some(checkpoints: Path) -> bool:
    return checkpoints.is_dir() and any(checkpoints.iterdir())
