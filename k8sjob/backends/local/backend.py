"""The back end of this machine: jobs as processes, their state in a folder that any terminal reads.

A job is kept by a supervisor (supervisor.py), which writes what it sees and takes requests that are
left for it. Reading a job needs no supervisor: where it is gone without a last word, the state says
so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import LOCAL, JobRef, Snapshot
from k8sjob.backends.conditions import finished, is_suspended
from k8sjob.backends.local.conditions import stamp
from k8sjob.backends.local.logfiles import attempts, follow, read
from k8sjob.backends.local.operator import DeleteJob, reconcile
from k8sjob.backends.local.runs import (
    Resumption,
    checkpoints_of,
    identity_of,
    named,
    resumption,
    source_of,
)
from k8sjob.backends.local.store import JobFolder, Store, read_json, write_json
from k8sjob.backends.local.truth import Silence, has_keeper, not_found, read_state, version
from k8sjob.errors import BackendError, JobExists, JobNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from threading import Event

    from k8sjob.backends.api import Json, LogLine, Plan

__all__ = ["LocalBackend"]

POLL_SECONDS: Final = 0.05
CLEAN_UP_SECONDS: Final = 6.0
"""How long replicas may take to end by themselves after their job."""
ANSWER_SECONDS: Final = 10.0
"""How long a supervisor is given to take up a request, beyond the grace of the replicas."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A job of this process: its supervisor, and the end of the lifeline that it hangs on."""

    ref: JobRef
    process: subprocess.Popen[bytes]
    lifeline: int


class LocalBackend:
    """Jobs on this machine.

    Args:
        state: the state folder; None: $K8SJOB_STATE, or the user's state folder.
        fresh: jobs made here start from scratch, ignoring the checkpoints of earlier runs.
        resume: the id of the run whose checkpoints they resume, whatever its folder and its end.
        oversubscribe: allow more processes than this machine can reasonably run.
    """

    name = "local"

    def __init__(
        self,
        state: Path | None = None,
        *,
        fresh: bool = False,
        resume: str = "",
        oversubscribe: bool = False,
    ) -> None:
        self._store = Store(state)
        self._fresh, self._resume, self._oversubscribe = fresh, resume, oversubscribe
        self._kept: dict[str, _Kept] = {}

    # --- making -----------------------------------------------------------------------------------

    def create(self, plan: Plan) -> JobRef:
        """Start a job. It is stopped when this process goes, however it goes.

        Raises:
            JobExists: one of that name has not ended.
            BackendError: a package, a variable, a folder or the space for it is missing, or it has
                too many processes.
        """
        from k8sjob.backends.local.paths import Places  # noqa: PLC0415 - a reader needs no spec
        from k8sjob.backends.local.prepare import (  # noqa: PLC0415 - the same
            check_processes,
            prepare,
        )

        ref = JobRef(plan.spec.name, LOCAL, str(uuid.uuid4()))
        if not self._oversubscribe:
            check_processes(plan.spec.world_size)
        self._refuse_taken(ref.name)
        self._trim_abandoned()
        resumed = Resumption(ref.uid)
        if plan.spec.checkpoint and not self._fresh:
            resumed = resumption(self._store, plan, ref.uid, run=self._resume)
        with self._store.draft() as draft:
            home = self._store.folder(ref.name, ref.uid).path
            kept = self._store.checkpoints(ref.name, resumed.checkpoints)
            places = Places(plan, home, kept, self._store)
            prepared = prepare(places, draft.path, fresh=self._fresh, resume=bool(self._resume))
            if resumed.notice:
                prepared.say("NotResumed", resumed.notice)
            now = datetime.now(UTC)
            prepared.job["metadata"] |= {"uid": ref.uid, "creationTimestamp": stamp(now)}
            notices = [_notice(prepared.job, *notice, now) for notice in prepared.notices]
            write_json(draft.state, {"job": prepared.job, "pods": [], "events": notices})
            launches = {name: launch.to_json() for name, launch in prepared.launches.items()}
            restarts = plan.spec.policy.max_restarts
            write_json(
                draft.launch,
                {
                    "checkpoints": resumed.checkpoints,
                    "source": str(plan.folder.resolve()),
                    "max_restarts": restarts,
                    "replicas": launches,
                },
            )
            draft.keep(os.getpid())  # until there is a supervisor
            with self._store.locked():
                self._refuse_taken(ref.name)
                folder = self._store.publish(draft, ref.name, ref.uid)
        self._start(ref, folder)
        return ref

    def _refuse_taken(self, name: str) -> None:
        for folder in self._store.folders(name):
            try:
                snapshot = read_state(folder)
            except JobNotFound:
                continue
            if not finished(snapshot.job.get("status") or {}):
                run, source = f"local/{name}@{folder.run}", source_of(folder)
                raise JobExists(
                    f"local/{name}{f' of {source}' if source else ''} has not ended; see `k8sjob"
                    f" status {run}`, end it by `k8sjob delete {run}`, or choose another name"
                )

    def _trim_abandoned(self) -> None:
        """Give back the space of jobs whose supervisors could not: they were killed."""
        for folder in self._store.folders():
            if folder.has_ballast and not has_keeper(folder):
                folder.trim()

    def _start(self, ref: JobRef, folder: JobFolder) -> None:
        inner, lifeline = os.pipe()
        try:
            with folder.log.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", f"{__package__}.supervisor", folder.path, str(inner)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder.path,
                    pass_fds=(inner,),
                    start_new_session=True,
                )
        finally:
            os.close(inner)
        self._kept[ref.uid] = _Kept(ref, process, lifeline)
        folder.keep(process.pid)

    # --- reading ----------------------------------------------------------------------------------

    def find(self, name: str) -> JobRef:
        """The newest job of that name, or the one that NAME@RUN names.

        Raises:
            JobNotFound: there is none.
            BackendError: several folders have jobs of that name, the working folder none.
        """
        return JobRef.of(read_state(named(self._store, name)).job)

    def jobs(self) -> list[Snapshot]:
        """All jobs, the newest first; one whose time after its end is over is removed."""
        found = []
        for folder in self._store.folders():
            try:
                snapshot = read_state(folder)
            except JobNotFound:
                continue
            if self._expired(snapshot) and not has_keeper(folder):
                folder.remove()
            else:
                found.append(snapshot)
        return found

    def snapshot(self, ref: JobRef) -> Snapshot:
        """The job now; JobNotFound if it is gone."""
        return read_state(self.folder(ref))

    def watch(self, ref: JobRef, *, stop: Event | None = None) -> Iterator[Snapshot]:
        """The job now, and again after each change; ends when it is gone, or `stop` is set."""
        folder = self.folder(ref)
        told: Snapshot | None = None
        seen: object = None
        look_at = 0.0
        while stop is None or not stop.is_set():
            now = version(folder)
            # The supervisor may also go without a word, which changes no file.
            if now != seen or time.monotonic() >= look_at:
                seen, look_at = now, time.monotonic() + 10 * POLL_SECONDS
                try:
                    snapshot = read_state(folder)
                except JobNotFound:
                    return
                if snapshot != told:
                    told = snapshot
                    yield snapshot
            time.sleep(POLL_SECONDS)

    def logs(
        self,
        ref: JobRef,
        replica: str,
        *,
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,  # noqa: ARG002 - files of this machine are read at once
        since: datetime | None = None,  # noqa: ARG002 - the same
        stop: Event | None = None,
    ) -> Iterator[LogLine]:
        """A replica's output, over all attempts; see Backend.logs.

        Raises:
            JobNotFound: there is no such job.
            BackendError: `previous`, and there was one attempt alone.
        """
        folder = self.folder(ref)
        if not folder.state.exists():
            raise not_found(ref)
        logs = folder.replica(replica) / "logs"
        if previous:
            earlier = attempts(logs)[:-1]
            if not earlier:
                raise BackendError(f"{ref}: {replica} was started once only; leave --previous out")
            return read(logs, replica, earlier[-1])
        if follow:
            return _follow(logs, replica, Silence(folder, replica), stop)
        return (line for number in attempts(logs) for line in read(logs, replica, number))

    def related(self, snapshot: Snapshot) -> tuple[Json, ...]:  # noqa: ARG002 - the Protocol's
        """None: on this machine everything about a job is in its own objects."""
        return ()

    def folder(self, ref: JobRef) -> JobFolder:
        """The folder of a job: state, output, and each replica's working folder.

        Raises:
            JobNotFound: the reference has no uid, and there is no job of its name.
        """
        uid = ref.uid or self.find(ref.name).uid
        return self._store.folder(ref.name, uid)

    # --- changing ---------------------------------------------------------------------------------

    def suspend(
        self,
        ref: JobRef,
        *,
        value: bool,
        waiting: Callable[[float], object] | None = None,  # noqa: ARG002 - there is no need to
    ) -> None:
        """Stop the job's replicas and keep the job, or let it go on.

        Raises:
            JobNotFound: there is no such job.
            BackendError: it has ended, or its supervisor does not answer.
        """
        folder = self.folder(ref)
        verb = "suspended" if value else "resumed"
        if finished(read_state(folder).job.get("status") or {}):
            raise BackendError(f"{ref} has ended and cannot be {verb}; run it again instead")
        folder.ask("suspend", value=value)

        def taken_up() -> bool:
            return is_suspended(read_state(folder).job) == value

        if not _wait_for(taken_up, ANSWER_SECONDS):
            raise BackendError(
                f"the supervisor of {ref} does not answer; see {folder.log}, or end the job by"
                f" `k8sjob delete {ref.name}`"
            )

    def stop(self, ref: JobRef, *, now: bool = False, message: str = "") -> None:
        """Ask that the job ends: SIGTERM to its replicas, SIGKILL after their grace.

        It ends as Failed with the reason PyTorchJobStopped, unless it succeeds meanwhile. Returns
        at once.

        Args:
            ref: the job.
            now: SIGKILL at once.
            message: why, for the job's status.
        """
        self.folder(ref).ask("stop", now=now, message=message)

    def finish(self, ref: JobRef) -> None:
        """Wait until a job that has ended is cleaned up; one that has not ended is stopped.

        To be called by the process that made the job, when it has seen the job's end, or will not
        wait for it. Replicas that outlive the job (cleanPodPolicy None) are stopped too. A
        supervisor that does not answer is killed, and its replicas end with it.
        """
        kept = self._kept.pop(ref.uid, None)
        if kept is None:
            return
        folder = self.folder(ref)
        with suppress(BackendError, subprocess.TimeoutExpired):
            if finished(read_state(folder).job.get("status") or {}):
                if not _wait_for(lambda: kept.process.poll() is not None, CLEAN_UP_SECONDS):
                    folder.ask("stop", message="its output was followed to the end")
                kept.process.wait(self._grace(folder) + ANSWER_SECONDS)
        os.close(kept.lifeline)
        try:
            kept.process.wait(CLEAN_UP_SECONDS)
        except subprocess.TimeoutExpired:
            kept.process.kill()
            kept.process.wait()

    def close(self) -> None:
        """Finish all jobs that this process has made: see finish."""
        for kept in list(self._kept.values()):
            self.finish(kept.ref)

    def checkpoints(self, ref: JobRef) -> Path | None:
        """The folder of a job's checkpoints; None where it has written none.

        Raises:
            JobNotFound: there is no such job.
        """
        return checkpoints_of(self.folder(ref))

    def delete(self, ref: JobRef, *, checkpoints: bool = False) -> None:
        """Stop the job and remove it with its output.

        Args:
            ref: the job.
            checkpoints: remove its checkpoints too, unless another run uses them or they lie in a
                folder of the user's own.

        Raises:
            JobNotFound: there is no such job.
            BackendError: its replicas could not be stopped.
        """
        folder = self.folder(ref)
        read_state(folder)
        if has_keeper(folder):
            folder.ask("delete")
            gone = _wait_for(lambda: not has_keeper(folder), self._grace(folder) + ANSWER_SECONDS)
            keeper = folder.keeper()
            if not gone and keeper and not keeper.kill():
                raise BackendError(
                    f"the supervisor of {ref}, process {keeper.pid} on {keeper.host}, does not"
                    " answer; end it there, and delete the job again"
                )
        identity = identity_of(folder)
        folder.remove()
        if checkpoints:
            self._store.remove_checkpoints(ref.name, identity)
        self.finish(ref)

    # --- small things -----------------------------------------------------------------------------

    @staticmethod
    def _expired(snapshot: Snapshot) -> bool:
        if not finished(snapshot.job.get("status") or {}):
            return False
        _, actions = reconcile(snapshot.job, snapshot.pods, datetime.now(UTC))
        return DeleteJob() in actions

    @staticmethod
    def _grace(folder: JobFolder) -> float:
        try:
            replicas = read_json(folder.launch)["replicas"].values()
            return max((float(launch["grace"]) for launch in replicas), default=0.0)
        except (BackendError, FileNotFoundError, KeyError, TypeError):
            return 0.0


def _follow(
    logs: Path, replica: str, ended: Callable[[], bool], stop: Event | None
) -> Iterator[LogLine]:
    return follow(logs, replica, ended=ended, stopped=stop.is_set if stop else lambda: False)


def _wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _notice(job: Json, reason: str, message: str, now: datetime) -> dict[str, Any]:
    """A warning of the back end itself, as an Event of the job."""
    meta, moment, uid = job["metadata"], stamp(now), str(uuid.uuid4())
    return {
        "metadata": {"name": f"{meta['name']}.{uid[:8]}", "uid": uid, "creationTimestamp": moment},
        "involvedObject": {"kind": "PyTorchJob", "name": meta["name"], "uid": meta["uid"]},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
    }
