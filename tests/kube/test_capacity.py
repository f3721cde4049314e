from decimal import Decimal

import pytest

from k8sjob.kube.capacity import (
    amounts,
    as_text,
    counts_gpus,
    devices,
    nodes_of,
    pod_requests,
    requested_by_node,
)


def container(cpu=None, *, always=False, limits=None, **more):
    requests = {"cpu": cpu} if cpu else {}
    sidecar = {"restartPolicy": "Always"} if always else {}
    return {"resources": {"requests": requests | more, "limits": limits or {}}, **sidecar}


def test_containers_add_up_and_init_containers_do_not():
    spec = {
        "initContainers": [container("3"), container("1")],
        "containers": [container("1"), container("500m")],
        "overhead": {"cpu": "250m"},
    }
    assert pod_requests(spec)["cpu"] == Decimal("3.25")
    assert pod_requests(spec)["pods"] == 1


def test_a_sidecar_stays_beside_what_comes_after_it():
    spec = {
        "initContainers": [container("1", always=True), container("2")],
        "containers": [container("1")],
    }
    assert pod_requests(spec)["cpu"] == 3


def test_a_limit_is_taken_for_a_request_that_is_not_there():
    spec = {"containers": [container("1", limits={"cpu": "4", "nvidia.com/gpu": "2"})]}
    assert pod_requests(spec) == {"cpu": 1, "nvidia.com/gpu": 2, "pods": 1}
    assert pod_requests(spec, "limits") == {"cpu": 4, "nvidia.com/gpu": 2, "pods": 1}


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_pods_that_ended_and_pods_without_a_node_take_nothing(phase):
    def pod(node, phase):
        return {
            "spec": {"nodeName": node, "containers": [container("2")]},
            "status": {"phase": phase},
        }

    pods = [pod("a", "Running"), pod("a", "Pending"), pod("a", phase), pod("", "Pending")]
    assert requested_by_node(pods) == {"a": {"cpu": 4, "pods": 2}}


def test_a_node_in_trouble_has_nothing_free():
    def item(name, *, cordoned=False, ready="True"):
        return {
            "metadata": {"name": name},
            "spec": {"unschedulable": cordoned},
            "status": {
                "allocatable": {"nvidia.com/gpu": "8"},
                "conditions": [{"type": "Ready", "status": ready}],
            },
        }

    used = {"a": {"nvidia.com/gpu": Decimal(3)}, "over": {"nvidia.com/gpu": Decimal(9)}}
    items = [item("a"), item("b", cordoned=True), item("c", ready="Unknown"), item("over")]
    nodes = nodes_of(items, used)
    assert [node.free("nvidia.com/gpu") for node in nodes] == [5, 0, 0, 0]
    assert [node.trouble for node in nodes] == ["", "cordoned", "not ready", ""]


def test_devices_are_distinguished_by_resource_and_model():
    def item(name, offers, **labels):
        labels = {key.replace("__", "/").replace("_", "."): v for key, v in labels.items()}
        return {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": offers}}

    h100 = {"nvidia_com__gpu_product": "H100"}
    nodes = nodes_of(
        [
            item("a", {"nvidia.com/gpu": "8", "cpu": "4", "rdma/hca": "1"}, **h100),
            item("b", {"nvidia.com/gpu": "4"}),
            item("c", {"amd.com/gpu": "2", "hugepages-2Mi": "0", "example.kubernetes.io/x": "1"}),
            item("d", {"nvidia.com/gpu": "0"}),
        ],
        {},
    )
    found = {key: [node.name for node in those] for key, those in devices(nodes).items()}
    assert found == {
        ("nvidia.com/gpu", "H100"): ["a"],
        ("nvidia.com/gpu", ""): ["b"],
        ("amd.com/gpu", ""): ["c"],
        ("rdma/hca", ""): ["a"],
    }


def test_what_is_no_quantity_is_left_out():
    assert amounts({"cpu": "4", "memory": "lots", "pods": 3}) == {"cpu": 4, "pods": 3}
    assert amounts(None) == {}


@pytest.mark.parametrize(
    ("resource", "amount", "text"),
    [
        ("memory", 33554432 * 1024, "32Gi"),
        ("requests.memory", 1536 * 2**20, "1.5Gi"),
        ("cpu", "3.500", "3.5"),
        ("nvidia.com/gpu", 100, "100"),
    ],
)
def test_amounts_are_reported_as_people_read_them(resource, amount, text):
    assert as_text(resource, Decimal(amount)) == text


@pytest.mark.parametrize(
    ("resource", "counts"),
    [
        ("nvidia.com/gpu", True),
        ("nvidia.com/mig-1g.5gb.me", True),
        ("volcano.sh/vgpu-number", True),
        ("aliyun.com/gpu-mem", False),
        ("nvidia.com/gpumem-percentage", False),
        ("gpu.example/port", False),
        ("cpu", False),
    ],
)
def test_memory_and_cores_of_a_gpu_are_no_gpus(resource, counts):
    assert counts_gpus(resource) is counts
