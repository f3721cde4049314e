"""`k8sjob usage`: where the GPU hours of jobs went."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from k8sjob.backends.api import JobRef
from k8sjob.cli.find_job import Place, find_all, job_argument, place_options
from k8sjob.cli.list import all_jobs
from k8sjob.cli.options import ago, format_option, selector_option
from k8sjob.cli.output import document, fail, first_names, line, print_status, table
from k8sjob.contract import counted
from k8sjob.errors import JobNotFound, JobTooLarge
from k8sjob.observe.logs import in_parallel
from k8sjob.observe.usage import Usage, Use, held_seconds, read_usage, shown_hours, slow_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from k8sjob.backends.api import Backend

_GROUPING: Final = re.compile(r"job|namespace|node|label:(?P<label>[A-Za-z0-9][\w./-]*)")
_MOST_NAMED: Final = 5
_Groups = dict[tuple[str, str], dict[Use, float]]


@click.command("usage")
@job_argument("jobs", many=True, required=False)
@selector_option
@click.option("--by", default="job", metavar="WHAT", help="job, namespace, node or label:KEY.")
@click.option("--since", metavar="AGE", callback=ago, help="Only the time since then: 12h or 7d.")
@click.option(
    "--price",
    type=click.FloatRange(min=0),
    envvar="K8SJOB_PRICE",
    help="Price of a GPU hour, or of a CPU hour; shows the costs. Default: $K8SJOB_PRICE.",
)
@format_option("table", "json", "yaml")
@place_options(everywhere=True)
def usage_command(  # noqa: PLR0917 - click hands them over by name
    jobs: tuple[str, ...],
    labels: str,
    by: str,
    since: datetime | None,
    price: float | None,
    output: str,
    place: Place,
) -> int:
    """Show where the GPU hours of jobs went; CPU hours of jobs without GPUs.

    Without NAME, all jobs on this machine and of the cluster are counted; NAME may be the record of
    a job that is gone. Each hour has one use: queued, starting, training, waiting for the slowest
    rank, repeated after a failure, stalled, idle at the end; running, where the script reports no
    steps; or unknown, before a suspension that left no trace.
    """
    group = _GROUPING.fullmatch(by)
    if group is None:
        raise click.UsageError(f"--by {by!r}: give job, namespace, node or label:KEY")
    if jobs and labels:
        raise click.UsageError("give names of jobs, or select jobs with -l SELECTOR")
    failed = False
    if jobs:
        chosen = find_all(jobs, place, recorded=True, any_kind=True)
    else:
        listed, failed, _ = all_jobs(labels, place)
        chosen = [(backend, JobRef.of(snapshot.job)) for backend, snapshot in listed]

    def read(job: tuple[Backend, JobRef]) -> Usage | None:
        backend, ref = job
        try:
            # Read again, since the jobs of a list lack the Pods that have ended.
            return read_usage(backend, backend.snapshot(ref), since=since)
        except (JobNotFound, JobTooLarge) as error:
            if jobs:
                raise
            if isinstance(error, JobTooLarge):
                fail(str(error))
            return None  # or it was deleted since it was listed

    usages = [usage for usage in in_parallel(read, chosen) if usage and usage.total]
    if output != "table":
        document([_document(usage, price) for usage in usages], output)
    elif not usages:
        print_status("no job has used anything in that time")
    else:
        _show(_grouped(usages, by, group["label"]), price)
        _advise(usages)
    return int(failed)


def _document(usage: Usage, price: float | None) -> dict[str, Any]:
    cost = None if price is None else round(usage.held / 3600 * price, 2)
    return {**usage.as_dict(), "cost": cost}


def _grouped(usages: Iterable[Usage], by: str, label: str | None = None) -> _Groups:
    """Device seconds by use, of each group and kind of device."""
    groups: dict[tuple[str, str], list[Mapping[Use, float]]] = defaultdict(list)
    for usage in usages:
        if by == "node":
            for node, seconds in usage.nodes.items():
                groups[node or "(not known)", usage.device].append(seconds)
            continue
        names = {"job": str(usage.ref), "namespace": usage.ref.namespace}
        name = usage.labels.get(label, f"(no {label})") if label else names[by]
        groups[name, usage.device].append(usage.seconds)
    return {group: _sum(parts) for group, parts in groups.items()}


def _sum(many: Iterable[Mapping[Use, float]]) -> dict[Use, float]:
    total: dict[Use, float] = defaultdict(float)
    for seconds in many:
        for use, value in seconds.items():
            total[use] += value
    return total


def _show(groups: _Groups, price: float | None) -> None:
    """A row a group, and their sum: hours, and the part of each use."""
    uses = [use for use in Use if any(seconds.get(use) for seconds in groups.values())]
    rows = [(name, device, seconds) for (name, device), seconds in groups.items()]
    rows.sort(key=lambda row: sum(row[2].values()), reverse=True)
    devices = dict.fromkeys(device for _, device, _ in rows)
    # With one row for each device a sum would repeat it.
    for device in devices if len(rows) > len(devices) else ():
        every = _sum(seconds for _, row_device, seconds in rows if row_device == device)
        rows.append(("all", device, every))
    header = ["NAME", "HOURS", *(use.upper() for use in uses), *["COST"] * (price is not None)]
    table(header, [_row(name, device, seconds, uses, price) for name, device, seconds in rows])


def _row(
    name: str, device: str, seconds: dict[Use, float], uses: Iterable[Use], price: float | None
) -> list[object]:
    whole = sum(seconds.values())
    parts = [f"{seconds[use] / whole:.1%}" if seconds.get(use) else "" for use in uses]
    cost = [] if price is None else [f"{held_seconds(seconds) / 3600 * price:.2f}"]
    return [name, f"{shown_hours(whole)} {device}", *parts, *cost]


def _advise(usages: Sequence[Usage]) -> None:
    """The largest part of all that could be less, and nodes that were slow again and again."""
    for device in dict.fromkeys(usage.device for usage in usages):
        alike = [usage for usage in usages if usage.device == device]
        largest = replace(alike[0], seconds=_sum(usage.seconds for usage in alike))
        if use := largest.avoidable:
            by_job = _grouped(alike, "job")
            by_name = {name: uses.get(use, 0.0) for (name, _), uses in by_job.items()}
            most = max(by_name, key=by_name.__getitem__)
            click.echo()
            line(largest.note + (f"; the most for: {most}" if len(by_name) > 1 else ""))
    for node, jobs in slow_nodes(usages).items():
        lost = shown_hours(sum(usage.slowed[node] for usage in jobs))
        named = first_names([str(usage.ref) for usage in jobs], _MOST_NAMED)
        click.echo()
        line(
            f"node {node} was the slowest of {counted(len(jobs), 'job')}: the others waited {lost}"
            f" {jobs[0].device} hours for it ({named}); have it checked"
        )
    for node in dict.fromkeys(node for usage in usages for node in usage.refused):
        refusals = {
            str(usage.ref): usage.refused[node] for usage in usages if node in usage.refused
        }
        named, why = first_names(list(refusals), _MOST_NAMED), next(iter(refusals.values()))
        click.echo()
        line(f"the preflight of {named} refused node {node}: {why}; have it checked")
