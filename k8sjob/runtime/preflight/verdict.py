"""Which nodes a preflight refuses, from what the ranks have reported; pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k8sjob.contract import counted
from k8sjob.runtime.base.errors import ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from k8sjob.runtime.preflight.links import Network
    from k8sjob.runtime.preflight.node import Report


@dataclass(slots=True)
class Verdict:
    """The outcome, the same on all ranks."""

    summary: str = ""  # what was measured, in a line; of a refusal why
    culprits: list[int] = field(default_factory=list)  # the ranks of the nodes that are refused
    refused: bool = False
    nodes: list[str] = field(default_factory=list)  # the culprits' nodes


def leaders(reports: Mapping[int, Report]) -> list[int]:
    """The first rank of each node, in order."""
    return [rank for rank, report in sorted(reports.items()) if report.local_rank == 0]


def judge(
    world: int,
    reports: Mapping[int, Report],
    networks: Mapping[int, Network],
    limits: Mapping[str, Any],
    seconds: float,
) -> Verdict | None:
    """The verdict; None: too early, some have not reported yet.

    Args:
        world: number of ranks.
        reports: by rank, of those that have begun.
        networks: by rank, of those that are through.
        limits: "timeout", "max_slowdown", and perhaps "min_bandwidth" in bytes per second.
        seconds: how long the ranks have been at it.
    """
    over = seconds >= limits["timeout"]
    absent = [rank for rank in range(world) if rank not in reports or not reports[rank].device]
    faults = {rank: list(report.problems) for rank, report in reports.items() if report.problems}
    if absent and not over:
        return None
    through = world == 1 or all(rank in networks and networks[rank].bus for rank in range(world))
    nodes = _ranks_of_nodes(reports)
    if not (faults or absent):
        rates = {node[0]: min(reports[rank].flops for rank in node) for node in nodes}
        # A node that only serves the others has no GPU to compare.
        gpus = {rank: rate for rank, rate in rates.items() if reports[rank].device == "cuda"}
        _compare(faults, gpus, limits, ("matrix products", 1e9, "GFLOP/s"))
        cpus = _by_machine({rank: rates[rank] for rank in rates.keys() - gpus.keys()}, reports)
        _compare(faults, cpus, limits, ("matrix products", 1e9, "GFLOP/s"))
        best = {rank: max(net.links.values()) for rank, net in networks.items() if net.links}
        machines = _by_machine(best, reports)
        if len(machines) > 2 and (through or over):
            _compare(faults, machines, limits, ("its better link", 2**20, "MiB/s"))
    for rank in absent:
        faults[rank] = [f"did not answer within {limits['timeout']:g} s"]
    if faults:
        return _refusal(faults, reports, nodes)
    if through:
        return _of_whole(nodes, reports, networks, limits, seconds)
    return _unfinished(reports, networks, limits) if over else None


def _unfinished(
    reports: Mapping[int, Report], networks: Mapping[int, Network], limits: Mapping[str, Any]
) -> Verdict:
    """All have examined their devices, and some did not get through the measurement."""
    rounds = {rank: networks[rank].rounds if rank in networks else 0 for rank in reports}
    behind = [rank for rank, count in rounds.items() if count == min(rounds.values())]
    # Where all wait in the same round, each may be the one that the others wait for.
    behind = behind if len(behind) < len(reports) else []
    names = ", ".join(sorted({f"node {reports[rank].node}" for rank in behind}))
    who = f"{names}: {ranks_in_words(behind)}" if behind else "the ranks"
    text = f"{who} did not get through the all-reduce within {limits['timeout']:g} s"
    return _refused(text, behind, reports)


def _of_whole(
    nodes: Sequence[Sequence[int]],
    reports: Mapping[int, Report],
    networks: Mapping[int, Network],
    limits: Mapping[str, Any],
    seconds: float,
) -> Verdict:
    rates = [min(reports[rank].flops for rank in node) for node in nodes]
    summary = f"{counted(len(nodes), 'node')} fine in {seconds:.1f} s:"
    summary += f" matrix products {statistics.median(rates) / 1e9:,.0f} GFLOP/s"
    if len(reports) == 1:
        return Verdict(summary)
    bus = min(network.bus for network in networks.values())
    summary += f", all-reduce {bus / 2**20:,.0f} MiB/s"
    if links := [max(net.links.values()) for net in networks.values() if net.links]:
        summary += f", links {min(links) / 2**20:,.0f} to {max(links) / 2**20:,.0f} MiB/s"
    least = limits.get("min_bandwidth") or 0
    if bus >= least:
        return Verdict(summary)
    text = f"the all-reduce of all ranks has {bus / 2**20:,.1f} MiB/s, and preflight.min_bandwidth"
    text += f" is {least / 2**20:,.1f} MiB/s"
    slow = [rank for rank, net in networks.items() if net.links and max(net.links.values()) < least]
    # All nodes, or one of the two ends of a single link: no node stands out.
    if not slow or len(slow) == len(nodes):
        return _refused(f"{text}; no node stands out", (), reports)
    names = ", ".join(f"node {reports[rank].node} ({ranks_in_words([rank])})" for rank in slow)
    return _refused(f"{names}: {text}, and both links of each are slower", slow, reports)


def _ranks_of_nodes(reports: Mapping[int, Report]) -> list[list[int]]:
    """The ranks of each node, in order."""
    nodes: list[list[int]] = []
    for rank, report in sorted(reports.items()):
        if report.local_rank == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    return nodes


def _by_machine(rates: Mapping[int, float], reports: Mapping[int, Report]) -> dict[int, float]:
    """The fastest rank of each node by name: Pods that share one take turns, and none is broken."""
    fastest: dict[str, int] = {}
    for rank in sorted(rates):
        name = reports[rank].node
        fastest[name] = max(fastest.get(name, rank), rank, key=rates.__getitem__)
    return {rank: rates[rank] for rank in fastest.values()}


def _compare(
    faults: dict[int, list[str]],
    rates: Mapping[int, float],
    limits: Mapping[str, Any],
    measured: tuple[str, float, str],
) -> None:
    """Add the ranks that are slower than the median by more than the limit.

    `measured` are the rates' name, their unit and its name.
    """
    what, unit, unit_name = measured
    if len(rates) < 2:
        return
    # Of two nodes the faster one, since the mean of both would hide any slowness below it.
    usual = statistics.median_high(rates.values())
    for rank, rate in rates.items():
        if rate * limits["max_slowdown"] < usual:
            faults.setdefault(rank, []).append(
                f"{what} at {rate / unit:,.1f} {unit_name}, {usual / max(rate, 1e-9):.1f} times"
                f" slower than the median of {counted(len(rates), 'node')}, {usual / unit:,.1f}"
            )


def _refusal(
    faults: Mapping[int, Sequence[str]],
    reports: Mapping[int, Report],
    nodes: Sequence[Sequence[int]],
) -> Verdict:
    texts = []
    for rank, problems in sorted(faults.items()):
        node = f"node {reports[rank].node} (rank {rank})" if rank in reports else f"rank {rank}"
        texts.append(f"{node}: {', '.join(problems)}")
    # All ranks of a node go with it.
    culprits = {rank for node in nodes if faults.keys() & {*node} for rank in node}
    return _refused("; ".join(texts), culprits | faults.keys(), reports)


def _refused(text: str, culprits: Collection[int], reports: Mapping[int, Report]) -> Verdict:
    nodes = dict.fromkeys(reports[rank].node for rank in sorted(culprits) if rank in reports)
    return Verdict(text, sorted(culprits), refused=True, nodes=list(nodes))
