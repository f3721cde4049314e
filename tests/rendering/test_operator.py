"""The operator's webhook and environment: case by case, and against its own code, compiled."""

import itertools
import json
import os
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest

from k8sjob.rendering.manifest import manifest, replica_env
from k8sjob.targets.pytorchjob.operator import operator_env, webhook_problems

PROGRAM = Path(__file__).parent / "operator/main.go"
REPLICAS = "spec.pytorchReplicaSpecs"
ROLES, RUN, ELASTIC = (
    ("spec", key) for key in ("pytorchReplicaSpecs", "runPolicy", "elasticPolicy")
)
NAME, NPROC, MANAGER = ("metadata", "name"), ("spec", "nprocPerNode"), (*RUN, "managedBy")
MASTER, WORKER = (*ROLES, "Master"), (*ROLES, "Worker")
CONTAINERS = ("template", "spec", "containers")
CONTAINER = (*WORKER, *CONTAINERS, 0)
OF_WORKER = f"{REPLICAS}.Worker.template.spec.containers"
PORT = {"name": "pytorchjob-port", "containerPort": 29500}


@pytest.fixture
def accepted(job):
    return manifest(job(namespace="team", replicas={"workers": 3})).document


def changed(document, *changes):
    """A copy with some fields set, or taken away where the value is `...`."""
    document = deepcopy(document)
    for path, value in changes:
        part = document
        for key in path[:-1]:
            part = part[key]
        if value is ...:
            part.pop(path[-1], None)
        else:
            part[path[-1]] = value
    return document


def fields(problems):
    return [problem.field for problem in problems]


# --- the webhook ----------------------------------------------------------------------------------

REFUSED = [
    *((NAME, name, "metadata.name") for name in ("Digits", "1digits", "digits-", "d.igits", "-")),
    *((NAME, name, "metadata.name") for name in ("digits\n", "d" * 64, "", "é", ...)),
    *((MANAGER, manager, "spec.runPolicy.managedBy") for manager in ("me", "")),
    *((ROLES, roles, REPLICAS) for roles in (..., None)),
    *(((*ROLES, role), {"template": {}}, f"{REPLICAS}.{role}") for role in ("worker", "Launcher")),
    *(((*MASTER, "replicas"), count, f"{REPLICAS}.Master.replicas") for count in (2, 0, -1, ...)),
    *(((*WORKER, "replicas"), count, f"{REPLICAS}.Worker.replicas") for count in (0, -1)),
    (WORKER, None, OF_WORKER),
    (CONTAINER[:-1], [], OF_WORKER),
    (CONTAINER[:-1], [{"name": "torch", "image": "x"}], OF_WORKER),
    (CONTAINER[:-1], [{"name": "pytorch"}], f"{OF_WORKER}[0].image"),
    (CONTAINER[:-1], [{"name": "pytorch", "image": "x"}, {"name": "y"}], f"{OF_WORKER}[1].image"),
    ((*CONTAINER, "image"), "", f"{OF_WORKER}[0].image"),
    (ELASTIC, {"nProcPerNode": 2}, "spec.elasticPolicy.nProcPerNode"),
]
PASSES = [
    (NAME, "d" * 63),
    (MANAGER, "kubeflow.org/training-operator"),
    (MANAGER, "kueue.x-k8s.io/multikueue"),
    (RUN, ...),
    ((*WORKER, "replicas"), 1),
    ((*WORKER, "replicas"), ...),
    (WORKER, ...),
    (MASTER, ...),
    (ELASTIC, {"nProcPerNode": None}),
]


def test_a_rendered_manifest_is_accepted(accepted):
    assert webhook_problems(accepted) == []


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [*REFUSED, (("apiVersion",), "kubeflow.org/v1beta1", "apiVersion"), (("kind",), "x", "kind")],
)
def test_what_the_webhook_refuses(accepted, path, value, field):
    assert field in fields(webhook_problems(changed(accepted, (path, value))))


@pytest.mark.parametrize(("path", "value"), PASSES)
def test_what_the_webhook_lets_pass(accepted, path, value):
    assert webhook_problems(changed(accepted, (path, value))) == []


def test_elastic_needs_workers(accepted):
    alone = changed(accepted, (WORKER, ...), (ELASTIC, {}))
    assert fields(webhook_problems(alone)) == [f"{REPLICAS}.Worker"]


def test_processes_per_node_stand_in_one_place(accepted):
    moved = changed(accepted, (ELASTIC, {"nProcPerNode": 2}), (NPROC, ...))
    assert webhook_problems(moved) == []


@pytest.mark.parametrize("value", [None, [], "text", 7, {"a": None}, [None], {"containers": 3}])
@pytest.mark.parametrize("length", range(1, 6))
def test_any_shape_is_judged(accepted, value, length):
    assert webhook_problems(changed(accepted, (CONTAINER[:length], value))) != []


# --- the environment; the numbers are those of the operator's source ------------------------------


def test_master_and_workers(job):
    spec = job(replicas={"workers": 3, "nproc_per_node": 2})
    common = {
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT"), "23456"),
        **dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR"), "digits-master-0"),
        "WORLD_SIZE": "8",
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "4",
    }
    for role, index, rank in (("Master", 0, "0"), ("Worker", 0, "1"), ("Worker", 2, "3")):
        env = replica_env(spec, role, index)
        assert env == {**common, "RANK": rank, "PET_NODE_RANK": rank}
        order = ["WORLD_SIZE", "RANK", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_NNODES"]
        assert list(env)[-5:] == order


def test_elastic_jobs_have_no_master(job):
    spec = job(replicas={"workers": 2, "elastic": {"min": 2, "max": 5}})
    assert replica_env(spec, "Worker", 2) == {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_ENDPOINT": "digits-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "2:5",
        "PET_MAX_RESTARTS": "3",
    }
    with pytest.raises(ValueError, match="no Master-0"):
        replica_env(spec, "Master", 0)


@pytest.mark.parametrize(
    ("role", "index"), [("Master", 1), ("Worker", 3), ("Worker", -1), ("Launcher", 0)]
)
def test_replicas_that_are_not_there(job, role, index):
    with pytest.raises(ValueError, match=role):
        replica_env(job(replicas={"workers": 3}), role, index)


@pytest.mark.parametrize(
    ("nproc", "world"), [("auto", "4"), ("gpu", "4"), ("2", "8"), ("+2", "8"), ("2.0", "4")]
)
def test_what_is_no_number_counts_as_one_process(accepted, nproc, world):
    env = operator_env(changed(accepted, (NPROC, nproc)), "Worker", 0)
    assert (env["WORLD_SIZE"], env["PET_NPROC_PER_NODE"]) == (world, nproc)


def bare(base):
    """A manifest that leaves all to the defaults."""
    roles = [MASTER, WORKER]
    ports = [((*role, *CONTAINERS, 0, "ports"), ...) for role in roles]
    return changed(base, (NPROC, ...), ((*WORKER, "replicas"), ...), *ports)


POLICIES = [
    ({}, {"PET_NNODES": "3:3", "PET_NPROC_PER_NODE": "1"}),
    ({"maxReplicas": 4}, {"PET_NNODES": "4:4"}),
    ({"minReplicas": 2}, {"PET_NNODES": "2:2"}),
    ({"minReplicas": 1, "maxReplicas": 5}, {"PET_NNODES": "1:5"}),
    ({"rdzvHost": "etcd", "rdzvPort": 2379}, {"PET_RDZV_ENDPOINT": "etcd:2379"}),
    ({"rdzvBackend": "etcd", "rdzvId": "x"}, {"PET_RDZV_BACKEND": "etcd", "PET_RDZV_ID": "x"}),
    ({"rdzvConf": [{"key": "a", "value": "1"}, {"key": "b"}]}, {"PET_RDZV_CONF": "a=1,b="}),
    ({"standalone": True}, {"PET_STANDALONE": ""}),
    ({"standalone": False}, {}),
    ({"maxRestarts": 0}, {"PET_MAX_RESTARTS": "0"}),
]


@pytest.mark.parametrize(("policy", "expected"), POLICIES)
def test_elastic_policies_of_foreign_manifests(accepted, policy, expected):
    foreign = changed(accepted, (MASTER, ...), (ELASTIC, policy))
    env = operator_env(foreign, "Worker", 0)
    assert expected.items() <= env.items()
    assert ("PET_STANDALONE" in env) is policy.get("standalone", False)


# --- the operator's own code ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """The operator's answers to a list of manifests; compiled like the test cluster's operator.

    Go keeps what it has compiled with the same flags, which takes minutes.
    """
    if shutil.which("go") is None:
        pytest.skip("the operator's code is compiled with go, which is not here; install go 1.23")
    folder = tmp_path_factory.mktemp("operator")
    (folder / "go.mod").write_text(
        "module example.org/ask\n\ngo 1.23.0\n\n"
        "require github.com/kubeflow/training-operator v1.9.4\n"
    )
    shutil.copy(PROGRAM, folder)
    build = subprocess.run(
        ["go", "build", "-mod=mod", "-trimpath", "-o", "ask", "."],
        cwd=folder,
        env={**os.environ, "GOFLAGS": "", "CGO_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    assert build.returncode == 0, build.stdout[-3000:]

    def question(manifests):
        given = json.dumps(manifests).encode()
        return json.loads(subprocess.check_output([folder / "ask"], input=given))

    return question


def shapes(job):
    """Jobs of every shape, as k8sjob renders them."""
    for workers, nproc in itertools.product((0, 1, 3), (None, 1, 4)):
        yield manifest(job(replicas={"workers": workers, "nproc_per_node": nproc})).document
    for low, high in ((1, 3), (3, 3), (2, 9)):
        elastic = {"workers": 2, "elastic": {"min": low, "max": high}}
        yield manifest(job(replicas=elastic, policy={"max_restarts": low})).document


def foreign(base):
    """Manifests as others write them: fields left out, elastic policies of all kinds."""
    for nproc in ("auto", "gpu", "cpu", "2", "+2", "-2", "2.0", "", " 2", "٢", ...):
        yield changed(base, (NPROC, nproc))
    for policy, _ in POLICIES:
        yield changed(base, (ELASTIC, policy))
        yield changed(base, (ELASTIC, policy), (MASTER, ...))
    yield bare(base)
    yield changed(bare(base), (ELASTIC, {"nProcPerNode": 3}))
    for ports in ([PORT | {"containerPort": 1}], [PORT | {"name": "http"}]):
        yield changed(base, ((*MASTER, *CONTAINERS, 0, "ports"), ports))


@pytest.mark.cluster  # go compiles the operator's code
def test_the_environment_is_the_operators(job, accepted, ask):
    manifests = [*shapes(job), *foreign(accepted)]
    compared = 0
    for given, reply in zip(manifests, ask(manifests), strict=True):
        assert bool(webhook_problems(given)) == bool(reply["refused"]), reply["refused"]
        for replica, variables in (reply["env"] or {}).items():
            role, index = replica.split("-")
            # The last of two variables of one name is the one that counts.
            expected = {item["name"]: item.get("value", "") for item in variables}
            assert operator_env(given, role, int(index)) == expected, given["spec"]
            compared += 1
    assert compared > 60


@pytest.mark.cluster
def test_the_webhook_refuses_what_we_refuse(accepted, ask):
    manifests = [changed(accepted, case[:2]) for case in (*REFUSED, *PASSES)]
    manifests += [changed(accepted, (WORKER, ...), (ELASTIC, {})), changed(accepted, (ROLES, {}))]
    for given, reply in zip(manifests, ask(manifests), strict=True):
        problems = webhook_problems(given)
        assert bool(problems) == bool(reply["refused"]), (reply["refused"], problems)
