"""Every rule of the operator's webhook: what is refused, and that its neighbour is not."""

from copy import deepcopy

import pytest

from k8sjob.rendering import manifest
from k8sjob.targets.pytorchjob.operator import webhook_problems

REPLICAS = "spec.pytorchReplicaSpecs"


@pytest.fixture
def accepted(job):
    return manifest(job(namespace="team", replicas={"workers": 3}))


def changed(document, path, value):
    """A copy with one field set, or taken away where the value is `...`."""
    document = deepcopy(document)
    *way, last = path
    part = document
    for key in way:
        part = part[key]
    if value is ...:
        del part[last]
    else:
        part[last] = value
    return document


ROLE = ("spec", "pytorchReplicaSpecs")
WORKER = (*ROLE, "Worker")
CONTAINER = (*WORKER, "template", "spec", "containers", 0)


def test_a_rendered_manifest_is_accepted(accepted):
    assert webhook_problems(accepted) == []


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("apiVersion",), "kubeflow.org/v1beta1", "apiVersion"),
        (("kind",), "TFJob", "kind"),
        (("metadata", "name"), "Digits", "metadata.name"),
        (("metadata", "name"), "1digits", "metadata.name"),
        (("metadata", "name"), "digits-", "metadata.name"),
        (("metadata", "name"), "d.igits", "metadata.name"),
        (("metadata", "name"), "digits\n", "metadata.name"),
        (("metadata", "name"), "d" * 64, "metadata.name"),
        (("metadata", "name"), ..., "metadata.name"),
        (("spec", "runPolicy", "managedBy"), "me", "spec.runPolicy.managedBy"),
        (("spec", "runPolicy", "managedBy"), "", "spec.runPolicy.managedBy"),
        (ROLE, ..., REPLICAS),
        (ROLE, None, REPLICAS),
        ((*ROLE, "worker"), {"template": {}}, f"{REPLICAS}[worker]"),
        ((*ROLE, "Master", "replicas"), 2, f"{REPLICAS}[Master].replicas"),
        ((*ROLE, "Master", "replicas"), 0, f"{REPLICAS}[Master].replicas"),
        ((*ROLE, "Master", "replicas"), ..., f"{REPLICAS}[Master].replicas"),
        ((*WORKER, "replicas"), 0, f"{REPLICAS}[Worker].replicas"),
        ((*WORKER, "replicas"), -1, f"{REPLICAS}[Worker].replicas"),
        (WORKER, None, f"{REPLICAS}[Worker].template.spec.containers"),
        ((*CONTAINER[:-1],), [], f"{REPLICAS}[Worker].template.spec.containers"),
        ((*CONTAINER, "image"), "", f"{REPLICAS}[Worker].template.spec.containers[0].image"),
        ((*CONTAINER, "image"), ..., f"{REPLICAS}[Worker].template.spec.containers[0].image"),
        ((*CONTAINER, "name"), "torch", f"{REPLICAS}[Worker].template.spec.containers"),
    ],
)
def test_what_the_webhook_refuses(accepted, path, value, field):
    problems = webhook_problems(changed(accepted, path, value))
    assert field in [problem.field for problem in problems]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("metadata", "name"), "d" * 63),
        (("spec", "runPolicy", "managedBy"), "kubeflow.org/training-operator"),
        (("spec", "runPolicy", "managedBy"), "kueue.x-k8s.io/multikueue"),
        (("spec", "runPolicy"), ...),
        ((*WORKER, "replicas"), ...),
        (WORKER, ...),
        ((*ROLE, "Master"), ...),
        (("spec", "elasticPolicy"), {"nProcPerNode": None}),
    ],
)
def test_what_the_webhook_lets_pass(accepted, path, value):
    assert webhook_problems(changed(accepted, path, value)) == []


def test_elastic_needs_workers(accepted):
    manifest = changed(changed(accepted, WORKER, ...), ("spec", "elasticPolicy"), {})
    assert [problem.field for problem in webhook_problems(manifest)] == [f"{REPLICAS}[Worker]"]


def test_processes_per_node_stand_in_one_place(accepted):
    twice = changed(accepted, ("spec", "elasticPolicy"), {"nProcPerNode": 2})
    assert [p.field for p in webhook_problems(twice)] == ["spec.elasticPolicy.nProcPerNode"]
    assert webhook_problems(changed(twice, ("spec", "nprocPerNode"), ...)) == []


def test_a_second_container_needs_an_image_too(accepted):
    containers = [{"name": "pytorch", "image": "x"}, {"name": "side"}]
    problems = webhook_problems(changed(accepted, CONTAINER[:-1], containers))
    assert [p.field for p in problems] == [f"{REPLICAS}[Worker].template.spec.containers[1].image"]


@pytest.mark.parametrize("value", [None, [], "text", 7, {"a": None}, [None], {"containers": 3}])
@pytest.mark.parametrize("length", range(1, 6))
def test_any_shape_is_judged(accepted, value, length):
    path = CONTAINER[:length]
    assert webhook_problems(changed(accepted, path, value)) != []
