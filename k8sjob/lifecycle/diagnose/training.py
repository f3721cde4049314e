"""Training that does not do what it seems to do, though nothing has failed."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from k8sjob.backends.events import moment
from k8sjob.contract import Event, EventKind, Reason
from k8sjob.lifecycle.diagnose.finding import SAME_STEPS, Cause, Finding, passed, who
from k8sjob.lifecycle.status import speaker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.lifecycle.diagnose.case import Case

__all__ = ["left_early", "nan_loss", "no_group"]

_SETTLED: Final = timedelta(seconds=30)
"""Ranks of one training end within this time."""


def left_early(case: Case) -> Iterator[Finding]:
    """Replicas that have ended with exit code 0 while others go on: these may wait for ever."""
    running = [pod for pod in case.pods if pod.runs]
    if case.status.state.finished or not running or _speaker(case) != next(iter(case.ranks), ""):
        return  # workers of a parameter server end each at its time
    left = {
        pod.replica: ended
        for pod in case.done
        if (ended := moment(pod.trainer.ended.get("finishedAt")) if pod.trainer else None)
        and case.now - ended > _SETTLED
        and not any("running" in container.state for container in pod.containers)  # a sidecar
    }
    if left:
        replicas = tuple(left)
        others = who(pod.replica for pod in running)
        yield Finding(
            Cause.LEFT_EARLY,
            f"{who(map(case.with_ranks, replicas))} ended with exit code 0"
            f"{passed(max(left.values()), case.now, again=False)}, and {others} still"
            f" {'run' if len(running) > 1 else 'runs'}: a collective would wait for ever",
            f"where {others} only evaluates or saves, wait; else see the last lines of all:"
            f" k8sjob logs {case.called}; {SAME_STEPS}",
            replicas[0],
            replicas,
        )


def no_group(case: Case) -> Iterator[Finding]:
    """Processes that each trained alone, as the agent of the Master says."""
    told = [
        reason
        for pod in case.pods
        if pod.trainer and (reason := Reason.decode(pod.trainer.ended.get("message") or ""))
    ]
    events = (Event.decode(line) for lines in case.logs.values() for line in lines)
    if any(reason.type == "Unmet" for reason in told) or any(
        event and event.kind == EventKind.UNMET for event in events
    ):
        yield Finding(
            Cause.NO_GROUP,
            "its processes made no process group: each of them trained alone, with a model of its"
            " own",
            "make a process group in the script before it trains: k8sjob's session(), or"
            " torch.distributed.init_process_group(); where none is needed, submit a job of one"
            " process each",
        )


def nan_loss(case: Case) -> Iterator[Finding]:
    """A loss that is no finite number in all that is known of it."""
    events = [Event.decode(line) for line in case.logs.get(_speaker(case), ())]
    progress = [event.data for event in events if event and event.kind == EventKind.PROGRESS]
    losses = [data["loss"] for data in progress if isinstance(data.get("loss"), int | float)]
    if losses and not any(map(math.isfinite, losses)):
        epoch, step = progress[0].get("epoch"), progress[0].get("step")
        since = "in all known steps"
        if isinstance(epoch, int) and isinstance(step, int):
            since = f"since epoch {epoch + 1}, step {step} or earlier"
        yield Finding(
            Cause.NAN_LOSS,
            f"the loss has been {losses[-1]} {since}: the model learns nothing",
            "lower the learning rate, clip the gradients, or look for the first such value in the"
            " data and the model: torch.autograd.set_detect_anomaly(True)",
        )


def _speaker(case: Case) -> str:
    return speaker(case.snapshot.job) if case.ranks else ""
