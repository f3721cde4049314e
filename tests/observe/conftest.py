"""Objects as an apiserver would return them, and a back end that returns them."""

import pytest

from k8sjob.backends.api import JobRef, LogLine, Snapshot
from k8sjob.errors import JobNotFound

LABEL = "training.kubeflow.org"


def condition(text):
    """ "Running", "-Suspended" (false), "Failed:reason:message"."""
    kind, _, rest = text.partition(":")
    reason, _, message = rest.partition(":")
    return {
        "type": kind.lstrip("-"),
        "status": "False" if kind.startswith("-") else "True",
        "reason": reason or f"PyTorchJob{kind.lstrip('-')}",
        "message": message,
        "lastTransitionTime": "2026-01-01T00:09:00Z",
    }


@pytest.fixture
def make_job():
    def make(*conditions, replicas=None, nproc="1", **status):
        counts = replicas or {"Master": 1, "Worker": 2}
        return {
            "metadata": {
                "name": "job",
                "namespace": "ns",
                "uid": "u",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {
                "nprocPerNode": nproc,
                "runPolicy": {"activeDeadlineSeconds": 60},
                "pytorchReplicaSpecs": {r: {"replicas": n} for r, n in counts.items()},
            },
            "status": {"conditions": [condition(text) for text in conditions], **status},
        }

    return make


@pytest.fixture
def make_pod():
    def make(replica, phase="Running", *, dying=False, restarts=0, last=None, **state):
        role, _, index = replica.rpartition("-")
        container = {"name": "pytorch", "restartCount": restarts, "state": state}
        if last:
            container["lastState"] = {"terminated": last}
        return {
            "metadata": {
                "name": f"job-{replica}",
                "labels": {f"{LABEL}/replica-type": role, f"{LABEL}/replica-index": index},
                **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if dying else {}),
            },
            "spec": {"nodeName": "node-1"},
            "status": {"phase": phase, "containerStatuses": [container]},
        }

    return make


class Script:
    """A back end that tells a story: snapshots in order, and lines of each replica.

    A snapshot is given when the lines that stand before it have been taken by their readers.
    """

    name = "script"

    def __init__(self, snapshots, lines=(), *, gone=False, errors=()):
        self.snapshots, self.lines, self.gone = snapshots, list(lines), gone
        self.errors = dict(errors)
        self.stopped, self.asked = [], []

    def find(self, name):
        return JobRef(name, "ns", "u")

    def snapshot(self, ref):
        if not self.snapshots:
            raise JobNotFound("gone")
        return self.snapshots[0]

    def watch(self, ref, *, stop=None):
        self.snapshot(ref)
        yield from self.snapshots
        if not self.gone and stop:
            stop.wait(30)
            self.stopped.append("watch")

    def logs(self, ref, replica, *, follow=False, previous=False, tail=None, since=None, stop=None):
        self.asked.append((replica, follow, tail, since))
        if replica in self.errors:
            raise self.errors[replica]
        wanted = [line for line in self.lines if line.replica == replica]
        if previous:
            wanted = [line for line in wanted if line.attempt == 0]
        if tail is not None:
            wanted = wanted[max(len(wanted) - tail, 0) :]
        yield from wanted


@pytest.fixture
def script():
    return Script


@pytest.fixture
def snapshot(make_job):
    """A snapshot with these conditions."""

    def make(*conditions, pods=(), events=(), **options):
        return Snapshot(make_job(*conditions, **options), tuple(pods), tuple(events))

    return make


@pytest.fixture
def line():
    def make(replica, text, second=0, attempt=0):
        return LogLine(replica, attempt, f"2026-01-01T00:00:{second:02d}.000000001Z", text)

    return make


@pytest.fixture
def ref():
    return JobRef("job", "ns", "u")
