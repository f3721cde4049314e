"""The roster of the nodes, over real sockets."""

from __future__ import annotations

import hmac
import json
import socket
import socketserver
import sys
import threading
from dataclasses import asdict, replace

import pytest
from waiting import until

from k8sjob.contract import Event, EventKind, Reason
from k8sjob.runtime.agent import roster as module
from k8sjob.runtime.agent.attempt import Attempt
from k8sjob.runtime.agent.restarts import Coordinator, RestartCount
from k8sjob.runtime.agent.roster import DONE, NodeState, Roster, _connect, _port
from k8sjob.runtime.base.config import agents_key
from k8sjob.runtime.base.env import NodeEnv


@pytest.fixture(params=["127.0.0.1", "a name"])
def nodes(request, master_port):
    """Three nodes; by a name they meet at all of a machine's addresses, as in a cluster."""
    addr = request.param if request.param != "a name" else socket.gethostname()
    return [NodeEnv(rank, 3, 2, addr, master_port) for rank in range(3)]


KEY = b"of the job"


@pytest.fixture(autouse=True)
def exchange_often(monkeypatch):
    monkeypatch.setattr(module, "TIMEOUTS", replace(module.TIMEOUTS, exchange=0.05))


def roster(node, key=KEY):
    return Roster(node, "j", key)


def signed(content, key=KEY):
    """A line of an agent that has a key, made without the roster."""
    body = content + b"\n"
    return hmac.new(key, body, "sha256").hexdigest().encode() + b" " + body


def content(node, job="j", nnodes=3):
    state = asdict(NodeState(node, DONE, restarts=99))
    return json.dumps({"job": job, "nnodes": nnodes, "state": state}).encode()


def answer_to(line, node):
    with _connect(node) as wire:
        wire.sendall(line)
        return wire.makefile("rb").readline()


def test_all_nodes_learn_the_states_of_all(nodes):
    with roster(nodes[0]) as first, roster(nodes[1]) as second:
        with roster(nodes[2]) as third:
            until(lambda: len(first.others()) == 2)
            third.report(state=DONE, grouped=True)
            third.flush(5)
        assert first.done() == (2,)
        until(lambda: second.done() == (2,))
        second.give_up(Reason(1, rank=3, message="x" * 10000))
        second.flush(5)
        assert first.failure() == Reason(1, rank=3, message="x" * 300)


def test_a_late_node_has_the_count_of_the_others(nodes):
    with roster(nodes[0]) as first, roster(nodes[1]) as second:
        first.report(restarts=2)
        until(lambda: second.restarts() == 2)
        with roster(nodes[2]) as third:
            until(lambda: third.joined == 2)
            assert third.own.restarts == 0


@pytest.mark.parametrize(("own", "others", "following"), [(0, 0, 1), (0, 2, 2), (1, 1, 2)])
def test_a_node_joins_the_restart_that_the_others_have_begun(nodes, own, others, following):
    with roster(nodes[0]) as first, roster(nodes[1]) as second:
        until(first.others)
        second.report(restarts=others)
        second.flush(5)
        assert Coordinator(nodes[0], first, RestartCount(None, 3)).next_restart(own) == following


@pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")
@pytest.mark.parametrize(
    ("master", "source", "grouped"),
    [
        ("digits-master-0", "127.0.0.2", True),
        ("digits-master-0", "127.0.0.1", False),  # within a pod
        ("127.0.0.1", "127.0.0.2", False),  # of whichever node
    ],
)
def test_what_a_script_starts_has_a_group_where_nodes_are_connected(master, source, grouped):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        node = NodeEnv(1, 2, 1, master, address[1])
        with socket.create_connection(address, source_address=(source, 0)):
            state = roster(node)
            Coordinator(node, state, RestartCount(None, 3)).note(Attempt())
    assert state.own.grouped is grouped


def test_a_new_node_0_learns_from_the_others(nodes):
    second = roster(nodes[1])
    second.report(restarts=2)
    with second, roster(nodes[0]) as first:
        until(lambda: first.joined == 2)


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\n",
        b"\xff\xfe\n",
        signed(b"[]"),
        signed(b"[" * 100_000),
        signed(content(1).replace(b"99", b"1e999")),
        signed(content(1, job="other")),
        signed(content(1, nnodes=2)),
        signed(content(9)),
        signed(content(0)),
        signed(content(1), b"another"),
        content(1) + b"\n",
        signed(content(1)).replace(b"99", b"98"),
        signed(content(1) + b" " * (1 << 18)),
    ],
)
def test_an_invalid_call_changes_nothing(nodes, line):
    with roster(nodes[0]) as first:
        answer_to(line, nodes[0])
        assert (first.others(), first.restarts()) == ([], 0)


def test_with_a_taken_port_each_node_decides_alone(nodes):
    with roster(nodes[0]) as first, roster(nodes[0]) as second:
        assert (first.active, second.active) == (True, False)


def test_a_single_node_does_not_listen():
    with roster(NodeEnv(0, 1, 2, "127.0.0.1", 1)) as alone:
        assert not alone.active


def test_a_call_with_the_key_is_taken_and_answered(nodes):
    with roster(nodes[0]) as first:
        line = signed(content(1))
        signature, _, body = answer_to(line, nodes[0]).partition(b" ")
        assert hmac.new(KEY, line + body, "sha256").hexdigest().encode() == signature
        assert [one["restarts"] for one in json.loads(body)] == [0, 99]
        assert first.restarts() == 99


def test_a_node_with_another_key_changes_nothing_and_says_so(nodes, capfd):
    """As where two replicas have other secrets, settings, or versions of k8sjob."""
    with roster(nodes[0]) as first, roster(nodes[1], b"another") as second:
        second.report(restarts=99)
        first.report(restarts=5)
        lines = []
        until(lambda: lines.append(capfd.readouterr()) or "does not accept" in written(lines, 1))
        assert (first.restarts(), second.restarts()) == (5, 99)
    assert written(lines, 1).count("start all pods from one image and one manifest") == 1
    events = [Event.decode(line) for line in written(lines, 0).splitlines()]
    assert [event.kind for event in events] == [EventKind.WARNING]


def written(lines, stream):
    return "".join(captured[stream] for captured in lines)


@pytest.mark.parametrize("answer", [b"", b"[]\n", b"x y\n", signed(b"[]")])
def test_an_answer_without_the_key_changes_nothing(nodes, answer, capfd):
    """signed(b"[]") is a call, or the answer to another one."""

    class Stranger(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(answer)

    class StrangersServer(socketserver.ThreadingTCPServer):
        allow_reuse_address = True  # connections of the test before may still be in TIME_WAIT

    with StrangersServer(("", _port(nodes[0])), Stranger) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with roster(nodes[1]) as second:
            lines = []
            until(lambda: lines.append(capfd.readouterr()) or "not accept" in written(lines, 1))
            assert (second.others(), second._reported.is_set()) == ([], False)
        server.shutdown()


def test_the_key_is_of_what_all_pods_of_a_job_have():
    environ = {"K8SJOB_CONFIG": "{}", "RANK": "0"}
    key = agents_key(environ)
    assert agents_key({**environ, "RANK": "1", "K8SJOB_PATHS": "{}"}) == key
    others = [agents_key({**environ, name: "x"}) for name in KEYS]
    assert len({key, *others}) == 4


KEYS = ("K8SJOB_CONFIG", "K8SJOB_JOB_UID", "K8SJOB_SECRET")
