"""The back end on the real thing, over each client."""

import threading
import time

import pytest

from k8sjob.backends.api import JobRef
from k8sjob.backends.connect import configured, connect, contexts
from k8sjob.errors import BackendError, JobExists, JobNotFound
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.observe.status import JobState, job_status, replica_names

SLEEP = ["sh", "-c", "trap 'exit 143' TERM; sleep 300 & wait"]
POD_GRACE = 2
CLIENTS = ("python", "kubectl")


@pytest.fixture(params=CLIENTS)
def backend(request, cluster, namespace, monkeypatch):
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    return connect(namespace=namespace, client=request.param)


@pytest.fixture
def manifest(cluster):
    """A PyTorchJob whose replicas run a command."""

    def make(name="one", command=("true",), workers=1, **spec):
        container = {"name": "pytorch", "image": cluster.base_image, "command": list(command)}
        pod = {"containers": [container], "terminationGracePeriodSeconds": POD_GRACE}
        replica = {"restartPolicy": "Never", "template": {"spec": pod}}
        roles = {"Master": {**replica, "replicas": 1}}
        if workers:
            roles["Worker"] = {**replica, "replicas": workers}
        return {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name},
            "spec": {
                "nprocPerNode": "1",
                "runPolicy": {"cleanPodPolicy": "Running"},
                "pytorchReplicaSpecs": roles,
                **spec,
            },
        }

    return make


def reached(backend, ref, state):
    return lambda: job_status(backend.snapshot(ref)).state is state


def test_the_kubeconfig_is_found(backend, cluster):
    assert configured()
    assert backend.context in contexts()


def test_a_job_from_its_making_to_its_end(backend, manifest, eventually):
    before = backend.dry_run(manifest())
    assert before["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    with pytest.raises(JobNotFound):
        backend.find("one")
    ref = backend.create_manifest(manifest())
    assert backend.find("one") == ref
    with pytest.raises(JobExists):
        backend.create_manifest(manifest())
    assert backend.dry_run(manifest(), name_free=True)["metadata"]["name"] == "one"
    eventually(reached(backend, ref, JobState.SUCCEEDED), "its success")
    (listed,) = backend.jobs()
    assert listed.job["metadata"]["uid"] == ref.uid
    found = backend.snapshot(ref)
    assert found.pods[0]["metadata"]["name"] == "one-master-0"
    both = {"SuccessfulCreatePod", "Scheduled"}  # by the operator, by the scheduler; not at once
    eventually(lambda: both <= {e["reason"] for e in backend.snapshot(ref).events}, "their events")
    with pytest.raises(BackendError, match="has ended and cannot be suspended"):
        backend.suspend(ref, value=True)
    backend.delete(ref)
    with pytest.raises(JobNotFound):
        backend.snapshot(ref)
    with pytest.raises(JobNotFound):
        backend.delete(ref)


def test_suspend_resume_and_delete(backend, manifest, eventually):
    ref = backend.create_manifest(manifest(command=SLEEP))
    eventually(reached(backend, ref, JobState.RUNNING), "its start")
    backend.suspend(ref, value=True)
    eventually(reached(backend, ref, JobState.SUSPENDED), "its pause")
    # At once: the operator would take the end of the old pods for a failure of the new ones.
    backend.suspend(ref, value=False)
    eventually(reached(backend, ref, JobState.RUNNING), "its return")
    backend.delete(ref)
    backend.wait_for_pods(ref, 60)
    again = backend.create_manifest(manifest(command=SLEEP))
    assert again.uid != ref.uid
    with pytest.raises(JobNotFound):
        backend.delete(ref)
    assert backend.find("one") == again, "the newer one of its name stays"
    assert [s.job["metadata"]["uid"] for s in backend.jobs()] == [again.uid]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda job: job["spec"].update(runPolcy={}), 'unknown field "spec.runPolcy"'),
        (lambda job: job["spec"].update(nprocPerNode=2), "spec.nprocPerNode: Invalid value"),
        (
            lambda job: job["spec"]["pytorchReplicaSpecs"]["Master"].update(replicas=2),
            "the training operator refuses the job: spec.pytorchReplicaSpecs",
        ),
        (lambda job: job["metadata"].update(name="1one"), "a DNS-1035 label"),
        (lambda job: job["metadata"].update(namespace="nowhere"), "no namespace 'nowhere'"),
    ],
)
def test_what_the_cluster_does_not_take(backend, manifest, change, words):
    wrong = manifest()
    change(wrong)
    for attempt in (backend.dry_run, backend.create_manifest):
        with pytest.raises(BackendError) as told:
            attempt(wrong)
        assert words in str(told.value)
    assert backend.jobs() == []


def test_two_that_make_the_same_job_at_once(backend, manifest):
    outcomes = []

    def make():
        try:
            outcomes.append(backend.create_manifest(manifest(command=SLEEP)))
        except JobExists as error:
            outcomes.append(error)

    makers = [threading.Thread(target=make) for _ in range(4)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    assert len([one for one in outcomes if isinstance(one, JobRef)]) == 1
    assert len(outcomes) == 4


def test_a_watch_sees_the_end_at_once(backend, manifest):
    ref = backend.create_manifest(manifest(command=["sleep", "2"], workers=2))
    late = None
    phases = set()
    for snapshot in backend.watch(ref):
        phases |= {pod["status"].get("phase") for pod in snapshot.pods}
        if job_status(snapshot).state.finished:
            written = job_status(snapshot).finished.timestamp()
            late = time.time() - written
            break
    assert {"Pending", "Running"} <= phases
    assert late < 5, "a client that polls comes later"


def test_a_watch_ends_when_the_job_is_deleted(backend, manifest):
    ref = backend.create_manifest(manifest(command=SLEEP))
    seen = 0
    for snapshot in backend.watch(ref):
        seen += 1
        assert len(replica_names(snapshot.job)) == 2
        if seen == 1:
            backend.delete(ref)
    assert seen >= 1


def test_a_job_that_a_finalizer_keeps_is_being_deleted(
    backend, manifest, cluster, namespace, eventually
):
    kept = manifest(workers=0)
    kept["metadata"]["finalizers"] = ["k8sjob.test/keep"]
    ref = backend.create_manifest(kept)
    try:
        backend.delete(ref)
        snapshot = backend.snapshot(ref)
        assert job_status(snapshot).state is JobState.DELETING
        first, *_ = diagnose(snapshot, {}, backend.related(snapshot))
        assert first.cause == Cause.DELETING
        assert "k8sjob.test/keep" in first.message
        with pytest.raises(BackendError, match="is being deleted and cannot be suspended"):
            backend.suspend(ref, value=True)
    finally:
        none = '{"metadata": {"finalizers": null}}'
        cluster.kubectl("patch", "pytorchjob", "one", "-n", namespace, "--type=merge", "-p", none)
    eventually(lambda: not backend.jobs(), "its end")


def test_warnings_of_pods_come_by_the_watch(backend, manifest):
    wrong = manifest(workers=0)
    pod = wrong["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["containers"][0]["envFrom"] = [{"secretRef": {"name": "nowhere"}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    pod["volumes"] = [{"name": "data", "configMap": {"name": "settings"}}]
    ref = backend.create_manifest(wrong)
    deadline = time.monotonic() + 60
    for snapshot in backend.watch(ref):
        assert time.monotonic() < deadline
        if any("settings" in event["message"] for event in snapshot.events):
            break
    found = backend.related(backend.snapshot(ref))
    missing = {tuple(o["details"].values()) for o in found if o["kind"] == "Status"}
    assert missing == {("secrets", "nowhere"), ("configmaps", "settings")}
    assert {"Node", "Namespace"} <= {o["kind"] for o in found}


def test_of_a_secret_nothing_is_read(backend, manifest, cluster, namespace):
    argv = ("create", "secret", "generic", "wandb", "--from-literal=key=very-secret")
    cluster.kubectl(*argv, "-n", namespace)
    wanting = manifest(workers=0, command=SLEEP)
    pod = wanting["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["containers"][0]["envFrom"] = [{"secretRef": {"name": "wandb"}}]
    ref = backend.create_manifest(wanting)
    (secret,) = [o for o in backend.related(backend.snapshot(ref)) if o["kind"] == "Secret"]
    assert secret["metadata"]["name"] == "wandb"
    assert "data" not in secret


def test_without_rights_it_is_told_what_is_missing(backend, cluster, namespace, tmp_path):
    user = cluster.kubectl("config", "view", "--minify", "--raw", "-o", "json").stdout
    path = tmp_path / "kubeconfig"
    path.write_text(user.replace('"user": {', '"user": {"as": "nobody-at-all",', 1))
    assert '"as"' in path.read_text()
    client = "kubectl" if "Kubectl" in type(backend.transport._transport).__name__ else "python"
    poor = connect(kubeconfig=path, namespace=namespace, client=client)
    with pytest.raises(BackendError) as told:
        poor.jobs()
    assert f"nobody-at-all may not list pytorchjobs in namespace {namespace}" in str(told.value)
    assert "manifests/rbac" in str(told.value)
