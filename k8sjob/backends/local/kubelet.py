"""What a kubelet does with the Pods of a job, all on this machine: start, restart, stop, report."""

from __future__ import annotations

import os
import selectors
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from k8sjob.backends.local import pods
from k8sjob.backends.local.conditions import stamp
from k8sjob.backends.local.container import Container
from k8sjob.backends.local.logfiles import attempts
from k8sjob.labels import replica_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8sjob.backends.api import Json
    from k8sjob.backends.local.container import Launch
    from k8sjob.backends.local.pods import End
    from k8sjob.backends.local.store import JobFolder

__all__ = ["Kubelet"]

_FIRST_BACKOFF: Final = 1.0
_LONGEST_BACKOFF: Final = 10.0
"""Seconds; a cluster's kubelet begins with 10 and goes up to 300."""
_LONG_ENOUGH: Final = 60.0
"""A container that ran so many seconds starts again without a back-off."""


@dataclass(slots=True)
class _Slot:
    """A Pod and its container."""

    pod: Json
    container: Container | None = None
    starts: int = 0
    backoff: float = 0.0
    start_at: float = 0.0
    end: End | None = None
    """How the last container ended, until something follows from it."""


class Kubelet:
    """Runs the containers of a job's Pods and keeps the Pods' status.

    Args:
        folder: of the job.
        launches: how each replica is started, by its name.
        environ: what a container's environment is, given how it is started.
        report: told of what a kubelet records as Events: pod, type, reason, message.
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
        # The containers hold the reading end; the writing end closes when this process goes.
        self._lifeline, self._hold = os.pipe()
        self._halted = False
        self.failures: Counter[str] = Counter()
        """How often each replica has ended badly by itself, over all its Pods."""

    @property
    def pods(self) -> list[Json]:
        """The Pods, by replica type (Master first) and index."""
        return [
            slot.pod
            for slot in sorted(self._slots.values(), key=lambda s: _order(replica_of(s.pod)))
        ]

    @property
    def busy(self) -> bool:
        """Whether any container runs."""
        return any(slot.container for slot in self._slots.values())

    def create(self, pod: Json) -> None:
        """Take over a Pod; its container is started by the next sync."""
        self._slots[pod["metadata"]["name"]] = _Slot(pod)

    def delete(self, name: str) -> None:
        """Stop a Pod's container with its grace; the Pod is gone when it has ended."""
        slot = self._slots[name]
        meta = slot.pod["metadata"]
        if meta.get("deletionTimestamp"):
            return
        grace = self._launches[replica_of(slot.pod)].grace
        meta["deletionTimestamp"] = stamp(datetime.now(UTC))
        meta["deletionGracePeriodSeconds"] = int(grace)
        self._stop(slot, None)

    def halt(self, grace: float | None = None) -> None:
        """Stop every container and start none again; the Pods stay, with how they ended.

        Args:
            grace: seconds until SIGKILL, where the Pods' own grace is longer.
        """
        self._halted = True
        for slot in self._slots.values():
            self._stop(slot, grace)
            if slot.container is None and slot.starts and pods.is_live(slot.pod) and slot.end:
                pods.ended(slot.pod, slot.starts - 1, slot.end, final=True)

    def sync(self) -> None:
        """One look at every container: what ended, what is to be started."""
        for name, slot in list(self._slots.items()):
            if slot.container:
                end = slot.container.poll()
                if end:
                    # Its output is closed: the next container may be given the same number.
                    if slot.container.output in self._selector.get_map():
                        self._selector.unregister(slot.container.output)
                    self._ended(slot, end)
            elif slot.pod["metadata"].get("deletionTimestamp"):
                del self._slots[name]
            elif pods.is_live(slot.pod) and not self._halted:
                self._start(slot)

    def wait(self, seconds: float) -> None:
        """Write down output as it comes, for so long at most."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return
        for key, _ in self._selector.select(seconds):
            container: Container = key.data
            if not container.read():
                self._selector.unregister(key.fileobj)

    def _start(self, slot: _Slot) -> None:
        if time.monotonic() < slot.start_at:
            if slot.end and "terminated" in slot.pod["status"]["containerStatuses"][0]["state"]:
                self._back_off(slot)
            return
        replica = replica_of(slot.pod)
        launch, folder = self._launches[replica], self._folder.replica(replica)
        earlier = attempts(folder / "logs")
        number = earlier[-1] + 1 if earlier else 0
        environ = self._environ(launch)
        slot.container = Container(launch, folder, number, environ, self._lifeline)
        slot.starts += 1
        slot.end = None
        pods.running(slot.pod, slot.starts - 1, slot.container.started)
        self._report(slot.pod, "Normal", "Started", "Started container pytorch")
        if not slot.container.end:
            self._selector.register(slot.container.output, selectors.EVENT_READ, slot.container)

    def _ended(self, slot: _Slot, end: End) -> None:
        slot.container, slot.end = None, end
        dying = bool(slot.pod["metadata"].get("deletionTimestamp"))
        policy = slot.pod["spec"]["restartPolicy"]
        again = policy == "Always" or (policy == "OnFailure" and end.exit_code != 0)
        final = dying or self._halted or not again
        if end.exit_code and not dying and not self._halted:
            self.failures[replica_of(slot.pod)] += 1
        pods.ended(slot.pod, slot.starts - 1, end, final=final)
        ran = (end.finished - end.started).total_seconds()
        if ran >= _LONG_ENOUGH:
            slot.backoff = 0.0
        slot.start_at = time.monotonic() + slot.backoff
        slot.backoff = min(max(2 * slot.backoff, _FIRST_BACKOFF), _LONGEST_BACKOFF)

    def _back_off(self, slot: _Slot) -> None:
        seconds = max(slot.start_at - time.monotonic(), 0.0)
        message = f"back-off {seconds:.0f}s restarting failed container=pytorch"
        pods.waiting(slot.pod, slot.starts - 1, "CrashLoopBackOff", message)
        name = slot.pod["metadata"]["name"]
        text = f"Back-off restarting failed container pytorch in pod {name}"
        self._report(slot.pod, "Warning", "BackOff", text)

    def _stop(self, slot: _Slot, grace: float | None) -> None:
        if slot.container and not slot.container.end:
            slot.container.stop(grace)
            self._report(slot.pod, "Normal", "Killing", "Stopping container pytorch")


def _order(replica: str) -> tuple[bool, int]:
    role, _, index = replica.rpartition("-")
    return role != "master", int(index)
