"""An Indexed Job as a target: what is rendered, and how its objects are read."""

from datetime import UTC, datetime, timedelta

import pytest
import yaml

from k8sjob.backends.api import Snapshot
from k8sjob.contract import Role
from k8sjob.errors import SpecError
from k8sjob.kube.objects import Object
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.rendering import companions, manifest, render, replica_env
from k8sjob.runtime.base.env import elastic_env
from k8sjob.spec import JobSpec, load
from k8sjob.spec.load import located
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import (
    by_name,
    has_ended,
    is_of_pods,
    is_suspended,
    own_pods,
    replica_names,
    target_of,
)

TARGET = by_name("job")
NOW = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)
INDEX = "batch.kubernetes.io/job-completion-index"


def spec(**fields):
    given = {"name": "tiny", "image": "example/image:1", "run": {"script": "main.py"}}
    return JobSpec.model_validate({**given, "target": "job", "replicas": {"workers": 2}, **fields})


def job(**status):
    meta = {"uid": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    made = manifest(spec())
    return {**made, "metadata": {**made["metadata"], **meta}, "status": status}


def condition(kind, **more):
    return {"conditions": [{"type": kind, "status": "True", **more}]}


def pod(index, *, created=0, suffix="aaaaa", labelled=True):
    labels = {"batch.kubernetes.io/job-name": "tiny"} | ({INDEX: str(index)} if labelled else {})
    return {
        "metadata": {
            "name": f"tiny-{index}-{suffix}",
            "labels": labels,
            "annotations": {INDEX: str(index)},
            "creationTimestamp": f"2026-01-01T00:00:{created:02}Z",
            "ownerReferences": [{"controller": True, "uid": "1"}],
        }
    }


def test_every_replica_has_the_environment_that_the_operator_would_inject():
    made = manifest(spec(replicas={"workers": 2, "nproc_per_node": 2}))
    (container,) = Object(made).part("spec", "template", "spec")["containers"]
    given = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    assert given["RANK"] == given["PET_NODE_RANK"] == rank
    for role, index in ((Role.MASTER, 0), (Role.WORKER, 1)):
        alike = replica_env(spec(replicas={"workers": 2, "nproc_per_node": 2}), role, index)
        found = {**given, **TARGET.injected_env(made, role, index)}
        differs = {name for name in alike if found[name] != alike[name]}
        assert differs == {"MASTER_ADDR", "PET_MASTER_ADDR"}
        assert found["MASTER_ADDR"] == "tiny-0.tiny"


@pytest.mark.parametrize(("role", "index"), [("Master", 1), ("Worker", 2), ("Worker", -2)])
def test_a_replica_that_there_is_not(role, index):
    with pytest.raises(ValueError, match="it has 3 Pods"):
        TARGET.injected_env(manifest(spec()), role, index)


def test_an_elastic_job_has_a_rendezvous_and_no_ranks():
    alike = spec(replicas={"workers": 2, "elastic": {"min": 2, "max": 4}})
    made = manifest(alike)
    (container,) = Object(made).part("spec", "template", "spec")["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    wanted = replica_env(alike, Role.WORKER, 0)
    differs = {name for name in wanted if given.get(name) != wanted[name]}
    assert (differs, given["PET_RDZV_ENDPOINT"]) == ({"PET_RDZV_ENDPOINT"}, "tiny-0.tiny:23456")
    assert elastic_env(given, "tiny-0").hosts
    assert TARGET.is_elastic(made)
    assert not TARGET.is_elastic(job())
    assert TARGET.injected_env(made, Role.WORKER, 1) == {}
    assert made["spec"]["backoffLimit"] == 12
    assert made["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}


@pytest.mark.parametrize(
    ("fields", "smallest"),
    [({}, None), ({"kueue_queue": "q"}, "2"), ({"kueue_queue": "q", "least": 3}, None)],
)
def test_kueue_may_start_an_elastic_job_with_fewer_nodes(fields, smallest):
    least = fields.pop("least", 2)
    made = manifest(spec(replicas={"workers": 2, "elastic": {"min": least, "max": 3}}, **fields))
    annotations = made["metadata"]["annotations"]
    assert annotations.get("kueue.x-k8s.io/job-min-parallelism") == smallest
    equal = annotations.get("kueue.x-k8s.io/job-completions-equal-parallelism")
    assert equal == (smallest and "true")


def test_the_service_gives_the_pods_their_names():
    (service,) = companions(spec(namespace="team"))
    made = manifest(spec(namespace="team"))
    assert service["metadata"]["name"] == made["spec"]["template"]["spec"]["subdomain"] == "tiny"
    assert service["metadata"]["namespace"] == "team"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert [one["kind"] for one in yaml.safe_load_all(render(spec()))] == ["Service", "Job"]


@pytest.mark.parametrize(
    ("policy", "restart", "limit", "rules"),
    [
        ({}, "Never", 9, ["Ignore", "Ignore", "FailJob"]),
        ({"restart_policy": "OnFailure", "max_restarts": 2}, "OnFailure", 7, []),
        ({"restart_policy": "OnFailure", "max_restarts": 0}, "OnFailure", 0, []),
        ({"restart_policy": "Never"}, "Never", 0, ["Ignore"]),
        ({"max_restarts": 0}, "Never", 0, ["Ignore", "Ignore", "FailJob"]),
    ],
)
def test_restarts(policy, restart, limit, rules):
    made = manifest(spec(policy=policy))["spec"]
    assert made["template"]["spec"]["restartPolicy"] == restart
    assert made["backoffLimit"] == limit
    found = made.get("podFailurePolicy", {}).get("rules", [])
    assert [rule["action"] for rule in found] == rules
    if rules:  # what a suspension ends is no failure
        assert found[0]["onExitCodes"]["values"] == [143]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resources.master", {"resources": {"cpu": 1, "master": {"cpu": 2}}}),
        ("gang", {"gang": {"scheduler": "volcano"}}),
        ("policy.clean_pod_policy", {"policy": {"clean_pod_policy": "All"}}),
        ("policy.restart_policy", {"policy": {"restart_policy": "Always"}}),
    ],
)
def test_what_it_does_not_have_is_refused_with_its_line(field, value, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**spec().model_dump(exclude_defaults=True), **value}))
    with pytest.raises(SpecError) as caught, located(file):
        manifest(load(file))
    (problem,) = caught.value.problems
    assert problem.field == field
    assert problem.line
    assert "target job does not have it" in problem.message
    assert "use target pytorchjob" in problem.message
    assert manifest(load(file).with_(target="pytorchjob"))


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, JobState.CREATED),
        ({"active": 3, "ready": 0}, JobState.CREATED),
        ({"active": 3, "ready": 1}, JobState.RUNNING),
        ({"active": 3, "ready": 3, "failed": 2}, JobState.RUNNING),
        ({"active": 2, "ready": 2, "failed": 1}, JobState.RESTARTING),
        ({"active": 0, "ready": 0, "failed": 3}, JobState.RESTARTING),
        ({"succeeded": 3}, JobState.RUNNING),
        ({"active": 1, **condition("SuccessCriteriaMet")}, JobState.RUNNING),
        ({"failed": 1, **condition("FailureTarget")}, JobState.RUNNING),
        (condition("Suspended"), JobState.SUSPENDED),
        ({"succeeded": 3, **condition("Complete")}, JobState.SUCCEEDED),
        ({"failed": 3, **condition("Failed")}, JobState.FAILED),
    ],
)
def test_the_state(status, state):
    assert TARGET.state(job(**status))[0] is state
    assert has_ended(job(**status)) == state.finished


def test_how_many_pods_are_in_which_phase():
    running = job(active=3, ready=1, failed=2)
    assert TARGET.counts(running, JobState.RUNNING) == {"Running": 1, "Pending": 2}
    assert TARGET.counts(job(succeeded=3), JobState.SUCCEEDED) == {"Succeeded": 3}
    assert TARGET.counts(job(failed=2), JobState.FAILED) == {"Failed": 2}


def test_a_failed_job_ends_when_its_pods_are_ended():
    times = {"lastTransitionTime": "2026-01-01T00:00:09Z"}
    failed = job(startTime="2026-01-01T00:00:01Z", **condition("FailureTarget", **times))
    assert TARGET.times(failed) == ("2026-01-01T00:00:01Z", "2026-01-01T00:00:09Z")


@pytest.mark.parametrize(("noticed", "findings"), [(True, 0), (False, 1)])
def test_a_deadline_that_the_controller_has_noticed_is_not_overdue(noticed, findings):
    status = condition("FailureTarget", lastTransitionTime="2026-01-01T00:00:10Z")
    late = job(startTime="2026-01-01T00:00:00Z", active=3, **(status if noticed else {}))
    late["spec"]["activeDeadlineSeconds"] = 10
    found = diagnose(Snapshot(late, (pod(0), pod(1), pod(2))), {}, now=NOW)
    assert [one.cause for one in found].count(Cause.DEADLINE) == findings


def test_a_controller_that_waits_before_it_replaces_a_pod_is_not_silent():
    lacking = Snapshot(job(active=2), (pod(0), pod(1)))
    found = diagnose(lacking, {}, now=NOW)
    assert Cause.OPERATOR_SILENT not in {one.cause for one in found}
    found = diagnose(lacking, {}, now=NOW + timedelta(seconds=660))
    assert Cause.OPERATOR_SILENT in {one.cause for one in found}


def test_suspension():
    assert not is_suspended(job())
    patched = {**job(), "spec": {**job()["spec"], **TARGET.suspension(value=True)["spec"]}}
    assert is_suspended(patched)


def test_the_replicas_by_their_index():
    assert target_of(job()) is TARGET
    assert replica_names(job()) == ("master-0", "worker-0", "worker-1")
    assert [TARGET.replica_of(pod(index)) for index in range(3)] == list(replica_names(job()))
    assert TARGET.replica_of(pod(2, labelled=False)) == "worker-1"
    assert TARGET.replica_of({"metadata": {"labels": {INDEX: "1"}}}) == ""
    found = TARGET.selector("tiny", {"master-0", "worker-1"})
    assert found == f"batch.kubernetes.io/job-name=tiny,{INDEX} in (0,2)"
    assert TARGET.replica_named("tiny", "tiny-2-x7k2p") == "worker-1"
    assert TARGET.replica_named("tiny", "tiny-two-0-x7k2p") == ""


def test_of_the_pods_of_a_replica_the_newest_counts():
    pods = [pod(1, created=5, suffix="bbbbb"), pod(0), pod(1, created=1)]
    assert [one["metadata"]["name"] for one in own_pods(job(), pods)] == [
        "tiny-0-aaaaa",
        "tiny-1-bbbbb",
    ]
    event = {"involvedObject": {"name": "tiny-1-aaaaa"}, "lastTimestamp": "2026-01-01T00:00:03Z"}
    assert is_of_pods(job(), event)


def test_what_the_apiserver_adds_is_not_the_authors():
    stored = job()
    stored["spec"]["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": "1"}}
    labels = stored["spec"]["template"]["metadata"]["labels"]
    labels |= {"controller-uid": "1", "batch.kubernetes.io/job-name": "tiny", "job-name": "tiny"}
    assert TARGET.written(stored) == manifest(spec())["spec"]
