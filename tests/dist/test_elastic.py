"""Elastic groups for real: nodes that come, go and are killed, as agents of one machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from k8sjob import contract
from k8sjob.contract import Event, ExitCode, Reason
from k8sjob.runtime.agent.elastic import is_loss
from k8sjob.runtime.base.env import NodeEnv
from k8sjob.runtime.base.network import reserve

pytestmark = pytest.mark.dist

UNTIL = Path(__file__).parent / "programs/until.py"
LIMIT_S = 240


class Node:
    """One agent with its ranks."""

    def __init__(self, folder, number, *, endpoint, settings, bounds, processes, program):
        self.output = folder / f"output-{number}"
        self.words = folder / "words" if program != UNTIL else folder / f"words-{number}"
        settings = {
            "checkpoint_dir": str(folder / "checkpoints"),
            "checkpoint_every": 1,
            "rendezvous_timeout": 120.0,
            "collective_timeout": 120.0,
            **settings,
        }
        env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("K8SJOB_")},
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PET_NNODES": bounds,
            "PET_NPROC_PER_NODE": str(processes),
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": endpoint,
            contract.CONFIG_ENV: contract.RuntimeConfig(**settings).encode(),
            contract.TERMINATION_LOG_ENV: str(self.words),
        }
        argv = [sys.executable, "-m", "k8sjob.runtime", str(program), str(folder / "done")]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(argv, env=env, stdout=file, stderr=file)

    @property
    def text(self):
        return self.output.read_text()

    def events(self, kind):
        found = (Event.decode(line) for line in self.text.splitlines())
        return [event.data for event in found if event and event.kind == kind]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def wait(self):
        return self.process.wait(LIMIT_S)


@pytest.fixture
def nodes(tmp_path):
    """nodes() -> Node, each of the same elastic group; all are ended afterwards."""
    running = []
    with reserve("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]

        def start(*, bounds="1:3", processes=1, host="127.0.0.1", program=UNTIL, **settings):
            how = {"settings": settings, "bounds": bounds, "processes": processes}
            how["program"] = program
            node = Node(tmp_path, len(running), endpoint=f"{host}:{port}", **how)
            running.append(node)
            return node

        start.finish = (tmp_path / "done").touch
        yield start
        for node in running:
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
        for node in running:
            node.wait()


def eventually(holds, *nodes):
    until = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until, [node.text for node in nodes]
        time.sleep(0.05)


def told(*nodes):
    """What rank 0 said of each epoch."""
    return [event for node in nodes for event in node.events("metrics")]


def worlds(*nodes):
    """How many ranks each round had, as rank 0 told it, wherever that was."""
    return [event["world_size"] for node in nodes for event in node.events("started")]


def test_nodes_come_and_go(nodes):
    """fsdp: what two ranks have saved, four go on from, and two again."""
    how = {"bounds": "1:2", "processes": 2, "strategy": "fsdp", "checkpoint_format": "sharded"}
    first = nodes(**how)
    eventually(lambda: first.events("metrics"), first)
    second = nodes(**how)
    eventually(lambda: 4 in worlds(first, second), first, second)
    epochs = len(told(first, second))
    eventually(lambda: len(told(first, second)) > epochs + 1, first, second)
    second.kill()
    eventually(lambda: worlds(first)[-1:] == [2] and len(worlds(first, second)) > 2, first, second)
    epochs = len(told(first))
    eventually(lambda: len(told(first)) > epochs, first)
    nodes.finish()
    assert first.wait() == 0, first.text
    resumed = first.events("resumed") + second.events("resumed")
    assert len(resumed) == 2
    assert all(event["step"] > 0 for event in resumed)
    # An epoch that a resize has cut in two is counted from where it went on.
    assert all(one["samples"] in range(24, 97, 24) for one in told(first, second))
    assert all(one["whole"] for one in told(first, second))


def test_the_host_of_the_rendezvous_is_lost(nodes):
    first = nodes(bounds="2:2")
    eventually(lambda: "rendezvous at" in first.text, first)
    second = nodes(bounds="2:2")
    eventually(lambda: told(first, second), first, second)
    first.kill()
    third = nodes(bounds="2:2")
    eventually(lambda: second.events("resumed") or third.events("resumed"), second, third)
    nodes.finish()
    assert (second.wait(), third.wait()) == (0, 0), second.text + third.text
    assert set(worlds(first, second, third)) == {2}


def test_one_node_more_than_there_may_be(nodes):
    running = [nodes(bounds="1:2") for _ in range(3)]

    def rounds():
        return [node.text.count("k8sjob: round") for node in running]

    eventually(lambda: 2 in worlds(*running) and told(*running), *running)
    waits = next(node for node in running if not node.text.count("k8sjob: round"))
    next(node for node in running if node is not waits).kill()
    eventually(lambda: "k8sjob: round" in waits.text, *running)
    before, epochs = rounds(), len(told(*running))
    eventually(lambda: len(told(*running)) > epochs + 10, *running)
    assert sum(rounds()) <= sum(before) + 1  # nobody makes room again and again
    nodes.finish()
    assert sorted(node.wait() for node in running) == [-9, 0, 0]


def test_too_few_nodes(nodes):
    alone = nodes(bounds="2:3", rendezvous_timeout=3.0)
    assert alone.wait() == ExitCode.PEER_LOST
    message = json.loads(alone.words.read_text())["message"]
    assert "fewer than 2 nodes joined at 127.0.0.1:" in message


def test_a_stop_while_it_waits_for_others(nodes):
    alone = nodes(bounds="2:3")
    eventually(lambda: "rendezvous at" in alone.text, alone)
    time.sleep(2)
    alone.process.send_signal(signal.SIGTERM)
    assert alone.wait() == 143


def test_a_batch_that_could_not_be_shared_by_all_who_may_come(nodes):
    alone = nodes(bounds="1:25", max_restarts=3)  # the program's global_batch is 24
    assert alone.wait() == 1, alone.text
    detail = json.loads(alone.words.read_text())["message"]
    assert "global_batch=24 is below the 25 ranks that this elastic job may come to have" in detail


@pytest.mark.parametrize(
    ("code", "culprits", "loss"),
    [
        (ExitCode.PEER_LOST, (), True),
        (ExitCode.HUNG, (0, 1), True),  # those of another node
        (ExitCode.HUNG, (1, 2), False),
        (ExitCode.HUNG, (), False),  # all wait for each other
        (ExitCode.USER_ERROR, (), False),
        (137, (), False),
    ],
)
def test_only_what_fails_here_counts_against_the_restarts(code, culprits, loss):
    node = NodeEnv(node_rank=1, nnodes=2, nproc_per_node=2, master_addr="a", master_port=1)
    assert is_loss(Reason(code, culprits=culprits, time=1), node) is loss


@pytest.mark.parametrize(
    ("failure", "starts"),
    [
        ("os.kill(os.getpid(), 9)", 3),  # from outside: it may end better
        ("os.abort()", 2),  # twice at the same place
    ],
)
def test_the_containers_of_a_pod_share_a_count(nodes, tmp_path, failure, starts):
    """A container that starts again after the last restart does not begin with the first."""
    script = tmp_path / "fails.py"
    script.write_text(f"import os\nprint('starts', flush=True)\n{failure}\n")
    how = {"bounds": "1:2", "program": script, "max_restarts": 2, "restart_policy": "OnFailure"}
    first = nodes(**how)
    assert first.wait() == {3: 137, 2: ExitCode.RESTARTS_SPENT}[starts], first.text
    assert first.text.count("starts\n") == starts
    assert [event["restart"] for event in first.events("restarting")] == [*range(1, starts)]
    again = nodes(**how)
    assert again.wait() == ExitCode.RESTARTS_SPENT, again.text
    assert "starts\n" not in again.text


def own_address():
    """The address of this machine's interface to others; where it has none, that of loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards, suppress(OSError):
        towards.connect(("198.51.100.1", 9))
        return towards.getsockname()[0]
    return "127.0.0.1"


@pytest.mark.parametrize("host", [own_address(), socket.gethostname()], ids=["address", "name"])
def test_nodes_meet_where_the_endpoint_is_not_their_own_name(nodes, host):
    """On the nodes' network no pod has the name of the endpoint; here both have its address."""
    first, second = (nodes(bounds="2:2", host=host) for _ in range(2))
    nodes.finish()
    assert (first.wait(), second.wait()) == (0, 0), (first.text, second.text)
    assert worlds(first, second) == [2]
