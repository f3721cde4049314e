"""manifests/network-policy.yaml: it is accepted, and selects the pods of its job and no others."""

import json
from pathlib import Path

import pytest
import yaml

MANIFEST = Path(__file__).resolve().parents[2] / "manifests/network-policy.yaml"
CLOSED = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "closed"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
}
PORT = 23456


def policy(job):
    """The policy for a job, as the first line of the file says."""
    return MANIFEST.read_text().replace("digits-ddp", job)


@pytest.fixture
def jobs(desk, eventually, get):
    """Two jobs of two pods each, which listen: "a" and "b"."""
    listen = f"python3 -m http.server {PORT}"
    for name in ("a", "b"):
        desk.call("submit", desk.file(listen, name=name))
    eventually(
        lambda: [pod["status"]["phase"] for pod in get("pods")] == ["Running"] * 4, "four pods"
    )


@pytest.fixture
def reaches(cluster, namespace, get):
    """Whether one pod can connect to another one."""

    def connect(here, there):
        address = get("pods", there)["status"]["podIP"]
        code = f"import socket; socket.create_connection(('{address}', {PORT}), 3)"
        argv = ("exec", here, "-c", "pytorch", "-n", namespace, "--", "python3", "-c", code)
        return cluster.kubectl(*argv, check=False).returncode == 0

    return connect


def test_it_selects_the_pods_of_its_job_and_no_others(cluster, namespace, jobs):
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=policy("a"))
    argv = ("get", "networkpolicy", "a", "-n", namespace, "-o", "json")
    spec = json.loads(cluster.kubectl(*argv).stdout)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    [into], [out, dns] = spec["ingress"], spec["egress"]
    # As long as all of them are one selector, it is enough to look at whom it selects.
    assert into["from"] == out["to"] == [{"podSelector": spec["podSelector"]}]
    assert {port["port"] for port in dns["ports"]} == {53}
    labels = ",".join(f"{key}={value}" for key, value in spec["podSelector"]["matchLabels"].items())
    found = cluster.kubectl("get", "pods", "-n", namespace, "-l", labels, "-o", "name").stdout
    assert sorted(found.split()) == ["pod/a-master-0", "pod/a-worker-0"]


def test_the_apiserver_finds_nothing_to_warn_of(cluster, namespace):
    argv = ("apply", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-")
    done = cluster.kubectl(*argv, stdin=policy("my-job"))
    assert done.stdout == "networkpolicy.networking.k8s.io/my-job created (server dry run)\n"
    assert done.stderr == ""


def test_the_job_is_named_once():
    assert MANIFEST.read_text().count("digits-ddp") == 2  # the other one is in the first lines
    spec = yaml.safe_load(policy("my-job"))
    assert spec["metadata"]["name"] == "my-job"
    assert json.dumps(spec).count("my-job") == 4


def test_a_job_with_it_is_closed_to_others(request, cluster, namespace, reaches, eventually):
    if cluster.node_folder:
        pytest.skip("no network plugin of a bed enforces a NetworkPolicy")
    request.getfixturevalue("jobs")
    eventually(lambda: reaches("b-master-0", "a-master-0"), "the way in")
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(CLOSED))
    for _ in range(10):
        enforced = not reaches("b-master-0", "a-master-0")
        if enforced:
            break
    else:
        pytest.skip("the network plugin of this cluster enforces no NetworkPolicy")
    cluster.kubectl("delete", "networkpolicy", "closed", "-n", namespace)
    eventually(lambda: reaches("b-master-0", "a-master-0"), "the way to be open again")
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=policy("a"))
    eventually(lambda: not reaches("b-master-0", "a-master-0"), "the way in to be closed")
    eventually(lambda: not reaches("a-master-0", "b-master-0"), "the way out to be closed")
    assert reaches("a-worker-0", "a-master-0")
    assert reaches("a-master-0", "a-worker-0")
