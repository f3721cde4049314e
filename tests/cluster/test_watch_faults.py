"""What happens between a watch and its cluster: each fault is played for real, with each client."""

import base64
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import yaml

from k8sjob.backends.api import JobRef
from k8sjob.backends.cluster import connect
from k8sjob.errors import BackendError
from k8sjob.observe.status import JobState, job_status
from k8sjob.targets.jobs import job_of

CLIENTS = ("python", "kubectl")
PODS = "/api/v1/namespaces/{}/pods"


@pytest.fixture(params=CLIENTS)
def client(request, cluster, monkeypatch):
    monkeypatch.setenv("PATH", cluster.env["PATH"])
    return request.param


@pytest.fixture
def backend(client, cluster, namespace):
    return connect(kubeconfig=cluster.kubeconfig, namespace=namespace, client=client)


@pytest.fixture
def manifest(pytorchjob):
    return lambda *command, name="one": pytorchjob(name, command)


class Watcher(threading.Thread):
    """Watches a job to its end and keeps what it was told."""

    def __init__(self, backend, ref):
        super().__init__(daemon=True)
        self.backend, self.ref = backend, ref
        self.stop = threading.Event()
        self.snapshot = self.error = None
        self.start()

    def run(self):
        try:
            for snapshot in self.backend.watch(self.ref, stop=self.stop):
                self.snapshot = snapshot
                if job_status(snapshot).state.finished:
                    return
        except BackendError as error:
            self.error = error

    def state(self):
        return self.snapshot and job_status(self.snapshot).state

    def over(self):
        return not self.is_alive()

    def labels(self):
        return self.snapshot.job.raw["metadata"].get("labels", {})

    def reasons(self):
        return [event["reason"] for event in self.snapshot.events]


@pytest.fixture
def watch():
    """Begins to watch a job."""
    watchers = []

    def begin(backend, ref):
        watchers.append(Watcher(backend, ref))
        return watchers[-1]

    yield begin
    for watcher in watchers:
        watcher.stop.set()
    for watcher in watchers:
        watcher.join(30)
    assert not any(watcher.is_alive() for watcher in watchers)


@pytest.fixture
def change(cluster, namespace, eventually):
    """Changes the job, as somebody else, and waits until a watcher has seen it."""

    def label(watcher, value):
        argv = ("label", "pytorchjob", "one", f"step={value}", "--overwrite", "-n", namespace)
        cluster.kubectl(*argv)
        eventually(lambda: watcher.labels().get("step") == value, value)

    return label


@pytest.fixture
def running(manifest, watch, eventually):
    """Begins a long job and a watch of it."""

    def begin(backend):
        ref = JobRef.of(backend.create_manifest(job_of(manifest("sleep", "300"))))
        watcher = watch(backend, ref)
        eventually(lambda: watcher.state() is JobState.RUNNING or watcher.over(), "its start")
        assert watcher.state() is JobState.RUNNING, watcher.snapshot
        return watcher

    return begin


@pytest.mark.parametrize("client", ["python"], indirect=True)
def test_an_apiserver_that_is_away_for_a_while(bed, backend, manifest, watch, eventually):
    ref = JobRef.of(backend.create_manifest(job_of(manifest("sleep", "6"))))
    watcher = watch(backend, ref)
    eventually(lambda: watcher.state() is JobState.RUNNING, "its start")
    bed.kill("apiserver")
    eventually(lambda: "ConnectionLost" in watcher.reasons(), "the loss")
    time.sleep(6)  # the container ends meanwhile
    bed.start("apiserver")
    eventually(lambda: "ConnectionRestored" in watcher.reasons(), "the return")
    watcher.join(120)
    assert watcher.error is None
    assert watcher.state() is JobState.SUCCEEDED
    assert [r for r in watcher.reasons() if r.startswith("Connection")] == [
        "ConnectionLost",
        "ConnectionRestored",
    ]


@pytest.mark.parametrize("client", ["kubectl"], indirect=True)
def test_without_the_operator_nothing_is_made_and_what_is_there_can_go(
    bed, backend, manifest, eventually
):
    ref = JobRef.of(backend.create_manifest(job_of(manifest("sleep", "300"))))
    eventually(lambda: backend.snapshot(ref).pods, "its pod")
    bed.stop("operator")
    for attempt in (
        lambda: backend.create_manifest(job_of(manifest("true", name="two"))),
        lambda: backend.suspend(ref, value=True),
    ):
        with pytest.raises(BackendError, match="the training operator does not respond"):
            attempt()
    # The collector of garbage is slow for a while after an outage of the apiserver.
    backend.delete(ref)
    backend.wait_for_pods(ref, 180)
    assert backend.jobs() == []


def test_a_version_that_is_too_old(backend, namespace):
    query = {"watch": "true", "resourceVersion": "1", "timeoutSeconds": "5"}
    try:
        lines = list(backend.transport.stream(PODS.format(namespace), query=query))
        event = json.loads(lines[0])
        assert (event["type"], event["object"]["code"]) == ("ERROR", 410)
    except BackendError as error:
        assert error.code == 410  # noqa: PT017 - a server may answer in either way


def test_a_version_from_the_future_is_answered_with_silence(backend, namespace):
    query = {"watch": "true", "resourceVersion": str(10**9), "timeoutSeconds": "3"}
    try:
        lines = list(backend.transport.stream(PODS.format(namespace), query=query))
    except BackendError as error:
        assert error.code in (0, 410, 500, 504)  # noqa: PT017 - or by an error, which is as good
    else:
        assert all(json.loads(line)["type"] == "ERROR" for line in lines)


@pytest.fixture
def through(proxy, tmp_path, namespace, client):
    """A back end that goes through the proxy, as another user where one is given."""

    def make(user=None):
        there = yaml.safe_load(proxy.kubeconfig.read_text())
        if user:
            there["users"][0]["user"] = user
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(there))
        return connect(kubeconfig=path, namespace=namespace, client=client)

    return make


@pytest.fixture
def account(cluster, namespace):
    """A service account that may use this namespace; gives tokens that can be revoked."""
    cluster.kubectl("create", "serviceaccount", "ada", "-n", namespace)
    binding = ("--clusterrole=cluster-admin", f"--serviceaccount={namespace}:ada")
    cluster.kubectl("create", "rolebinding", "ada", *binding, "-n", namespace)

    def token(name):
        """A token that lives as long as a secret of that name does."""
        cluster.kubectl("create", "secret", "generic", name, "-n", namespace)
        bound = ("--bound-object-kind=Secret", f"--bound-object-name={name}")
        return cluster.kubectl("create", "token", "ada", *bound, "-n", namespace).stdout.strip()

    return token


@pytest.fixture
def revoke(cluster, namespace, config, tmp_path, eventually):
    """Makes a token worthless; returns when the apiserver, which remembers it, knows that too."""
    bare = {**config, "users": [{"name": config["users"][0]["name"], "user": {}}]}
    path = tmp_path / "bare"
    path.write_text(json.dumps(bare))

    def revoke(name, token):
        cluster.kubectl("delete", "secret", name, "-n", namespace)
        argv = (f"--kubeconfig={path}", "get", "pods", f"--token={token}", "-n", namespace)
        eventually(lambda: cluster.kubectl(*argv, check=False).returncode, "the token's end")

    return revoke


@pytest.fixture
def plugin(tmp_path):
    """A program of the kubeconfig that gives the token which stands in a file."""
    token = tmp_path / "token"
    program = tmp_path / "plugin"
    kind = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
    program.write_text(
        f"#!{sys.executable}\nimport json\ntoken = open({str(token)!r}).read()\n"
        f"print(json.dumps({{**{kind!r}, 'status': {{'token': token}}}}))\n"
    )
    program.chmod(0o755)
    api = kind["apiVersion"]
    user = {"exec": {"command": str(program), "apiVersion": api, "interactiveMode": "Never"}}
    return user, token


@pytest.fixture
def cut_off(through, account, plugin, running, revoke, proxy):  # noqa: PLR0917 - fixtures
    """A watch whose token was revoked, and that has to be begun anew: the watcher, the token, and
    where the next one goes.
    """
    user, file = plugin
    first = account("first")
    file.write_text(first)
    watcher = running(through(user))
    revoke("first", first)
    proxy.cut()
    return watcher, first, file


def test_a_token_that_is_revoked_in_the_middle_of_a_watch(cut_off, account, eventually, change):
    watcher, first, file = cut_off
    eventually(lambda: "ConnectionLost" in watcher.reasons(), "the loss")
    lost = next(e for e in watcher.snapshot.events if e["reason"] == "ConnectionLost")
    assert "Unauthorized" in lost["message"]
    assert first not in json.dumps(watcher.snapshot.events)
    file.write_text(account("second"))
    eventually(lambda: "ConnectionRestored" in watcher.reasons(), "the return")
    change(watcher, "seen")
    assert watcher.error is None


IN_A_POD = """
set -e
mount -t tmpfs none /run
mkdir -p /run/secrets/kubernetes.io/serviceaccount
cd /run/secrets/kubernetes.io/serviceaccount
cp "$HERE"/token "$HERE"/ca.crt "$HERE"/namespace .
unset KUBECONFIG
export HOME=/run
cd /
exec "$PYTHON" -c "
from k8sjob.backends.cluster import connect
from k8sjob.kube.client.kubeconfig import configured
assert configured()
backend = connect(client='$CLIENT')
print(backend.context, backend.namespace, len(backend.jobs()))
"
"""


@pytest.fixture
def pod(cluster, account, config, namespace, tmp_path):
    """The environment of a process in a pod, and in HERE what its kubelet would lay down."""
    there = config["clusters"][0]["cluster"]
    host, _, port = there["server"].removeprefix("https://").partition(":")
    (tmp_path / "ca.crt").write_bytes(base64.b64decode(there["certificate-authority-data"]))
    (tmp_path / "token").write_text(account("own"))
    (tmp_path / "namespace").write_text(namespace)
    service = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    return {**cluster.env, **service, "HERE": str(tmp_path), "PYTHON": sys.executable}


def test_in_a_pod_its_own_account_is_used(client, pod, namespace):
    if os.geteuid() != 0:
        pytest.skip("a mount namespace of one's own needs root")
    env = {**pod, "CLIENT": client}
    done = subprocess.run(
        ["unshare", "--mount", "--", "sh", "-c", IN_A_POD],
        check=False,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["in-cluster", namespace, "0"], done.stderr
