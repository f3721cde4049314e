"""A way to write a PyTorchJob down to what a test is about."""

import copy

import pytest

CONTAINER = {"name": "pytorch", "image": "train:1", "command": ["python", "main.py"]}


@pytest.fixture
def pytorchjob():
    """A function that makes a sound PyTorchJob: its containers' fields, its pods', its own."""

    def make(container=None, pod=None, *, workers=3, master=True, **spec):
        def replica(count):
            merged = {**copy.deepcopy(CONTAINER), **(container or {})}
            template = {"spec": {"containers": [merged], **(pod or {})}}
            return {"replicas": count, "template": template}

        roles = {"Master": replica(1)} if master else {}
        if workers:
            roles["Worker"] = replica(workers)
        policy = {"backoffLimit": 3 * (workers + 1) + 1, "cleanPodPolicy": "Running"}
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": "digits"},
            "spec": {"runPolicy": policy, **spec, "pytorchReplicaSpecs": roles},
        }

    return make
