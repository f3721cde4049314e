"""Jobs as metrics, for Prometheus: docs/how-to/metrics.md has a table of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from k8sjob.backends.api import LOCAL
from k8sjob.errors import BackendError
from k8sjob.observe.status import job_status
from k8sjob.observe.usage import usage
from k8sjob.view.json_output import progress_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.core import Metric

    from k8sjob.backends.api import Backend, JobRef, Snapshot
    from k8sjob.observe.status import JobStatus
    from k8sjob.view.json_output import JobProgress

_JOB: Final = ("namespace", "name", "run")
_ROWS: Final = [
    row.split("\t")
    for row in Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
]
"""The metrics of a job: the end of the name, the attribute of Progress (or none), the help."""


class JobCollector:
    """Reads the jobs whenever Prometheus asks.

    Args:
        jobs: returns the jobs, each with its back end, and whether a place could not be read.
    """

    def __init__(self, jobs: Callable[[], tuple[Sequence[tuple[Backend, Snapshot]], bool]]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """The metrics of all existing jobs; metrics of training for the running ones."""
        up = GaugeMetricFamily("k8sjob_up", "Whether the jobs could be read.")
        try:
            jobs, failed = self._jobs()
        except BackendError:
            jobs, failed = [], True
        up.add_metric([], not failed)
        yield up
        states = GaugeMetricFamily(
            "k8sjob_job_state", "1 for the state that the job has.", labels=(*_JOB, "state")
        )
        about = InfoMetricFamily("k8sjob_job", "What the job is.", labels=_JOB)
        replicas = GaugeMetricFamily(
            "k8sjob_job_replicas", "Replicas by situation.", labels=(*_JOB, "situation")
        )
        devices = CounterMetricFamily(
            "k8sjob_job_device_seconds",
            "Seconds that its replicas have held their GPUs, or CPUs; while it runs.",
            labels=(*_JOB, "device"),
        )
        gauges = {
            name: GaugeMetricFamily(f"k8sjob_job_{name}", text, labels=_JOB)
            for name, _, text in _ROWS
        }
        progress = progress_of(jobs)
        for _, snapshot in jobs:
            status = job_status(snapshot)
            of = _labels(status.ref)
            states.add_metric([*of, str(status.state)], 1)
            about.add_metric(of, {"uid": status.ref.uid, "kind": status.ref.kind})
            for situation, count in status.counts.items():
                replicas.add_metric([*of, situation], count)
            if not status.state.finished:
                used = usage(snapshot, ())
                devices.add_metric([*of, used.device], used.held)
            for name, value in _numbers(status, progress.get(status.ref)).items():
                if value is not None and math.isfinite(value):
                    gauges[name].add_metric(of, value)
        yield from (states, about, replicas, devices, *gauges.values())


def _labels(ref: JobRef) -> list[str]:
    """The labels of a job; with its run on this machine, which may have several of one name."""
    return [ref.namespace, ref.name, ref.uid[:8] if ref.namespace == LOCAL else ""]


def _numbers(status: JobStatus, progress: JobProgress | None) -> dict[str, Any]:
    times = {name: getattr(status, name) for name in ("created", "started", "finished")}
    numbers: dict[str, Any] = {
        f"{name}_timestamp_seconds": at and at.timestamp() for name, at in times.items()
    }
    numbers["restarts"] = sum(replica.restarts for replica in status.replicas)
    if progress and progress.training.progress.epoch:
        now = progress.training.progress
        numbers |= {name: getattr(now, attribute) for name, attribute, _ in _ROWS if attribute}
        numbers["epochs"] = now.epochs or None
    return numbers
