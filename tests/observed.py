"""Jobs, Pods and Events as an apiserver would return them, and a back end that returns them."""

import copy
import json
import re
from datetime import UTC, datetime
from pathlib import Path

from hostile import places
from hypothesis import strategies as st

from k8sjob.backends.api import JobRef, LogLine, Snapshot
from k8sjob.contract import Reason
from k8sjob.errors import JobNotFound
from k8sjob.observe.diagnose import diagnose
from k8sjob.spec import schema
from k8sjob.targets.jobs import job_of
from k8sjob.targets.workload.job import Workload
from k8sjob.targets.workload.target import WorkloadTarget

RECORDED = {
    file.stem: json.loads(file.read_text())
    for file in sorted(Path(__file__).with_name("observe").glob("recorded/*.json"))
}
"""The sick jobs that test_recorded.py describes, by name."""
LABEL = "training.kubeflow.org"
NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
REF = JobRef("job", "ns", "u")
MASTER, WORKER, PAIR = {"Master": 1}, {"Worker": 1}, {"Master": 1, "Worker": 1}
"""How many replicas a job has."""


SPEC = schema()


def _fields(part, above=""):
    """The names of fields of a job.yaml that nothing else has: `node_selector`, `run.args`."""
    part = SPEC["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
    for several in ("anyOf", "oneOf", "allOf"):
        for inner in part.get(several, ()):
            yield from _fields(inner, above)
    yield from _fields(part["items"], f"{above}[]") if "items" in part else ()
    for name, inner in part.get("properties", {}).items():
        yield from [name] * ("_" in name) + [f"{above}.{name}"] * bool(above)
        yield from _fields(inner, name)


_NAMES = "|".join(sorted(map(re.escape, {*_fields(SPEC)} - {"resources.requests"})))
OF_JOB_YAML = re.compile(rf"job\.yaml|(?<![\w.\]])(?:{_NAMES})\b(?!\()")
"""What only a job.yaml has, and nothing that `why` says of the jobs of others may have."""


def snapshot_of(recorded, moment=None):
    """The job, Pods, Events and PodGroups of a recorded job."""
    groups = [part for part in recorded.get("related", ()) if part["kind"] == "PodGroup"]
    pods, events = recorded.get("pods", []), recorded.get("events", [])
    job, word = recorded["job"], recorded.get("word")
    kind = WorkloadTarget(job.get("kind", ""), job.get("apiVersion", ""), "", "")
    below = recorded.get("below", [])
    read = Workload.read(kind, job, word, pods, below) if word else job_of(job)
    return Snapshot(read, pods, events, moment, groups=groups)


def replayed(recorded, *, logs=True, related=True, now=None):
    """What `why` says of a recorded job."""
    return diagnose(
        snapshot_of(recorded),
        recorded.get("logs", {}) if logs else {},
        recorded.get("related", []) if related else [],
        now=now or datetime.fromisoformat(recorded["now"]),
    )


def at(time):
    """A moment, by minute and second: "05:00"."""
    return f"2026-01-01T00:{time}Z"


def condition(text):
    """ "Running", "-Suspended" (false), "Failed:reason:message"."""
    kind, _, rest = text.partition(":")
    reason, _, message = rest.partition(":")
    return {
        "type": kind.lstrip("-"),
        "status": "False" if kind.startswith("-") else "True",
        "reason": reason or f"PyTorchJob{kind.lstrip('-')}",
        "message": message,
        "lastTransitionTime": at("09:00"),
    }


def make_job(*conditions, replicas=None, nproc="1", labels=None, deadline=60, **status):
    counts = replicas or {"Master": 1, "Worker": 2}
    return {
        "metadata": {
            "name": "job",
            "namespace": "ns",
            "uid": "u",
            "creationTimestamp": at("00:00"),
            "labels": {"app.kubernetes.io/managed-by": "k8sjob", **(labels or {})},
        },
        "spec": {
            "nprocPerNode": nproc,
            "runPolicy": {"activeDeadlineSeconds": deadline} if deadline else {},
            "pytorchReplicaSpecs": {role: {"replicas": n} for role, n in counts.items()},
        },
        "status": {"conditions": [condition(text) for text in conditions], **status},
    }


def make_jobset(*replicated, condition):
    """A JobSet of others, with these replicatedJobs."""
    meta = {"name": "job", "namespace": "ns", "uid": "u", "creationTimestamp": at("00:00")}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": meta,
        "spec": {"replicatedJobs": [*replicated]},
        "status": {"conditions": [condition]},
    }


def make_pod(replica, phase="Running", *, dying=False, restarts=0, last=None, meta=(), **state):
    """The Pod of a replica, with this state of its container: `running={}`, `terminated=...`."""
    role, _, index = replica.rpartition("-")
    container = {"name": "pytorch", "restartCount": restarts, "state": state}
    if last:
        container["lastState"] = {"terminated": last}
    return {
        "metadata": {
            "name": f"job-{replica}",
            "labels": {f"{LABEL}/replica-type": role, f"{LABEL}/replica-index": index},
            **({"deletionTimestamp": at("00:00")} if dying else {}),
            **dict(meta),
        },
        "spec": {"nodeName": "node-1"},
        "status": {"phase": phase, "containerStatuses": [container]},
    }


def running(*names):
    return [make_pod(name, running={}) for name in names]


def unplaced(replica, reason, message, **spec):
    """A Pod for which the scheduler has no node."""
    pod = make_pod(replica, "Pending")
    waits = condition(f"-PodScheduled:{reason}:{message}")
    return {**pod, "spec": spec, "status": {"phase": "Pending", "conditions": [waits]}}


def ended(code, message="", reason="Error", time="05:00"):
    """How a container ended."""
    return {"exitCode": code, "reason": reason, "message": message, "finishedAt": at(time)}


def reported(code, rank, kind, message, where="", *, time="05:00", **more):
    """How a container ended whose runtime reports the reason."""
    return ended(code, Reason(code, rank, kind, message, where, **more).encode(), time=time)


def about(kind, name, reason, message, *, time="05:00", uid="", **more):
    """An Event."""
    return {
        "kind": "Event",
        "metadata": {"uid": f"{name} {reason} {message}"},
        "involvedObject": {"kind": kind, "name": name, **({"uid": uid} if uid else {})},
        "reason": reason,
        "message": message,
        "lastTimestamp": at(time),
        **more,
    }


def about_job(reason, message, **more):
    return about("PyTorchJob", "job", reason, message, **more)


def snapshot(*conditions, pods=(), events=(), **options):
    """A snapshot of a job with these conditions."""
    return Snapshot(job_of(make_job(*conditions, **options)), tuple(pods), tuple(events))


def line(replica, text, second=0, attempt=0):
    return LogLine(replica, attempt, f"2026-01-01T00:00:{second:02d}.000000001Z", text)


class Script:
    """A back end that tells a story: snapshots in order, and lines of each replica.

    A snapshot is given when the lines that stand before it have been taken by their readers.
    """

    recorded = False

    def __init__(self, snapshots, lines=(), *, gone=False, errors=(), related=()):
        self.snapshots, self.lines, self.gone = snapshots, list(lines), gone
        self.errors, self.beside = dict(errors), tuple(related)
        self.stopped, self.asked = [], []

    def related(self, _snapshot):
        return self.beside

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

    def logs(
        self, ref, replica, *, follow=False, previous=False, tail=None, since=None, **_options
    ):
        self.asked.append((replica, follow, tail, since))
        if replica in self.errors:
            raise self.errors[replica]
        wanted = [line for line in self.lines if line.replica == replica]
        if previous:
            wanted = [line for line in wanted if line.attempt == 0]
        if tail is not None:
            wanted = wanted[max(len(wanted) - tail, 0) :]
        yield from wanted


def of_recorded(job, lines=()):
    """A back end of a recorded job, with these lines before those that it has."""
    stamp = "2026-01-01T00:05:00.000000000Z"
    recorded_lines = [
        LogLine(replica, 0, stamp, text)
        for replica, texts in job.get("logs", {}).items()
        for text in texts
    ]
    moment = datetime.fromisoformat(job["now"])
    related = job.get("related", ())
    return Script([snapshot_of(job, moment)], [*lines, *recorded_lines], related=related)


def lacking(data, objects, matters):
    """A copy of objects without up to three of the places that matter, as a test draws them."""
    seen = copy.deepcopy(objects)
    for _ in range(3):
        if not (left := [path for path in places(seen) if matters(path)]):
            break
        *path, last = data.draw(st.sampled_from(left))
        inner = seen
        for key in path:
            inner = inner[key]
        del inner[last]
    return seen
