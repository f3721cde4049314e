"""The cluster of these tests: one bed for all that only use it, or the one that KUBECONFIG names.

Tests that stop parts of a cluster have a bed of their own, in one process of pytest.
"""

import contextlib
import fcntl
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from baseimage import SUITE, Buildah, missing_tools, once
from cluster.bed import Bed, Cluster
from cluster.bed.cluster import plural
from cluster.bed.components import gang_rights
from cluster.bed.controllers import MANAGED
from cluster.desk import Desk
from cluster.proxy import Proxy
from gomodules import COSCHEDULING, source
from needs import lacking

from k8sjob.backends.api import JobRef
from k8sjob.backends.cluster import connect
from k8sjob.jobs.plan import plan_job
from k8sjob.rendering.dockerfile import write_context
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import job_of

YOURS = "KUBECONFIG and K8SJOB_TEST_REGISTRY let these tests use a cluster of yours"
BASE = "K8SJOB_TEST_BASE"
"""Names another image than Debian's."""
OWN = "own-bed"  # tests/conftest.py looks for it in the names of tests
STOPPING = {"bed", "coscheduling", "with_template"}
"""Fixtures by which a test stops parts of its cluster: no other test may use that one."""
CRDS = {
    "jobset": "crd/jobsets.jobset.x-k8s.io",
    "trainer": "crd/trainjobs.trainer.kubeflow.org",
    "kueue": "crd/workloads.kueue.x-k8s.io",
}
TRAIN = Path(__file__).resolve().parents[1] / "dist/programs/train.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
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
        found = Cluster(kubeconfig, registry)
        return Bed.attach(found.node_folder.parent) if found.node_folder else found
    if "PYTEST_XDIST_WORKER" in os.environ:
        if reason := lacking("cluster"):
            pytest.skip(f"{reason}; {YOURS}")
        return shared_cluster(tmp_path_factory.getbasetemp().parent)
    return request.getfixturevalue("own_bed")


def shared_cluster(folder):
    """The bed that the first process of this session makes, which ends with pytest's own."""
    file = folder / "cluster"
    with (folder / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            KEPT.append(Bed(owner=os.getppid()).__enter__())
            file.write_text(str(KEPT[-1].folder))
    return Bed.attach(file.read_text())


@pytest.fixture
def bed(cluster):
    """The cluster as a `Bed`, whose components can be stopped; a test starts them again."""
    before = cluster.running()
    yield cluster
    cluster.restore(before)


@pytest.fixture
def with_flag(bed):
    """Starts the operator anew with another flag."""
    before = bed.commands["operator"]

    def start(flag):
        bed.stop("operator")
        bed.commands["operator"] = [*before, flag]
        bed.start("operator")

    yield start
    bed.stop("operator")
    bed.commands["operator"] = before
    bed.start("operator")


@pytest.fixture
def with_template(bed, with_flag):
    """Starts the operator anew with an init container template."""

    def start(template):
        (bed.folder / "conf/initContainer.yaml").write_text(template)
        with_flag("--pytorch-init-container-template-file=/run/bed/conf/initContainer.yaml")

    return start


@pytest.fixture
def coscheduling(bed, with_flag):
    """A second scheduler, with the coscheduling plugin, and the operator makes its PodGroups."""
    if "coscheduling" not in bed.running():
        crd = source(COSCHEDULING) / "manifests/coscheduling/crd.yaml"
        bed.kubectl("apply", "--server-side", "-f", str(crd))
        bed.kubectl("wait", "--for=condition=Established", "crd", "--all")
        bed.apply(gang_rights())
        bed.start("coscheduling")
    with_flag("--gang-scheduler-name=coscheduling")


def added(cluster, name):
    """Skips a test where a cluster that is no bed lacks this controller."""
    if isinstance(cluster, Bed):
        cluster.add(name)
    elif cluster.kubectl("get", CRDS[name], check=False).returncode != 0:
        pytest.skip(f"there is no {name} in the cluster of KUBECONFIG")


@pytest.fixture
def controllers(trainer):
    """Those of all kinds run."""


@pytest.fixture
def jobset(cluster):
    """The JobSet controller runs in the cluster."""
    added(cluster, "jobset")


@pytest.fixture
def trainer(cluster):
    """Kubeflow Trainer 2 runs in the cluster, and JobSet."""
    added(cluster, "trainer")


@pytest.fixture
def kueue(cluster, namespace, request):
    """Kueue manages the test's namespace; makes its queues: `kueue("team", cpu=1)`.

    A queue is a LocalQueue and a ClusterQueue with a quota, and has a ResourceFlavor of its own.
    """
    added(cluster, "kueue")
    label = {"metadata": {"labels": MANAGED}}
    cluster.api.request("PATCH", f"/api/v1/namespaces/{namespace}", body=label)

    def make(name, flavor="", spec=None, level="", **quota):
        """The name of the ClusterQueue and the ResourceFlavor of a LocalQueue of this name.

        With `flavor` the queue has the flavor of another one, with `spec` more in its ClusterQueue.
        With `level`, a label of the nodes, its flavor has a Topology of this one level.
        """
        whole = f"{namespace}-{name}"
        resources = [{"name": key, "nominalQuota": amount} for key, amount in quota.items()]
        group = {
            "coveredResources": list(quota),
            "flavors": [{"name": flavor or whole, "resources": resources}],
        }
        nodes = {"nodeLabels": {"kubernetes.io/os": "linux"}, "topologyName": whole}
        specs = {
            **({"Topology": {"levels": [{"nodeLabel": level}]}} if level else {}),
            **({} if flavor else {"ResourceFlavor": nodes if level else {}}),
            "ClusterQueue": {"namespaceSelector": {}, "resourceGroups": [group], **(spec or {})},
            "LocalQueue": {"clusterQueue": whole},
        }
        for kind, content in specs.items():
            local = kind == "LocalQueue"
            metadata = {"name": name if local else whole}
            document = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": metadata}
            cluster.create({**document, "spec": content}, namespace if local else "")
            if not local:
                request.addfinalizer(functools.partial(cluster.delete, plural(kind), whole))
        return whole

    return make


@pytest.fixture
def namespace(cluster):
    """A namespace for one test; it and all in it is gone soon after."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    cluster.create({"kind": "Namespace", "metadata": {"name": name}})
    eventually(lambda: cluster.read("serviceaccounts", "default", name), "its account")
    yield name
    cluster.delete("pytorchjobs", namespace=name)
    cluster.delete("namespaces", name)


@pytest.fixture
def config(cluster, namespace):
    """The administrator's kubeconfig, as data, to be changed; its namespace is the test's."""
    view = ("config", "view", "--raw", "--minify", "--flatten", "-o", "json")
    config = json.loads(cluster.kubectl(*view).stdout)
    config["contexts"][0]["context"]["namespace"] = namespace
    return config


@pytest.fixture
def kubeconfig_of(cluster, namespace, config, tmp_path):
    """Writes the kubeconfig of a service account of the test's namespace: its file, and a token."""

    def write(account):
        token = cluster.kubectl("create", "token", account, "-n", namespace).stdout.strip()
        users = [{"name": config["users"][0]["name"], "user": {"token": token}}]
        file = tmp_path / f"{account}.kubeconfig"
        file.write_text(json.dumps({**config, "users": users}))
        return file, token

    return write


@pytest.fixture(scope="session")
def image_of(cluster, tmp_path_factory):
    """Builds the image of a spec as k8sjob renders it, and pushes it: a reference by digest."""
    if reason := missing_tools():
        pytest.skip(reason)
    buildah = Buildah()
    built = {}

    def make(spec, home, suite=SUITE):
        """The reference for the spec whose job.yaml lies in `home`, on this suite of Debian."""
        try:
            base = os.environ.get(BASE) or buildah.base_image(suite)
        except subprocess.CalledProcessError as error:
            if suite == SUITE:
                raise
            pytest.skip(f"Debian {suite}, which still changes, cannot be installed: {error}")
        image = spec.image.model_copy(update={"base": base})
        key = (image.model_dump_json(), str(home))
        if key not in built:
            context = tmp_path_factory.mktemp("image") / "context"
            write_context(spec.model_copy(update={"image": image}), home, context)
            with once("build"):  # what another process installs meanwhile is a layer afterwards
                tag = buildah.build(context, f"localhost/k8sjob-test-{spec.name}")
            built[key] = cluster.push(buildah, tag)
        return built[key]

    return make


@pytest.fixture
def train(desk, tmp_path, image_of):
    """Creates a job that runs train.py, 100m of a core a node: its reference."""
    shutil.copy(TRAIN, tmp_path)

    def submit(name, options, **fields):
        spec = JobSpec(
            name=name,
            namespace=desk.namespace,
            image={"repository": "registry.example/tests/train", "base": "debian"},
            resources={"cpu": 1, "requests": {"cpu": "100m"}},
            run={"script": TRAIN.name, "args": [json.dumps(options)], "env": ONE_THREAD},
            **fields,
        )
        return desk.backend.create(plan_job(spec, tmp_path, image=image_of(spec, tmp_path)))

    return submit


def eventually(done, what, *, deadline=300.0):
    """Returns what `done` returns once it is true; fails loudly when that takes too long."""
    end = time.monotonic() + deadline
    while True:
        begun = time.monotonic()
        if found := done():
            return found
        now = time.monotonic()
        assert now < end, f"waited {deadline:.0f} s in vain for {what}"
        time.sleep(max(0.2, 2 * (now - begun)))  # a look that starts processes needs a processor


@pytest.fixture(name="eventually", scope="session")
def eventually_fixture():
    """`eventually(done, what)`: wait for something to become true."""
    return eventually


@pytest.fixture
def get(cluster, namespace):
    """`get(resource, name)`: an object of the test's namespace, or a list of them, or None."""
    return functools.partial(cluster.read, namespace=namespace)


@pytest.fixture
def pytorchjob(cluster, namespace):
    """A PyTorchJob whose Master and Workers run these commands; fields of the container by name."""

    def make(name, master, worker=None, *, workers=1, policy="Never", clean="Running", **fields):
        def replica(count, command):
            mounts = [{"name": "scratch", "mountPath": "/scratch"}]
            container = {"name": "pytorch", "image": cluster.base_image, "command": list(command)}
            pod = {
                "terminationGracePeriodSeconds": 2,
                "containers": [{**container, "volumeMounts": mounts, **fields}],
                "volumes": [{"name": "scratch", "emptyDir": {}}],
            }
            return {"replicas": count, "restartPolicy": policy, "template": {"spec": pod}}

        roles = {"Worker": replica(workers, worker)} if worker else {}
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "runPolicy": {"cleanPodPolicy": clean},
                "pytorchReplicaSpecs": {"Master": replica(1, master), **roles},
            },
        }

    return make


@pytest.fixture
def created(cluster, namespace, pytorchjob):
    """Creates a PyTorchJob, see `pytorchjob`; its back end and reference."""

    def create(*args, **options):
        backend = connect(kubeconfig=cluster.kubeconfig, namespace=namespace)
        return backend, JobRef.of(backend.create_manifest(job_of(pytorchjob(*args, **options))))

    return create


@pytest.fixture
def desk(cluster, namespace, tmp_path):
    """A user's terminal; what was started there ends with the test."""
    made = Desk(cluster, namespace, tmp_path)
    yield made
    for child in made.started:
        if child.returncode is None:
            child.kill()
            child.communicate()


@pytest.fixture(params=["python", "kubectl"])
def either(desk, request):
    """The same, once for each client."""
    desk.by = ("--client", request.param)
    return desk


@pytest.fixture
def proxy(cluster, tmp_path):
    """A proxy before the apiserver."""
    made = Proxy(cluster.kubeconfig, tmp_path)
    yield made
    made.close()


@pytest.fixture
def collected():
    """Nothing of a test's connections is left to be collected after it."""
    yield
    time.sleep(1)  # threads that read a stream see within a second that they are to end
    gc.collect()


@pytest.fixture
def checkpoints(cluster, namespace, request):
    """Makes volumes that pods which are not root can write, by the names of their claims.

    With `group`, only those of this group can, as after the kubelet has applied it as fsGroup.
    """

    def make(name, group=None):
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        folder = cluster.node_folder
        if folder or not cluster.read("storageclasses"):
            volume = f"{namespace}-{name}"
            claim["spec"] = {**spec, "storageClassName": "", "volumeName": volume}
            where = {"path": f"/tmp/{volume}", "type": "DirectoryOrCreate"}
            held = {
                "accessModes": spec["accessModes"],
                "capacity": spec["resources"]["requests"],
                "hostPath": where,
                # Or any claim that fits, of another test, may get it first.
                "claimRef": {"namespace": namespace, "name": name},
            }
            made = {"kind": "PersistentVolume", "metadata": {"name": volume}, "spec": held}
            cluster.create(made)
            request.addfinalizer(lambda: cluster.delete("persistentvolumes", volume))
        cluster.create(claim, namespace)
        if folder:  # a pod of a second may wait minutes for a busy node
            (folder / volume).mkdir()
            os.chown(folder / volume, 0, group or 0)
            (folder / volume).chmod(0o2770 if group else 0o777)
        else:
            open_volume(cluster, namespace, name)

    return make


def open_volume(cluster, namespace, claim):
    """Let everybody write into the volume of a claim; by a pod, wherever it is."""
    container = {
        "name": "chmod",
        "image": cluster.base_image,
        "command": ["chmod", "0777", "/volume"],
        "volumeMounts": [{"name": "volume", "mountPath": "/volume"}],
    }
    volume = {"name": "volume", "persistentVolumeClaim": {"claimName": claim}}
    spec = {"restartPolicy": "Never", "containers": [container], "volumes": [volume]}
    name = f"open-{claim}"
    cluster.create({"kind": "Pod", "metadata": {"name": name}, "spec": spec}, namespace)
    eventually(
        lambda: cluster.read("pods", name, namespace)["status"]["phase"] == "Succeeded",
        "the volume",
    )
