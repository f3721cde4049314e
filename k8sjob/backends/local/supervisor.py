"""The supervisor process of a local job: it runs what the job's state machine says.

`python -m k8sjob.backends.local.supervisor JOBDIR [LIFELINE_FD]`, started by LocalBackend.create in
a new session, so that a Ctrl-C in the terminal does not reach it. It reads only JSON and imports
only the standard library. The lifeline is a pipe whose other end is held by the process that runs
the job: at its end of file the job is stopped. The rules are in k8sjob.targets.lifecycle; here
is what they need of a machine: processes, signals, requests, the clock, a disk.
"""

from __future__ import annotations

import os
import secrets
import select
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.backends.local.container import Launch, LocalContainer
from k8sjob.backends.local.logfiles import attempts
from k8sjob.backends.local.state_folder import SIGN_S, JobFolder, read_json, write_json
from k8sjob.contract import SECRET_ENV
from k8sjob.environment import variables
from k8sjob.errors import BackendError
from k8sjob.kube.objects import Object
from k8sjob.targets.api import JobState, LocalReason
from k8sjob.targets.lifecycle import Lifecycle

if TYPE_CHECKING:
    from k8sjob.targets.local_replica import Replica

TICK_SECONDS: Final = 0.05
CLEAN_UP_DELAY: Final = 5.0
"""Seconds for the other replicas to end by themselves after the Master has succeeded."""
ORPHAN_GRACE: Final = 3.0
"""Seconds between SIGTERM and SIGKILL when the process that runs the job is gone."""
WRITE_AGAIN_S: Final = 1.0
"""Seconds until a state that could not be written is tried again."""
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
        state, launch = read_json(folder.state), read_json(folder.launch)
        self._folder, self._lifeline = folder, lifeline
        self._job = Lifecycle(
            state["job"],
            state["events"],
            max_restarts=int(launch["max_restarts"]),
            node=socket.gethostname(),
        )
        self._launches = {name: Launch(**fields) for name, fields in launch["replicas"].items()}
        self._containers: dict[str, LocalContainer] = {}
        self._start_at: dict[str, float] = {}
        self._selector = selectors.DefaultSelector()
        # The containers hold the reading end; the writing end closes when this process ends.
        self._hold, self._hold_writer = os.pipe()
        self._grace: float | None = None
        self._clean_up_at: float | None = None
        self._saved, self._sign_at, self._write_at = "", 0.0, 0.0
        self._port = _reserve_port()
        self._secret = secrets.token_hex()

    def run(self) -> None:
        """Run until the job has ended and its replicas are gone, or the job is deleted."""
        try:
            while not self._is_over():
                # Requests first, then the ends of containers: a stop must not find a replica
                # started again.
                self._take_requests()
                self._run_containers()
                self._job.advance(datetime.now(UTC))
                self._clean_up()
                self._save()
                self._wait(TICK_SECONDS)
            if Object(self._job.job).deleting:
                self._folder.remove()
            else:
                self._folder.trim()
        except BaseException as error:
            self._give_up(error)
            raise

    def _take_requests(self) -> None:
        for verb, details in self._folder.asked().items():
            if verb == "suspend":
                self._job.policy["suspend"] = bool(details["value"])
            elif verb == "stop":
                self.stop(str(details.get("message", "")), 0.0 if details.get("now") else None)
            elif verb == "delete":
                self._job.delete(datetime.now(UTC))
        if self._lifeline is not None and select.select([self._lifeline], [], [], 0)[0]:
            self._lifeline = None  # nothing is ever written into it: readable means closed
            self.stop("the process that ran the job is gone", ORPHAN_GRACE)

    def stop(self, message: str, grace: float | None) -> None:
        """Stop the job: SIGKILL after `grace` seconds; None: after the grace of each replica."""
        self._job.stop(message)
        if grace is not None:
            self._grace = min(grace, grace if self._grace is None else self._grace)

    def _clean_up(self) -> None:
        """Clean up once after the end; of a job that has failed the state machine has done it."""
        if self._job.state is JobState.SUCCEEDED and not self._job.stop_message:
            now = time.monotonic()
            self._clean_up_at = self._clean_up_at or now + CLEAN_UP_DELAY
            if now >= self._clean_up_at or not self._job.is_busy:
                self._clean_up_at = float("inf")
                self._job.clean_up(datetime.now(UTC))

    def _is_over(self) -> bool:
        job = self._job
        # A job that is deleted stays until its last Pod is gone.
        if job.is_busy or Object(job.job).deleting:
            return not (job.is_busy or job.pods())
        # Nobody else knows how the job has ended before it is written.
        unwritten = self._write_at > 0 and not job.stop_message
        return job.state.finished and not unwritten

    # --- the containers -------------------------------------------------------------------------

    def _run_containers(self) -> None:
        """Stop, reap and start containers, as the states of their replicas say."""
        for replica in self._job.replicas:
            if container := self._containers.get(replica.name):
                if replica.stopped and container.stop(self._grace):
                    self._record("Normal", "Killing", "Stopping container pytorch", replica)
                if container.poll():
                    self._reap(replica, container)
            elif replica.is_due and time.monotonic() >= self._start_at.get(replica.name, 0.0):
                self._start(replica)

    def _start(self, replica: Replica) -> None:
        launch, folder = self._launches[replica.name], self._folder.replica(replica.name)
        # Over all Pods of the replica: an earlier Pod's output stays.
        number = max(attempts(folder / "logs"), default=-1) + 1
        container = LocalContainer(launch, folder, number, self._environ(launch), self._hold)
        self._containers[replica.name] = container
        replica.begin(container.started)
        self._record("Normal", "Started", "Started container pytorch", replica)
        if not container.end:
            self._selector.register(container.output, selectors.EVENT_READ, container)

    def _reap(self, replica: Replica, container: LocalContainer) -> None:
        del self._containers[replica.name]
        # Its output is closed: the next container may be given the same number.
        if container.output in self._selector.get_map():
            self._selector.unregister(container.output)
        if container.missing_output:
            self._record("Warning", "OutputMissing", container.missing_output, replica)
        self._job.ended(replica, container.end, datetime.now(UTC))
        self._start_at[replica.name] = time.monotonic() + replica.pause
        if replica.is_due and replica.pause:
            pod = self._job.pod_name(replica)
            message = f"Back-off restarting failed container pytorch in pod {pod}"
            self._record("Warning", "BackOff", message, replica)

    def _wait(self, seconds: float) -> None:
        """Write down output as it comes, for so long; returns when a container closes its own."""
        end = time.monotonic() + seconds
        while (remaining := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(remaining):
                container: LocalContainer = key.data
                if not container.read():
                    self._selector.unregister(key.fileobj)
                    # The container has probably ended: look at once.
                    end = 0.0

    # --- the state ------------------------------------------------------------------------------

    def _record(self, kind: str, reason: str, message: str, replica: Replica | None = None) -> None:
        self._job.record(kind, reason, message, datetime.now(UTC), replica)

    def _save(self) -> None:
        """Write what changed; a disk that is full or broken for now does not end the job."""
        if time.monotonic() >= self._sign_at:
            self._sign_at = time.monotonic() + SIGN_S
            self._folder.show_alive()
        state = {"job": self._job.job, "pods": self._job.pods(), "events": self._job.events}
        # Compared as text, since the state machine changes its objects in place.
        text = repr(state)
        if text == self._saved or time.monotonic() < self._write_at:
            return
        try:
            write_json(self._folder.state, state)
            self._saved, self._write_at = text, 0.0
        except BackendError as error:
            if self._folder.is_gone:
                raise  # nobody asks for it any more
            if not self._write_at:
                self._record("Warning", "StateNotWritten", str(error))
            self._write_at = time.monotonic() + WRITE_AGAIN_S
            if self._job.state.finished:
                self._folder.make_room()

    def _give_up(self, error: BaseException) -> None:
        """After an error of the supervisor: kill the replicas, and write the error to the state."""
        deadline = time.monotonic() + 2.0
        self.stop("", 0.0)
        with suppress(Exception):
            while self._job.is_busy and time.monotonic() < deadline:
                self._run_containers()  # whoever follows the job waits for the ends of its replicas
                time.sleep(TICK_SECONDS)
        with suppress(Exception):
            self._folder.make_room()
            self._write_at = 0.0
            message = f"the supervisor of the job failed: {str(error) or type(error).__name__}"
            self._job.fail(LocalReason.SUPERVISOR_FAILED, message, datetime.now(UTC))
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
        programs = str(Path(sys.executable).parent)  # `python` means the one that runs k8sjob
        inherited["PATH"] = os.pathsep.join(filter(None, (programs, inherited.get("PATH", ""))))
        port = self._port.getsockname()[1]
        values = {"MASTER_PORT": str(port), "PET_MASTER_PORT": str(port)}
        values["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{port}"
        # Only where the manifest has them: a job without a Master has no MASTER_PORT.
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
    # A Ctrl-C is answered by the process that runs the job.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    message = "the supervisor of the job was terminated"
    signal.signal(signal.SIGTERM, lambda *_: supervisor.stop(message, ORPHAN_GRACE))
    supervisor.run()


if __name__ == "__main__":
    main(sys.argv[1:])
