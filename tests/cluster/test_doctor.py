"""What the doctor says of a real cluster, well and ill."""

import json
from pathlib import Path

import pytest
from cluster import commands

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/set-up-a-cluster.md"
VALIDATOR = "validator.pytorchjob.training-operator.kubeflow.org"
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
GIVES_UP = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 65534,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture
def doctor(cluster, namespace):
    """The checks by topic, as `k8sjob doctor -o json` gives them, and its exit code."""

    def examine(*args, env=None):
        where = ("-n", namespace, "-o", "json")
        done = commands.run("doctor", *where, *args, env=cluster.env | (env or {}))
        assert done.stdout, done.stderr
        checks = {}
        for check in json.loads(done.stdout)["checks"]:
            checks.setdefault(check["topic"], []).append(check)
        return checks, done.returncode

    return examine


@pytest.fixture
def gpus(bed):
    """The bed, whose node has 8 GPUs."""
    bed.fake_gpus(8)
    yield bed
    bed.fake_gpus(0)


@pytest.fixture
def job_file(cluster, tmp_path):
    """Writes a small job.yaml with further lines."""

    def write(*lines):
        file = tmp_path / "job.yaml"
        text = ["name: digits", f"image: {cluster.base_image}", "run: {command: [sleep, '1']}"]
        file.write_text("\n".join([*text, *lines]) + "\n")
        return file

    return write


def apply(cluster, namespace, kind, name, api="v1", **content):
    made = {"apiVersion": api, "kind": kind, "metadata": {"name": name, "namespace": namespace}}
    cluster.create(made | content, namespace)


@pytest.mark.parametrize("client", ["python", "kubectl"])
def test_a_cluster_where_jobs_can_be_submitted(client, doctor, get):
    checks, code = doctor("--client", client)
    assert code == 0
    assert VALIDATOR in checks["webhook"][0]["seen"]
    for topic in ("server", "permissions", "crd", "webhook", "operator", "dry-run"):
        assert [check["verdict"] for check in checks[topic]] == ["ok"], checks[topic]
    assert not get("pytorchjobs")  # nothing was created


def test_a_namespace_that_is_not_there(doctor):
    checks, code = doctor("-n", "not-there")
    assert code == 1
    assert checks["namespace"][0]["seen"] == "there is no namespace not-there"


def test_everything_that_a_job_lacks_is_found_before_it_is_made(doctor, job_file, get):
    file = job_file(
        "resources: {cpu: 500, memory: 1Ti}",
        "volumes: [{name: d, mount: /d, pvc: data}, {name: s, mount: /s, secret: keys}]",
        "service_account: trainer",
        "priority_class: high",
        "runtime_class: nvidia",
    )
    checks, code = doctor(file)
    assert code == 1
    missing = {check["seen"].split(" in ")[0] for check in checks["objects"]}
    assert missing == {
        "there is no service account trainer",
        "there is no claim data",
        "there is no secret keys",
        "there is no priority class high",
        "there is no runtime class nvidia",
    }
    assert "too large for every node" in checks["fit"][0]["seen"]
    assert not get("pytorchjobs")


def test_what_is_there_is_found(cluster, namespace, doctor, job_file):
    cluster.kubectl("create", "secret", "generic", "keys", "--from-literal=k=v", "-n", namespace)
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    apply(cluster, namespace, "PersistentVolumeClaim", "data", spec=claim)
    volumes = "volumes: [{name: d, mount: /d, pvc: data}, {name: s, mount: /s, secret: keys}]"
    checks, code = doctor(job_file(volumes, "replicas: {workers: 1}"))
    assert code == 0
    shared, there = checks["objects"]
    assert (shared["verdict"], "ReadWriteOnce:" in shared["seen"]) == ("warning", True)
    assert there["seen"] == "found: claim data, secret keys"


def test_what_the_apiserver_would_refuse(doctor, job_file):
    checks, code = doctor(job_file("overlay: {spec: {runPolcy: {}}}"))
    assert code == 1
    assert 'unknown field "spec.runPolcy"' in checks["dry-run"][0]["seen"]


def test_a_quota_that_the_job_would_exceed(cluster, namespace, doctor, job_file, eventually):
    hard = {"pods": "3", "requests.cpu": "1", "limits.memory": "1Gi"}
    apply(cluster, namespace, "ResourceQuota", "small", spec={"hard": hard})
    resources = "resources: {cpu: 100m, memory: 64Mi}"
    small = ("resourcequotas", "small", namespace)
    eventually(lambda: cluster.read(*small)["status"].get("used"), "the quota to be counted")
    fits, code = doctor(job_file(resources, "replicas: {workers: 2}"))
    assert (fits["quota"][0]["verdict"], code) == ("ok", 0)
    large, code = doctor(job_file(resources, "replicas: {workers: 3}"))
    assert large["quota"][0]["seen"] == "small has too little pods"
    assert code == 1
    silent, code = doctor(job_file())
    assert "requires every container to set" in silent["quota"][1]["seen"]
    assert code == 1


def test_free_gpus_are_what_running_pods_leave(gpus, namespace, doctor, job_file, eventually):
    file = job_file("resources: {gpus: 3}", "replicas: {workers: 2}")

    def all_free():  # a node is not ready for seconds after a component of the bed began anew
        checks, _ = doctor(file)
        return checks["devices"][0]["seen"] == "nvidia.com/gpu: 8 of 8 free" and checks

    checks = eventually(all_free, "8 of 8 GPUs to be free")
    assert checks["fit"][0]["seen"].startswith("2 of 3 replicas fit now")
    container = {
        "name": "c",
        "image": gpus.base_image,
        "command": ["sleep", "600"],
        "resources": {"limits": {"nvidia.com/gpu": "5"}},
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    apply(gpus, namespace, "Pod", "other", spec=spec)
    other = ("pods", "other", namespace)
    eventually(lambda: gpus.read(*other)["spec"].get("nodeName"), "the pod to be scheduled")
    checks, _ = doctor(file)
    assert checks["devices"][0]["seen"] == "nvidia.com/gpu: 3 of 8 free"
    assert checks["devices"][0]["details"] == ["node: 3 of 8 free"]
    gpus.delete(*other)


def test_an_operator_that_does_not_answer(bed, doctor):
    bed.stop("operator")
    checks, code = doctor()
    assert code == 1
    assert checks["webhook"][0]["verdict"] == "problem"
    assert "connection refused" in checks["webhook"][0]["seen"]


def test_an_apiserver_that_does_not_answer(bed, doctor):
    bed.stop("apiserver")
    checks, code = doctor()
    bed.start("apiserver")  # the end of the namespace asks it
    assert code == 1
    assert set(checks) == {"server"}
    assert checks["server"][0]["verdict"] == "problem"


@pytest.fixture
def restricted(bed, namespace, get, pytorchjob):
    """A restricted namespace with a job whose own containers it lets in; its pods' phases."""
    bed.kubectl("label", "namespace", namespace, RESTRICTED)
    sleeps = ["sleep", "600"]
    bed.create(pytorchjob("r", sleeps, sleeps, securityContext=GIVES_UP), namespace)
    return lambda: [pod["status"]["phase"] for pod in get("pods") or ()]


def test_a_restricted_namespace_and_the_template_of_the_documentation(
    restricted, with_template, doctor, eventually, get
):
    refused = eventually(
        lambda: [e for e in get("events") if e["reason"] == "FailedCreatePod"], "the refusal"
    )
    assert 'container "init-pytorch" must set' in refused[0]["message"]
    checks, code = doctor()
    assert (checks["pod-security"][0]["verdict"], code) == ("warning", 0)

    text = PAGE.read_text()
    with_template(text[text.index("- name: init-pytorch") :].partition("```")[0])
    eventually(lambda: restricted() == ["Running"] * 2, "two pods")
    checks, code = doctor()
    assert (checks["pod-security"][0]["verdict"], code) == ("ok", 0)
    assert checks["pod-security"][0]["seen"].endswith("init container complies, as pods here show")
    assert "pulled on 1 node," in checks["init-image"][0]["seen"]
    assert "init-wait" not in checks  # that template asks at once again
