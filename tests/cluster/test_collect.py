"""`k8sjob collect` in a real cluster, with the rights and the rules of manifests/collector."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from baseimage import Buildah, missing_tools
from serving import Inbox

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "manifests/collector/collector.yaml"
SOONER = """
from k8sjob.cli import main
from k8sjob.observe import collector
collector._LOOK_SECONDS, collector._AGAIN_SECONDS = 1.0, 2.0
main()
"""
"""`k8sjob` whose collector records a running job after seconds instead of minutes."""


@pytest.fixture
def messages():
    with Inbox() as inbox:
        yield inbox


@pytest.fixture
def collect(either, kubeconfig, messages):
    """Starts `k8sjob collect`: the process, once it collects."""
    env = {"KUBECONFIG": str(kubeconfig), "K8SJOB_WEBHOOK_URL": messages.url}
    env |= {"K8SJOB_STATE": str(either.folder / "state")}
    argv = [sys.executable, "-c", SOONER, "collect", *either.by, "--notify-on", "failed"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def start():
        either.started.append(subprocess.Popen(argv, env=either.cluster.env | env, **pipes))
        assert either.started[-1].stderr.readline().endswith("the jobs continue.\n")
        return either.started[-1]

    return start


@pytest.fixture
def kubeconfig(cluster, namespace, kubeconfig_of):
    """Of a service account that has the collector's role in all namespaces."""
    objects = {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text())}
    role, bound = objects["ClusterRole"], objects["ClusterRoleBinding"]
    role["metadata"]["name"] = bound["metadata"]["name"] = f"collector-{namespace}"
    bound["roleRef"]["name"] = role["metadata"]["name"]
    bound["subjects"][0]["namespace"] = namespace
    account = {**objects["ServiceAccount"], "metadata": {"name": "k8sjob-collector"}}
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(account))
    for one in (role, bound):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(one))
    yield kubeconfig_of("k8sjob-collector")[0]
    for one in (role, bound):
        cluster.kubectl("delete", one["kind"], one["metadata"]["name"])


@pytest.mark.parametrize("either", ["kubectl"], indirect=True)
def test_jobs_that_nobody_watched(either, collect, messages, eventually):
    collector = collect()
    never = {"policy": {"restart_policy": "Never", "termination_grace": "2s"}}
    either.call("submit", either.file("echo the last words; exit 7", name="breaks", **never))
    either.call("submit", either.file("echo fine", name="works"))
    either.call("submit", either.file("echo so far; sleep 600 & wait", name="runs"))
    records = either.folder / "state/records" / either.namespace
    names = lambda: {one.name.partition("@")[0] for one in records.glob("*.k8sjob")}  # noqa: E731
    eventually(lambda: names() == {"breaks", "works", "runs"}, "three records")
    eventually(lambda: messages.bodies, "the message")
    eventually(lambda: either.status("works").state == "Succeeded", "its end")
    eventually(lambda: either.status("runs").counts == {"Running": 2}, "its replicas")
    file = next(records.glob("runs@*.k8sjob"))
    eventually(lambda: "so far" in either.call("logs", str(file))[0], "a record while it runs")
    eventually(
        lambda: "Succeeded" in either.call("status", str(next(records.glob("works@*"))))[0],
        "the record of its end",
    )
    for name in ("breaks", "works", "runs"):
        either.cluster.kubectl("delete", "pytorchjob", name, "-n", either.namespace)
    eventually(lambda: not either.objects("pytorchjobs"), "their deletion")
    # Another collector, after the first one was killed: no message comes twice.
    collector.kill()
    collector.communicate()
    again = collect()
    out, err = either.call("why", f"{either.namespace}/breaks")
    assert "exit code 7: the last words" in out
    assert f"this is its record: {next(records.glob('breaks@*.k8sjob'))}" in err
    assert "the last words\n" in either.call("logs", f"{either.namespace}/breaks")[0]
    assert "so far\n" in either.call("logs", f"{either.namespace}/runs")[0]
    again.send_signal(signal.SIGTERM)
    assert again.communicate(timeout=60)[1] == ""
    assert again.returncode == 0
    message = messages.bodies[0]["text"]
    assert len(messages.bodies) == 1
    assert message.startswith(f"{either.namespace}/breaks failed")
    assert "\nwhy: " in message


@pytest.fixture
def installation(cluster, namespace):
    """The manifest with other names, in its namespace; it applies it: the Deployment's name.

    Its volume is a folder of root, to which the kubelet gives the Pod's fsGroup.
    """
    name = f"{namespace}-collector"
    image = cluster.push(buildah := Buildah(), buildah.client_image())
    # Cluster roles of this name, and the namespace k8sjob, may belong to an installation.
    manifest = MANIFEST.read_text().replace("IMAGE", image).replace("k8sjob-collector", name)
    manifest = re.sub(r"(?m)(name(?:space)?): k8sjob$", rf"\1: {name}", manifest)
    applied = cluster.kubectl("apply", "-f", "-", stdin=manifest)
    assert "would violate PodSecurity" not in applied.stderr
    if folder := cluster.node_folder:  # the cluster of KUBECONFIG has a storage class
        (folder / name).mkdir(mode=0o755)
        linux = {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}
        nodes = {"nodeSelectorTerms": [{"matchExpressions": [linux]}]}
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "100Gi"},
            "local": {"path": f"/tmp/{name}"},  # a hostPath gets no fsGroup
            "nodeAffinity": {"required": nodes},
            "claimRef": {"namespace": name, "name": "k8sjob-records"},
        }
        cluster.create({"kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})
    yield name
    for kind in ("namespace", "clusterrole", "clusterrolebinding"):
        cluster.kubectl("delete", "--wait=false", kind, name)
    if folder:
        cluster.delete("persistentvolumes", name)


@pytest.mark.timeout(900)  # the image of k8sjob may have to be built
@pytest.mark.skipif(bool(missing_tools()), reason=str(missing_tools()))
def test_the_manifest_collects_on_a_volume_of_root(
    cluster, namespace, installation, created, eventually
):
    inside = ("exec", "-n", installation, f"deploy/{installation}", "--", "k8sjob")
    why = (*inside, "why", f"{namespace}/breaks")
    backend, ref = created("breaks", ["sh", "-c", "echo the last words; exit 7"])
    eventually(lambda: "exit code 7" in cluster.kubectl(*why, check=False).stdout, "the collector")
    shell = (*inside[:-1], "sh", "-c", "k8sjob why /records/state/records/*/breaks@*.k8sjob")
    eventually(
        lambda: "exit code 7" in cluster.kubectl(*shell, check=False).stdout,
        "the record of its end",
    )
    backend.delete(ref)
    eventually(lambda: not cluster.read("pytorchjobs", "breaks", namespace), "its deletion")
    answer = cluster.kubectl(*why)
    assert "exit code 7: the last words" in answer.stdout
    assert "this is its record" in answer.stderr
