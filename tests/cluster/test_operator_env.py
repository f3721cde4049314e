"""What k8sjob foretells about the operator, against the operator: environments and refusals."""

import copy
import re

import pytest

from k8sjob.kube.client.transport import ApiError
from k8sjob.rendering.manifest import manifest, replica_env
from k8sjob.spec import JobSpec
from k8sjob.targets.pytorchjob.operator import webhook_problems

ROLE = ("spec", "pytorchReplicaSpecs")
MASTER, WORKER = (*ROLE, "Master"), (*ROLE, "Worker")
CONTAINERS = ("template", "spec", "containers")
ABSENT = object()


def job(cluster, **fields):
    """A job whose pods sleep: it is their objects that are looked at."""
    given = {"name": "digits", "image": cluster.base_image, "run": {"command": ["sleep", "600"]}}
    return JobSpec(**{**given, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"replicas": {"workers": 3, "nproc_per_node": 2}},
        {"replicas": {"workers": 0}},
        {
            "replicas": {"workers": 3, "elastic": {"min": 2, "max": 4}},
            "run": {"command": ["torchrun", "main.py"]},
        },
    ],
    ids=["1+3 of 2", "alone", "elastic"],
)
def test_replicas_get_the_environment_that_was_predicted(
    cluster, namespace, get, eventually, fields
):
    spec = job(cluster, **fields)
    document = manifest(spec).document
    replicas = {
        (role, index)
        for role, replica in document["spec"]["pytorchReplicaSpecs"].items()
        for index in range(replica["replicas"])
    }
    cluster.create(document, namespace)
    names = {f"digits-{role.lower()}-{index}": (role, index) for role, index in replicas}

    def pods():
        found = {pod["metadata"]["name"]: pod for pod in get("pods")}
        return found if found.keys() == names.keys() else None

    for name, pod in eventually(pods, f"pods {sorted(names)}").items():
        (container,) = pod["spec"]["containers"]
        own = document["spec"]["pytorchReplicaSpecs"][names[name][0]]["template"]["spec"]
        written = own["containers"][0].get("env", [])
        # The operator's come after the job's own, in this order.
        injected = container["env"][len(written) :]
        expected = replica_env(spec, *names[name])
        assert [(item["name"], item.get("value", "")) for item in injected] == list(
            expected.items()
        )


def changed(document, path, value):
    """A copy with one field set, or taken away."""
    document = copy.deepcopy(document)
    *way, last = path
    part = document
    for key in way:
        part = part[key]
    if value is ABSENT:
        del part[last]
    else:
        part[last] = value
    return document


REFUSED = [
    (("metadata", "name"), "1digits"),
    (("metadata", "name"), "d.igits"),
    (("metadata", "name"), "d" * 64),
    (("spec", "runPolicy", "managedBy"), "me"),
    ((*ROLE, "worker"), {"template": {}}),
    ((*MASTER, "replicas"), 2),
    ((*MASTER, "replicas"), 0),
    ((*MASTER, "replicas"), ABSENT),
    ((*WORKER, "replicas"), 0),
    ((*WORKER, *CONTAINERS), []),
    ((*WORKER, *CONTAINERS, 0, "name"), "torch"),
    ((*WORKER, *CONTAINERS, 0, "image"), ABSENT),
    ((*WORKER, *CONTAINERS), [{"name": "pytorch", "image": "x"}, {"name": "side"}]),
    (("spec", "elasticPolicy"), {"nProcPerNode": 2}),
]
ACCEPTED = [
    (("metadata", "name"), "d" * 63),
    (("spec", "runPolicy", "managedBy"), "kueue.x-k8s.io/multikueue"),
    (("spec", "runPolicy"), ABSENT),
    ((*WORKER, "replicas"), ABSENT),
    (MASTER, ABSENT),
    (WORKER, ABSENT),
    (("spec", "nprocPerNode"), "gpu"),
]


def refusal(cluster, namespace, document):
    """What the cluster says against the manifest, without keeping it; empty where it takes it."""
    try:
        cluster.create(document, namespace, dryRun="All", fieldValidation="Strict")
    except ApiError as error:
        return error.detail
    return ""


@pytest.mark.parametrize(("path", "value"), REFUSED)
def test_what_we_refuse_the_webhook_refuses_for_the_same_field(cluster, team, path, value):
    document = changed(manifest(job(cluster, replicas={"workers": 3})).document, path, value)
    detail = refusal(cluster, team, document)
    assert "denied the request" in detail
    problems = webhook_problems(document)
    assert problems
    for problem in problems:
        # The webhook puts a role into brackets, as Kubernetes does with the keys of a map.
        field = re.sub(r"(pytorchReplicaSpecs)\.(\w+)", r"\1[\2]", problem.field)
        assert f"{field}: " in detail


@pytest.mark.parametrize(("path", "value"), ACCEPTED)
def test_what_we_accept_the_webhook_accepts(cluster, team, path, value):
    document = changed(manifest(job(cluster, replicas={"workers": 3})).document, path, value)
    assert webhook_problems(document) == []
    assert refusal(cluster, team, document) == ""


@pytest.fixture(scope="module")
def team(cluster):
    """One namespace for all dry runs, which leave nothing in it."""
    cluster.create({"kind": "Namespace", "metadata": {"name": "test-dry-runs"}})
    yield "test-dry-runs"
    cluster.delete("namespaces", "test-dry-runs")
