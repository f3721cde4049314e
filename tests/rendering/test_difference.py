import copy

import pytest

from k8sjob.kube.objects import MANIFEST_DIGEST
from k8sjob.rendering.diff import difference
from k8sjob.rendering.manifest import manifest
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import job_of

SPEC = JobSpec(
    name="tiny",
    namespace="blue",
    image="team/tiny:1",
    run={"script": "main.py", "env": {"A": "1"}},
    replicas={"workers": 2},
)
MASTER = "spec.pytorchReplicaSpecs.Master"
WORKER = "spec.pytorchReplicaSpecs.Worker"


@pytest.fixture
def job():
    return manifest(SPEC)


def test_what_a_server_adds_is_no_difference(job):
    there = copy.deepcopy(job)
    there.raw["status"] = {"conditions": []}
    there.raw["metadata"] |= {
        "uid": "u", "resourceVersion": "7", "generation": 1, "managedFields": [{}],
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    there.annotations["kubectl.kubernetes.io/last-applied-configuration"] = "{}"
    there.annotations[MANIFEST_DIGEST] = "0" * 64
    there.spec["pytorchReplicaSpecs"]["Master"]["template"]["metadata"]["creationTimestamp"] = None
    assert not difference(there, job)
    assert difference(there, job).lines == ()


def test_the_order_of_keys_is_none(job):
    turned = {key: job.raw[key] for key in reversed(job.raw)}
    turned["spec"] = dict(reversed(job.spec.items()))
    assert not difference(job_of(turned), job)


def test_a_job_that_is_not_there_is_new_as_a_whole(job):
    found = difference(None, job)
    assert (found.is_new, found.recreated, found.at_once) == (True, (), ())
    assert found.lines[0] == "--- /dev/null"
    assert found.lines[1] == "+++ blue/tiny as it would be"
    assert all(line.startswith("+") for line in found.lines[3:])


def test_a_changed_field_is_a_line_out_and_a_line_in(job):
    wanted = manifest(SPEC.with_(image="team/tiny:2"))
    found = difference(job, wanted)
    changed = [line.strip("+- ") for line in found.lines[2:] if line[0] in "+-"]
    assert changed == ['image: "team/tiny:1"', 'image: "team/tiny:2"'] * 2
    at = "template.spec.containers[0].image"
    assert found.recreated == (f"{MASTER}.{at}", f"{WORKER}.{at}")
    assert found.at_once == ()


@pytest.mark.parametrize(
    ("changes", "anew", "at_once"),
    [
        ({"replicas": {"workers": 3}}, [f"{WORKER}.replicas"], ["spec.runPolicy.backoffLimit"]),
        ({"policy": {"ttl_after_finished": 60}}, [], ["spec.runPolicy.ttlSecondsAfterFinished"]),
        ({"policy": {"suspend": True}}, [], ["spec.runPolicy.suspend"]),
        ({"gang": {"queue": "q"}}, ["spec.runPolicy.schedulingPolicy"], []),
        (
            {"policy": {"restart_policy": "Never"}},
            [
                f"{role}.{field}"
                for role in (MASTER, WORKER)
                for field in (
                    "restartPolicy",
                    "template.spec.containers[0].env[1].value.restart_policy",
                )
            ],
            [],
        ),
    ],
)
def test_what_running_pods_would_notice(changes, anew, at_once, job):
    found = difference(job, manifest(SPEC.with_(**changes)))
    assert (list(found.recreated), list(found.at_once)) == (anew, at_once)


def test_a_label_reaches_the_job_at_once_and_only_new_pods(job):
    found = difference(job, manifest(SPEC.with_(labels={"team": "red"})))
    assert found.at_once == ("metadata.labels.team",)
    assert found.recreated == tuple(f"{r}.template.metadata.labels.team" for r in (MASTER, WORKER))


def test_a_list_of_another_length_is_named_as_a_whole(job):
    wanted = manifest(SPEC.with_(run={"env": {"A": "1", "B": "2"}}))
    assert difference(job, wanted).recreated == tuple(
        f"{r}.template.spec.containers[0].env" for r in (MASTER, WORKER)
    )


def test_a_setting_of_the_runtime_shows_by_itself(job):
    wanted = manifest(SPEC.with_(checkpoint={"dir": "/data/checkpoints", "keep": 5}))
    found = difference(job, wanted)
    assert f"{MASTER}.template.spec.containers[0].env[1].value.checkpoint_keep" in found.recreated
    assert [line for line in found.lines if line.split() == ["+", "checkpoint_keep:", "5"]]
    job.spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["env"][1] = {
        "name": "K8SJOB_CONFIG", "value": "no JSON",
    }  # fmt: skip
    assert difference(job, wanted)


@pytest.mark.parametrize("target", ["pytorchjob", "job", "jobset", "trainjob"])
def test_what_kueue_writes_into_a_job_that_it_starts_is_no_difference(target):
    spec = SPEC.with_(target=target, kueue_queue="research")
    job = manifest(spec)
    there = copy.deepcopy(job)
    assert start_by_kueue(there.document) > 0
    assert not difference(there, job)
    edited = manifest(spec.with_(image="team/tiny:2", node_selector={"gpu": "a100"}))
    changed = {line.strip("+- ") for line in difference(there, edited).lines[2:] if line[0] == "+"}
    assert changed >= {'image: "team/tiny:2"'}
    assert not any("kueue.x-k8s.io" in line or "suspend" in line for line in changed)


def start_by_kueue(value):
    """Write into a job what Kueue does; the number of places."""
    if isinstance(value, list):
        return sum(map(start_by_kueue, value))
    if not isinstance(value, dict):
        return 0
    places = sum([start_by_kueue(one) for one in value.values()])
    if "suspend" in value:
        value["suspend"] = False
        places += 1
    if "containers" in value:
        value["nodeSelector"] = {"gpu": "h100"}
    if "containers" in (value.get("spec") or {}):
        value["metadata"].setdefault("annotations", {})["kueue.x-k8s.io/workload"] = "w"
        value["metadata"].setdefault("labels", {})["kueue.x-k8s.io/podset"] = "main"
    return places
