"""A kind of job that k8sjob does not have: what a new one must say, and what follows from that.

A Regatta has one crew, whose Pods are called NAME-seat-INDEX, and tells its state in a phase.
"""

import re

import pytest
import yaml
from clusters import Cluster

from k8sjob.backends.api import JobRef
from k8sjob.backends.cluster.backend import ClusterBackend
from k8sjob.checks.lint import lint_manifest
from k8sjob.contract import Reason, Role
from k8sjob.errors import SpecError
from k8sjob.findings import invalid
from k8sjob.jobs.plan import plan_job
from k8sjob.kube.api_resources import Controller, ResourcePath
from k8sjob.kube.objects import Object, moment
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.status import job_status
from k8sjob.rendering.manifest import render
from k8sjob.spec import JobSpec
from k8sjob.targets.api import Job, JobState, Pods, RoleReplicas, Target
from k8sjob.targets.field_types import type_problems
from k8sjob.targets.jobs import TARGETS, is_job, job_of, replica_names
from k8sjob.targets.shapes import ABOUT, POD_TEMPLATE

TEMPLATE = """\
apiVersion: water.example/v1
kind: Regatta
metadata:
  name: {{ spec.name | scalar }}
  labels:
{{ job_labels | tree(4) }}
spec:
  suspend: {{ suspend | scalar }}
  crew:
    size: {{ size | scalar }}
{% with replica = replicas[0] %}
    template:
      spec:
        restartPolicy: Never
{% filter indent(8, first=true) %}
{% include "pod.yaml.j2" %}
{% endfilter %}
{% endwith %}
"""
SEAT, NAME = "water.example/seat", "water.example/regatta"
CREW = ("spec", "crew", "template")


class Regatta(Job):
    """How a Regatta is read."""

    @property
    def replicas(self):
        size, template = self.part("spec", "crew").get("size", 1), self.part(*CREW)
        counts = {Role.MASTER: 1, Role.WORKER: size - 1}
        return tuple(
            RoleReplicas(role, count, CREW, template, "Never")
            for role, count in counts.items()
            if count
        )

    nproc_per_node, is_elastic = "1", False

    def injected_env(self, role, index):
        return {"RANK": str(index + (role is Role.WORKER))}

    def applies_at_once(self, path):
        return path == ("spec", "suspend")

    def state(self):
        phases = {"Rowing": JobState.RUNNING, "Sunk": JobState.FAILED, "Home": JobState.SUCCEEDED}
        phase = self.status.get("phase")
        return phases.get(phase, JobState.CREATED), {"type": phase, "reason": "Umpire"}

    def times(self):
        return self.status.get("begun"), self.status.get("ended")

    def counts(self, state):
        return {"Running": self.status.get("afloat", 0)}

    def replica_named(self, pod):
        match = re.fullmatch(rf"{self.name}-seat-(\d+)", pod)
        return replica(int(match[1])) if match else ""

    def recreations(self, replica, events):
        return 0


class Seats(Pods):
    """The Pods of Regattas."""

    job_label = NAME
    creations = (("NoSeat", "SeatTaken", "Seated "),)
    ended_stay = True

    def replica_of(self, pod):
        seat = Object(pod).labels.get(SEAT)
        return replica(int(seat)) if seat else ""

    def selector(self, name, replicas=()):
        return f"{NAME}={name}"


def replica(seat):
    return f"worker-{seat - 1}" if seat else "master-0"


class RegattaTarget(Target):
    """How a spec becomes a Regatta."""

    name = "regatta"
    kind = "Regatta"
    api_version = "water.example/v1"
    resource = "regattas"
    job_type = Regatta
    pods = Seats()
    controller = Controller("Regatta", "the umpire", "ask for it")
    manager = "water.example/umpire"
    file = "regatta.yaml"

    def __init__(self, templates):
        crew = {"size": int, "template": POD_TEMPLATE}
        self.shapes = {**ABOUT, "spec": {"suspend": bool, "crew": crew}}
        self.templates = templates

    def refusals(self, spec):
        if spec.gang is not None:
            yield invalid(("gang",), "a regatta starts when it likes", "remove it")

    def values(self, spec):
        return {"size": spec.nnodes, "injected": {}, "fields": {}}

    def problems(self, manifest):
        return list(type_problems(self.typed(manifest)[1]))


@pytest.fixture
def target(tmp_path, monkeypatch):
    """The kind, registered as long as a test runs."""
    (tmp_path / "regatta.yaml.j2").write_text(TEMPLATE)
    target = RegattaTarget(tmp_path)
    TARGETS.append(target)
    yield target
    TARGETS.remove(target)


class Sea(Cluster):
    """A cluster that has Regattas, and no other kind of job.

    Attributes:
        objects: by resource and name.
    """

    namespace = "team"

    def __init__(self):
        super().__init__()
        self.objects = {("namespaces", "team"): {"kind": "Namespace", "metadata": {"name": "team"}}}

    def answer(self, method, path, query, body):
        at = ResourcePath.of(path)
        if at.resource not in {"regattas", "pods", "events", "namespaces"}:
            return None
        if method == "POST":
            meta = {**body["metadata"], "uid": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
            created = {**body, "metadata": {**meta, "namespace": "team", "resourceVersion": "1"}}
            if "dryRun" not in query:
                self.objects[at.resource, meta["name"]] = created
            return created
        if at.name:
            return self.objects.get((at.resource, at.name))
        items = [item for (resource, _), item in self.objects.items() if resource == at.resource]
        return {"metadata": {"resourceVersion": "2"}, "items": items}

    def add(self, resource, name, **fields):
        self.objects[resource, name] = {"metadata": {"name": name, "namespace": "team"}, **fields}
        return self.objects[resource, name]["metadata"]

    def seat(self, number, phase, **state):
        """The Pod of a seat, and the state of its container."""
        status = {"name": "pytorch", "restartCount": 0, "ready": False, "state": state}
        meta = self.add(
            "pods",
            f"tiny-seat-{number}",
            status={"phase": phase, "containerStatuses": [status]},
            spec={"containers": [{"name": "pytorch"}], "nodeName": "lake"},
        )
        meta |= {"labels": {NAME: "tiny", SEAT: str(number)}, "uid": f"seat-{number}"}
        meta["ownerReferences"] = [{"controller": True, "uid": "1"}]
        meta["creationTimestamp"] = "2026-01-01T00:00:01Z"


def spec(**fields):
    document = {"name": "tiny", "image": "example/image:1", "run": {"script": "main.py"}}
    document |= {"replicas": {"workers": 1}, **fields}
    # The names that a job.yaml may have are in k8sjob.spec.values, which a new kind extends.
    return JobSpec.model_validate(document).model_copy(update={"target": "regatta"})


def test_a_spec_becomes_its_object(target):
    (regatta,) = yaml.safe_load_all(render(spec()))
    assert (regatta["kind"], regatta["spec"]["crew"]["size"]) == ("Regatta", 2)
    (container,) = regatta["spec"]["crew"]["template"]["spec"]["containers"]
    assert container["image"] == "example/image:1"
    assert is_job(regatta)
    assert list(replica_names(job_of(regatta))) == ["master-0", "worker-0"]
    assert lint_manifest(yaml.safe_dump(regatta)) == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"gang": {"queue": "q"}}, "gang"),
        ({"overlay": {"spec": {"crew": {"size": "two"}}}}, "overlay.spec.crew.size"),
        ({"overlay": {"spec": {"runPolicy": {}}}}, "overlay.spec.runPolicy"),
    ],
)
def test_what_it_cannot_be_is_refused(target, fields, field):
    with pytest.raises(SpecError) as caught:
        render(spec(**fields))
    assert caught.value.findings[0].field == field


def test_it_is_created_watched_and_explained(target, tmp_path):
    sea = Sea()
    backend = ClusterBackend(sea)
    ref = backend.create(plan_job(spec(), tmp_path))
    assert (ref.name, ref.kind) == ("tiny", "Regatta")
    assert job_status(backend.snapshot(ref)).state is JobState.CREATED
    regatta = sea.objects["regattas", "tiny"]
    regatta["status"] = {"phase": "Rowing", "begun": "2026-01-01T00:00:01Z", "afloat": 2}
    (listed,) = backend.jobs(pods=True)
    assert job_status(listed).state is JobState.RUNNING

    sea.seat(0, "Running", running={"startedAt": "2026-01-01T00:00:02Z"})
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-01T00:00:09Z"}
    message = Reason(1, "ValueError: the oar broke", "Traceback ...").encode()
    sea.seat(1, "Failed", terminated={**ended, "message": message})
    regatta["status"] |= {"phase": "Sunk", "ended": "2026-01-01T00:00:10Z"}
    snapshot = backend.snapshot(JobRef("tiny", "team"))
    status = job_status(snapshot)
    assert (status.state, status.finished) == (JobState.FAILED, moment("2026-01-01T00:00:10Z"))
    assert [replica.name for replica in status.replicas] == ["master-0", "worker-0"]
    first = diagnose(snapshot, {})[0]
    assert "the oar broke" in first.message
    assert "worker-0" in str(first)
