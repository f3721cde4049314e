"""`k8sjob collect` in a real cluster, with the rights and the rules of manifests/collector."""

import json
import signal
from pathlib import Path

import pytest
import yaml
from serving import Handler, Server

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "manifests/collector/collector.yaml"


@pytest.fixture
def messages():
    """What a webhook got, and its URL."""

    class Messages(Handler):
        def do_POST(self):  # noqa: N802 - http.server's name
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.got.append(json.loads(body)["text"])
            self.reply(200, b"ok")

    server = Server(Messages)
    server.got = []
    server.url = f"http://{server.host}/"
    yield server
    server.stop()


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


def test_jobs_that_nobody_watched(either, kubeconfig, messages, eventually, monkeypatch):
    monkeypatch.setenv("K8SJOB_WEBHOOK_URL", messages.url)
    args = ("collect", *either.by, "--notify-on", "failed")
    collector = either.start(*args, kubeconfig=kubeconfig)
    never = {"policy": {"restart_policy": "Never", "termination_grace": "2s"}}
    either.call("submit", either.file("echo the last words; exit 7", name="breaks", **never))
    either.call("submit", either.file("echo fine", name="works"))
    either.call("submit", either.file("echo so far; sleep 600 & wait", name="runs"))
    records = either.folder / "state/records" / either.namespace
    names = lambda: {one.name.partition("@")[0] for one in records.glob("*.k8sjob")}  # noqa: E731
    eventually(lambda: names() == {"breaks", "works", "runs"}, "three records")
    eventually(lambda: messages.got, "the message")
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
    again = either.start(*args, kubeconfig=kubeconfig)
    out, err = either.call("why", f"{either.namespace}/breaks")
    assert "exit code 7: the last words" in out
    assert f"this is its record: {next(records.glob('breaks@*.k8sjob'))}" in err
    assert "the last words\n" in either.call("logs", f"{either.namespace}/breaks")[0]
    assert "so far\n" in either.call("logs", f"{either.namespace}/runs")[0]
    again.send_signal(signal.SIGTERM)
    assert again.communicate(timeout=60)[1].endswith("the jobs continue.\n")
    assert again.returncode == 0
    (message,) = messages.got
    assert message.startswith(f"{either.namespace}/breaks failed")
    assert "\nwhy: " in message


def test_the_manifest_is_accepted_by_the_strictest_namespace(cluster):
    """kubectl prints a warning where a Deployment's Pods would be refused."""
    parts = yaml.safe_load_all(MANIFEST.read_text())
    others = [one for one in parts if one["kind"] != "Namespace"]
    level = {"pod-security.kubernetes.io/enforce": "restricted"}
    space = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": "k8sjob", "labels": level},
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(space))
    try:
        for one in others:
            done = cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(one))
            assert "Warning" not in done.stderr
    finally:
        cluster.kubectl("delete", "namespace", "k8sjob")
