"""Why a job waits in a queue: objects and texts as Kueue 0.19 writes them."""

from datetime import UTC, datetime, timedelta

import pytest
from observed import NOW, at, snapshot

from k8sjob.observe.diagnose import diagnose

GPU = "nvidia.com/gpu"
DEACTIVATED = "The workload is deactivated due to a check"
LATE = "Exceeded the PodsReady timeout ns/mine"
SHORT = (
    "couldn't assign flavors to pod set master: insufficient unused quota for nvidia.com/gpu in"
    " flavor a100, 1 more needed; couldn't assign flavors to pod set worker: insufficient unused"
    " quota for nvidia.com/gpu in flavor a100, 3 more needed"
)
TOO_MUCH = (
    "couldn't assign flavors to pod set master: insufficient unused quota for nvidia.com/gpu in"
    " flavor a100, 1 more needed; couldn't assign flavors to pod set worker: insufficient quota for"
    " nvidia.com/gpu in flavor a100, previously considered podsets requests (1) + current podset"
    " request (16) > maximum capacity (8)"
)
PREEMPTED = (
    "Preempted to accommodate a workload (UID: 11111111-2222-3333-4444-555555555555, JobUID: j9)"
    " due to reclamation within the cohort; preemptor path: /c/b; preemptee path: /c/a"
)


def condition(kind, status, reason, message=""):
    about = {"reason": reason, "message": message, "lastTransitionTime": at("08:00")}
    return {"type": kind, "status": status, **about}


def mine(*conditions, **options):
    """The Workload of the job."""
    return workload("mine", *conditions, **options)


def pending(message, reason="Pending"):
    return condition("QuotaReserved", "False", reason, message)


def evicted(reason, message, status="True"):
    return condition("Evicted", status, reason, message)


def workload(name, *conditions, of="u", minute=0, gpus=0, priority=0, **more):
    roles = [{"name": "main", "flavors": {GPU: "a100"}, "resourceUsage": {GPU: str(gpus)}}]
    admission = {"clusterQueue": "team-a", "podSetAssignments": roles}
    return {
        "kind": "Workload",
        "metadata": {
            "name": f"job-{name}-1a2b3",
            "namespace": "ns",
            "uid": more.pop("uid", name),
            "creationTimestamp": at(f"0{minute}:00"),
            "ownerReferences": [{"kind": "Job", "name": name, "uid": of}],
        },
        "spec": {"queueName": "research", "priority": priority, **more.pop("spec", {})},
        "status": {"conditions": [*conditions], **more, "admission": admission if gpus else None},
    }


def queue(kind, name, spec, **active):
    """A queue, with the condition that it is not active where that is given."""
    conditions = [condition("Active", "False", **active)] if active else []
    about = {"kind": kind, "metadata": {"name": name, "namespace": "ns"}}
    return {**about, "spec": spec, "status": {"conditions": conditions}}


def cluster_queue(**active):
    flavor = {"name": "a100", "resources": [{"name": GPU, "nominalQuota": "8"}]}
    spec = {"resourceGroups": [{"flavors": [flavor]}]}
    return queue("ClusterQueue", "team-a", spec, **active)


def local_queue(**active):
    return queue("LocalQueue", "research", {"clusterQueue": "team-a"}, **active)


def absent(kind, name=""):
    return {"kind": "Status", "details": {"kind": kind, "name": name}, "reason": "NotFound"}


@pytest.fixture
def job():
    return snapshot("Suspended", labels={"kueue.x-k8s.io/queue-name": "research"})


def explained(job, *related, now=NOW):
    (finding,) = diagnose(job, {}, related, now=now)
    return finding


def reserved():
    message = "Quota reserved in ClusterQueue team-a"
    return condition("QuotaReserved", "True", "QuotaReserved", message)


def test_what_is_short_who_has_it_and_who_is_ahead(job):
    finding = explained(
        job,
        local_queue(),
        cluster_queue(),
        mine(pending(SHORT), minute=8),
        workload("large", reserved(), of="1", gpus=5),
        workload("small", reserved(), of="2", gpus=2),
        workload("done", reserved(), condition("Finished", "True", "Succeeded"), of="3", gpus=8),
        workload("older", pending(SHORT), of="4", minute=7),
        workload("urgent", pending(SHORT), of="5", minute=9, priority=100),
        workload("younger", pending(SHORT), of="6", minute=9),
    )
    assert finding.id == "queued"
    assert finding.message == (
        f"the job has waited in the queue 'research' for 2 min: {SHORT}; of the 8 of ClusterQueue"
        " team-a ns/large has 5 and ns/small has 2; ahead of it: ns/urgent and ns/older"
    )
    assert finding.next_step.startswith("it starts when they end; earlier with")


@pytest.mark.parametrize(
    ("places", "detail"),
    [
        ({"mine": 0, "other": 1}, "; it is the next one"),
        ({"other": 2, "mine": 3}, "; 3 are ahead of it (ns/other)"),
        ({"mine": 1}, "; 1 is ahead of it"),
        ({"other": 1}, SHORT),
    ],
)
def test_the_place_that_kueue_gives_away(job, places, detail):
    items = [
        {**workload(name, of=name), "positionInClusterQueue": place}
        for name, place in places.items()
    ]
    summary = {"kind": "PendingWorkloadsSummary", "items": items}
    finding = explained(job, summary, local_queue(), mine(pending(SHORT)))
    assert finding.message.endswith(detail)


@pytest.mark.parametrize("missing", [[absent("localqueues")], [absent("workloads")]])
def test_a_job_that_its_user_suspended_is_resumed_where_kueue_does_not_manage_it(job, missing):
    assert "k8sjob resume ns/job" in explained(job, *missing).next_step


def test_a_priority_class_that_does_not_exist():
    labels = {
        "kueue.x-k8s.io/queue-name": "research",
        "kueue.x-k8s.io/priority-class": "urgent",
    }
    related = absent("workloads"), local_queue(), absent("workloadpriorityclasses", "urgent")
    found = explained(snapshot("Suspended", labels=labels), *related)
    assert found.id == "no-queue"
    assert "there is no WorkloadPriorityClass 'urgent'" in found.message
    assert "kueue_priority_class" in found.next_step
    assert "kubectl label pytorchjob job -n ns --overwrite" in found.next_step
    assert "resume" not in found.next_step


NEVER = [
    ([absent("localqueues"), absent("workloads")], "Kueue is not installed in this cluster"),
    ([absent("localqueues", "research")], "there is no queue 'research' in namespace ns"),
    (
        [absent("workloads")],
        "Kueue has made no Workload for it in 10 min: it is not running, or does",
    ),
    (
        [local_queue(), absent("clusterqueues", "team-a")],
        "the LocalQueue research belongs to ClusterQueue team-a, which does not exist",
    ),
    (
        [local_queue(), cluster_queue(reason="FlavorNotFound", message="Can't admit: [a100].")],
        "the LocalQueue research belongs to ClusterQueue team-a, which is inactive: FlavorNotFound",
    ),
    ([local_queue(reason="Stopped")], "the LocalQueue research is stopped (spec.stopPolicy)"),
    ([mine(pending(TOO_MUCH))], "couldn't assign flavors to pod set master"),
    (
        [mine(pending('Flavor "a100" does not contain the requested level'))],
        'Flavor "a100" does not contain the requested level',
    ),
    (
        [mine(pending("ClusterQueue team-a is inactive", "Inadmissible"))],
        "ClusterQueue team-a is inactive",
    ),
    (
        [mine(pending("Admission is gated by: x/y", "AdmissionGated"))],
        "Admission is gated by: x/y",
    ),
    (
        [
            mine(
                evicted("Deactivated", DEACTIVATED),
                spec={"active": False},
                admissionChecks=[{"name": "budget", "state": "Rejected", "message": "spent"}],
            )
        ],
        f"its Workload is deactivated: {DEACTIVATED}; the adm",
    ),
    (
        [mine(condition("Finished", "True", "FailedToStart", "bad podset info"))],
        "its Workload has ended: FailedToStart: bad podset info",
    ),
]


@pytest.mark.parametrize(("related", "detail"), NEVER)
def test_what_no_other_job_can_change(job, related, detail):
    finding = explained(job, *related)
    assert finding.id == "no-queue"
    assert finding.message.startswith(f"the job cannot start: {detail}")
    assert "starts when they end" not in finding.next_step


def test_an_admission_check_is_somebody_elses_decision(job):
    waits = mine(reserved(), admissionChecks=[{"name": "nodes", "state": "Pending"}], gpus=1)
    finding = explained(job, local_queue(), cluster_queue(), waits)
    assert finding.next_step.startswith("ask Kueue's administrator who decides that check; kubectl")


def test_a_busy_kueue_makes_a_workload_after_some_seconds(job):
    early = datetime(2026, 1, 1, 0, 0, 5, tzinfo=UTC)
    found = explained(job, absent("workloads"), now=early)
    assert found.id == "queued"
    assert "starts when they end" not in found.next_step
    late = explained(job, absent("workloads"), now=early + timedelta(seconds=5))
    assert late.id == "no-queue"


def test_where_nothing_of_it_may_be_read(job):
    found = explained(job)
    assert found.id == "queued"
    assert "you cannot read Kueue's Workloads" in found.message
    assert "starts when they end" not in found.next_step


@pytest.mark.parametrize(
    ("own", "detail", "again"),
    [
        (mine(), "Kueue has not considered it yet", False),
        (
            mine(pending("topology allows to fit only 1 out of 2 pod(s)")),
            "only 1 out of 2 pod(s); it is the next one",
            False,
        ),
        (
            mine(reserved(), admissionChecks=[{"name": "nodes", "state": "Pending"}], gpus=1),
            "it has its quota, and waits for the admission check nodes (Pending)",
            False,
        ),
        (
            mine(
                pending(PREEMPTED),
                evicted("Preempted", PREEMPTED),
                condition("Preempted", "True", "InCohortReclamation", PREEMPTED),
            ),
            "it needs its quota again; Kueue stopped it, 2 min ago: preempted by ns/other (InC",
            True,
        ),
        (
            mine(
                pending(LATE),
                evicted("PodsReadyTimeout", LATE),
                requeueState={"count": 1, "requeueAt": "2026-01-01T00:12:00Z"},
            ),
            "PodsReady timeout ns/mine, and tries again at 2026-01-01T00:12:00Z",
            False,
        ),
        (
            mine(pending(SHORT), evicted("QuotaReserved", f"Previously: {PREEMPTED}", "False")),
            SHORT,
            True,
        ),
        (
            mine(pending(f"{SHORT}. Pending the preemption of 1 workload(s)")),
            "Pending the preemption of 1 workload(s)",
            True,
        ),
    ],
)
def test_what_it_waits_for(job, own, detail, again):
    by = workload("other", reserved(), of="o", minute=9, uid="11111111-2222-3333-4444-555555555555")
    place = {**own, "positionInClusterQueue": 0}
    first = {"kind": "PendingWorkloadsSummary", "items": [place] if "next one" in detail else []}
    finding = explained(job, local_queue(), own, by, first)
    assert finding.id == "queued"
    assert detail in finding.message
    assert ("starts when they end" in finding.next_step) is again


def test_a_deactivated_workload_is_not_ahead(job):
    message = "insufficient unused quota for cpu in flavor a100"
    first, off = (workload(name, of=name) for name in ("first", "off"))
    off["spec"]["active"] = False
    found = explained(job, local_queue(), mine(pending(message), minute=5), first, off)
    assert "ahead of it: ns/first" in found.message
    assert "ns/off" not in found.message
