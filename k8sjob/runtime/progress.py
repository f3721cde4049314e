"""The progress of a run over all ranks: loss, pace and cost of the training.

No GPU waits for the host every step: losses add up on the device, and about once a second they are
reduced over the ranks, which is when the host waits for them. All ranks must do so at the same
step, and their clocks differ: so the next such step is computed from the reduced time, which is the
same number everywhere.
"""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from k8sjob.contract import EventKind
from k8sjob.runtime.base.hangs import SYNC

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from k8sjob.runtime.base.event_lines import Reporter
    from k8sjob.runtime.comm.process_group import Group


class Waiting:
    """The time for which a rank waited for the others, from the watchdog's phases.

    Where forward or backward communicate, a "sync" phase includes computation, which is the rank's
    own time: see Computing.
    """

    def __init__(self, computed: Callable[[], float] = lambda: 0.0) -> None:
        """Start at zero; `computed` is a clock that advances while this thread computes."""
        self._computed = computed
        self.seconds = 0.0
        self._since: tuple[float, float] | None = None

    def phase(self, phase: str) -> None:
        """A phase begins, "sync" or another."""
        if phase == SYNC:
            self._since = self._since or (time.monotonic(), self._computed())
        elif self._since is not None:
            (began, computed), self._since = self._since, None
            self.seconds += max(0.0, time.monotonic() - began - (self._computed() - computed))

    def reset(self) -> None:
        """Start at zero again."""
        self.seconds = 0.0


class Computing:
    """A clock that advances while its thread runs on a core, or waits for one.

    Other processes or the container's CPU limit may make it wait for a core: the other ranks then
    wait for this one as if it had more to compute. Only Linux measures that (the second number of
    schedstat in proc). GPU time is not included.
    """

    def __init__(self) -> None:
        self._schedstat: int | None = None
        with suppress(OSError):
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._schedstat)

    def __call__(self) -> float:
        """Seconds since an arbitrary moment."""
        waited = 0
        if self._schedstat is not None:
            with suppress(OSError):  # the thread has ended
                waited = int(os.pread(self._schedstat, 80, 0).split()[1])
        return time.thread_time() + waited / 1e9


def lost_time(seconds: Sequence[float]) -> tuple[float, int]:
    """(mean seconds that ranks waited for the slowest, the slowest rank).

    Every step ends for all ranks at once, so each waits for the one that needs most `seconds`.
    """
    slowest = max(range(len(seconds)), key=lambda rank: seconds[rank])
    return seconds[slowest] - sum(seconds) / len(seconds), slowest


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of torch on its GPU, else in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # only on Unix

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts it in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


_EVERY_S = 1.0
_GROWTH = 8
"""The distance between two reports grows by this factor at most: the first steps are slow."""


class ProgressReporter:
    """Counts the steps and losses of a run, and reports them.

    Attributes:
        loss: mean loss over the samples of the epoch so far, over all ranks; nan before the first.
    """

    def __init__(self, group: Group, reporter: Reporter, waiting: Waiting) -> None:
        self._group, self._reporter, self._waiting = group, reporter, waiting
        self._pending = torch.zeros((), dtype=torch.float64, device=group.device)
        self._pending_weight, self._pending_count = 0.0, 0
        self._distance = 1
        self._warm = False  # the first step also loads kernels, or compiles: no pace to go by
        self._between_epochs, self._steps = 0.0, 0
        self.begin(0, 1, 0, 0)

    def begin(
        self, epoch: int, epochs: int, steps: int, step: int, *, loss: float = 0.0, count: float = 0
    ) -> None:
        """Begin an epoch, counted from 0, or continue one.

        `step` of its `steps` optimizer steps (0: not known) are done, with samples of the weight
        `count` over all ranks, whose losses sum up to `loss`.
        """
        # What a script does after an epoch, as an evaluation, it will do after each that is left.
        if self._steps and step == 0:
            self._between_epochs = time.monotonic() - self._since
        self._epoch, self._epochs, self._steps, self._step = epoch, epochs, steps, step
        self._total, self._count = loss, count
        self._next = step + self._distance
        self._mark(time.monotonic())

    @property
    def loss(self) -> float:
        """See the class."""
        return self._total / self._count if self._count else math.nan

    @property
    def sums(self) -> tuple[float, float]:
        """(sum of losses, of weights) of the epoch so far, over all ranks; what begin() takes."""
        return self._total, self._count

    def add(self, loss: Tensor, count: int, weight: float | None = None) -> None:
        """Add a batch of `count` samples: its mean loss over these, or over `weight` tokens."""
        weight = count if weight is None else weight
        self._pending_count += count
        if weight:
            self._pending.add_(loss, alpha=weight)
            self._pending_weight += weight

    @property
    def due(self) -> bool:
        """Whether the step that comes now is one to report; the same on all ranks."""
        return self._step + 1 in {self._next, self._steps}

    def step(self, grad_norm: Tensor | None = None) -> None:
        """An optimizer step is done, with this norm of its gradients; report if it is time to."""
        # `due` is about the step that comes, so it is asked before that is counted.
        due = self.due
        self._step += 1
        if due:
            self._report(grad_norm)

    def finish(self) -> int:
        """Report the end of an epoch whose length was not known; returns its steps."""
        if self._step != self._steps:
            self._steps = self._step
            self._report(None)
        return self._step

    def _mark(self, now: float) -> None:
        self._since, self._from_step = now, self._step
        self._waiting.reset()
        self._recent, self._recent_weight, self._recent_count = 0.0, 0.0, 0.0

    def settle(self) -> list[list[float]]:
        """Add up what is pending; all ranks call it at the same step.

        Returns:
            By rank: seconds since the mark, its own, bytes of memory.
        """
        loss = float(self._pending)  # waits for the GPU's steps
        elapsed = time.monotonic() - self._since
        own_seconds = elapsed - self._waiting.seconds
        numbers = [loss, self._pending_weight, self._pending_count, elapsed, own_seconds]
        rows = self._group.table([*numbers, peak_memory(self._group.device)])
        self._pending.zero_()
        self._pending_weight, self._pending_count = 0.0, 0
        loss, weight, count = (sum(row[at] for row in rows) for at in (0, 1, 2))
        self._total, self._count = self._total + loss, self._count + weight
        self._recent, self._recent_weight = self._recent + loss, self._recent_weight + weight
        self._recent_count += count
        return [row[3:] for row in rows]

    def _report(self, grad_norm: Tensor | None) -> None:
        elapsed, own_seconds, memory = zip(*self.settle(), strict=True)
        seconds = max(sum(elapsed) / len(elapsed), 1e-9)
        done = max(1, self._step - self._from_step)
        pace = done / seconds
        steps_left = self._steps - self._step + (self._epochs - self._epoch - 1) * self._steps
        loss = self._recent / self._recent_weight if self._recent_weight else math.nan
        more: dict[str, float] = {"memory_bytes": int(max(memory))}
        if self._warm and self._steps >= self._step:
            gaps = self._epochs - self._epoch - 1
            more["eta_s"] = steps_left / pace + gaps * self._between_epochs
        self._warm = True
        if len(own_seconds) > 1:
            lost, slowest = lost_time(own_seconds)
            more |= {"wait_s": lost / done, "slowest": slowest}
        if grad_norm is not None:
            more["grad_norm"] = float(grad_norm)
        if self._step == self._steps:
            more["epoch_loss"] = self.loss
        self._reporter.emit(
            EventKind.PROGRESS,
            epoch=self._epoch,
            epochs=self._epochs,
            step=self._step,
            steps=self._steps,
            loss=loss,
            samples_per_s=self._recent_count / seconds,
            step_s=seconds / done,
            **more,
        )
        distance = max(1, round(pace * _EVERY_S))
        self._distance = min(distance, self._distance * _GROWTH)
        self._next = self._step + self._distance
        self._mark(time.monotonic())
