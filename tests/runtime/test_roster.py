"""The roster of the nodes, over real sockets."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict

import pytest
from waiting import until

from k8sjob.contract import Reason
from k8sjob.runtime.agent.restarts import Coordinator, RestartCount
from k8sjob.runtime.agent.roster import DONE, NodeState, Roster, _connect
from k8sjob.runtime.base.env import NodeEnv


@pytest.fixture(params=["127.0.0.1", "a name"])
def nodes(request, master_port):
    """Three nodes; by a name they meet at all of a machine's addresses, as in a cluster."""
    addr = request.param if request.param != "a name" else socket.gethostname()
    return [NodeEnv(rank, 3, 2, addr, master_port) for rank in range(3)]


def call(node):
    state = asdict(NodeState(node, DONE, restarts=99))
    return json.dumps({"job": "j", "nnodes": 3, "state": state}).encode() + b"\n"


def test_all_nodes_learn_the_states_of_all(nodes):
    with Roster(nodes[0], "j") as first, Roster(nodes[1], "j") as second:
        with Roster(nodes[2], "j") as third:
            until(lambda: len(first.others()) == 2)
            third.report(state=DONE, grouped=True)
            third.flush(5)
        assert first.done() == (2,)
        until(lambda: second.done() == (2,))
        second.give_up(Reason(1, rank=3, message="x" * 10000))
        second.flush(5)
        assert first.failure() == Reason(1, rank=3, message="x" * 300)


def test_a_late_node_has_the_count_of_the_others(nodes):
    with Roster(nodes[0], "j") as first, Roster(nodes[1], "j") as second:
        first.report(restarts=2)
        until(lambda: second.restarts() == 2)
        with Roster(nodes[2], "j") as third:
            until(lambda: third.joined == 2)
            assert third.own.restarts == 0


@pytest.mark.parametrize(("own", "others", "following"), [(0, 0, 1), (0, 2, 2), (1, 1, 2)])
def test_a_node_joins_the_restart_that_the_others_have_begun(nodes, own, others, following):
    with Roster(nodes[0], "j") as first, Roster(nodes[1], "j") as second:
        until(first.others)
        second.report(restarts=others)
        second.flush(5)
        assert Coordinator(nodes[0], first, RestartCount(None, 3)).next_restart(own) == following


def test_a_new_node_0_learns_from_the_others(nodes):
    second = Roster(nodes[1], "j")
    second.report(restarts=2)
    with second, Roster(nodes[0], "j") as first:
        until(lambda: first.joined == 2)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"GET / HTTP/1.1\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"[" * 100_000 + b"\n",
        call(1).replace(b"99", b"1e999"),
        b'{"job": "other", "nnodes": 3, "state": {}}\n',
        b'{"job": "j", "nnodes": 2, "state": {}}\n',
        call(9),
        call(0),
    ],
)
def test_an_invalid_call_changes_nothing(nodes, line):
    with Roster(nodes[0], "j") as first:
        with _connect(nodes[0]) as wire:
            wire.sendall(line)
            wire.recv(1 << 16)
        assert (first.others(), first.restarts()) == ([], 0)


def test_with_a_taken_port_each_node_decides_alone(nodes):
    with Roster(nodes[0], "j") as first, Roster(nodes[0], "j") as second:
        assert (first.active, second.active) == (True, False)


def test_a_single_node_does_not_listen():
    with Roster(NodeEnv(0, 1, 2, "127.0.0.1", 1), "j") as roster:
        assert not roster.active
