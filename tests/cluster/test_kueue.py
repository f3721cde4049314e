"""Jobs of every kind in Kueue's queues, and what `submit`, `doctor` and `why` say of them."""

import itertools
import json

import pytest
import yaml

from k8sjob.checks.doctor import examine_needs, gather_needs
from k8sjob.jobs.plan import plan_job
from k8sjob.kube.capacity import amounts
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import JobState, job_status
from k8sjob.observe.suspension import last_suspension
from k8sjob.observe.timing import read_timing
from k8sjob.observe.usage import Use, read_usage
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import TARGETS, by_name

from .desk import SLEEP

FRAMEWORKS = {target.name: target.kueue_framework for target in TARGETS}
HOST = "kubernetes.io/hostname"
KINDS = tuple(target.name for target in TARGETS)
NEVER = (
    ("none", "there is no queue none in", "there is no queue 'none'"),
    ("small", "requests 0.1 of cpu, and ClusterQueue", "maximum capacity (50m)"),
    ("lost", "inactive: FlavorNotFound: Can't admit", "FlavorNotFound"),
    ("orphan", "ClusterQueue nowhere, which does not exist", "which does not exist"),
)
"""Queues that never start a job: what is said of them before and after it is submitted."""


@pytest.fixture
def plan(desk):
    """The plan of a job of two nodes that sleep, 50m of a core each."""

    def make(name, target, **fields):
        file = desk.file(SLEEP, name, target=target, **{"resources": {"cpu": "50m"}, **fields})
        return plan_job(JobSpec.model_validate(yaml.safe_load(file.read_text())))

    return make


@pytest.fixture
def create(desk, plan):
    return lambda *args, **fields: desk.backend.create(plan(*args, **fields))


@pytest.fixture
def state(desk):
    return lambda ref: job_status(desk.backend.snapshot(ref)).state


@pytest.fixture
def reason(desk):
    """Why a job waits: the cause and the message; empty for one that does not."""

    def find(ref):
        snapshot = desk.backend.snapshot(ref)
        found = diagnose(snapshot, {}, desk.backend.related(snapshot))
        return next(((one.id, one.message) for one in found if "queue" in one.id), ("", ""))

    return find


def test_a_job_waits_for_quota_and_starts_when_it_is_free(
    desk, kueue, create, *, state, reason, eventually
):
    queues = {kind: kueue(kind, cpu="150m") for kind in KINDS}
    first = {kind: create(f"first-{kind}", kind, kueue_queue=kind) for kind in KINDS}
    for kind, ref in first.items():
        eventually(lambda ref=ref: state(ref) is JobState.RUNNING, f"the first {kind}")
    then = {kind: create(f"then-{kind}", kind, kueue_queue=kind) for kind in KINDS}
    for kind, ref in then.items():
        has = f"of the 0.15 of ClusterQueue {queues[kind]} {desk.namespace}/first-{kind} has 0.1"
        eventually(lambda ref=ref, has=has: has in reason(ref)[1], f"why the second {kind} waits")
        cause, message = reason(ref)
        assert cause == "queued"
        assert "insufficient unused quota for cpu in flavor" in message
        assert state(ref) is JobState.QUEUED
        desk.backend.delete(first[kind])
    for kind, ref in then.items():
        eventually(lambda ref=ref: state(ref) is JobState.RUNNING, f"the second {kind}")


@pytest.mark.usefixtures("kueue", "trainer")
def test_doctor_knows_trainers_webhook_where_kueue_has_one(desk):
    asked = ("doctor", "-n", desk.namespace, "--target", "trainjob", "-o", "json")
    checks = json.loads(desk.call(*asked)[0])["checks"]
    (found,) = [check["seen"] for check in checks if check["topic"] == "webhook"]
    assert found.startswith("answers: validator.trainingruntime.trainer.kubeflow.org refused")


def test_what_never_starts_is_reported_before_and_after(desk, kueue, plan, reason, eventually):
    kueue("small", cpu="50m")
    kueue("lost", flavor="nowhere", cpu="1")
    orphan = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue"}
    orphan |= {"metadata": {"name": "orphan"}, "spec": {"clusterQueue": "nowhere"}}
    desk.cluster.create(orphan, desk.namespace)
    for kind, (queue, before, after) in itertools.product(KINDS, NEVER):
        made = plan(f"{kind}-in-{queue}", kind, kueue_queue=queue)

        def warned(made=made, before=before):
            facts = gather_needs(desk.backend.transport, desk.namespace, made.job)
            return any(before in check.message for check in examine_needs(facts))

        eventually(warned, f"a warning of {queue} for a {kind}")
        ref = desk.backend.create(made)

        def explained(ref=ref, after=after):
            cause, message = reason(ref)
            return cause == "no-queue" and after in message

        eventually(explained, f"the reason of a {kind} in {queue}")


def test_an_admission_check_that_nobody_has_decided(desk, kueue, create, reason, eventually):
    """No controller decides it: this test says that it is active, as one would."""
    check = {"kind": "AdmissionCheck", "metadata": {"name": desk.namespace}}
    check |= {"spec": {"controllerName": "example.com/approval"}}
    desk.cluster.create({"apiVersion": "kueue.x-k8s.io/v1beta2", **check})
    active = {"type": "Active", "status": "True", "reason": "Active", "message": "it is"}
    conditions = [{**active, "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    patch = json.dumps({"status": {"conditions": conditions}})
    about = ("admissioncheck", desk.namespace, "--subresource=status", "--type=merge")
    desk.cluster.kubectl("patch", *about, "-p", patch)
    checks = {"admissionChecksStrategy": {"admissionChecks": [{"name": desk.namespace}]}}
    kueue("checked", spec=checks, cpu="1")
    refs = {kind: create(kind, kind, kueue_queue="checked") for kind in KINDS}
    waits = f"it has its quota, and waits for the admission check {desk.namespace} (Pending)"
    for kind, ref in refs.items():
        eventually(lambda ref=ref: waits in reason(ref)[1], f"why the {kind} waits")
    watched = desk.start("watch", f"{desk.namespace}/job")
    lines = iter(watched.stdout.readline, "")
    assert any(waits in line for line in lines)  # `watch` says so by itself
    for ref in refs.values():
        desk.backend.delete(ref)
    desk.cluster.delete("admissionchecks", desk.namespace)


def test_a_job_of_a_higher_priority_overtakes_those_that_wait(
    desk, kueue, create, *, state, reason, eventually
):
    urgent = {"kind": "WorkloadPriorityClass", "metadata": {"name": desk.namespace}, "value": 9}
    desk.cluster.create({"apiVersion": "kueue.x-k8s.io/v1beta2", **urgent})
    alone = {"replicas": {"workers": 0}}
    for kind in KINDS:
        kueue(kind, cpu="50m")
    first, later, fast = {}, {}, {}
    for kind in KINDS:
        first[kind] = create(f"first-{kind}", kind, kueue_queue=kind, **alone)
    for kind, ref in first.items():
        eventually(lambda ref=ref: state(ref) is JobState.RUNNING, f"the first {kind}")
        later[kind] = create(f"later-{kind}", kind, kueue_queue=kind, **alone)
    for kind, ref in later.items():
        eventually(lambda ref=ref: reason(ref)[0] == "queued", f"the wait of the {kind}")
        own = {"kueue_queue": kind, "kueue_priority_class": desk.namespace}
        fast[kind] = create(f"fast-{kind}", kind, **own, **alone)
        ahead = f"ahead of it: {desk.namespace}/fast-{kind}"
        eventually(lambda ref=ref, ahead=ahead: ahead in reason(ref)[1], f"who is before {kind}")
        desk.backend.delete(first[kind])
    for kind, ref in fast.items():
        eventually(lambda ref=ref: state(ref) is JobState.RUNNING, f"the urgent {kind}")
        assert state(later[kind]) is JobState.QUEUED
    desk.cluster.delete("workloadpriorityclasses", desk.namespace)


def test_a_job_runs_in_one_domain_of_the_topology(
    desk, kueue, create, *, state, reason, eventually
):
    kueue("racks", level=HOST, cpu="1000")
    refs = {
        kind: create(kind, kind, kueue_queue="racks", kueue_topology={"required": HOST})
        for kind in KINDS
    }
    for kind, ref in refs.items():
        eventually(lambda ref=ref: state(ref) is JobState.RUNNING, f"the {kind}")
        pods = desk.backend.snapshot(ref).pods
        assert len({pod["spec"]["nodeSelector"][HOST] for pod in pods}) == 1
    groups = {}
    for workload in desk.objects("workloads").values():
        (owner,) = workload["metadata"]["ownerReferences"]
        requests = [pods["topologyRequest"] for pods in workload["spec"]["podSets"]]
        assert {request["required"] for request in requests} == {HOST}
        groups[owner["name"]] = [request.get("podSetGroupName") for request in requests]
    assert groups.pop("pytorchjob") == ["pytorchjob", "pytorchjob"]
    assert groups == {"job": [None], "jobset": [None], "trainjob": [None]}
    nodes = [amounts(node["status"]["allocatable"]) for node in desk.cluster.read("nodes")]
    half = f"{max(node['cpu'] for node in nodes) * 600:.0f}m"  # a little more
    for kind in KINDS:
        wide = {"kueue_queue": "racks", "resources": {"cpu": half}}
        ref = create(f"wide-{kind}", kind, kueue_topology={"required": HOST}, **wide)
        eventually(lambda ref=ref: "allow" in reason(ref)[1], f"why a wide {kind} waits")
        assert f'topology "{desk.namespace}-racks"' in reason(ref)[1]
        assert state(ref) is JobState.QUEUED


def test_a_job_that_another_preempts_continues_where_it_was(
    desk, kueue, create, train, *, state, reason, checkpoints, eventually
):
    refs, rivals = {}, {}
    for kind in KINDS:
        cohort = {"cohortName": f"{desk.namespace}-{kind}"}
        reclaims = {**cohort, "preemption": {"reclaimWithinCohort": "Any"}}
        flavor = kueue(f"owner-{kind}", spec=reclaims, cpu="100m")
        kueue(f"guest-{kind}", flavor=flavor, spec=cohort, cpu="50m")
        checkpoints(kind)
        refs[kind] = train(
            f"guest-{kind}",
            {"epochs": 2, "dropout": 0.3, "hold": 3},
            target=kind,
            kueue_queue=f"guest-{kind}",
            checkpoint={"dir": "/checkpoints", "every": 1},
            volumes=[{"name": "c", "mount": "/checkpoints", "pvc": kind}],
        )

    def lines(ref, kind):
        found = desk.backend.logs(ref, "master-0")
        return [line.text for line in found if f'"kind":"{kind}"' in line.text]

    for kind, ref in refs.items():
        eventually(lambda ref=ref: lines(ref, "checkpoint"), f"a checkpoint of {kind}")
        snapshot = desk.backend.snapshot(ref)._replace(events=())
        assert last_suspension(snapshot, desk.backend.related(snapshot)).first, kind
        assert read_timing(desk.backend, snapshot).since == "submission", kind
        assert Use.UNKNOWN not in read_usage(desk.backend, desk.backend.snapshot(ref)).seconds
        rivals[kind] = create(
            f"owner-{kind}", kind, kueue_queue=f"owner-{kind}", resources={"cpu": "50m"}
        )
    for kind, ref in refs.items():
        note = f"preempted by {desk.namespace}/owner-{kind} (InCohortReclamation)"
        eventually(lambda ref=ref, note=note: note in reason(ref)[1], f"why {kind} was stopped")
        assert state(ref) is JobState.QUEUED
        eventually(lambda kind=kind: state(rivals[kind]) is JobState.RUNNING, f"the other {kind}")
        desk.backend.delete(rivals[kind])
    results = []
    for kind, ref in refs.items():
        eventually(lambda ref=ref: state(ref).finished, f"the end of {kind}")
        last = last_lines(desk.backend, desk.backend.snapshot(ref))
        assert state(ref) is JobState.SUCCEEDED, (kind, last)
        assert lines(ref, "resumed")
        snapshot = desk.backend.snapshot(ref)
        used = read_usage(desk.backend, snapshot)
        assert used.seconds[Use.UNKNOWN] > 0, kind  # the output of its first Pod is gone
        split = read_timing(desk.backend, snapshot)
        assert (split.since, split.phases[0].phase) == ("suspension", "suspended"), kind
        by_events = last_suspension(snapshot)
        no_events = snapshot._replace(events=())
        assert last_suspension(no_events).begin is None
        by_workload = last_suspension(no_events, desk.backend.related(snapshot))
        assert by_workload.begin == pytest.approx(by_events.begin, abs=10), kind
        assert by_workload.ran, kind
        results.append(desk.result(ref))
    for one in results:
        assert one["losses"] == pytest.approx(results[0]["losses"], rel=1e-9)


def test_kueue_starts_an_elastic_job_with_fewer_nodes(desk, kueue, train, state, eventually):
    kueue("tight", cpu="250m")
    ref = train(
        "fewer",
        {"epochs": 2},
        target="job",
        kueue_queue="tight",
        replicas={"workers": 2, "elastic": {"min": 2, "max": 3}},
    )
    eventually(lambda: state(ref).finished, "its end")
    assert state(ref) is JobState.SUCCEEDED
    spec = desk.objects("jobs")["fewer"]["spec"]
    assert (spec["completions"], spec["parallelism"]) == (2, 2)
    log = [line.text for line in desk.backend.logs(ref, "master-0")]
    assert any("of 2" in line and "round 1: node" in line for line in log), log
    assert desk.result(ref, "master-0", "worker-0")["equal"]  # any of them may have rank 0


def test_kinds_that_kueue_does_not_manage(bed, desk, kueue, plan, *, state, reason, eventually):
    kueue("team", cpu="1")
    for managed in (["job"], [kind for kind in KINDS if kind != "job"]):
        bed.add("kueue", integrations={"frameworks": [FRAMEWORKS[kind] for kind in managed]})
        refs = {}
        for kind in KINDS:
            made = plan(f"{kind}-{len(managed)}", kind, kueue_queue="team")
            facts = gather_needs(desk.backend.transport, desk.namespace, made.job)
            seen = [check.message for check in examine_needs(facts) if check.id == "queue"]
            lacks = f"Kueue does not manage {by_name(kind).kind}s in namespace {desk.namespace}"
            assert (lacks in seen) is (kind not in managed)
            refs[kind] = desk.backend.create(made)
        for kind in managed:
            ref = refs.pop(kind)
            eventually(lambda ref=ref: state(ref) is JobState.RUNNING, f"the {kind}")
        for kind, ref in refs.items():
            unmade = lambda ref=ref: "Kueue has made no Workload for it" in reason(ref)[1]  # noqa: E731
            eventually(unmade, f"why a {kind} never starts")
            assert reason(ref)[0] == "no-queue"
            assert state(ref) is JobState.QUEUED
