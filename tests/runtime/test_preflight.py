"""The preflight: the verdict from what ranks report, and ranks that report it over gloo."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from k8sjob.contract import ExitCode
from k8sjob.runtime.base.env import DistEnv
from k8sjob.runtime.preflight.links import ring
from k8sjob.runtime.preflight.node import Report, examine, matmul
from k8sjob.runtime.preflight.verdict import judge

LIMITS = {"timeout": 10, "max_slowdown": 3.0}
GIB = 2**30


def reports(*flops, nproc=1, **problems):
    return {
        rank: Report(
            rank, rank % nproc, f"n{rank // nproc}", "cpu", rate, problems.get(f"r{rank}", ())
        )
        for rank, rate in enumerate(flops)
    }


def ringed(all_ranks, links, bus=GIB, rounds=3):
    """With the better ones of links (first, second, rate)."""
    return {
        rank: replace(
            report, rounds=rounds, bus=bus, link=max(rate for *ends, rate in links if rank in ends)
        )
        for rank, report in all_ranks.items()
    }


@pytest.mark.parametrize("nodes", range(2, 9))
def test_each_leader_meets_its_neighbours_in_disjoint_pairs(nodes):
    rounds = list(ring(range(nodes)))
    pairs = {frozenset(pair) for pairs in rounds for pair in pairs}
    assert pairs == {frozenset((i, (i + 1) % nodes)) for i in range(nodes)}
    assert all(len({*sum(pairs, ())}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) <= 3


def test_a_slow_node_is_told_from_its_neighbours():
    links = [(0, 1, GIB), (1, 2, GIB / 9), (2, 3, GIB / 9), (3, 0, GIB)]
    verdict = judge(4, ringed(reports(1, 1, 1, 1), links, bus=GIB / 9), LIMITS, 1.0)
    assert (verdict.refused, verdict.culprits) == (True, [2])
    assert "node n2 (rank 2)" in verdict.summary
    assert "9.0 times slower than the median of 4 nodes" in verdict.summary


def test_one_slow_link_between_two_nodes_names_none():
    pair = ringed(reports(1, 1), [(0, 1, GIB / 100)], bus=GIB / 100)
    assert not judge(2, pair, LIMITS, 1.0).refused
    verdict = judge(2, pair, {**LIMITS, "min_bandwidth": GIB}, 1.0)
    assert (verdict.refused, verdict.culprits) == (True, [])
    assert "no node stands out" in verdict.summary


def test_pods_that_share_a_node_are_not_compared():
    shared = {rank: replace(report, node="n") for rank, report in reports(9, 1, 9, 9).items()}
    links = [(0, 1, GIB), (1, 2, 1), (2, 3, 1), (3, 0, GIB)]
    assert not judge(4, ringed(shared, links), LIMITS, 1.0).refused


def test_of_two_nodes_the_slower_device_is_named_with_all_ranks_of_its_node():
    verdict = judge(4, reports(8e9, 8e9, 8e9, 2e9, nproc=2), LIMITS, 1.0)
    assert verdict.culprits == [2, 3]
    assert "matrix products at 2.0 GFLOP/s, 4.0 times slower" in verdict.summary


def test_ranks_that_do_not_answer_are_named_after_the_time_and_not_before():
    silent = reports(1, 1, 1) | {1: Report(1, 0, "n1")}
    assert judge(3, silent, LIMITS, 9.0) is None
    verdict = judge(3, silent, LIMITS, 10.0)
    assert (verdict.culprits, verdict.nodes) == ([1], ["n1"])
    assert verdict.summary == "node n1 (rank 1): did not answer within 10 s"


def test_a_pair_that_stands_still_is_named_and_a_whole_group_is_not():
    begun = ringed(reports(1, 1, 1, 1), [(0, 3, GIB), (1, 2, GIB)], bus=0.0, rounds=1)
    still = begun | {rank: replace(begun[rank], rounds=0) for rank in (1, 2)}
    assert judge(4, still, LIMITS, 10.0).culprits == [1, 2]
    verdict = judge(4, begun, LIMITS, 10.0)
    assert (verdict.refused, verdict.culprits) == (True, [])


def test_a_device_that_computes_wrongly_once_is_seen(monkeypatch):
    assert matmul(torch.device("cpu"))[1]
    plain, calls = torch.Tensor.__matmul__, []

    def flip(left, right):
        product = plain(left, right)
        calls.append(1)
        product[3, 5] += len(calls) == 2
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", flip)
    assert not matmul(torch.device("cpu"))[1]


def test_what_a_node_lacks_of_what_the_job_asks_for():
    asked = {"gpus": 64, "memory": 2**60, "shm": 2**60}
    blank = Report(0, 0, "n0")
    problems = examine(DistEnv(0, 0, 1, 1, "127.0.0.1", 1), blank, asked).problems
    assert [word for word in ("/dev/shm", "GPUs") if any(word in text for text in problems)] == [
        "/dev/shm",
        "GPUs",
    ]


# --- ranks ----------------------------------------------------------------------------------------

MEET = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier()"
FAULTY = """
import os, sys, time
import importlib.abc

class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "k8sjob.runtime.preflight.node" and os.environ["RANK"] == "1":
            import torch
            torch.Tensor.__matmul__ = lambda *_: time.sleep(600)

sys.meta_path.insert(0, Hook())
"""


@pytest.fixture
def nodes(group):
    def run(script, nnodes, nproc=1, timeout=10, **environ):
        checks = {**LIMITS, "max_slowdown": 1000, "timeout": timeout, "asks": [{}, {}]}
        config = json.dumps({"preflight": checks, "max_restarts": 0})
        environ |= {"K8SJOB_CONFIG": config, "GLOO_SOCKET_IFNAME": "lo", "K8SJOB_NODE_NAME": "n"}
        return [node.finish(120) for node in group([script], nnodes, nproc, environ)]

    return run


@pytest.mark.dist
def test_a_script_makes_its_own_group_at_the_same_port_afterwards(nodes):
    before = "import threading, torch; assert threading.active_count() == 3\n"
    before += "assert not torch.distributed.is_initialized()\n"
    ends = nodes(before + MEET, 2, nproc=2)
    assert [end.code for end in ends] == [0, 0], ends[0].err
    assert "k8sjob: preflight: 2 nodes fine" in ends[0].err


@pytest.mark.dist
@pytest.mark.skipif(sys.platform != "linux", reason="the ranks' children are killed by the kernel")
def test_a_rank_that_hangs_is_named_by_all(nodes, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(FAULTY)
    ends = nodes(MEET, 3, timeout=2, PYTHONPATH=str(tmp_path))
    assert [end.code for end in ends] == [ExitCode.PREFLIGHT] * 3, ends[0].err
    assert {(*end.reason.culprits, *end.reason.nodes) for end in ends} == {(1, "n")}
