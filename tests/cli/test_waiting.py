"""Replicas that have no output: `logs` says what they wait for."""

from k8sjob.backends.api import Snapshot
from k8sjob.cli.logs import _waiting
from k8sjob.observe.status import job_status
from k8sjob.targets.pytorchjob.operator import REPLICA_INDEX, REPLICA_TYPE

UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


def pending(role, index):
    labels = {REPLICA_TYPE: role, REPLICA_INDEX: str(index)}
    return {
        "metadata": {"name": f"digits-{role}-{index}", "labels": labels},
        "spec": {},
        "status": {"phase": "Pending", "conditions": [UNSCHEDULABLE]},
    }


def test_replicas_that_wait_for_the_same_are_named_together():
    template = {"spec": {"containers": [{"name": "pytorch"}]}}
    counts = {"Master": 1, "Worker": 2}
    roles = {role: {"replicas": n, "template": template} for role, n in counts.items()}
    job = {
        "kind": "PyTorchJob",
        "metadata": {"name": "digits", "namespace": "team", "uid": "u"},
        "spec": {"pytorchReplicaSpecs": roles},
    }
    status = job_status(Snapshot(job, (pending("master", 0), pending("worker", 0))))
    assert list(_waiting(status, ("master-0", "worker-0", "worker-1"))) == [
        "master-0 and 1 more: there is no output (Unschedulable); -f waits for it",
        "worker-1: there is no output (it has no pod, the job is Created); -f waits for it",
    ]
