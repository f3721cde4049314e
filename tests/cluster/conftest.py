"""The cluster of these tests: one bed for all that only use it, or the one that KUBECONFIG names.

Tests that stop parts of a cluster have a bed of their own, in one process of pytest.
"""

import contextlib
import fcntl
import json
import os
import sys
import time
import uuid
from pathlib import Path

import pytest
from baseimage import Buildah, missing_tools
from cluster.bed import Bed, Cluster
from cluster.desk import Desk
from needs import lacking

from k8sjob.rendering import write_context

YOURS = "KUBECONFIG and K8SJOB_TEST_REGISTRY let these tests use a cluster of yours"
OWN = "own-bed"  # tests/conftest.py looks for it in the names of tests
STOPPING = {"bed", "with_template"}
"""Fixtures by which a test stops parts of its cluster: no other test may use that one."""
KEPT = []
"""Beds that other processes of this session use, too; they end with the session."""


def pytest_generate_tests(metafunc):
    """Each test has the cluster of all, or its process's own, of which its name tells."""
    names = set(metafunc.fixturenames)
    if names & STOPPING:
        metafunc.parametrize("cluster", [OWN], indirect=True, scope="session")
    elif "cluster" in names:
        shared = pytest.param("shared", id=pytest.HIDDEN_PARAM)
        metafunc.parametrize("cluster", [shared], indirect=True, scope="session")


@pytest.fixture(scope="session")
def a_bed(request):
    """Makes a bed, on demand; its logs are kept when a test of the session has failed."""
    if reason := lacking("cluster"):
        pytest.skip(f"{reason}; {YOURS}")

    @contextlib.contextmanager
    def make():
        with Bed() as bed:
            yield bed
            if request.session.testsfailed:
                capture = request.config.pluginmanager.getplugin("capturemanager")
                with capture.global_and_fixture_disabled():
                    sys.stderr.write(f"the cluster's logs are kept in {bed.keep_logs()}\n")

    return make


@pytest.fixture(scope="session")
def own_bed(a_bed):
    """A bed of this process of pytest."""
    with a_bed() as bed:
        yield bed


@pytest.fixture(scope="session")
def cluster(request, tmp_path_factory):
    """A `Cluster`: kubeconfig, registry, env, kubectl(), push()."""
    if request.param == OWN:
        return request.getfixturevalue("own_bed")
    registry, kubeconfig = map(os.environ.get, ("K8SJOB_TEST_REGISTRY", "KUBECONFIG"))
    if registry and kubeconfig:
        return Cluster(kubeconfig, registry)
    if "PYTEST_XDIST_WORKER" in os.environ:
        if reason := lacking("cluster"):
            pytest.skip(f"{reason}; {YOURS}")
        return shared_cluster(tmp_path_factory.getbasetemp().parent)
    return request.getfixturevalue("own_bed")


def shared_cluster(folder):
    """The bed that the first process of this session makes, which ends with pytest's own."""
    file = folder / "cluster.json"
    with (folder / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            KEPT.append(Bed(owner=os.getppid()).__enter__())
            made = KEPT[-1]
            parts = [made.kubeconfig, made.registry, made.kubectl_path]
            file.write_text(json.dumps([str(part) for part in parts]))
    kubeconfig, registry, kubectl = json.loads(file.read_text())
    found = Cluster(Path(kubeconfig), registry)
    found.kubectl_path = Path(kubectl)
    return found


@pytest.fixture
def bed(cluster):
    """The cluster as a `Bed`, whose components can be stopped; a test starts them again."""
    yield cluster
    for name in cluster.parts:
        if name not in cluster.running():
            cluster.start(name)


@pytest.fixture
def with_template(bed):
    """Starts the operator anew with an init container template."""
    before = bed.commands["operator"]

    def start(template):
        (bed.folder / "conf/initContainer.yaml").write_text(template)
        file = "--pytorch-init-container-template-file=/run/bed/conf/initContainer.yaml"
        bed.stop("operator")
        bed.commands["operator"] = [*before, file]
        bed.start("operator")

    yield start
    bed.stop("operator")
    bed.commands["operator"] = before
    bed.start("operator")


@pytest.fixture
def namespace(cluster):
    """A namespace for one test; it and all in it is gone soon after."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    account = ("get", "serviceaccount", "default", "-n", name)
    eventually(lambda: cluster.kubectl(*account, check=False).returncode == 0, "its account")
    yield name
    cluster.kubectl("delete", "pytorchjobs", "--all", "-n", name, "--wait=false")
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def image_of(cluster, tmp_path_factory):
    """Builds the image of a spec as k8sjob renders it, and pushes it: a reference by digest."""
    if reason := missing_tools():
        pytest.skip(reason)
    buildah = Buildah()
    built = {}

    def make(spec, home, *, newer=False):
        """The reference for the spec whose job.yaml lies in `home`."""
        base = buildah.newer_image() if newer else buildah.base_image()
        if base is None:
            pytest.skip("Debian's next release, which has a newer torch, cannot be installed now")
        image = spec.image.model_copy(update={"base": base})
        key = (image.model_dump_json(), str(home))
        if key not in built:
            context = tmp_path_factory.mktemp("image") / "context"
            write_context(spec.model_copy(update={"image": image}), home, context)
            tag = buildah.build(context, f"localhost/k8sjob-test-{spec.name}")
            built[key] = cluster.push(buildah, tag)
        return built[key]

    return make


def eventually(done, what, *, deadline=300.0):
    """Returns what `done` returns once it is true; fails loudly when that takes too long."""
    end = time.monotonic() + deadline
    while not (found := done()):
        assert time.monotonic() < end, f"waited {deadline:.0f} s in vain for {what}"
        time.sleep(0.1)
    return found


@pytest.fixture(name="eventually", scope="session")
def eventually_fixture():
    """`eventually(done, what)`: wait for something to become true."""
    return eventually


@pytest.fixture
def get(cluster, namespace):
    """`get(kind, name)`: an object of the test's namespace, or a list of them, or None."""

    def read(*args):
        argv = ("get", *args, "-n", namespace, "-o", "json", "--ignore-not-found")
        text = cluster.kubectl(*argv).stdout
        if not text.strip():
            return None if len(args) > 1 else []
        found = json.loads(text)
        return found["items"] if found["kind"] == "List" else found

    return read


@pytest.fixture
def desk(cluster, namespace, tmp_path):
    """A user's terminal; what was started there ends with the test."""
    made = Desk(cluster, namespace, tmp_path)
    yield made
    for child in made.started:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture(params=["python", "kubectl"])
def either(desk, request):
    """The same, once for each client."""
    desk.by = ("--client", request.param)
    return desk


@pytest.fixture
def checkpoints(cluster, namespace, eventually, request):
    """Makes volumes that pods which are not root can write, by the names of their claims."""
    return lambda name: make_claim(cluster, namespace, eventually, request, name)


def make_claim(cluster, namespace, eventually, request, name):
    """A claim for a folder of the node, or of the cluster's own kind where it has one."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    classes = cluster.kubectl("get", "storageclass", "-o", "name").stdout
    if not classes:
        volume = f"{namespace}-{name}"
        claim["spec"] |= {"storageClassName": "", "volumeName": volume}
        folder = {"path": f"/tmp/k8sjob-tests/{volume}", "type": "DirectoryOrCreate"}
        persistent = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteMany"],
                "hostPath": folder,
            },
        }
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(persistent))
        request.addfinalizer(lambda: cluster.kubectl("delete", "pv", volume, "--wait=false"))
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(claim))
    opening = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"open-{name}", "namespace": namespace},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": "chmod",
                    "image": cluster.base_image,
                    "command": ["chmod", "0777", "/volume"],
                    "volumeMounts": [{"name": "volume", "mountPath": "/volume"}],
                }
            ],
            "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": name}}],
        },
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(opening))
    phase = ("get", "pod", f"open-{name}", "-n", namespace, "-o", "jsonpath={.status.phase}")
    eventually(lambda: cluster.kubectl(*phase).stdout == "Succeeded", "the volume")
