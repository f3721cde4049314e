"""What a bed only pretends to have: GPUs on its node, and nodes without machines."""

import json

from .build import KWOK, module_folder

NODE = "/api/v1/nodes/node"
GPU = "nvidia.com/gpu"
MARK = "kwok.x-k8s.io/node"  # annotation, label and taint of a fake node
SELECTOR = f"{MARK}=fake"
STAGES = ("node/fast", "pod/fast")


def node_is_ready(access):
    """Whether the real node takes pods."""
    return _is_ready(json.loads(access.request("GET", NODE)[1]))


def ready(access):
    """How many of the fake nodes take pods."""
    answer = access.request("GET", f"/api/v1/nodes?labelSelector={SELECTOR}")[1]
    return sum(map(_is_ready, json.loads(answer).get("items", ())))


def _is_ready(found):
    conditions = found.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def set_gpus(access, count):
    """Write the node's capacity; the kubelet keeps what it does not know of."""
    change = {"status": {"capacity": {GPU: str(count)}, "allocatable": {GPU: str(count)}}}
    kind = "application/strategic-merge-patch+json"
    access.request("PATCH", f"{NODE}/status", change, kind)


def gpus(access):
    """How many GPUs the scheduler sees on the node."""
    status = json.loads(access.request("GET", NODE)[1]).get("status", {})
    return int(status.get("allocatable", {}).get(GPU, "0"))


def stages():
    """kwok's own stages, which make nodes ready and pods run at once."""
    folder = module_folder(KWOK) / "kustomize/stage"
    texts = []
    for name in STAGES:
        files = sorted((folder / name).glob("*.yaml"))
        texts += [file.read_text() for file in files if file.name != "kustomization.yaml"]
    return "\n---\n".join(texts)


def create_nodes(access, count, gpus):
    """Create the fake nodes."""
    for number in range(count):
        access.request("POST", "/api/v1/nodes", node(f"fake-{number}", gpus))


def node(name, gpus):
    """A node that only kwok looks after."""
    size = {"cpu": "64", "memory": "512Gi", "pods": "1000", GPU: str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {MARK: "fake"}, "labels": {MARK: "fake"}},
        "spec": {"taints": [{"key": MARK, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"capacity": size, "allocatable": size},
    }
