"""A gang that waits: PodGroups of Volcano and of the coscheduling plugin, and Volcano's Queues."""

import copy
import json
from datetime import datetime

import pytest
from clusters import Cluster
from observed import RECORDED

from k8sjob.backends.api import Snapshot
from k8sjob.backends.cluster.related import related
from k8sjob.kube.client.transport import ApiError
from k8sjob.observe.diagnose import diagnose
from k8sjob.targets.jobs import job_of

WAITS = RECORDED["gang-queue"]
LOOK = "kubectl describe queues.scheduling.volcano.sh "
QUOTA = "queue resource quota insufficient: insufficient nvidia.com/gpu"


def why(change=lambda _group, _queue: None, events=None):
    """The findings about the job of gang-queue.json after a change of its PodGroup and Queue."""
    seen = copy.deepcopy(WAITS)
    change(*seen["related"])
    shown = Snapshot(job_of(seen["job"]), (), seen["events"] if events is None else events)
    return diagnose(shown, {}, seen["related"], now=datetime.fromisoformat(seen["now"]))


def missing(_group, queue):
    name = queue["metadata"]["name"]
    queue.clear()
    queue |= {"kind": "Status", "details": {"kind": "queues", "name": name}}


@pytest.mark.parametrize(
    ("change", "cause", "words"),
    [
        (lambda _group, _queue: None, "queued", "32 nvidia.com/gpu needed, 24 of 32 in use"),
        (lambda _, queue: queue["spec"].clear(), "queued", "waits in the queue 'research'"),
        (lambda _, queue: queue["status"].update(state="Closed"), "no-queue", "is Closed"),
        (
            lambda group, _: group["spec"].update(minResources={"nvidia.com/gpu": "64"}),
            "no-queue",
            "need more than the queue 'research' may have: 64 nvidia.com/gpu needed",
        ),
        (missing, "no-queue", "there is no queue 'research'"),
        (lambda group, _: group["status"].clear(), "queued", "in gang unschedulable"),
    ],
)
def test_a_pod_group_that_its_queue_does_not_admit(change, cause, words):
    [finding] = why(change)
    assert finding.id == cause
    assert words in finding.message


def test_what_volcano_says_of_the_queue_comes_before_what_it_says_of_the_gang():
    [told] = copy.deepcopy(WAITS["events"])
    told |= {"message": QUOTA, "lastTimestamp": "2026-11-20T10:01:00Z"}
    [finding] = why(events=[told, *WAITS["events"]])
    assert QUOTA in finding.message


def test_a_pod_group_of_the_coscheduling_plugin_has_no_queue():
    [finding] = why(lambda group, _: group.update(apiVersion="scheduling.x-k8s.io/v1alpha1"))
    assert "waits, for" in finding.message
    assert "queue" not in finding.next_step


def test_the_next_step_has_the_queue_as_one_word_and_the_field_of_a_manifest():
    [finding] = why(lambda group, _: group["spec"].update(queue="a; reboot"))
    assert finding.next_step.endswith(
        " change spec.runPolicy.schedulingPolicy.queue; " + LOOK + "'a; reboot'"
    )


def test_an_admitted_pod_group_is_no_cause():
    admitted = why(lambda group, _: group["status"].update(phase="Inqueue"), events=())
    assert [finding.id for finding in admitted] == ["operator-silent"]


def cluster(answers, code):
    """Answers for objects by what their paths end with, or with one error."""

    def answer(_method, path, _query, _body):
        named = "scheduling." in path and answers.get(path.rpartition("/")[2])
        return named or ApiError(f"{path} cannot be read", code=code, reason="NotFound")

    return Cluster(answer)


def paths(transport):
    return [path for _, path, *_ in transport.asked]


@pytest.mark.parametrize("code", [403, 404, 500])
def test_pod_groups_are_asked_for_and_what_cannot_be_read_is_left_out(code):
    job = Snapshot(job_of(WAITS["job"]))
    group, queue = WAITS["related"]
    volcano = cluster({"ranker": group, "research": queue}, code)
    kinds = [one["kind"] for one in related(volcano, job) if one["kind"] != "Status"]
    assert kinds == ["PodGroup", "PodGroup", "Queue"]  # one of each scheduler, in this cluster
    nothing = cluster({}, code)
    assert not [one for one in related(nothing, job) if "PodGroup" in json.dumps(one)]
    assert not any("queues" in path and "volcano" in path for path in paths(nothing))
    label = "scheduling.x-k8s.io/pod-group"
    pods = [{"metadata": {"name": f"p-{n}", "labels": {label: f"g-{n}"}}} for n in range(99)]
    related(nothing := cluster({}, code), Snapshot(job_of(WAITS["job"]), pods))
    assert sum("podgroups" in path for path in paths(nothing)) < 10
    plain = copy.deepcopy(WAITS["job"])
    del plain["spec"]["runPolicy"]["schedulingPolicy"]
    related(nothing := cluster({}, code), Snapshot(job_of(plain)))
    assert not any("podgroups" in path for path in paths(nothing))
