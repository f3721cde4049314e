"""The back end on the real thing, over each client."""

import time

import pytest

from k8sjob.backends.api import JobRef
from k8sjob.backends.cluster import connect
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.observe.status import JobState, job_status
from k8sjob.targets.jobs import job_of

SLEEP = ["sh", "-c", "trap 'exit 143' TERM; sleep 300 & wait"]
CLIENTS = ("python", "kubectl")


@pytest.fixture(params=CLIENTS)
def backend(request, cluster, namespace, monkeypatch):
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    return connect(namespace=namespace, client=request.param)


@pytest.fixture
def manifest(pytorchjob):
    def make(command=("true",), workers=1):
        return pytorchjob("one", command, command if workers else None)

    return make


def reached(backend, ref, state):
    return lambda: job_status(backend.snapshot(ref)).state is state


def test_suspend_resume_and_delete(backend, manifest, eventually):
    ref = JobRef.of(backend.create_manifest(job_of(manifest(command=SLEEP))))
    eventually(reached(backend, ref, JobState.RUNNING), "its start")
    backend.suspend(ref, value=True)
    eventually(reached(backend, ref, JobState.SUSPENDED), "its pause")
    # At once: the operator would take the end of the old pods for a failure of the new ones.
    backend.suspend(ref, value=False)
    eventually(reached(backend, ref, JobState.RUNNING), "its return")
    backend.delete(ref)
    backend.wait_for_pods(ref, 60)
    again = JobRef.of(backend.create_manifest(job_of(manifest(command=SLEEP))))
    assert again.uid != ref.uid
    with pytest.raises(JobNotFound):
        backend.delete(ref)
    assert backend.find("one") == again, "the newer one of its name stays"
    assert [s.job.raw["metadata"]["uid"] for s in backend.jobs()] == [again.uid]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda job: job["spec"].update(nprocPerNode=2), "spec.nprocPerNode: Invalid value"),
        (
            lambda job: job["spec"]["pytorchReplicaSpecs"]["Master"].update(replicas=2),
            "the training operator refuses the job: spec.pytorchReplicaSpecs",
        ),
        (lambda job: job["metadata"].update(name="1one"), "a DNS-1035 label"),
    ],
)
def test_what_the_cluster_does_not_take(backend, manifest, change, words):
    wrong = manifest()
    change(wrong)
    for attempt in (backend.dry_run, backend.create_manifest):
        with pytest.raises(BackendError) as told:
            attempt(job_of(wrong))
        assert words in str(told.value)
    assert backend.jobs() == []


def test_warnings_of_pods_come_by_the_watch(backend, manifest):
    wrong = manifest(workers=0)
    pod = wrong["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    pod["containers"][0]["envFrom"] = [{"secretRef": {"name": "nowhere"}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    pod["volumes"] = [{"name": "data", "configMap": {"name": "settings"}}]
    ref = JobRef.of(backend.create_manifest(job_of(wrong)))
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
    ref = JobRef.of(backend.create_manifest(job_of(wanting)))
    (secret,) = [o for o in backend.related(backend.snapshot(ref)) if o["kind"] == "Secret"]
    assert secret["metadata"]["name"] == "wandb"
    assert "data" not in secret
