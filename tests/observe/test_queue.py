"""Why a job waits in a queue: what Kueue 0.19 writes beside what the recorded jobs show."""

import copy
from datetime import timedelta

import pytest
from observed import RECORDED, replayed

from k8sjob.kube.objects import moment

SHORT = RECORDED["queue-short"]
JOB = SHORT["job"]["metadata"]
NEEDS = "insufficient unused quota for cpu in flavor a100"


def absent(kind, name=""):
    return {"kind": "Status", "details": {"kind": kind, "name": name}, "reason": "NotFound"}


def condition(kind, status, reason, message=""):
    return {"type": kind, "status": status, "reason": reason, "message": message}


def pending(message, reason="Pending"):
    return condition("QuotaReserved", "False", reason, message)


def short(workload=None, related=None):
    """The job that lacks quota, with other conditions or objects beside it."""
    job = copy.deepcopy(SHORT)
    own = next(w for w in job["related"] if w["metadata"]["name"].startswith("pytorchjob-queue-sh"))
    for key, part in (workload or {}).items():
        own[key] = own[key] | part
    job["related"] = job["related"] if related is None else related
    return job


def only(job, **options):
    (finding,) = replayed(job, **options)
    return finding


def test_who_holds_the_quota_and_who_is_ahead():
    words = "of the 0.08 of ClusterQueue team-a team/large has 0.05 and team/small has 0.02"
    assert f"{words}; ahead of it: team/urgent and team/older" in only(SHORT).message
    job = short()
    workloads = {w["metadata"]["ownerReferences"][0]["name"]: w for w in job["related"]
                 if w["kind"] == "Workload"}  # fmt: skip
    workloads["urgent"]["spec"]["active"] = False
    workloads["large"]["status"]["conditions"].append(condition("Finished", "True", "Succeeded"))
    message = only(job).message
    assert "of ClusterQueue team-a team/small has 0.02; ahead of it: team/older" in message


@pytest.mark.parametrize(
    ("places", "detail"),
    [
        ({"queue-short": 0, "other": 1}, "; it is the next one"),
        ({"other": 2, "queue-short": 3}, "; 3 are ahead of it (team/other)"),
        ({"other": 1}, NEEDS),
    ],
)
def test_the_place_that_kueue_gives_away(places, detail):
    job = short()
    own = [w for w in job["related"] if w["kind"] == "Workload" and JOB["uid"] in str(w)]
    others = {"namespace": "team", "ownerReferences": [{"name": "other"}]}
    meta = {"queue-short": own[0]["metadata"], "other": others}
    rows = [{"metadata": meta[name], "positionInClusterQueue": n} for name, n in places.items()]
    job["related"] = [r for r in job["related"] if r["kind"] != "Workload"] + own
    job["related"].append({"kind": "PendingWorkloadsSummary", "items": rows})
    assert detail in only(job).message.rpartition(", 30m")[-1] or detail == NEEDS


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ([absent("localqueues"), absent("workloads")], "Kueue is not installed in this cluster"),
        ([absent("workloads")], "Kueue has made no Workload for it in 10 s: it is not running, or"),
    ],
)
def test_a_job_that_kueue_does_not_manage_is_resumed_without_it(missing, words):
    """Kueue makes a Workload within a second, a busy one after some seconds."""
    later = moment(JOB["creationTimestamp"]) + timedelta(seconds=10)
    finding = only(short(related=missing), now=later)
    assert (finding.id, words in finding.message) == ("no-queue", True)
    assert "k8sjob resume team/queue-short" in finding.next_step
    early = only(short(related=[absent("workloads")]), now=later - timedelta(seconds=5))
    assert early.id == "queued"
    assert "starts when they end" not in early.next_step


def test_where_nothing_of_it_may_be_read():
    finding = only(short(related=[]))
    assert finding.id == "queued"
    assert "you cannot read Kueue's Workloads" in finding.message
    assert "starts when they end" not in finding.next_step


@pytest.mark.parametrize(
    ("conditions", "detail"),
    [
        ([pending(f"couldn't assign flavors to pod set master: {NEEDS}, 1 more needed; couldn't"
                  " assign flavors to pod set worker: insufficient quota for cpu > maximum capacity"
                  " (8)")], "couldn't assign flavors to pod set master"),
        ([pending('Flavor "a100" does not contain the requested level')], 'Flavor "a100"'),
        ([pending("ClusterQueue team-a is inactive", "Inadmissible")], "ClusterQueue team-a is"),
        ([condition("Finished", "True", "FailedToStart", "bad podset info")],
         "its Workload has ended: FailedToStart: bad podset info"),
    ],
)  # fmt: skip
def test_what_no_other_job_can_change(conditions, detail):
    finding = only(short({"status": {"conditions": conditions}}))
    assert finding.id == "no-queue"
    assert finding.message.startswith(f"the job cannot start: {detail}")
    assert "starts when they end" not in finding.next_step


LATE = "Exceeded the PodsReady timeout ns/mine"


@pytest.mark.parametrize(
    ("status", "detail", "again"),
    [
        ({"conditions": [pending(LATE), condition("Evicted", "True", "PodsReadyTimeout", LATE)],
          "requeueState": {"count": 1, "requeueAt": "2026-01-01T00:12:00Z"}},
         "PodsReady timeout ns/mine, and tries again at 2026-01-01T00:12:00Z", False),
        ({"conditions": [pending(NEEDS), condition("Evicted", "False", "QuotaReserved", "Previ")]},
         NEEDS, True),
        ({"conditions": [pending(f"{NEEDS}. Pending the preemption of 1 workload(s)")]},
         "Pending the preemption of 1 workload(s)", True),
        ({"conditions": [condition("QuotaReserved", "True", "QuotaReserved")]},
         "it has its quota", False),
    ],
)  # fmt: skip
def test_what_it_waits_for(status, detail, again):
    finding = only(short({"status": status}))
    assert finding.id == "queued"
    assert detail in finding.message
    assert ("starts when they end" in finding.next_step) is again
