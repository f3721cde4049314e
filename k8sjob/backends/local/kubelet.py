"""The kubelet of a job's Pods on this machine: start, restart, stop, and the Pods' status."""

from __future__ import annotations

import os
import selectors
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from k8sjob.backends.local.container import LocalContainer
from k8sjob.backends.local.logfiles import attempts
from k8sjob.contract import CONTAINER_NAME
from k8sjob.kube.objects import Object, Pod, stamp, training
from k8sjob.targets.jobs import replica_of, replica_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8sjob.backends.local.container import ContainerEnd, Launch
    from k8sjob.backends.local.state_folder import JobFolder
    from k8sjob.kube.objects import Json

_FIRST_BACKOFF: Final = 1.0
_LONGEST_BACKOFF: Final = 10.0
"""Seconds; a cluster's kubelet begins with 10 and goes up to 300."""
_LONG_ENOUGH: Final = 60.0
"""Seconds after which a container is restarted without a back-off."""


@dataclass(slots=True)
class _Slot:
    """A Pod and its container."""

    pod: Json
    container: LocalContainer | None = None
    starts: int = 0
    backoff: float = 0.0
    start_at: float = 0.0
    end: ContainerEnd | None = None
    """How the last container ended, until something follows from it."""
    halted: bool = False

    @property
    def deleting(self) -> bool:
        return Object(self.pod).deleting


class Kubelet:
    """Runs the containers of a job's Pods and keeps the Pods' status.

    `environ` gives the environment of a container by its launch; `report` is called with what a
    kubelet records as Events: pod, type, reason, message.

    Attributes:
        failures: how often each replica has failed by itself, over all its Pods.
    """

    def __init__(
        self,
        folder: JobFolder,
        launches: Mapping[str, Launch],
        environ: Callable[[Launch], dict[str, str]],
        report: Callable[[Json, str, str, str], None],
    ) -> None:
        self._folder, self._launches = folder, launches
        self._environ, self._report = environ, report
        self._slots: dict[str, _Slot] = {}
        self._selector = selectors.DefaultSelector()
        # The containers hold the reading end; the writing end closes when this process ends.
        self._lifeline, self._hold = os.pipe()
        self._halted = False
        self.failures: Counter[str] = Counter()

    @property
    def pods(self) -> list[Json]:
        """The Pods, by replica type (Master first) and index."""
        pods = (slot.pod for slot in self._slots.values())
        return sorted(pods, key=lambda pod: replica_order(replica_of(pod)))

    @property
    def busy(self) -> bool:
        """Whether any container runs."""
        return any(slot.container for slot in self._slots.values())

    def create(self, pod: Json) -> None:
        """Take over a Pod; its container is started by the next sync."""
        self._slots[Object(pod).name] = _Slot(pod)

    def delete(self, name: str) -> None:
        """Stop a Pod's container with its grace period; the Pod is gone when it has ended."""
        slot = self._slots[name]
        if slot.deleting:
            return
        grace = self._launches[replica_of(slot.pod)].grace
        metadata = Object(slot.pod).metadata
        metadata["deletionTimestamp"] = stamp(datetime.now(UTC))
        metadata["deletionGracePeriodSeconds"] = int(grace)
        self._stop(slot, None)

    def halt(self, grace: float | None = None) -> None:
        """Stop every container and start none again; the Pods stay, with how they ended.

        Args:
            grace: seconds until SIGKILL, where the Pods' own grace period is longer.
        """
        self._halted = True
        for name in self._slots:
            self.halt_pod(name, grace)

    def halt_pod(self, name: str, grace: float | None = None) -> None:
        """Stop a Pod's container for good; the Pod stays, with how it ended."""
        slot = self._slots[name]
        if not (slot.halted and grace is None):
            self._stop(slot, grace)
        slot.halted = True
        if slot.container is None and slot.starts and Pod(slot.pod).live and slot.end:
            container_ended(slot.pod, slot.starts - 1, slot.end, final=True)

    def sync(self) -> None:
        """Check every container once: which have ended, which are to be started."""
        for name, slot in list(self._slots.items()):
            if slot.container:
                end = slot.container.poll()
                if end:
                    # Its output is closed: the next container may be given the same number.
                    if slot.container.output in self._selector.get_map():
                        self._selector.unregister(slot.container.output)
                    self._ended(slot, end)
            elif slot.deleting:
                del self._slots[name]
            elif Pod(slot.pod).live and not (self._halted or slot.halted):
                self._start(slot)

    def wait(self, seconds: float) -> None:
        """Write down output as it comes, for so long; returns when a container closes its own."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                container: LocalContainer = key.data
                if not container.read():
                    self._selector.unregister(key.fileobj)
                    end = 0.0

    def _start(self, slot: _Slot) -> None:
        if time.monotonic() < slot.start_at:
            if slot.end and Pod(slot.pod).terminated:
                self._back_off(slot)
            return
        replica = replica_of(slot.pod)
        launch, folder = self._launches[replica], self._folder.replica(replica)
        number = max(attempts(folder / "logs"), default=-1) + 1
        environ = self._environ(launch)
        slot.container = LocalContainer(launch, folder, number, environ, self._lifeline)
        slot.starts += 1
        slot.end = None
        running = {"running": {"startedAt": stamp(slot.container.started)}}
        _set_status(slot.pod, "Running", running, slot.starts - 1, ready=True)
        self._report(slot.pod, "Normal", "Started", "Started container pytorch")
        if not slot.container.end:
            self._selector.register(slot.container.output, selectors.EVENT_READ, slot.container)

    def _ended(self, slot: _Slot, end: ContainerEnd) -> None:
        if slot.container and (missing := slot.container.missing_output):
            self._report(slot.pod, "Warning", "OutputMissing", missing)
        slot.container, slot.end = None, end
        policy = Object(slot.pod).spec["restartPolicy"]
        again = policy == "Always" or (policy == "OnFailure" and end.exit_code != 0)
        stopping = slot.deleting or self._halted or slot.halted
        if end.exit_code and not stopping:
            self.failures[replica_of(slot.pod)] += 1
        container_ended(slot.pod, slot.starts - 1, end, final=stopping or not again)
        if (end.finished - end.started).total_seconds() >= _LONG_ENOUGH:
            slot.backoff = 0.0
        slot.start_at = time.monotonic() + slot.backoff
        slot.backoff = min(max(2 * slot.backoff, _FIRST_BACKOFF), _LONGEST_BACKOFF)

    def _back_off(self, slot: _Slot) -> None:
        seconds = max(slot.start_at - time.monotonic(), 0.0)
        message = f"back-off {seconds:.0f}s restarting failed container=pytorch"
        waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}
        _set_status(slot.pod, "Running", waiting, slot.starts - 1)
        text = f"Back-off restarting failed container pytorch in pod {Object(slot.pod).name}"
        self._report(slot.pod, "Warning", "BackOff", text)

    def _stop(self, slot: _Slot, grace: float | None) -> None:
        if slot.container and not slot.container.end:
            slot.container.stop(grace)
            self._report(slot.pod, "Normal", "Killing", "Stopping container pytorch")


# --- pods as an apiserver would hold them ---------------------------------------------------------


def container_ended(pod: Json, restarts: int, end: ContainerEnd, *, final: bool) -> None:
    """Write into a Pod's status that its container has ended; if that is final, so has the Pod."""
    phase = "Running" if not final else "Succeeded" if end.exit_code == 0 else "Failed"
    _set_status(pod, phase, {"terminated": end.to_json()}, restarts)


def _set_status(pod: Json, phase: str, state: Json, restarts: int, *, ready: bool = False) -> None:
    old = Pod(pod)
    status = old.status
    # A state that was already the end of the container becomes the last one.
    past = "terminated" not in state and old.terminated
    last = {"terminated": past} if past else old.container.part("lastState")
    status["phase"] = phase
    status["containerStatuses"] = [
        {
            "name": CONTAINER_NAME,
            "image": training(old.spec["containers"]).get("image", ""),
            "ready": ready,
            "started": ready,
            "restartCount": restarts,
            "state": state,
            "lastState": last,
        }
    ]
    text = "True" if ready else "False"
    if old.condition("Ready").status != text:
        now = stamp(datetime.now(UTC))
        status["conditions"] = [{"type": "Ready", "status": text, "lastTransitionTime": now}]
