"""`k8sjob collect` in a real cluster, with the rights and the rules of manifests/collector."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from serving import Handler, Server

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


def test_jobs_that_nobody_watched(either, collect, messages, eventually):
    collector = collect()
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
    again = collect()
    out, err = either.call("why", f"{either.namespace}/breaks")
    assert "exit code 7: the last words" in out
    assert f"this is its record: {next(records.glob('breaks@*.k8sjob'))}" in err
    assert "the last words\n" in either.call("logs", f"{either.namespace}/breaks")[0]
    assert "so far\n" in either.call("logs", f"{either.namespace}/runs")[0]
    again.send_signal(signal.SIGTERM)
    assert again.communicate(timeout=60)[1] == ""
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
