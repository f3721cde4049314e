"""The state machine of a job, beside what training-operator v1.9.4 does."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from k8sjob.contract import Reason
from k8sjob.kube.objects import true_conditions
from k8sjob.targets.api import JobState
from k8sjob.targets.lifecycle import Lifecycle, is_expired

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FAILED, SUCCEEDED, RUNNING = JobState.FAILED, JobState.SUCCEEDED, JobState.RUNNING
RESTARTING, SUSPENDED, CREATED = JobState.RESTARTING, JobState.SUSPENDED, JobState.CREATED


class Run:
    """A job whose containers are started at once, and end when a test says so."""

    def __init__(self, *, master=True, workers=1, policy="OnFailure", restarts=99, **run_policy):
        elastic = run_policy.pop("elastic", None)
        counts = {"Master": 1} if master else {}
        counts |= {"Worker": workers} if workers else {}
        roles = {
            role: {"replicas": count, "restartPolicy": policy, "template": {}}
            for role, count in counts.items()
        }
        spec = {"runPolicy": run_policy, "pytorchReplicaSpecs": roles, "elasticPolicy": elastic}
        meta = {"name": "j", "namespace": "local", "uid": "u"}
        self.job = Lifecycle({"metadata": meta, "spec": spec}, max_restarts=restarts)
        self.replicas = {replica.name: replica for replica in self.job.replicas}
        self.now = NOW
        self.advance()

    def advance(self, seconds=0):
        """Let time pass, and start what is due."""
        for _ in range(2):
            self.now += timedelta(seconds=seconds / 2)
            self.job.advance(self.now)
            for replica in self.job.replicas:
                if replica.is_due:
                    replica.begin(self.now)
        self.job.advance(self.now)

    def end(self, *, advance=True, message="", **codes):
        """Let the containers of replicas end, `master_0=1`."""
        for name, code in codes.items():
            at = self.now.isoformat()
            end = {"exitCode": code, "reason": "x", "message": message}
            end |= {"startedAt": at, "finishedAt": at}
            self.job.ended(self.replicas[name.replace("_", "-")], end, self.now)
        self.job.advance(self.now)
        if advance:
            self.advance()

    @property
    def conditions(self):
        return [(c["type"], c["status"]) for c in self.job.status["conditions"]]

    @property
    def message(self):
        return self.job.status["conditions"][-1]["message"]

    @property
    def events(self):
        return [(event["reason"], event["message"]) for event in self.job.events]

    @property
    def phases(self):
        return {
            p["metadata"]["name"].removeprefix("j-"): p["status"]["phase"] for p in self.job.pods()
        }


def test_a_new_job_gets_its_pods_and_runs_with_its_master():
    run = Run(workers=2)
    assert [pod["metadata"]["name"] for pod in run.job.pods()] == [
        "j-master-0",
        "j-worker-0",
        "j-worker-1",
    ]
    assert ("SuccessfulCreatePod", "Created pod: j-worker-1") in run.events
    assert run.conditions == [("Created", "True"), ("Running", "True")]
    assert run.message == "PyTorchJob j is running."
    assert run.job.status["startTime"] == "2026-01-01T00:00:00Z"


MASTER_DONE = "PyTorchJob j is successfully completed."
WORKERS_DONE = "PyTorchJob local/j successfully completed."
LIMIT = "Job j has failed because it has reached the specified backoff limit"


@pytest.mark.parametrize(
    ("options", "codes", "state", "message"),
    [
        ({}, {"master_0": 0}, SUCCEEDED, MASTER_DONE),
        ({}, {"worker_0": 0}, RUNNING, ""),
        ({"policy": "Never"}, {"master_0": 0, "worker_0": 1}, SUCCEEDED, MASTER_DONE),
        (
            {"master": False, "workers": 2},
            {"worker_0": 0},
            RUNNING,
            "PyTorchJob local/j is running.",
        ),
        ({"master": False, "workers": 2}, {"worker_0": 0, "worker_1": 0}, SUCCEEDED, WORKERS_DONE),
        ({"master": False, "workers": 2, "elastic": {}}, {"worker_1": 0}, SUCCEEDED, WORKERS_DONE),
        # A restart, in the Pod or with a new one, or the end of the job:
        ({"policy": "OnFailure"}, {"worker_0": 1}, RUNNING, ""),
        ({"policy": "OnFailure"}, {"master_0": 137}, RUNNING, ""),
        ({"policy": "Always"}, {"worker_0": 0}, RUNNING, ""),
        ({"policy": "Always"}, {"worker_0": 1}, RUNNING, ""),
        ({"policy": "ExitCode"}, {"worker_0": 137}, RUNNING, ""),
        ({"policy": "ExitCode"}, {"worker_0": 128}, RUNNING, ""),
        (
            {"policy": "ExitCode"},
            {"worker_0": 127},
            FAILED,
            'job "j" is failing because "Worker" replica(s) failed.',
        ),
        (
            {"policy": "Never"},
            {"worker_0": 137},
            FAILED,
            "PyTorchJob j is failed because 1 Worker replica(s) failed.",
        ),
        ({"restarts": 0}, {"worker_0": 3}, FAILED, "worker-0 failed 1 time and max_restarts is 0"),
        # A limit of 0 also forbids a new Pod:
        ({"policy": "ExitCode", "backoffLimit": 0}, {"worker_0": 137}, FAILED, LIMIT),
        ({"backoffLimit": 0}, {"worker_0": 1}, FAILED, LIMIT),
        ({"backoffLimit": 0}, {"worker_0": 0}, RUNNING, ""),
        # Otherwise it adds up the restarts of all running Pods, and of those that may restart:
        ({"backoffLimit": 2}, {"worker_0": 1}, RUNNING, ""),
        ({"backoffLimit": 2}, {"worker_0": 1, "master_0": 1}, FAILED, LIMIT),
    ],
)
def test_what_follows_from_the_ends_of_containers(options, codes, state, message):
    run = Run(**options)
    run.end(**codes)
    assert run.job.state is state
    assert message in run.message
    assert ("Running" in true_conditions(run.job.status)) is (state is RUNNING)
    has_time = state.finished and options.get("policy") != "ExitCode"
    assert ("completionTime" in run.job.status) is (has_time or message == LIMIT)


@pytest.mark.parametrize("type_of_error", [1, 2])
def test_an_error_that_another_start_would_repeat_ends_the_job(type_of_error):
    run = Run()
    run.end(worker_0=type_of_error, message=Reason(type_of_error, message="oh").encode())
    assert run.message.endswith(f"worker-0 ended with exit code {type_of_error}")


def test_a_replaced_pod_is_another_one_and_the_job_restarts_meanwhile():
    run = Run(policy="ExitCode", workers=0)
    (pod,) = run.job.pods()
    run.end(advance=False, master_0=137)
    assert (run.job.state, run.phases) == (RESTARTING, {"master-0": "Pending"})
    assert run.conditions == [("Created", "True"), ("Restarting", "True")]
    message = "job j is restarting because Master replica(s) failed."
    exited = ("ExitedWithCode", "Pod: local.j-master-0 exited with code 137")
    assert run.events[-4:] == [
        ("PyTorchJobRestarting", message),
        exited,
        ("SuccessfulDeletePod", "Deleted pod: j-master-0"),
        ("SuccessfulCreatePod", "Created pod: j-master-0"),
    ]
    run.advance()
    (new,) = run.job.pods()
    assert new["metadata"]["uid"] != pod["metadata"]["uid"]
    assert run.conditions == [("Created", "True"), ("Running", "True")]
    run.job.max_restarts = 1
    run.end(master_0=137)
    assert run.job.state is FAILED
    assert run.events.count(exited) == 1  # `why` counts them as new Pods


def test_a_crash_in_a_pod_that_lives_on_is_recorded_and_followed_by_longer_pauses():
    run = Run(workers=0)
    pauses = []
    for _ in range(6):
        run.end(master_0=3, message="oh", advance=False)
        pauses.append(run.replicas["master-0"].pause)
        (pod,) = run.job.pods()
        run.advance()
    assert pauses == [0, 1, 2, 4, 8, 10]
    text = "Error pod j-master-0 container pytorch exitCode: 3 terminated message: oh"
    assert ("x", text) in run.events
    (container,) = pod["status"]["containerStatuses"]
    assert container["restartCount"] == 5
    assert container["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert container["lastState"]["terminated"]["exitCode"] == 3


def test_deadline():
    run = Run(activeDeadlineSeconds=60)
    run.advance(seconds=59)
    assert run.job.state is RUNNING
    run.advance(seconds=1)
    assert run.message == "Job j has failed because it was active longer than specified deadline"


def test_the_last_condition_after_a_resume_is_suspended_and_false():
    run = Run(workers=0)
    run.job.policy["suspend"] = True
    run.advance()
    assert run.conditions[1:] == [("Running", "False"), ("Suspended", "True")]
    assert run.replicas["master-0"].stopped
    run.end(master_0=143)
    assert (run.job.state, run.phases) == (SUSPENDED, {})
    run.job.policy["suspend"] = False
    run.now += timedelta(minutes=5)
    run.job.advance(run.now)
    assert run.conditions[-1] == ("Suspended", "False")
    assert run.job.status["startTime"] == "2026-01-01T00:05:00Z"
    assert (run.job.state, run.phases) == (CREATED, {"master-0": "Pending"})


def test_a_job_created_suspended_starts_nothing():
    run = Run(suspend=True)
    assert (run.job.state, run.phases) == (SUSPENDED, {})
    assert "startTime" not in run.job.status


@pytest.mark.parametrize(
    ("policy", "deleted"),
    [
        ("None", set()),
        ("Running", {"worker-1"}),
        ("All", {"master-0", "worker-0", "worker-1"}),
    ],
)
def test_clean_pod_policy(policy, deleted):
    run = Run(workers=2, policy="Never", cleanPodPolicy=policy)
    run.end(worker_0=0)
    run.end(master_0=0)
    assert run.job.status["replicaStatuses"]["Worker"] == {"succeeded": 2}  # one still runs
    run.job.clean_up(run.now)
    messages = {message for _, message in run.events if message.startswith("Deleted pod")}
    assert messages == {f"Deleted pod: j-{name}" for name in deleted}
    run.end(worker_1=143)
    assert run.phases.keys() == run.replicas.keys() - deleted
    run = Run(workers=2, policy="Never", cleanPodPolicy=policy)
    run.end(worker_0=1)
    assert run.replicas["worker-1"].stopped is (policy != "None")
    run.end(worker_1=143, master_0=143)
    assert run.phases == dict.fromkeys(run.replicas, "Failed")  # they show how they ended


def test_a_stop_waits_for_the_containers_and_the_masters_success_counts():
    for code, state in ((0, SUCCEEDED), (143, JobState.STOPPED)):
        run = Run(workers=1)
        run.job.stop("Ctrl-C")
        run.end(worker_0=143)
        assert run.job.state is RUNNING
        run.end(master_0=code)
        assert run.job.state is state
    assert run.message == "PyTorchJob j was stopped: Ctrl-C."


def test_time_to_live_after_the_end():
    run = Run(workers=0, ttlSecondsAfterFinished=60)
    run.end(master_0=0)
    assert not is_expired(run.job.job, NOW + timedelta(seconds=60))
    assert is_expired(run.job.job, NOW + timedelta(seconds=61))


@st.composite
def histories(draw):
    policies = ["OnFailure", "Always", "Never", "ExitCode"]
    options = {
        "master": (master := draw(st.booleans())),
        "workers": draw(st.integers(0 if master else 1, 3)),
        "policy": draw(st.sampled_from(policies)),
        "restarts": draw(st.integers(0, 3)),
        "cleanPodPolicy": draw(st.sampled_from(["None", "Running", "All"])),
    }
    for name, most in (("backoffLimit", 5), ("activeDeadlineSeconds", 90)):
        number = draw(st.none() | st.integers(0, most))
        options |= {} if number is None else {name: number}
    inputs = st.one_of(
        st.tuples(st.just("end"), st.integers(0, 3), st.integers(0, 255)),
        st.tuples(st.just("suspend"), st.booleans()),
        st.tuples(st.just("wait"), st.integers(0, 60)),
        st.sampled_from([("stop",), ("delete",)]),
    )
    return options, draw(st.lists(inputs, max_size=12))


@examples(300)
@given(histories())
def test_conditions_stay_in_order_whatever_happens(history):
    options, inputs = history
    run = Run(**options)
    for verb, *details in inputs:
        before, ended = json.dumps(run.job.status), run.job.state.finished
        running = [r for r in run.job.replicas if r.state == "Running"]
        if verb == "end" and details[0] < len(running):
            run.end(**{running[details[0]].name.replace("-", "_"): details[1]})
        elif verb == "suspend":
            run.job.policy["suspend"] = details[0]
        elif verb == "stop":
            run.job.stop("enough")
        elif verb == "delete":
            run.job.delete(run.now)
        run.advance(details[0] if verb == "wait" else 0)
        kinds = [kind for kind, _ in run.conditions]
        assert len(kinds) == len(set(kinds))
        assert not {"Running", "Restarting"} <= set(kinds)
        assert not ended or json.dumps(run.job.status) == before
        if ended or run.job.stop_message or run.job.state is SUSPENDED:
            assert not any(replica.is_due for replica in run.job.replicas)
        assert len({pod["metadata"]["name"] for pod in run.job.pods()}) == len(run.job.pods())
