"""Targets of one Indexed Job: what is rendered, and how their objects are read."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from k8sjob.adopt import adopt
from k8sjob.backends.api import Snapshot
from k8sjob.contract import Role
from k8sjob.errors import BackendError, SpecError
from k8sjob.kube.objects import Object
from k8sjob.observe.diagnose import Cause, diagnose
from k8sjob.observe.logs import select
from k8sjob.observe.status import job_status, processes, reporting_replica
from k8sjob.rendering.manifest import container_env, manifest, remarks, render, replica_env
from k8sjob.runtime.base.env import elastic_env
from k8sjob.spec import JobSpec, load
from k8sjob.spec.load import located
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import (
    TARGETS,
    by_name,
    has_ended,
    is_below,
    job_of,
    own_pods,
    replica_names,
    with_child,
)

NOW = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)
INDEX = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class Kind:
    """What differs between the kinds.

    Attributes:
        name: the target's.
        at: where the spec of the Indexed Job is.
        pods: how the names of its Pods begin.
        label: the label of its Pods with the job's name.
        complete: the condition of a job that has succeeded.
        others: the variables with other values than those of the training operator.
    """

    name: str
    at: tuple[str | int, ...]
    pods: str
    label: str
    complete: str
    differing: frozenset = frozenset({"MASTER_ADDR", "PET_MASTER_ADDR"})

    @property
    def target(self):
        return by_name(self.name)

    def spec(self, **fields):
        document = {"name": "tiny", "image": "example/image:1", "run": {"script": "main.py"}}
        document |= {"target": self.name, "replicas": {"workers": 2}}
        return JobSpec.model_validate({**document, **fields})

    def indexed(self, job):
        """The spec of its Indexed Job."""
        return job.at(*self.at)

    def job(self, **status):
        """The job, with this status of the Indexed Job and the conditions that follow from it."""
        meta = {"uid": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
        job = manifest(self.spec())
        metadata = {**job.metadata, **meta}
        job = job.with_document({**job.document, "metadata": metadata, "status": status})
        if self.pods == "tiny":
            return job
        names = {"Complete": self.complete, "Failed": "Failed", "Suspended": "Suspended"}
        conditions = [
            {**condition, "type": names[condition["type"]], "reason": "its own"}
            for condition in status.get("conditions", ())
            if condition["type"] in names
        ]
        owners = [{"controller": True, "uid": "1" if self is JOBSET else "its set"}]
        about = {**meta, "name": self.pods, "uid": "child", "ownerReferences": owners}
        child = {"metadata": about, "status": status}
        job = job.with_document({**job.document, "status": {"conditions": conditions}})
        return with_child(job, [child])

    def pod(self, index, *, created=0, suffix="aaaaa", labeled=True, uid="1"):
        labels = {"batch.kubernetes.io/job-name": self.pods, self.label: "tiny", UID: uid}
        return {
            "metadata": {
                "name": f"{self.pods}-{index}-{suffix}",
                "labels": labels | ({INDEX: str(index)} if labeled else {}),
                "annotations": {INDEX: str(index)},
                "creationTimestamp": f"2026-01-01T00:00:{created:02}Z",
                "ownerReferences": [{"controller": True, "uid": uid if self is JOB else "child"}],
            }
        }


GROUP = "kueue.x-k8s.io/podset-group-name"
UID = "jobset.sigs.k8s.io/jobset-uid"
SET_NAME = "jobset.sigs.k8s.io/jobset-name"
IN_SET = ("spec", "replicatedJobs", 0, "template", "spec")
IN_RUNTIME = ("runtime", "spec", "template", *IN_SET)
PORTS = {"MASTER_PORT", "PET_MASTER_PORT"}
JOB = Kind("job", ("spec",), "tiny", "batch.kubernetes.io/job-name", "Complete")
JOBSET = Kind("jobset", IN_SET, "tiny-node-0", SET_NAME, "Completed")
TRAINJOB = Kind("trainjob", IN_RUNTIME, "tiny-node-0", SET_NAME, "Complete", JOB.differing | PORTS)
KINDS = [JOB, JOBSET, TRAINJOB]
of_each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def condition(kind, **more):
    return {"conditions": [{"type": kind, "status": "True", **more}]}


@of_each_kind
def test_every_replica_has_the_environment_that_the_operator_would_inject(kind):
    spec = kind.spec(replicas={"workers": 2, "nproc_per_node": 2})
    job = manifest(spec)
    (container,) = job.replicas[0].pod["containers"]
    env = {v["name"]: v.get("value", v.get("valueFrom")) for v in container["env"]}
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    assert env["RANK"] == rank
    for role, index in ((Role.MASTER, 0), (Role.WORKER, 1)):
        alike = replica_env(spec, role, index)
        injected = {**env, **job.injected_env(role, index)}
        differs = {name for name in alike if injected[name] != alike[name]}
        assert differs == kind.differing
        assert injected["MASTER_ADDR"] == f"{kind.pods}-0.tiny"


@pytest.mark.parametrize(("role", "index"), [("Master", 1), ("Worker", 2), ("Worker", -2)])
def test_a_replica_that_there_is_not(role, index):
    with pytest.raises(ValueError, match="it has 3 Pods"):
        manifest(JOB.spec()).injected_env(role, index)


@pytest.mark.parametrize("kind", [JOB, JOBSET], ids=lambda kind: kind.name)
def test_an_elastic_job_has_a_rendezvous_and_no_ranks(kind):
    alike = kind.spec(replicas={"workers": 2, "elastic": {"min": 2, "max": 4}})
    job = manifest(alike)
    (container,) = Object(kind.indexed(job)).part("template", "spec")["containers"]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    expected = replica_env(alike, Role.WORKER, 0)
    differs = {name for name in expected if env.get(name) != expected[name]}
    endpoint = f"{kind.pods}-0.tiny:23456"
    assert (differs, env["PET_RDZV_ENDPOINT"]) == ({"PET_RDZV_ENDPOINT"}, endpoint)
    assert elastic_env(env, f"{kind.pods}-0").hosts
    assert job.is_elastic
    assert not kind.job().is_elastic
    assert job.injected_env(Role.WORKER, 1) == {}
    assert kind.indexed(job)["backoffLimit"] == 12
    assert kind.indexed(job)["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


@pytest.mark.parametrize(
    ("fields", "smallest"),
    [({}, None), ({"kueue_queue": "q"}, "2"), ({"kueue_queue": "q", "least": 3}, None)],
)
def test_kueue_may_start_an_elastic_job_with_fewer_nodes(fields, smallest):
    least = fields.pop("least", 2)
    replicas = {"workers": 2, "elastic": {"min": least, "max": 3}}
    job = manifest(JOB.spec(replicas=replicas, **fields))
    annotations = job.annotations
    assert annotations.get("kueue.x-k8s.io/job-min-parallelism") == smallest
    equal = annotations.get("kueue.x-k8s.io/job-completions-equal-parallelism")
    assert equal == (smallest and "true")


def test_the_service_gives_the_pods_their_names():
    job = manifest(JOB.spec(namespace="team"))
    service = job.companion
    assert service["metadata"]["name"] == job.spec["template"]["spec"]["subdomain"] == "tiny"
    assert service["metadata"]["namespace"] == "team"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert [doc["kind"] for doc in yaml.safe_load_all(render(JOB.spec()))] == ["Service", "Job"]
    assert yaml.safe_load(render(JOBSET.spec()))["kind"] == "JobSet"  # makes its own


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
@of_each_kind
def test_restarts(policy, restart, limit, rules, kind):
    job_spec = kind.indexed(manifest(kind.spec(policy=policy)))
    assert job_spec["template"]["spec"]["restartPolicy"] == restart
    assert job_spec["backoffLimit"] == limit
    # Without it the failures of all replicas add up to the pause before each of them starts again.
    assert job_spec.get("backoffLimitPerIndex", 0) == (limit if restart == "Never" else 0)
    pod_rules = job_spec.get("podFailurePolicy", {}).get("rules", [])
    assert [rule["action"] for rule in pod_rules] == rules
    if rules:  # what a suspension ends is no failure
        assert pod_rules[0]["onExitCodes"]["values"] == [143]


COMMAND = {"run": {"command": ["sh", "-c", "exit 1"]}}


@pytest.mark.parametrize(
    ("fields", "restarts", "final"),
    [
        (COMMAND, 3, None),
        ({**COMMAND, "replicas": {"workers": 1}}, 3, None),
        ({"replicas": {"workers": 0}}, 3, [3]),  # with the agent, which restarts in place
        ({**COMMAND, "policy": {"max_restarts": 0}}, 0, None),
    ],
)
@of_each_kind
def test_by_default_each_restart_is_a_new_pod(fields, restarts, final, kind):
    spec = kind.spec(**{"replicas": {"workers": 0}, **fields})
    job_spec = kind.indexed(manifest(spec))
    assert spec.restart_policy == "OnFailure"
    assert job_spec["template"]["spec"]["restartPolicy"] == "Never"
    limits = {job_spec["backoffLimit"], job_spec.get("backoffLimitPerIndex", 0)}
    assert limits == {restarts * spec.nnodes}
    stopped, disrupted, *rules = job_spec["podFailurePolicy"]["rules"]
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [143])
    assert (disrupted["action"], "onPodConditions" in disrupted) == ("Ignore", True)
    codes = [(rule["action"], rule["onExitCodes"]["values"]) for rule in rules]
    assert codes == ([("FailJob", final)] if final else [])
    # The agent ends with 3, and not with 137, when it has no restart left.
    config = json.loads(container_env(spec)["K8SJOB_CONFIG"])
    assert (config["restart_policy"], config["max_restarts"]) == ("ExitCode", restarts)
    back = adopt(render(spec)).spec
    assert back == spec.with_(security="default")
    assert [*remarks(spec)] == []


@of_each_kind
def test_the_first_worker_reports_where_the_master_only_serves(kind):
    served = {"kind": "parameter_server", "servers": 3}
    job = manifest(kind.spec(strategy=served, run={"module": "train"}))
    assert (processes(job), reporting_replica(job)) == ((4, 1), "worker-0")


@of_each_kind
def test_what_a_literal_on_failure_costs(kind):
    (remark,) = remarks(kind.spec(policy={"restart_policy": "OnFailure"}))
    assert remark.startswith(f"policy.restart_policy: with OnFailure, a {kind.target.kind} that")
    assert remarks(kind.spec(policy={"restart_policy": "OnFailure"}, target="pytorchjob")) == []


@of_each_kind
@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("OnFailure", "again without policy.restart_policy OnFailure, which keeps them, or follow"),
        ("Never", "to see the cause, run it again and follow it: k8sjob watch"),
    ],
)
def test_where_the_pods_are_gone_why_says_how_they_stay(kind, policy, words):
    job = kind.job(**condition("Failed", message="Job has reached the specified backoff limit"))
    kind.indexed(job)["template"]["spec"]["restartPolicy"] = policy
    (finding,) = diagnose(Snapshot(job), {}, now=NOW)
    assert words in finding.next_step


@of_each_kind
def test_a_restart_policy_that_its_rules_forbid_is_refused_with_its_line(kind, tmp_path):
    file, on_failure = tmp_path / "job.yaml", {"spec": {"restartPolicy": "OnFailure"}}
    document = {**kind.spec().model_dump(exclude_defaults=True), "pod_template": on_failure}
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(SpecError) as caught, located(file):
        manifest(load(file))
    (problem,) = caught.value.findings
    assert (problem.field, bool(problem.line)) == ("pod_template.spec.restartPolicy", True)
    assert "with a podFailurePolicy needs Never" in problem.message
    assert manifest(load(file).with_(policy={"restart_policy": "OnFailure"}))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("resources.master", {"resources": {"cpu": 1, "master": {"cpu": 2}}}),
        ("gang", {"gang": {"scheduler": "volcano"}}),
        ("policy.clean_pod_policy", {"policy": {"clean_pod_policy": "All"}}),
        ("policy.restart_policy", {"policy": {"restart_policy": "Always"}}),
        ("policy.ttl_after_finished", {"policy": {"ttl_after_finished": "1h"}}),
        ("replicas.elastic", {"replicas": {"workers": 1, "elastic": {"min": 1, "max": 2}}}),
        ("run.command", {"run": {"command": ["tune", "run"]}}),
        (f"annotations.{GROUP}", {"annotations": {GROUP: "g"}, "kueue_queue": "q"}),
    ],
)
def test_a_refusal_names_the_targets_that_have_the_field(path, fields):
    refused = {target.name: [*target.refusals(JOB.spec(**fields))] for target in TARGETS}
    having = [name for name, problems in refused.items() if not problems]
    assert 0 < len(having) < len(TARGETS)
    for problem in [problem for problems in refused.values() for problem in problems]:
        assert ".".join(map(str, problem.path)) == path
        named = problem.next_step.partition("use target ")[2]
        assert set(named.replace(" or ", ", ").split(", ")) == set(having)


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
@of_each_kind
def test_the_state(status, state, kind):
    assert kind.job(**status).state()[0] is state
    assert has_ended(kind.job(**status)) == state.finished


@of_each_kind
def test_why_it_failed_is_what_its_job_says(kind):
    failed = kind.job(**condition("Failed", reason="BackoffLimitExceeded"))
    assert failed.state()[1]["reason"] == "BackoffLimitExceeded"
    suspended = kind.job(**condition("Suspended", reason="JobSuspended"))
    reason = "JobSuspended" if kind is JOB else "its own"  # known before the Job's
    assert suspended.state()[1]["reason"] == reason


@of_each_kind
def test_how_many_pods_are_in_which_phase(kind):
    job = kind.job
    running = job(active=3, ready=1, failed=2)
    assert running.counts(JobState.RUNNING) == {"Running": 1, "Pending": 2}
    assert job().counts(JobState.QUEUED) == {}
    assert job(succeeded=3).counts(JobState.SUCCEEDED) == {"Succeeded": 3}
    assert job(failed=2).counts(JobState.FAILED) == {"Failed": 2}
    assert job(failed=9, succeeded=1).counts(JobState.FAILED) == {"Succeeded": 1, "Failed": 2}


@of_each_kind
def test_a_failed_job_ends_when_its_pods_are_ended(kind):
    times = {"lastTransitionTime": "2026-01-01T00:00:09Z"}
    failed = kind.job(startTime="2026-01-01T00:00:01Z", **condition("FailureTarget", **times))
    assert failed.times() == ("2026-01-01T00:00:01Z", "2026-01-01T00:00:09Z")


@pytest.mark.parametrize(("noticed", "findings"), [(True, 0), (False, 1)])
@of_each_kind
def test_a_deadline_that_the_controller_has_noticed_is_not_overdue(noticed, findings, kind):
    status = condition("FailureTarget", lastTransitionTime="2026-01-01T00:00:10Z")
    late = kind.job(startTime="2026-01-01T00:00:00Z", active=3, **(status if noticed else {}))
    kind.indexed(late)["activeDeadlineSeconds"] = 10
    causes = diagnose(Snapshot(late, tuple(map(kind.pod, range(3)))), {}, now=NOW)
    assert [finding.id for finding in causes].count(Cause.DEADLINE) == findings


@of_each_kind
def test_why_a_deleted_pod_has_no_successor(kind):
    """The Job keeps the old one until then."""

    def event(reason, message, minute):
        about = {"kind": "Job", "name": kind.pods}
        stamp = f"2026-01-01T00:{minute:02}:00Z"
        details = {"reason": reason, "message": message, "lastTimestamp": stamp}
        return {"kind": "Event", "involvedObject": about, **details}

    running, gone = kind.pod(0), kind.pod(1)
    running["status"] = {"phase": "Running"}
    gone["status"] = {"phase": "Failed"}
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    refusal = f'Error creating: pods "{kind.pods}-1-zzzzz" is forbidden: exceeded quota: small,'
    refusal += " requested: pods=1, used: pods=2, limited: pods=2"
    events = [event("FailedCreate", refusal, 2)]
    job = kind.job(active=1)
    findings = diagnose(Snapshot(job, (running, gone), tuple(events)), {}, now=NOW)
    assert findings[0].id == Cause.QUOTA
    assert findings[0].message.startswith("worker-0 ")
    events.append(event("SuccessfulCreate", f"Created pod: {kind.pods}-1-yyyyy", 3))
    later = diagnose(Snapshot(job, (running, gone), tuple(events)), {}, now=NOW)
    assert Cause.QUOTA not in [finding.id for finding in later]


@of_each_kind
def test_a_controller_that_waits_before_it_replaces_a_pod_is_not_silent(kind):
    lacking = Snapshot(kind.job(active=2), (kind.pod(0), kind.pod(1)))
    findings = diagnose(lacking, {}, now=NOW)
    assert Cause.OPERATOR_SILENT not in {finding.id for finding in findings}
    findings = diagnose(lacking, {}, now=NOW + timedelta(seconds=660))
    assert Cause.OPERATOR_SILENT in {finding.id for finding in findings}


@of_each_kind
def test_suspension(kind):
    assert not kind.job().suspended
    job = kind.job()
    spec = {**job.spec, **kind.target.suspension(value=True)["spec"]}
    assert job.with_document({**job.document, "spec": spec}).suspended


@of_each_kind
def test_the_replicas_by_their_index(kind):
    target = kind.target
    assert job_of(kind.job().raw).target is target
    assert tuple(replica_names(kind.job())) == ("master-0", "worker-0", "worker-1")
    replica_of = kind.job().replica_of
    assert [replica_of(kind.pod(index)) for index in range(3)] == list(replica_names(kind.job()))
    assert replica_of(kind.pod(2, labeled=False)) == "worker-1"
    assert replica_of({"metadata": {"labels": {INDEX: "1"}}}) == ""
    selector = target.pods.selector("tiny", {"master-0", "worker-1"})
    assert selector == f"{kind.label}=tiny,{INDEX} in (0,2)"
    assert kind.job().replica_named(f"{kind.pods}-2-x7k2p") == "worker-1"
    assert kind.job().replica_named(f"{kind.pods}-two-0-x7k2p") == ""


@of_each_kind
def test_of_the_pods_of_a_replica_the_newest_counts(kind):
    pods = [kind.pod(1, created=5, suffix="bbbbb"), kind.pod(0), kind.pod(1, created=1)]
    pods.append(kind.pod(2, created=9, uid="of a job before it"))
    about = {"name": "tiny", "uid": "1", "creationTimestamp": "2026-01-01T00:00:01Z"}
    objects = [{"metadata": {**about, "ownerReferences": [{"controller": True, "uid": "1"}]}}]
    assert [pod["metadata"]["name"] for pod in own_pods(kind.job(), pods, objects)] == [
        f"{kind.pods}-0-aaaaa",
        f"{kind.pods}-1-bbbbb",
    ]
    event = {"lastTimestamp": "2026-01-01T00:00:03Z"}
    assert is_below(kind.job(), {**event, "involvedObject": {"name": f"{kind.pods}-1-aaaaa"}})
    about_job = {**event, "involvedObject": {"kind": "Job", "name": kind.pods}}
    assert is_below(kind.job(), about_job) == (kind is not JOB)  # its own are asked for by uid
    about_set = {**event, "involvedObject": {"kind": "JobSet", "name": "tiny"}}
    assert is_below(kind.job(), about_set) == (kind is TRAINJOB)


def test_pods_of_an_earlier_trainjob_are_not_this_ones():
    job, before = TRAINJOB.job(), TRAINJOB.pod(0, uid="its set")
    before["metadata"]["creationTimestamp"] = "2025-12-31T23:59:59Z"
    assert own_pods(job, [before]) == ()  # where its JobSet may not be read, by their age
    late = TRAINJOB.pod(0, created=9, uid="its set")
    assert len(own_pods(job, [late])) == 1
    about = {"name": "tiny", "uid": "its set", "creationTimestamp": "2026-01-01T00:00:00Z"}
    of_earlier = {**about, "ownerReferences": [{"controller": True, "uid": "0"}]}
    assert own_pods(job, [late], [{"metadata": of_earlier}]) == ()
    its_own = {**about, "ownerReferences": [{"controller": True, "uid": "1"}]}
    assert len(own_pods(job, [late], [{"metadata": its_own}])) == 1


def test_what_the_apiserver_adds_is_not_the_authors():
    stored = JOB.job()
    stored.spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": "1"}}
    labels = stored.spec["template"]["metadata"]["labels"]
    labels |= {"controller-uid": "1", "batch.kubernetes.io/job-name": "tiny", "job-name": "tiny"}
    assert stored.written_spec == manifest(JOB.spec()).spec


@pytest.mark.parametrize(
    ("row", "state", "counts"),
    [
        ({}, JobState.CREATED, {"Pending": 3}),
        ({"active": 1, "ready": 0}, JobState.CREATED, {"Pending": 3}),
        ({"active": 1, "ready": 1}, JobState.RUNNING, {"Running": 3}),
        ({"active": 0, "succeeded": 1}, JobState.RUNNING, {"Succeeded": 3}),
    ],
)
def test_who_may_not_read_its_job_sees_what_the_set_says(row, state, counts):
    job = job_of({**manifest(JOBSET.spec()).raw, "status": {"replicatedJobsStatus": [row]}})
    assert job.state()[0] is state
    assert job.counts(state) == counts


class TestUnlikeJobs:
    """A JobSet of others: one Job `leader` of one Pod, and two Jobs `actors` of two Pods each."""

    def job(self, *rows, jobs=(("leader", 1, 1), ("actors", 2, 2))):
        listed = [
            {
                "name": name,
                "replicas": replicas,
                "template": {
                    "spec": {
                        "completionMode": "Indexed",
                        "completions": pods,
                        "template": {"spec": {"containers": [{"name": name}]}},
                    }
                },
            }
            for name, replicas, pods in jobs
        ]
        statuses = [dict(zip(("name", "ready", "succeeded"), row, strict=True)) for row in rows]
        return job_of(
            {
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "metadata": {"name": "rl", "uid": "1", "creationTimestamp": "2026-01-01T00:00:00Z"},
                "spec": {"replicatedJobs": listed},
                "status": {"replicatedJobsStatus": statuses},
            }
        )

    def pod(self, name, number, index, jobs="3"):
        labels = {
            "batch.kubernetes.io/job-name": f"rl-{name}-{number}",
            "jobset.sigs.k8s.io/replicatedjob-name": name,
            "jobset.sigs.k8s.io/job-index": str(number),
            "jobset.sigs.k8s.io/global-replicas": jobs,
            INDEX: str(index),
            UID: "1",
        }
        about = {"name": f"rl-{name}-{number}-{index}-aaaaa", "labels": labels}
        return {"metadata": {**about, "creationTimestamp": "2026-01-01T00:00:01Z"}}

    def test_each_pod_is_a_replica(self):
        names = ("leader-0-0", "actors-0-0", "actors-0-1", "actors-1-0", "actors-1-1")
        job, of = (
            self.job(),
            [("leader", 0, 0), *(("actors", i, j) for i in (0, 1) for j in (0, 1))],
        )
        pods = [self.pod(*place) for place in of]
        assert tuple(replica_names(job)) == names
        assert tuple(map(job.replica_of, pods)) == names
        for pod, name in zip(pods, names, strict=True):
            assert job.replica_named(pod["metadata"]["name"]) == name
        assert job.replica_named("rl-actors-2-0-aaaaa") == ""
        assert JOBSET.target.pods.selector("rl", {"actors-1-0"}) == f"{SET_NAME}=rl,{INDEX} in (0)"
        shown = job_status(Snapshot(job, own_pods(job, [*pods[::-1]])))
        assert [replica.name for replica in shown.replicas] == sorted(names)
        specs = [role.pod["containers"][0]["name"] for role in job.replicas]
        assert specs == ["leader", "actors"]

    def test_they_are_chosen_by_their_names_and_the_beginnings_of_these(self):
        assert select(self.job(), ["actors"]) == replica_names(self.job())[1:]
        assert select(self.job(), ["actors-1"]) == ("actors-1-0", "actors-1-1")
        assert select(self.job(), ["leader-0-0"]) == ("leader-0-0",)
        with pytest.raises(BackendError, match="it has leader-0-0, actors-0-0"):
            select(self.job(), ["worker"])

    @pytest.mark.parametrize(
        ("leader", "actors", "state", "counts"),
        [
            ((0, 0), (0, 0), JobState.CREATED, {"Pending": 5}),
            ((1, 0), (1, 0), JobState.RUNNING, {"Running": 3, "Pending": 2}),
            ((0, 1), (2, 0), JobState.RUNNING, {"Running": 4, "Succeeded": 1}),
        ],
    )
    def test_the_counts_are_those_of_all(self, leader, actors, state, counts):
        job = self.job(("leader", *leader), ("actors", *actors))
        assert job.state()[0] is state
        assert job.counts(state) == counts

    def test_billions_of_jobs_cost_nothing_until_they_are_named(self):
        most = 2**31 - 1
        job = self.job(jobs=(("leader", 1, 1), ("node", most, 2), ("actors", most, most)))
        names = replica_names(job)
        assert names[:3] == ("master-0", "worker-0", "leader-0-0")
        assert names[3:5] == ("node-1-0", "node-1-1")
        assert names[-1] == f"actors-{most - 1}-{most - 1}"
        _, _, _, nodes, _ = job.replicas
        assert ("node-2-1" in nodes, "node-0-0" in nodes, "node-2-2" in nodes) == (1, 0, 0)
        assert job.replica_named("rl-actors-99999999-0-aaaaa")
        assert job.has_below("Job", "rl-node-7")
        assert not job.has_below("Job", f"rl-node-{most}")
        status = job_status(Snapshot(job))
        assert status.counts == {"Pending": 1 + 2 * most + most**2}

    def test_one_job_of_another_name_has_the_ranks(self):
        job = self.job(jobs=(("workers", 1, 2),))
        assert tuple(replica_names(job)) == ("master-0", "worker-0")
        assert job.replica_of(self.pod("workers", 0, 1, jobs="1")) == "worker-0"
        assert job.replica_named("rl-workers-0-1-aaaaa") == "worker-0"

    def test_the_initializers_of_a_trainjob_stand_beside_its_nodes(self):
        job = self.job(jobs=(("dataset-initializer", 1, 1), ("node", 1, 2)))
        assert tuple(replica_names(job)) == ("master-0", "worker-0", "dataset-initializer-0-0")
        assert job.replica_of(self.pod("node", 0, 1)) == "worker-0"
        pod = self.pod("dataset-initializer", 0, 0)
        assert job.replica_of(pod) == "dataset-initializer-0-0"


def test_the_job_of_an_earlier_set_is_not_its_child():
    owners = [{"controller": True, "uid": "0"}]
    earlier = {"metadata": {"name": "tiny-node-0", "ownerReferences": owners}}
    job = job_of({**manifest(JOBSET.spec()).raw, "metadata": {"name": "tiny", "uid": "1"}})
    assert with_child(job, [earlier]).child is None
    assert with_child(job, [JOBSET.job().child, earlier]).child


@pytest.mark.parametrize(("length", "workers", "fits"), [(48, 2, 1), (49, 2, 0), (48, 10, 0)])
def test_names_of_pods_have_a_limit(length, workers, fits):
    spec = JOBSET.spec(name="a" * length, replicas={"workers": workers})
    findings = list(JOBSET.target.refusals(spec))
    assert [finding.field for finding in findings] == ["name"] * (not fits)
    assert all(finding.next_step == f"use at most {47 + (workers < 10)}" for finding in findings)


OWNED = {"ownerReferences": [{"kind": "CronJob", "uid": "2", "controller": True}]}


@pytest.mark.parametrize(
    ("metadata", "mode", "training"),
    [({}, "Indexed", True), ({}, "NonIndexed", False), (OWNED, "Indexed", False)],
)
def test_which_jobs_of_others_are_trainings(metadata, mode, training):
    theirs = {"kind": "Job", "metadata": metadata, "spec": {"completionMode": mode}}
    assert job_of(theirs).is_training is training
