"""The environments of all launchers, read into one form, and those that cannot work."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.contract import ExitCode
from k8sjob.runtime.base.env import DistEnv, ElasticEnv, NodeEnv, dist_env, elastic_env, node_env
from k8sjob.runtime.base.errors import EnvError

MASTER = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


def operator(rank: int, replicas: int, nproc: str = "auto") -> dict[str, str]:
    """What the operator injects for a job with a Master: envvar.go, master.go."""
    each = int(nproc) if nproc.isdigit() else 1
    return {
        "PYTHONUNBUFFERED": "1",
        **MASTER,
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
        "WORLD_SIZE": str(replicas * each),
        "RANK": str(rank),
        "PET_NODE_RANK": str(rank),
        "PET_NPROC_PER_NODE": nproc,
        "PET_NNODES": str(replicas),
    }


def worker_only(replicas: int) -> dict[str, str]:
    """What it injects without a Master: no address, no rank, no size."""
    return {"PET_NPROC_PER_NODE": "auto", "PET_NNODES": str(replicas)}


def elastic(rank: int, replicas: int, bounds: str, nproc: str = "1") -> dict[str, str]:
    return {
        **operator(rank, replicas, nproc),
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": bounds,
    }


def trainer_v2(rank: int, nodes: int, nproc: str = "1") -> dict[str, str]:
    return {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": nproc,
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29400",
    }


class TestNode:
    @pytest.mark.parametrize(
        ("environ", "node"),
        [
            ({}, NodeEnv(0, 1, 1, "127.0.0.1", 0)),
            ({"WORLD_SIZE": "1"}, NodeEnv(0, 1, 1, "127.0.0.1", 0)),
            ({"PET_NPROC_PER_NODE": "4"}, NodeEnv(0, 1, 4, "127.0.0.1", 0)),
            (operator(0, 1), NodeEnv(0, 1, 1, "job-master-0", 23456)),
            (operator(3, 4), NodeEnv(3, 4, 1, "job-master-0", 23456)),
            (operator(1, 2, "4"), NodeEnv(1, 2, 4, "job-master-0", 23456)),
            (operator(1, 2, "gpu"), NodeEnv(1, 2, 1, "job-master-0", 23456)),
            (operator(1, 2, "cpu"), NodeEnv(1, 2, 1, "job-master-0", 23456)),
            (worker_only(1), NodeEnv(0, 1, 1, "127.0.0.1", 0)),
            (elastic(2, 4, "2:4"), NodeEnv(2, 4, 1, "job-master-0", 23456)),
            (elastic(1, 3, "2:2", "2"), NodeEnv(1, 3, 2, "job-master-0", 23456)),
            (trainer_v2(1, 3, "2"), NodeEnv(1, 3, 2, "job-node-0-0.job", 29400)),
            ({"RANK": "1", "WORLD_SIZE": "2", **MASTER}, NodeEnv(1, 2, 1, "job-master-0", 23456)),
        ],
    )
    def test_every_shape(self, environ, node):
        assert node_env(environ) == node

    @pytest.mark.parametrize(
        ("environ", "seen"),
        [
            (operator(0, 2) | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
            (operator(0, 2) | {"RANK": "-1", "PET_NODE_RANK": "-1"}, "RANK='-1'"),
            (operator(0, 2) | {"RANK": "1_0"}, "RANK='1_0'"),
            (operator(0, 2) | {"RANK": "\u0661"}, "is not a whole number"),
            (operator(0, 2) | {"RANK": ""}, "RANK=''"),
            (operator(0, 2) | {"RANK": "9" * 5000}, "RANK='999"),
            (operator(0, 2) | {"MASTER_ADDR": "", "PET_MASTER_ADDR": ""}, "MASTER_ADDR not set"),
            (operator(0, 2) | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
            (worker_only(3) | {"PET_NNODES": "x"}, "PET_NNODES='x'"),
        ],
    )
    def test_what_would_hang_is_refused(self, environ, seen):
        """The others are rows of docs/reference/errors-environment.md."""
        with pytest.raises(EnvError) as caught:
            node_env(environ)
        assert seen in str(caught.value)
        assert caught.value.exit_code == ExitCode.CONFIG

    @pytest.mark.parametrize(("nnodes", "nproc", "serving"), [(3, 1, 2), (3, 4, 3), (2, 1, 6)])
    def test_a_node_that_serves_has_a_different_number_of_processes(self, nnodes, nproc, serving):
        nodes = [node_env(operator(rank, nnodes, str(nproc))) for rank in range(nnodes)]
        nodes = [replace(node, serving=serving) for node in nodes]
        assert [node.processes for node in nodes] == [serving, *[nproc] * (nnodes - 1)]
        found = [
            dist_env(operator(node.node_rank, nnodes, str(nproc)) | node.process(local))
            for node in nodes
            for local in range(node.processes)
        ]
        assert [process.rank for process in found] == list(range(nodes[0].world_size))
        trainers = [process.among_trainers(serving) for process in found[serving:]]
        assert [trainer.rank for trainer in trainers] == list(range((nnodes - 1) * nproc))
        assert {trainer.world_size for trainer in trainers} == {(nnodes - 1) * nproc}

    @given(
        nnodes=st.integers(1, 50),
        nproc=st.integers(1, 16),
        restart=st.integers(0, 9),
        data=st.data(),
    )
    def test_nodes_and_processes_tile_the_group(self, nnodes, nproc, restart, data):
        """Each process finds itself again, and the ranks of all nodes are 0..N-1, each once."""
        node_rank = data.draw(st.integers(0, nnodes - 1))
        node = node_env(operator(node_rank, nnodes, str(nproc)))
        ranks = []
        for local in range(nproc):
            process = dist_env(
                operator(node_rank, nnodes, str(nproc)) | node.process(local, restart)
            )
            where = (nnodes * nproc, nproc, "job-master-0", 23456, restart)
            assert process == DistEnv(process.rank, local, *where)
            ranks.append(process.rank)
        assert ranks == list(range(node_rank * nproc, (node_rank + 1) * nproc))

    @given(
        st.dictionaries(
            st.sampled_from([*operator(0, 1), "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
            st.sampled_from(
                ["", "0", "1", "2", "4", "-1", "auto", "2:4", "x", ":", "job-master-0"]
            ),
        )
    )
    def test_any_environment_is_accepted_or_refused_with_a_message(self, environ):
        """What is accepted is possible: a rank inside its group, with a way to meet it."""
        for read in (node_env, dist_env):
            try:
                found = read(environ)
            except EnvError:
                continue
            if isinstance(found, NodeEnv):
                assert 0 <= found.node_rank < found.nnodes
                assert found.nproc_per_node >= 1
                assert found.nnodes == 1 or (found.master_addr and found.master_port)
            else:
                assert 0 <= found.rank < found.world_size
                assert 0 <= found.local_rank < found.local_world_size <= found.world_size
                assert found.world_size == 1 or (found.master_addr and found.master_port)


class TestProcess:
    @pytest.mark.parametrize(
        ("environ", "process"),
        [
            ({}, DistEnv(0, 0, 1, 1, "127.0.0.1", 0)),
            (operator(2, 4), DistEnv(2, 0, 4, 1, "job-master-0", 23456)),
            (trainer_v2(1, 2), DistEnv(1, 0, 2, 1, "job-node-0-0.job", 29400)),
            (
                {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
                | MASTER,
                DistEnv(5, 1, 8, 4, "job-master-0", 23456),
            ),
            # A LOCAL_RANK of one's own in run.env, one process a node.
            (
                operator(1, 2) | {"LOCAL_RANK": "0"},
                DistEnv(1, 0, 2, 1, "job-master-0", 23456),
            ),
        ],
    )
    def test_every_shape(self, environ, process):
        assert dist_env(environ) == process


class TestElastic:
    """elastic_env(): what a node of an elastic job is told, and what it is not."""

    MET: ClassVar = {
        **worker_only(2),
        "PET_NNODES": "2:4",
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
    }

    @pytest.mark.parametrize(
        ("hostname", "hosts"),
        [("job-worker-0", True), ("job-worker-0.example", True), ("job-worker-1", False)],
    )
    def test_the_first_worker_hosts(self, hostname, hosts):
        found = elastic_env(self.MET, hostname)
        assert found == ElasticEnv("job-worker-0", 23456, hosts, "k8sjob", 2, 4, 1)

    @pytest.mark.parametrize("environ", [{}, worker_only(3), operator(0, 2), elastic(1, 4, "2:4")])
    def test_others_have_a_fixed_size(self, environ):
        assert elastic_env(environ, "job-worker-0") is None
