"""Which nodes a preflight refuses, from what the ranks have reported; pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k8sjob.contract import counted
from k8sjob.runtime.base.errors import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from k8sjob.runtime.preflight.node import Report

    Reports = Mapping[int, Report]
    """By rank, of those that have begun."""


@dataclass(slots=True)
class Verdict:
    """The outcome, the same on all ranks."""

    summary: str = ""  # what was measured, in a line; of a refusal why
    culprits: list[int] = field(default_factory=list)  # the ranks of the nodes that are refused
    refused: bool = False
    nodes: list[str] = field(default_factory=list)  # the culprits' nodes


def leaders(reports: Reports) -> list[int]:
    """The first rank of each node, in order."""
    return [rank for rank, report in sorted(reports.items()) if report.local_rank == 0]


def judge(
    world: int, reports: Reports, limits: Mapping[str, Any], seconds: float
) -> Verdict | None:
    """The verdict; None: too early, some have not reported yet.

    Args:
        world: number of ranks.
        reports: by rank, of those that have begun.
        limits: "timeout", "max_slowdown", and perhaps "min_bandwidth" in bytes per second.
        seconds: how long the ranks have been at it.
    """
    over = seconds >= limits["timeout"]
    absent = [rank for rank in range(world) if rank not in reports or not reports[rank].device]
    if absent and not over:
        return None
    faults = {rank: report.problems for rank, report in reports.items() if report.problems}
    faults |= {rank: [f"did not answer within {limits['timeout']:g} s"] for rank in absent}
    through = world == 1 or all(report.bus for report in reports.values())
    rates = {} if absent else _rates(reports)
    if not faults:
        faults = _slow_nodes(reports, rates, limits["max_slowdown"], with_links=through or over)
    if faults:
        return _refusal(faults, reports)
    if through:
        return _of_whole(reports, statistics.median(rates.values()), limits, seconds)
    return _unfinished(reports, limits) if over else None


def _rates(reports: Reports) -> dict[int, float]:
    """By the first rank of each node, the matrix products of its slowest rank."""
    rates: dict[int, float] = {}
    for rank, report in sorted(reports.items()):
        first = rank - report.local_rank
        rates[first] = min(rates.get(first, report.flops), report.flops)
    return rates


def _slow_nodes(
    reports: Reports, rates: Mapping[int, float], limit: float, *, with_links: bool
) -> dict[int, Sequence[str]]:
    # A node that only serves the others has no GPU to compare.
    gpus = {rank: rate for rank, rate in rates.items() if reports[rank].device == "cuda"}
    cpus = _by_machine({rank: rates[rank] for rank in rates.keys() - gpus.keys()}, reports)
    links = _by_machine({rank: reports[rank].link for rank in rates}, reports)
    comparisons = [
        (gpus, "matrix products", 1e9, "GFLOP/s"),
        (cpus, "matrix products", 1e9, "GFLOP/s"),
    ]
    if with_links and len(links) > 2:
        comparisons.append((links, "its better link", 2**20, "MiB/s"))
    faults: dict[int, list[str]] = {}
    for measured, label, unit, name in comparisons:
        # Of two nodes the faster one, since the mean of both would hide any slowness below it.
        usual = statistics.median_high(measured.values()) if measured else 0
        for rank, rate in measured.items():
            if rate * limit < usual:
                faults.setdefault(rank, []).append(
                    f"{label} at {rate / unit:,.1f} {name}, {usual / max(rate, 1e-9):.1f} times"
                    f" slower than the median of {len(measured)} nodes, {usual / unit:,.1f}"
                )
    return {**faults}


def _by_machine(rates: Mapping[int, float], reports: Reports) -> dict[int, float]:
    """The fastest rank of each node by name: Pods that share one take turns, and none is broken."""
    fastest: dict[str, int] = {}
    for rank in sorted(rates, key=rates.__getitem__):
        fastest[reports[rank].node] = rank
    return {rank: rates[rank] for rank in fastest.values()}


def _refusal(faults: Mapping[int, Sequence[str]], reports: Reports) -> Verdict:
    texts = []
    for rank, problems in sorted(faults.items()):
        node = f"node {reports[rank].node} (rank {rank})" if rank in reports else f"rank {rank}"
        texts.append(f"{node}: {', '.join(problems)}")
    # All ranks of a node go with it.
    first = {rank - reports[rank].local_rank for rank in faults.keys() & reports.keys()}
    culprits = {rank for rank, report in reports.items() if rank - report.local_rank in first}
    return _refused("; ".join(texts), culprits | faults.keys(), reports)


def _unfinished(reports: Reports, limits: Mapping[str, Any]) -> Verdict:
    """All have examined their devices, and some did not get through the measurement."""
    least = min(report.rounds for report in reports.values())
    behind = [rank for rank, report in reports.items() if report.rounds == least]
    # Where all wait in the same round, each may be the one that the others wait for.
    behind = behind if len(behind) < len(reports) else []
    names = ", ".join(sorted({f"node {reports[rank].node}" for rank in behind}))
    who = f"{names}: {ranks_in_words(behind)}" if behind else "the ranks"
    text = f"{who} did not get through the all-reduce within {limits['timeout']:g} s"
    return _refused(text, behind, reports)


def _of_whole(reports: Reports, rate: float, limits: Mapping[str, Any], seconds: float) -> Verdict:
    first = leaders(reports)
    summary = f"{counted(len(first), 'node')} fine in {seconds:.1f} s:"
    summary += f" matrix products {rate / 1e9:,.0f} GFLOP/s"
    if len(reports) == 1:
        return Verdict(summary)
    bus = min(report.bus for report in reports.values()) / 2**20
    summary += f", all-reduce {bus:,.0f} MiB/s"
    links = {rank: reports[rank].link / 2**20 for rank in first if len(first) > 1}
    if links:
        summary += f", links {min(links.values()):,.0f} to {max(links.values()):,.0f} MiB/s"
    least = (limits.get("min_bandwidth") or 0) / 2**20
    if bus >= least:
        return Verdict(summary)
    text = f"the all-reduce of all ranks has {bus:,.1f} MiB/s, and preflight.min_bandwidth"
    text += f" is {least:,.1f} MiB/s"
    slow = [rank for rank, link in links.items() if link < least]
    # All nodes, or one of the two ends of a single link: no node stands out.
    if not slow or len(slow) == len(first):
        return _refused(f"{text}; no node stands out", (), reports)
    names = ", ".join(f"node {reports[rank].node} ({ranks_in_words([rank])})" for rank in slow)
    return _refused(f"{names}: {text}, and both links of each are slower", slow, reports)


def _refused(text: str, culprits: Collection[int], reports: Reports) -> Verdict:
    nodes = dict.fromkeys(reports[rank].node for rank in sorted(culprits) if rank in reports)
    return Verdict(text, sorted(culprits), refused=True, nodes=list(nodes))
