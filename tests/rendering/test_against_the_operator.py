"""The webhook's rules and the environment, compared with the operator's own code, compiled."""

import itertools
import json
import os
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest

from k8sjob.rendering import manifest
from k8sjob.targets.pytorchjob.operator import operator_env, webhook_problems

pytestmark = pytest.mark.cluster  # go compiles the operator's code
PROGRAM = Path(__file__).parent / "operator/main.go"


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """The operator's answers to a list of manifests. Go keeps what it has compiled."""
    if shutil.which("go") is None:
        pytest.skip("the operator's code is compiled with go, which is not here; install go 1.23")
    folder = tmp_path_factory.mktemp("operator")
    (folder / "go.mod").write_text(
        "module example.org/ask\n\ngo 1.23.0\n\n"
        "require github.com/kubeflow/training-operator v1.9.4\n"
    )
    shutil.copy(PROGRAM, folder)
    build = subprocess.run(
        ["go", "build", "-mod=mod", "-o", "ask", "."],
        cwd=folder,
        env={**os.environ, "GOFLAGS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    assert build.returncode == 0, build.stdout[-3000:]

    def question(manifests):
        done = subprocess.run(
            [folder / "ask"],
            input=json.dumps(manifests),
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    return question


def shapes(job):
    """Jobs of every shape, as k8sjob renders them."""
    for workers, nproc in itertools.product((0, 1, 3), (None, 1, 4)):
        yield manifest(job(replicas={"workers": workers, "nproc_per_node": nproc}))
    for low, high in ((1, 3), (3, 3), (2, 9)):
        elastic = {"workers": 2, "elastic": {"min": low, "max": high}}
        yield manifest(job(replicas=elastic, policy={"max_restarts": low}))


def foreign(base):
    """Manifests as others write them: fields left out, elastic policies of all kinds."""
    for nproc in ("auto", "gpu", "cpu", "2", "+2", "-2", "2.0", "", " 2", "٢", None):
        yield changed(base, ("spec", "nprocPerNode"), nproc)
    no_master = changed(base, (*ROLES, "Master"), None)
    for start, policy in itertools.product(
        (base, no_master),
        (
            {},
            {"minReplicas": 1},
            {"maxReplicas": 5},
            {"minReplicas": 1, "maxReplicas": 5},
            {"rdzvBackend": "etcd", "rdzvHost": "etcd", "rdzvPort": 2379, "rdzvId": "x"},
            {"rdzvConf": [{"key": "a", "value": "1"}, {"key": "b", "value": ""}]},
            {"standalone": True, "maxRestarts": 0},
            {"standalone": False},
        ),
    ):
        yield changed(start, ("spec", "elasticPolicy"), policy)
    bare = changed(changed(base, ("spec", "nprocPerNode"), None), (*WORKER, "replicas"), None)
    yield changed(bare, (*CONTAINER, "ports"), None)
    yield changed(bare, ("spec", "elasticPolicy"), {"nProcPerNode": 3})
    yield changed(
        bare, (*MASTER, *CONTAINER[len(WORKER) :], "ports"), [PORT | {"containerPort": 1}]
    )
    yield changed(base, (*MASTER, *CONTAINER[len(WORKER) :], "ports"), [PORT | {"name": "http"}])


def wrong(base):
    """Manifests that something is wrong with, or that look as if."""
    for name in ("Digits", "1a", "a-", "a.b", "a" * 63, "a" * 64, "-", "", "a\n", "é"):
        yield changed(base, ("metadata", "name"), name)
    for manager in ("", "me", "kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue"):
        yield changed(base, ("spec", "runPolicy", "managedBy"), manager)
    for role, count in itertools.product((MASTER, WORKER), (-1, 0, 1, 2, None)):
        yield changed(base, (*role, "replicas"), count)
    for role in ("master", "worker", "Launcher"):
        yield changed(base, (*ROLES, role), base["spec"]["pytorchReplicaSpecs"]["Worker"])
    yield changed(base, ("spec", "pytorchReplicaSpecs"), None)
    yield changed(base, ("spec", "pytorchReplicaSpecs"), {})
    yield changed(base, (*ROLES, "Worker"), None)
    for containers in ([], [{"name": "x", "image": "y"}], [{"name": "pytorch"}]):
        yield changed(base, CONTAINER[:-1], containers)
    both = [{"name": "pytorch", "image": "x"}, {"name": "side"}]
    yield changed(base, CONTAINER[:-1], both)
    yield changed(base, ("spec", "elasticPolicy"), {"nProcPerNode": 2})
    master_only = changed(base, (*ROLES, "Worker"), None)
    yield changed(master_only, ("spec", "elasticPolicy"), {})


ROLES = ("spec", "pytorchReplicaSpecs")
MASTER, WORKER = (*ROLES, "Master"), (*ROLES, "Worker")
CONTAINER = (*WORKER, "template", "spec", "containers", 0)
PORT = {"name": "pytorchjob-port", "containerPort": 29500}


def changed(document, path, value):
    """A copy with one field set, or taken away for None."""
    document = deepcopy(document)
    *way, last = path
    part = document
    for key in way:
        part = part[key]
    if value is None:
        part.pop(last, None)
    else:
        part[last] = value
    return document


def test_the_environment_is_the_operators(job, ask):
    base = manifest(job(replicas={"workers": 2}))
    manifests = [*shapes(job), *foreign(base)]
    accepted = 0
    for given, reply in zip(manifests, ask(manifests), strict=True):
        assert bool(webhook_problems(given)) == bool(reply["refused"]), reply["refused"]
        for replica, variables in (reply["env"] or {}).items():
            role, index = replica.split("-")
            # The last of two variables of one name is the one that counts.
            expected = {item["name"]: item.get("value", "") for item in variables}
            assert operator_env(given, role, int(index)) == expected, given["spec"]
            accepted += 1
    assert accepted > 60


def test_the_webhook_refuses_what_we_refuse(job, ask):
    manifests = list(wrong(manifest(job(replicas={"workers": 2}))))
    replies = ask(manifests)
    assert 10 < sum(bool(reply["refused"]) for reply in replies) < len(manifests) - 5
    for given, reply in zip(manifests, replies, strict=True):
        problems = webhook_problems(given)
        assert bool(problems) == bool(reply["refused"]), (reply["refused"], problems)
