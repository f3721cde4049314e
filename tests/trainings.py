"""Jobs with their pods and the output of a training, at given seconds after the creation."""

from datetime import UTC, datetime, timedelta

from k8sjob.backends.api import LogLine
from k8sjob.contract import Event, EventKind

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds):
    return (BEGIN + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def job(*, end=None, workers=1, gpus=1, state="Succeeded", name="job", resource="nvidia.com/gpu"):
    limits = {resource: gpus} if gpus else {"cpu": "2"}
    pod = {"spec": {"containers": [{"name": "pytorch", "resources": {"limits": limits}}]}}
    conditions = [{"type": state, "status": "True", "lastTransitionTime": at(end)}] if end else []
    status = {"conditions": conditions, "startTime": at(0)}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": name,
            "creationTimestamp": at(0),
            "labels": {"team": "red"},
        },
        "spec": {
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, "template": pod},
                "Worker": {"replicas": workers, "template": pod},
            }
        },
        "status": {**status, "completionTime": at(end)} if end else status,
    }


def pod(replica, scheduled, end=None, node=""):
    role, _, index = replica.rpartition("-")
    labels = {"replica-type": role, "replica-index": index}
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(scheduled)}
    ended = {"terminated": {"exitCode": 0, "finishedAt": at(end)}} if end else {"running": {}}
    return {
        "metadata": {
            "name": f"job-{replica}",
            "creationTimestamp": at(0),
            "labels": {f"training.kubeflow.org/{key}": value for key, value in labels.items()},
        },
        "spec": {"nodeName": node or f"node-{replica}"},
        "status": {
            "phase": "Succeeded" if end else "Running",
            "conditions": [bound],
            "containerStatuses": [{"name": "pytorch", "state": ended}],
        },
    }


def line(seconds, event="text", attempt=0):
    text = event.encode() if isinstance(event, Event) else event
    return LogLine("master-0", attempt, at(seconds), text)


def met(seconds, attempt=0):
    return line(seconds, Event(EventKind.STARTED, {"world_size": 2}, 1.0), attempt)


def step(seconds, number, attempt=0, *, wait=0.0, slowest=0):
    data = {"epoch": 0, "step": number, "step_s": 1.0, "wait_s": wait, "slowest": slowest}
    return line(seconds, Event(EventKind.PROGRESS, data, 1.0), attempt)


def finished(seconds, attempt=0):
    return line(seconds, Event(EventKind.FINISHED, {}, 1.0), attempt)
