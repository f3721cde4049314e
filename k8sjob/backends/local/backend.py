"""The back end of this machine: jobs as processes, their state in a folder that any terminal reads.

A job has a supervisor (supervisor.py), which writes its state and takes the requests that are left
for it. To read a job needs no supervisor: where it is gone before the job's end, the state says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final, NamedTuple, Unpack

from k8sjob.backends.api import LOCAL, JobRef, Launched, Snapshot
from k8sjob.backends.local.logfiles import attempts, follow_lines, read, read_last
from k8sjob.backends.local.runs import (
    LatestState,
    checkpoints_of,
    find_run,
    identity_of,
    launch_of,
    read_state,
    remove_checkpoints,
    resumed_checkpoints,
    source_of,
)
from k8sjob.backends.local.state_folder import JobFolder, Store, write_json
from k8sjob.checkout import commit_of
from k8sjob.errors import BackendError, JobExists, JobNotFound
from k8sjob.kube.objects import new_event, stamp
from k8sjob.targets.jobs import has_ended
from k8sjob.targets.lifecycle import is_expired

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k8sjob.backends.api import LogLine, LogOptions, Plan
    from k8sjob.kube.objects import Json

_SUPERVISOR: Final = f"{__package__}.supervisor"
POLL_SECONDS: Final = 0.05
CLEAN_UP_SECONDS: Final = 6.0
"""How long replicas may take to end by themselves after their job."""
ANSWER_SECONDS: Final = 10.0
"""How long a supervisor may take to act on a request, beyond the grace of the replicas."""


class _Started(NamedTuple):
    """A job of this process: its supervisor, and this end of the supervisor's lifeline."""

    ref: JobRef
    process: subprocess.Popen[bytes]
    lifeline: int


class LocalBackend:
    """Jobs on this machine; JobNotFound where a reference names none of them.

    Args:
        state: the state folder; None: $K8SJOB_STATE, or the user's state folder.
        fresh: new jobs start from scratch, ignoring the checkpoints of earlier runs.
        resume: the id of the run whose checkpoints they resume, whatever its folder and its end.
        oversubscribe: allow more processes than this machine can reasonably run.
        detached: new jobs continue when this process ends.
    """

    recorded = False

    def __init__(
        self,
        state: Path | None = None,
        *,
        fresh: bool = False,
        resume: str = "",
        oversubscribe: bool = False,
        detached: bool = False,
    ) -> None:
        self._store = Store(state)
        self._fresh, self._resume, self._oversubscribe = fresh, resume, oversubscribe
        self._detached = detached
        self._started: dict[str, _Started] = {}
        self._latest: dict[Path, LatestState] = {}  # of the jobs that were listed, by folder

    # --- creating ---------------------------------------------------------------------------------

    def create(self, plan: Plan) -> JobRef:
        """Start a job. Unless it is detached, it is stopped when this process ends, in any way.

        Raises:
            JobExists: one of that name has not ended.
            BackendError: a package, a variable, a folder or the space for it is missing, or it has
                too many processes.
        """
        from k8sjob.backends.local.machine import check_processes  # noqa: PLC0415 - this alone does
        from k8sjob.backends.local.prepare import Places, prepare  # noqa: PLC0415 - the same

        ref = JobRef(plan.spec.name, LOCAL, str(uuid.uuid4()))
        if not self._oversubscribe:
            check_processes(plan.spec.world_size)
        self._refuse_taken(ref.name)
        source, notice, identity = str(plan.folder.resolve()), "", ref.uid
        if plan.spec.checkpoint and not self._fresh:
            identity, notice = resumed_checkpoints(
                self._store, ref.name, source, ref.uid, run=self._resume
            )
        with self._store.draft() as draft:
            home = self._store.folder(ref.name, ref.uid).path
            # Paths in the launch data are those of the published folder, not of the draft.
            places = Places(plan, home, self._store.checkpoints(ref.name, identity), self._store)
            prepared = prepare(places, draft.path, fresh=self._fresh, resume=bool(self._resume))
            if notice:
                prepared.notice("NotResumed", notice)
            now, job = datetime.now(UTC), prepared.job
            job.metadata.update(uid=ref.uid, creationTimestamp=stamp(now))
            events = [new_event(job.raw, "Warning", *notice, now) for notice in prepared.notices]
            write_json(draft.state, {"job": job.raw, "pods": [], "events": events})
            launch_data = {
                "checkpoints": identity,
                "source": source,
                "commit": commit_of(plan.context),
                "spec": plan.spec.to_yaml(),
                "max_restarts": plan.spec.policy.max_restarts,
                "replicas": {name: asdict(launch) for name, launch in prepared.launches.items()},
            }
            write_json(draft.launch, launch_data)
            draft.record_supervisor(os.getpid())  # until there is a supervisor
            # Another process may have made a job of this name while the copies were made.
            with self._store.locked():
                self._refuse_taken(ref.name)
                folder = self._store.publish(draft, ref.name, ref.uid)
        self._start(ref, folder)
        return ref

    def _refuse_taken(self, name: str) -> None:
        for folder, snapshot in self._states(name):
            if not has_ended(snapshot.job):
                run, source = f"local/{name}@{folder.run}", source_of(folder)
                raise JobExists(
                    f"local/{name}{f' of {source}' if source else ''} has not ended; see `k8sjob"
                    f" status {run}`, end it with `k8sjob delete {run}`, or choose another name"
                )

    def _states(self, name: str | None = None) -> Iterator[tuple[JobFolder, Snapshot]]:
        """Each job's folder and state, or those of one name, the newest first."""
        for folder in self._store.folders(name):
            with suppress(JobNotFound):
                yield folder, read_state(folder)

    def _start(self, ref: JobRef, folder: JobFolder) -> None:
        inner, lifeline = os.pipe()
        # The supervisor of a detached job must not hold a pipe whose end would stop it.
        passed = () if self._detached else (inner,)
        try:
            with folder.log.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", _SUPERVISOR, folder.path, *map(str, passed)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder.path,
                    pass_fds=passed,
                    start_new_session=True,
                )
        finally:
            os.close(inner)
        # Until now this process was responsible: a job is never without one.
        folder.record_supervisor(process.pid)
        if self._detached:
            os.close(lifeline)
            process.returncode = 0  # or Python would warn that it still runs
        else:
            self._started[ref.uid] = _Started(ref, process, lifeline)

    # --- reading ----------------------------------------------------------------------------------

    def find(self, name: str) -> JobRef:
        """The newest job of that name, or the one that NAME@RUN names.

        Raises:
            JobNotFound: there is none.
            BackendError: several folders have jobs of that name, the working folder none.
        """
        return JobRef.of(read_state(find_run(self._store, name)).job)

    def jobs(self) -> list[Snapshot]:
        """All jobs, the newest first; those past their ttl_after_finished are removed.

        A job that has not changed since the last call is the same object.
        """
        folders = self._store.folders()
        # Most jobs have ended, and hundreds of them take half a second to read.
        before, self._latest = self._latest, {}
        snapshots = []
        for folder in folders:
            latest = before.get(folder.path) or LatestState(folder)
            with suppress(JobNotFound):
                snapshot = latest.snapshot()
                # The operator deletes such a job; here nobody runs after its end but who lists the
                # jobs.
                expired = is_expired(snapshot.job.raw, datetime.now(UTC))
                if expired and has_ended(snapshot.job) and not folder.supervisor():
                    folder.remove()
                else:
                    self._latest[folder.path] = latest
                    snapshots.append(snapshot)
        return snapshots

    def snapshot(self, ref: JobRef) -> Snapshot:
        """The job now; JobNotFound if it is gone."""
        return read_state(self.folder(ref))

    def watch(self, ref: JobRef, *, stop: Event | None = None) -> Iterator[Snapshot]:
        """The job now, and again after each change; ends when it is gone, or `stop` is set."""
        latest, shown = LatestState(self.folder(ref)), None
        with suppress(JobNotFound):
            while stop is None or not stop.is_set():
                snapshot = latest.snapshot()
                if snapshot is not shown:
                    shown = snapshot
                    yield snapshot
                time.sleep(POLL_SECONDS)

    def logs(self, ref: JobRef, replica: str, **how: Unpack[LogOptions]) -> Iterator[LogLine]:
        """A replica's output; see Backend.logs. BackendError without an attempt before the last."""
        folder = self.folder(ref)
        if not folder.state.exists():
            raise JobNotFound(f"{ref} is gone; `k8sjob list` shows the existing jobs")
        logs = folder.replica(replica) / "logs"
        if how.get("previous"):
            earlier = attempts(logs)[:-1]
            if not earlier:
                raise BackendError(
                    f"{ref}: the container of {replica} was started only once, and its output also"
                    " has the earlier starts of its processes; omit --previous"
                )
            return read(logs, replica, earlier[-1])
        tail, stop = how.get("tail"), how.get("stop") or Event()
        if not how.get("follow"):
            if tail is not None:
                return iter(read_last(logs, replica, tail))
            return (line for number in attempts(logs) for line in read(logs, replica, number))
        ended = partial(LatestState(folder).is_silent, replica)
        return follow_lines(logs, replica, ended=ended, stopped=stop.is_set)

    def related(self, snapshot: Snapshot) -> tuple[Json, ...]:  # noqa: ARG002 - the Protocol's
        """Nothing: on this machine everything about a job is in its own objects."""
        return ()

    def folder(self, ref: JobRef) -> JobFolder:
        """The folder of a job: state, output, and each replica's working folder."""
        uid = ref.uid or self.find(ref.name).uid
        return self._store.folder(ref.name, uid)

    def launched(self, ref: JobRef) -> Launched:
        """What a job was started from.

        Raises:
            BackendError: its launch.json is damaged.
        """
        folder = self.folder(ref)
        launch = launch_of(folder)
        if "spec" not in launch or not launch.get("source"):
            raise BackendError(f"{folder.launch} is damaged; run {ref} again from its job.yaml")
        with suppress(OSError):
            place, code = Path(launch["source"]), folder.code()
            return Launched(launch["spec"], place, code, folder.work, launch.get("commit", ""))
        raise JobNotFound(f"{ref} is gone")

    # --- changing ---------------------------------------------------------------------------------

    def suspend(
        self,
        ref: JobRef,
        *,
        value: bool,
        waiting: Callable[[float], object] | None = None,  # noqa: ARG002 - there is no need to
    ) -> None:
        """Stop the job's replicas and keep the job, or resume it.

        Raises:
            BackendError: it has ended, or its supervisor does not respond.
        """
        folder = self.folder(ref)
        verb = "suspended" if value else "resumed"
        if has_ended(read_state(folder).job):
            raise BackendError(f"{ref} has ended and cannot be {verb}; run it again instead")
        folder.ask("suspend", value=value)
        if not _wait_for(lambda: read_state(folder).job.suspended == value, ANSWER_SECONDS):
            raise BackendError(
                f"the supervisor of {ref} does not respond; see {folder.log}, or end the job with"
                f" `k8sjob delete {ref.name}`"
            )

    def stop(self, ref: JobRef, *, now: bool = False, message: str = "") -> None:
        """Request the end of the job, and return: SIGTERM to its replicas, after the grace SIGKILL.

        It ends as Failed with the reason PyTorchJobStopped, unless it succeeds first. With `now`
        SIGKILL comes at once. The message is that of the job's status.
        """
        self.folder(ref).ask("stop", now=now, message=message)

    def finish(self, ref: JobRef) -> None:
        """Wait until a job that has ended is cleaned up; stop one that has not.

        For the process that created the job, after the job's end or when it no longer waits for it.
        Replicas that outlive the job (cleanPodPolicy None) are stopped too. A supervisor that does
        not respond is killed, and its replicas end with it.
        """
        started = self._started.pop(ref.uid, None)
        if started is None:
            return
        folder = self.folder(ref)
        with suppress(BackendError, subprocess.TimeoutExpired):
            if has_ended(read_state(folder).job):
                if not _wait_for(lambda: started.process.poll() is not None, CLEAN_UP_SECONDS):
                    folder.ask("stop", message="its output was followed to the end")
                started.process.wait(_grace(folder) + ANSWER_SECONDS)
        os.close(started.lifeline)
        try:
            started.process.wait(CLEAN_UP_SECONDS)
        except subprocess.TimeoutExpired:
            started.process.kill()
            started.process.wait()

    def close(self) -> None:
        """Finish all jobs that this process has created: see finish."""
        for started in list(self._started.values()):
            self.finish(started.ref)

    def checkpoints(self, ref: JobRef) -> Path | None:
        """The folder of a job's checkpoints; None if it has written none."""
        return checkpoints_of(self.folder(ref))

    def delete(self, ref: JobRef, *, checkpoints: bool = False) -> None:
        """Stop the job and remove it with its output.

        With `checkpoints` these are removed, too, unless another run uses them or they lie in a
        folder of the user's own.

        Raises:
            BackendError: its replicas could not be stopped.
        """
        folder = self.folder(ref)
        read_state(folder)
        if folder.supervisor():
            folder.ask("delete")
            _wait_for(lambda: not folder.supervisor(), _grace(folder) + ANSWER_SECONDS)
            if (supervisor := folder.supervisor()) and not supervisor.kill():
                raise BackendError(
                    f"the supervisor of {ref}, process {supervisor.pid} on {supervisor.host}, does"
                    " not respond; end it there, and delete the job again"
                )
        # Read before the folder goes, which has the name.
        identity = identity_of(folder)
        folder.remove()
        if checkpoints:
            remove_checkpoints(self._store, ref.name, identity)
        self.finish(ref)


def _grace(folder: JobFolder) -> float:
    replicas = launch_of(folder).get("replicas") or {}
    return max((float(replica.get("grace", 0)) for replica in replicas.values()), default=0.0)


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
