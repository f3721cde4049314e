"""The supervisor process of a local job: the training operator and the kubelet in one.

`python -m k8sjob.backends.local.supervisor JOBDIR [LIFELINE_FD]`, started by LocalBackend.create in
a new session, so that a Ctrl-C in the terminal does not reach it. It reads only JSON and imports
only the standard library. The lifeline is a pipe whose other end is held by the process that runs
the job: at its end of file the job is stopped.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.backends.local.container import Launch
from k8sjob.backends.local.kubelet import Kubelet
from k8sjob.backends.local.state_folder import (
    SIGN_S,
    JobFolder,
    read_json,
    write_json,
)
from k8sjob.contract import SECRET_ENV, ExitCode, Reason, counted
from k8sjob.environment import variables
from k8sjob.errors import BackendError
from k8sjob.kube.objects import Object, Pod, is_true, new_event, stamp
from k8sjob.targets.api import CreatePod, DeletePod, LocalReason, RecordEvent
from k8sjob.targets.jobs import DEFAULT, LOCAL_CONTROLLER, has_ended, replica_of

if TYPE_CHECKING:
    from k8sjob.kube.objects import Json

TICK_SECONDS: Final = 0.05
CLEAN_UP_DELAY: Final = 5.0
"""Seconds for the other replicas to end by themselves after the Master has succeeded."""
ORPHAN_GRACE: Final = 3.0
"""Seconds between SIGTERM and SIGKILL when the process that runs the job is gone."""
WRITE_AGAIN_S: Final = 1.0
"""Seconds until a state that could not be written is tried again."""
MAX_EVENTS: Final = 500
_PERMANENT: Final = {ExitCode.USER_ERROR, ExitCode.CONFIG, ExitCode.RESTARTS_SPENT}
_NOT_INHERITED: Final = ("K8SJOB_", "PET_", "TORCHELASTIC_", "MASTER_")
_RANK_NAMES: Final = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"}
)


class Supervisor:
    """Runs one job to its end.

    Args:
        folder: the job's folder, with state.json and launch.json in it.
        lifeline: file descriptor at whose end of file the job is stopped; None: there is none.
    """

    def __init__(self, folder: JobFolder, lifeline: int | None = None) -> None:
        state = read_json(folder.state)
        self._folder, self._lifeline = folder, lifeline
        self._job: Json = state["job"]
        self._events: list[Json] = state["events"]
        self._recorded: set[str] = set()
        self._saved, self._sign_at, self._write_at = "", 0.0, 0.0
        self._port = _reserve_port()
        self._secret = secrets.token_hex()
        launch = read_json(folder.launch)
        self._max_restarts = int(launch["max_restarts"])
        self._kubelet = Kubelet(
            folder,
            {name: Launch(**one) for name, one in launch["replicas"].items()},
            self._environ,
            lambda pod, kind, reason, text: self._record(pod, RecordEvent(kind, reason, text)),
        )
        self._stopping = ""
        self._ended_at: float | None = None

    def run(self) -> None:
        """Run until the job has ended and its replicas are gone, or the job is deleted."""
        try:
            while not self._over():
                self._take_requests()
                self._kubelet.sync()
                self._operate()
                self._save()
                self._kubelet.wait(TICK_SECONDS)
            if self._deleted:
                self._folder.remove()
            else:
                self._folder.trim()
        except BaseException as error:
            self._give_up(error)
            raise

    def terminated(self) -> None:
        """Stop the job, as this process was sent SIGTERM."""
        self._stop("the supervisor of the job was terminated", ORPHAN_GRACE)

    # --- requests -------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        for verb, details in self._folder.asked().items():
            if verb == "suspend":
                policy = self._job
                for key in DEFAULT.policy_at:
                    policy = policy.setdefault(key, {})
                policy["suspend"] = bool(details["value"])
            elif verb == "stop":
                self._stop(str(details.get("message", "")), 0.0 if details.get("now") else None)
            elif verb == "delete":
                Object(self._job).metadata.setdefault("deletionTimestamp", stamp(datetime.now(UTC)))
        if self._deleted:
            for pod in self._kubelet.pods:
                self._kubelet.delete(Object(pod).name)
        if self._lifeline is not None and select.select([self._lifeline], [], [], 0)[0]:
            self._lifeline = None  # nothing is ever written into it: readable means closed
            self._stop("the process that ran the job is gone", ORPHAN_GRACE)

    def _stop(self, message: str, grace: float | None) -> None:
        self._stopping = self._stopping or message or "on request"
        self._kubelet.halt(grace)

    @property
    def _deleted(self) -> bool:
        return Object(self._job).deleting

    # --- the operator ---------------------------------------------------------------------------

    def _operate(self) -> None:
        if self._deleted or (self._stopping and self._kubelet.busy):
            return
        ended = has_ended(self._job)
        if ended:
            self._ended_at = self._ended_at or time.monotonic()
            late = time.monotonic() - self._ended_at > CLEAN_UP_DELAY
            if self._kubelet.busy and not (late or Object(self._job).condition("Failed").true):
                return
        now = datetime.now(UTC)
        reconcile = partial(LOCAL_CONTROLLER.reconcile, self._job, self._kubelet.pods, now)
        status, actions = reconcile()
        trouble = self._permanent_failure() or self._restarts_exhausted()
        if trouble and not has_ended({**self._job, "status": status}):
            status, actions = reconcile(trouble=trouble)
        if self._stopping and not (ended or is_true(status, "Succeeded")):
            message = f"{DEFAULT.kind} {Object(self._job).name} was stopped: {self._stopping}."
            status = LOCAL_CONTROLLER.fail(
                Object(self._job).status, LocalReason.STOPPED, message, now
            )
        self._job["status"], failed = status, is_true(status, "Failed")
        for action in () if self._stopping else actions:
            if isinstance(action, CreatePod):
                where = action.role, action.index, now, socket.gethostname()
                self._kubelet.create(LOCAL_CONTROLLER.new_pod(self._job, *where))
            elif isinstance(action, DeletePod):
                # The operator deletes it, and its end with it; that of a failed job is shown here.
                end = self._kubelet.halt_pod if failed else self._kubelet.delete
                end(action.name)
            elif isinstance(action, RecordEvent):
                self._record(self._job, action)

    def _permanent_failure(self) -> str:
        """Why another start would end the same way, by the agent's message; here a user waits."""
        for pod in self._kubelet.pods:
            end = Pod(pod).terminated or Pod(pod).terminated_before
            reason = Reason.decode(end.get("message", ""))
            if reason and {int(end.get("exitCode", 0)), reason.exit_code} & _PERMANENT:
                return (
                    f"Job {Object(self._job).name} has failed because"
                    f" {replica_of(pod)} ended with exit code {reason.exit_code}"
                )
        return ""

    def _restarts_exhausted(self) -> str:
        """Why no restart is left; the operator's backoffLimit adds up those of all replicas."""
        for replica, failures in self._kubelet.failures.items():
            if failures > self._max_restarts:
                return (
                    f"Job {Object(self._job).name} has failed because {replica} failed"
                    f" {counted(failures, 'time')} and max_restarts is"
                    f" {self._max_restarts}"
                )
        return ""

    def _over(self) -> bool:
        if self._kubelet.busy:
            return False
        if self._deleted:
            return not self._kubelet.pods
        dying = any(Object(pod).deleting for pod in self._kubelet.pods)
        # Nobody else knows how the job has ended before it is written.
        unwritten = self._write_at > 0 and not self._stopping
        return has_ended(self._job) and self._ended_at is not None and not (dying or unwritten)

    # --- the state ------------------------------------------------------------------------------

    def _record(self, about: Json, record: RecordEvent) -> None:
        if record.key and record.key in self._recorded:
            return
        self._recorded.add(record.key)
        event = new_event(about, record.type, record.reason, record.message, datetime.now(UTC))
        self._events = [*self._events[-MAX_EVENTS:], event]

    def _save(self) -> None:
        state = {"job": self._job, "pods": self._kubelet.pods, "events": self._events}
        text = repr(state)
        if text != self._saved and time.monotonic() >= self._write_at:
            self._write(state, text)
        if time.monotonic() >= self._sign_at:
            self._sign_at = time.monotonic() + SIGN_S
            self._folder.show_alive()

    def _write(self, state: Json, text: str) -> None:
        """Write the state; a disk that is full or broken for now does not end the job."""
        try:
            write_json(self._folder.state, state)
            self._saved, self._write_at = text, 0.0
        except BackendError as error:
            if self._folder.is_gone:
                raise  # nobody asks for it any more
            self._write_at = time.monotonic() + WRITE_AGAIN_S
            self._record(self._job, RecordEvent("Warning", "StateNotWritten", str(error), "state"))
            if has_ended(self._job):
                self._folder.make_room()

    def _give_up(self, error: BaseException) -> None:
        """After an error of the supervisor: kill the replicas, and write the error to the state."""
        self._kubelet.halt(0.0)
        deadline = time.monotonic() + 2.0
        with suppress(Exception):
            while self._kubelet.busy and time.monotonic() < deadline:
                self._kubelet.sync()
                time.sleep(TICK_SECONDS)
        with suppress(Exception):
            self._folder.make_room()
            self._write_at = 0.0
            message = f"the supervisor of the job failed: {str(error) or type(error).__name__}"
            self._job["status"] = LOCAL_CONTROLLER.fail(
                Object(self._job).status, LocalReason.SUPERVISOR_FAILED, message, datetime.now(UTC)
            )
            self._save()
            self._folder.trim()

    # --- the environment of a container ---------------------------------------------------------

    def _environ(self, launch: Launch) -> dict[str, str]:
        """This process's environment without variables of another job, and the replica's own."""
        inherited = {
            name: value
            for name, value in variables().items()
            if not name.startswith(_NOT_INHERITED) and name not in _RANK_NAMES
        }
        here = str(Path(sys.executable).parent)  # `python` means the one that runs k8sjob
        inherited["PATH"] = os.pathsep.join(filter(None, (here, inherited.get("PATH", ""))))
        port = self._port.getsockname()[1]
        values = {"MASTER_PORT": str(port), "PET_MASTER_PORT": str(port)}
        values["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{port}"
        ports = {name: value for name, value in values.items() if name in launch.env}
        return {**inherited, **launch.env, **ports, SECRET_ENV: self._secret}


def _reserve_port() -> socket.socket:
    """A socket that keeps others off its port; rank 0 binds it, too, as both set SO_REUSEADDR."""
    port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    return port


def main(arguments: list[str]) -> None:
    """Run the job whose folder is the first argument."""
    lifeline = int(arguments[1]) if len(arguments) > 1 else None
    supervisor = Supervisor(JobFolder(Path(arguments[0])), lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: supervisor.terminated())
    supervisor.run()


if __name__ == "__main__":
    main(sys.argv[1:])
