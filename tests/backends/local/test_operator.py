"""The reconcile loop, beside what training-operator v1.9.4 does."""

import copy
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from k8sjob.contract import Role
from k8sjob.kube.objects import is_true
from k8sjob.targets.api import CreatePod, DeleteJob, DeletePod, RecordEvent
from k8sjob.targets.pytorchjob.reconcile import finished, reconcile

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def job(*, master=True, workers=2, policy="OnFailure", elastic=False, **run_policy):
    replicas = {"Master": 1} if master else {}
    if workers:
        replicas["Worker"] = workers
    spec = {
        "runPolicy": run_policy,
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": policy, "template": {}}
            for role, count in replicas.items()
        },
    }
    if elastic:
        spec["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 2}
    return {"metadata": {"name": "j", "namespace": "local", "uid": "u"}, "spec": spec}


def pod(replica, phase="Running", *, code=None, restarts=0, dying=False):
    role, _, index = replica.rpartition("-")
    state = {"running": {}} if code is None else {"terminated": {"exitCode": code, "reason": "x"}}
    return {
        "metadata": {
            "name": f"j-{replica}",
            "namespace": "local",
            "uid": f"uid-{replica}",
            "labels": {
                "training.kubeflow.org/replica-type": role,
                "training.kubeflow.org/replica-index": index,
            },
            **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if dying else {}),
        },
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "pytorch", "restartCount": restarts, "state": state}],
        },
    }


def conditions(status):
    return [(c["type"], c["status"], c["reason"]) for c in status["conditions"]]


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


RUNNING = [pod("master-0"), pod("worker-0"), pod("worker-1")]


def test_a_new_job_is_created_and_gets_its_pods():
    status, actions = reconcile(job(), [], NOW)
    assert conditions(status) == [("Created", "True", "PyTorchJobCreated")]
    assert status["conditions"][0]["message"] == "PyTorchJob j is created."
    assert status["startTime"] == "2026-01-01T00:00:00Z"
    assert of(CreatePod, actions) == [
        CreatePod(Role.MASTER, 0),
        CreatePod(Role.WORKER, 0),
        CreatePod(Role.WORKER, 1),
    ]
    assert RecordEvent("Normal", "SuccessfulCreatePod", "Created pod: j-worker-1") in actions


def test_only_the_master_decides_about_running():
    workers_only, _ = reconcile(job(), [pod("master-0", "Pending"), *RUNNING[1:]], NOW)
    assert not is_true(workers_only, "Running")
    status, _ = reconcile(job(), [pod("master-0")], NOW)
    assert is_true(status, "Running")
    assert status["conditions"][-1]["message"] == "PyTorchJob j is running."


def test_succeeded_when_the_master_succeeded_whatever_the_workers_do():
    pods = [pod("master-0", "Succeeded", code=0), pod("worker-0", "Failed", code=1)]
    status, _ = reconcile(job(workers=1, policy="Never"), pods, NOW)
    assert is_true(status, "Succeeded")
    assert not is_true(status, "Failed")
    assert status["completionTime"] == "2026-01-01T00:00:00Z"
    assert status["conditions"][-1]["message"] == "PyTorchJob j is successfully completed."


@pytest.mark.parametrize(
    ("elastic", "phases", "succeeded"),
    [
        (False, ["Succeeded", "Running"], False),
        (False, ["Succeeded", "Succeeded"], True),
        (True, ["Succeeded", "Running"], True),
    ],
)
def test_without_a_master_all_workers_or_any_elastic_one(elastic, phases, succeeded):
    pods = [pod(f"worker-{i}", phase) for i, phase in enumerate(phases)]
    status, _ = reconcile(job(master=False, elastic=elastic), pods, NOW)
    assert is_true(status, "Succeeded") is succeeded
    assert is_true(status, "Running") is not succeeded
    expected = "successfully completed" if succeeded else "is running"
    assert status["conditions"][-1]["message"] == f"PyTorchJob local/j {expected}."


def test_the_last_condition_after_a_resume_is_suspended_and_false():
    resource = job()
    resource["status"], _ = reconcile(resource, RUNNING, NOW)
    resource["spec"]["runPolicy"]["suspend"] = True
    resource["status"], actions = reconcile(resource, RUNNING, NOW)
    assert [a.name for a in of(DeletePod, actions)] == ["j-master-0", "j-worker-0", "j-worker-1"]
    assert conditions(resource["status"])[1:] == [
        ("Running", "False", "PyTorchJobSuspended"),
        ("Suspended", "True", "PyTorchJobSuspended"),
    ]
    resource["spec"]["runPolicy"]["suspend"] = False
    later = NOW + timedelta(minutes=5)
    resource["status"], actions = reconcile(resource, [], later)
    assert conditions(resource["status"])[-1] == ("Suspended", "False", "PyTorchJobResumed")
    assert resource["status"]["startTime"] == "2026-01-01T00:05:00Z"
    assert len(of(CreatePod, actions)) == 3


def test_a_job_created_suspended_starts_nothing():
    status, actions = reconcile(job(suspend=True), [], NOW)
    assert not of(CreatePod, actions)
    assert "startTime" not in status
    assert conditions(status)[-1] == ("Suspended", "True", "PyTorchJobSuspended")


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [
        ("OnFailure", 1, True),
        ("Always", 1, True),
        ("ExitCode", 137, True),
        ("ExitCode", 128, True),
        ("ExitCode", 127, False),
        ("Never", 137, False),
    ],
)
def test_restart_policy(policy, code, again):
    pods = [pod("master-0"), pod("worker-0", "Failed", code=code)]
    status, actions = reconcile(job(workers=1, policy=policy), pods, NOW)
    assert bool(of(DeletePod, actions)) is again
    assert is_true(status, "Restarting") is again
    assert is_true(status, "Failed") is not again
    # Running and Restarting displace each other.
    assert is_true(status, "Running") is False


def test_the_exit_code_policy_that_gives_up_leaves_no_completion_time():
    pods = [pod("master-0"), pod("worker-0", "Failed", code=1)]
    status, _ = reconcile(job(workers=1, policy="ExitCode"), pods, NOW)
    assert 'job "j" is failing because "Worker" replica(s) failed.' in str(status)
    assert "completionTime" not in status


@pytest.mark.parametrize(
    ("limit", "restarts", "failed"),
    [
        (3, [1, 1, 0], False),
        (3, [1, 1, 1], True),
        (3, [0, 3, 0], True),
        (0, [0, 0, 0], False),
        (0, [0, 1, 0], True),
        (None, [9, 9, 9], False),
    ],
)
def test_backoff_limit_adds_up_all_running_pods(limit, restarts, failed):
    names = ["master-0", "worker-0", "worker-1"]
    pods = [pod(name, restarts=n) for name, n in zip(names, restarts, strict=True)]
    options = {} if limit is None else {"backoffLimit": limit}
    status, actions = reconcile(job(cleanPodPolicy="Running", **options), pods, NOW)
    assert is_true(status, "Failed") is failed
    assert bool(of(DeletePod, actions)) is failed
    if failed:
        message = "Job j has failed because it has reached the specified backoff limit"
        assert status["conditions"][-1]["message"] == message


def test_pods_that_do_not_run_are_not_counted_nor_those_that_never_restart():
    pods = [pod("master-0"), pod("worker-0", "Pending", restarts=9), pod("worker-1")]
    assert not is_true(reconcile(job(backoffLimit=3), pods, NOW)[0], "Failed")
    pods = [pod("master-0", restarts=9)]
    never = job(backoffLimit=3, policy="Never", workers=0)
    assert not is_true(reconcile(never, pods, NOW)[0], "Failed")


def test_a_limit_of_nought_forbids_a_new_pod_too():
    pods = [pod("master-0"), pod("worker-0", "Failed", code=137)]
    resource = job(workers=1, policy="ExitCode", backoffLimit=0)
    assert is_true(reconcile(resource, pods, NOW)[0], "Failed")


def test_deadline():
    resource = job(activeDeadlineSeconds=60)
    resource["status"], _ = reconcile(resource, RUNNING, NOW)
    just, _ = reconcile(resource, RUNNING, NOW + timedelta(seconds=59))
    assert not is_true(just, "Failed")
    over, _ = reconcile(resource, RUNNING, NOW + timedelta(seconds=60))
    message = "Job j has failed because it was active longer than specified deadline"
    assert over["conditions"][-1]["message"] == message


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        ("None", []),
        ("Running", ["j-worker-0", "j-worker-2"]),
        ("All", ["j-master-0", "j-worker-0", "j-worker-1", "j-worker-2"]),
    ],
)
def test_clean_pod_policy(policy, deleted):
    pods = [pod("master-0", "Succeeded", code=0), pod("worker-0"), pod("worker-1", "Failed")]
    pods.append(pod("worker-2", "Pending"))
    resource = job(workers=3, cleanPodPolicy=policy, policy="Never")
    resource["status"], first = reconcile(resource, pods, NOW)
    assert not of(DeletePod, first)  # it cleans up at its next look
    status, actions = reconcile(resource, pods, NOW)
    assert [action.name for action in of(DeletePod, actions)] == deleted
    assert status["replicaStatuses"]["Worker"]["succeeded"] == 1  # the one that still ran


def test_time_to_live_after_the_end():
    resource = job(workers=0, ttlSecondsAfterFinished=60)
    pods = [pod("master-0", "Succeeded", code=0)]
    resource["status"], _ = reconcile(resource, pods, NOW)
    assert not of(DeleteJob, reconcile(resource, pods, NOW + timedelta(seconds=60))[1])
    assert of(DeleteJob, reconcile(resource, pods, NOW + timedelta(seconds=61))[1])


def test_the_end_of_a_pod_that_lives_on_is_reported_by_an_event():
    pods = [pod("master-0", code=3, restarts=2), *RUNNING[1:]]
    pods[0]["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = "oh"
    _, actions = reconcile(job(), pods, NOW)
    warning = next(a for a in of(RecordEvent, actions) if a.type == "Warning")
    text = "Error pod j-master-0 container pytorch exitCode: 3 terminated message: oh"
    assert (warning.reason, warning.message) == ("x", text)


def test_trouble_of_ones_own_fails_the_job_and_cleans_up():
    status, actions = reconcile(job(cleanPodPolicy="Running"), RUNNING, NOW, trouble="enough")
    assert status["conditions"][-1]["message"] == "enough"
    assert len(of(DeletePod, actions)) == 3


# --- properties

PHASES = st.sampled_from(["Pending", "Running", "Succeeded", "Failed"])


@st.composite
def cases(draw):
    master = draw(st.booleans())
    workers = draw(st.integers(0 if master else 1, 3))
    policies = ["OnFailure", "Always", "Never", "ExitCode"]
    options = {
        "cleanPodPolicy": draw(st.sampled_from(["None", "Running", "All"])),
        "suspend": draw(st.booleans()),
    }
    for name, most in (("backoffLimit", 5), ("activeDeadlineSeconds", 90)):
        value = draw(st.none() | st.integers(0, most))
        options |= {} if value is None else {name: value}
    resource = job(
        master=master, workers=workers, policy=draw(st.sampled_from(policies)), **options
    )
    names = ["master-0"] * master + [f"worker-{i}" for i in range(workers)]
    looks = []
    for _ in range(draw(st.integers(1, 6))):
        pods = []
        for name in draw(st.lists(st.sampled_from(names), unique=True)):
            phase = draw(PHASES)
            ended = {"Succeeded": st.just(0), "Failed": st.integers(1, 255)}
            code = draw(ended.get(phase, st.none()))
            restarts, dying = draw(st.integers(0, 3)), draw(st.booleans())
            pods.append(pod(name, phase, code=code, restarts=restarts, dying=dying))
        looks.append((draw(st.booleans()), draw(st.integers(0, 60)), pods))
    return resource, looks


@examples(300)
@given(cases())
def test_conditions_stay_in_order_whatever_happens(case):
    resource, looks = case
    now = NOW
    for suspend, seconds, pods in looks:
        now += timedelta(seconds=seconds)
        resource["spec"]["runPolicy"]["suspend"] = suspend
        before, seen = copy.deepcopy(resource), copy.deepcopy(pods)
        status, actions = reconcile(resource, pods, now)
        assert (resource, pods) == (before, seen)
        kinds = [c["type"] for c in status["conditions"]]
        assert len(kinds) == len(set(kinds))
        assert not {"Running", "Restarting"} <= set(kinds)
        if finished(before.get("status", {})):
            assert status["conditions"] == before["status"]["conditions"]
            assert not of(CreatePod, actions)
        if suspend:
            assert not of(CreatePod, actions)
        present = {p["metadata"]["name"] for p in pods}
        dying = {p["metadata"]["name"] for p in pods if p["metadata"].get("deletionTimestamp")}
        assert {a.name for a in of(DeletePod, actions)} <= present - dying
        made = {f"j-{a.role.lower()}-{a.index}" for a in of(CreatePod, actions)}
        assert not made & present
        for counts in status.get("replicaStatuses", {}).values():
            assert all(counts.get(k, 0) >= 0 for k in ("active", "succeeded", "failed"))
        resource["status"] = status


@examples(200)
@given(cases())
def test_looking_again_changes_nothing_more(case):
    resource, [(_, _, pods), *_] = case
    resource["status"], _ = reconcile(resource, pods, NOW)
    resource["status"], _ = reconcile(resource, pods, NOW)  # an end moves the counts once more
    assert reconcile(resource, pods, NOW)[0] == resource["status"]
