"""A gang that waits: PodGroups of Volcano 1.15 and of the coscheduling plugin, Volcano's Queues.

The objects are recorded; test_recorded.py has what is said of each as it was.
"""

import copy
import json
from datetime import datetime, timedelta

import pytest
from clusters import Cluster
from observed import RECORDED, replayed

from k8sjob.backends.api import Snapshot
from k8sjob.backends.cluster.informer import with_groups
from k8sjob.backends.cluster.related import related
from k8sjob.kube.client.transport import ApiError
from k8sjob.observe.status import job_status
from k8sjob.rendering.merge import merge
from k8sjob.targets.jobs import job_of

LOOK = "kubectl describe queues.scheduling.volcano.sh "


def changed(name, change, *, seconds=0):
    """The findings about a recorded job after a change of its PodGroup, Queue and job."""
    recorded = copy.deepcopy(RECORDED[name])
    by_kind = {part["kind"]: part for part in recorded["related"]}
    change(by_kind.get("PodGroup", {}), by_kind.get("Queue", {}), recorded)
    now = datetime.fromisoformat(recorded["now"]) + timedelta(seconds=seconds)
    return replayed(recorded, now=now)


def without_group(recorded, missing=()):
    """As where Volcano's webhook, or a cluster without its API, has refused the PodGroup."""
    recorded["related"] = [
        part for part in recorded["related"] if part["kind"] not in {"PodGroup", *missing}
    ]


def not_served(recorded):
    without_group(recorded, {"Queue"})
    recorded["related"].append({"kind": "Status", "details": {"kind": "queues", "name": ""}})


@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        (lambda _group, queue, _: queue["spec"].clear(), "queued", "waits in the queue 'research'"),
        (lambda _group, queue, _: queue["status"].update(state="Closed"), "no-queue", "is Closed"),
        (lambda _group, queue, _: queue["status"].clear(), "no-queue", "controllers do not run"),
        (lambda group, _queue, _: group["status"].clear(), "no-queue", "has not looked at"),
        (
            lambda _, queue, recorded: (
                without_group(recorded) or queue["status"].update(state="Closed")
            ),
            "no-queue",
            "the queue 'research' is Closed",
        ),
        (lambda *parts: not_served(parts[2]), "no-queue", "no gang scheduler is installed"),
    ],
)
def test_a_gang_without_pods(change, cause, words):
    [finding] = changed("gang-queue", change, seconds=20)
    assert finding.id == cause
    assert words in finding.message


def test_pods_that_no_scheduler_has_looked_at():
    def unseen(_group, _queue, recorded):
        for pod in recorded["pods"]:
            pod["status"].pop("conditions")

    [finding] = changed("gang-job", unseen, seconds=20)
    assert "the scheduler 'volcano' has not looked at its PodGroup" in finding.message


def test_the_next_step_has_the_queue_as_one_word_and_the_field_of_a_manifest():
    [finding] = changed("gang-queue", lambda group, *_: group["spec"].update(queue="a; reboot"))
    assert finding.next_step.endswith(
        " change spec.runPolicy.schedulingPolicy.queue; " + LOOK + "'a; reboot'"
    )


def test_an_admitted_pod_group_is_no_cause():
    silent = changed(
        "gang-queue", lambda group, *_: group["status"].update(phase="Inqueue"), seconds=3600
    )
    assert [finding.id for finding in silent] == ["operator-silent"]


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("gang-queue", "Queued"),
        ("gang-job", "Queued"),
        ("gang-trainjob", "Created"),
        ("gang-coscheduling", "Created"),
    ],
)
def test_the_pod_groups_of_a_job_are_those_that_it_owns_or_its_pods_name(name, state):
    recorded = RECORDED[name]
    group = copy.deepcopy(next(p for p in recorded["related"] if p["kind"] == "PodGroup"))
    stranger = copy.deepcopy(group)
    stranger["metadata"] |= {"name": "stranger", "ownerReferences": [{"uid": "another"}]}
    elsewhere = copy.deepcopy(stranger)
    elsewhere["metadata"] |= {"name": group["metadata"]["name"], "namespace": "elsewhere"}

    def answer(_method, path, _query, _body):
        if group["apiVersion"] in path:
            return {"items": [stranger, elsewhere, group]}
        return ApiError(f"{path} is not served", code=404, reason="NotFound")

    job = Snapshot(job_of(recorded["job"]), recorded.get("pods", []))
    running = Snapshot(job.job, [{"metadata": {"name": "p"}, "spec": {"nodeName": "node"}}])
    of_job, of_running = with_groups(Cluster(answer), "", [job, running])
    assert [dict(part) for part in of_job.groups] == [group]
    assert not of_running.groups
    by_name = {"fieldSelector": f"metadata.name={group['metadata']['name']}", "limit": "500"}
    cluster = Cluster(answer)
    with_groups(cluster, "", [job])
    assert [query for _, _, query, _ in cluster.asked] == [by_name]
    group["metadata"] |= {"ownerReferences": [{"uid": "another"}]}
    of_another, many = with_groups(Cluster(answer), "", [job, job])[0], Cluster(answer)
    assert bool(of_another.groups) == bool(job.pods)
    names = ({"metadata": {"name": f"{number}"}} for number in range(9))
    with_groups(many, "", [Snapshot(job_of(merge(recorded["job"], name))) for name in names])
    assert [query for _, _, query, _ in many.asked] == [{"limit": "500"}]
    assert job_status(of_job).state == state
    asked = Cluster(answer)
    related(asked, of_job)
    queues = [path.rpartition("/")[2] for _, path, *_ in asked.asked if "/queues/" in path]
    assert queues == ["research"] * ("volcano" in group["apiVersion"])


@pytest.mark.parametrize("code", [403, 404, 500])
def test_what_cannot_be_read_is_left_out(code):
    nothing = Cluster(lambda _, path, *__: ApiError(path, code=code, reason="NotFound"))
    job = Snapshot(job_of(RECORDED["gang-queue"]["job"]))
    assert [snapshot.groups for snapshot in with_groups(nothing, "team", [job])] == [()]
    assert "PodGroup" not in json.dumps(related(nothing, job))


def test_the_queue_that_a_job_asks_for():
    jobs = [job_of(RECORDED[name]["job"]) for name in ("gang-queue", "gang-job", "gang-cluster")]
    assert [job.gang and job.gang["queue"] for job in jobs] == ["research", "research", None]
    runtime = {"spec": {"schedulerName": "volcano", "containers": []}}
    jobset = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": runtime}}}]}
    annotated = {"annotations": {"scheduling.volcano.sh/queue-name": "small"}}
    template = {"metadata": annotated, "spec": jobset}
    trained = {"kind": "TrainJob", "runtime": {"spec": {"template": template}}}
    assert job_of(trained).gang == {"queue": "small"}
