import itertools
from datetime import UTC, datetime

import pytest
from observed import REF, at, condition, make_pod, running, snapshot

from k8sjob.contract import Reason
from k8sjob.observe.status import JobState, job_status
from k8sjob.targets.jobs import own_pods


@pytest.mark.parametrize(
    ("conditions", "state", "exit_code"),
    [
        ([], "Created", 101),
        (["Created"], "Created", 101),
        (["Created", "Running"], "Running", 101),
        (["Created", "Restarting"], "Restarting", 101),
        (["Created", "-Running", "Suspended"], "Suspended", 103),
        (["Created", "-Running", "Succeeded"], "Succeeded", 0),
        (["Created", "-Running", "Failed"], "Failed", 100),
        (["Created", "Failed:PyTorchJobStopped:by hand"], "Stopped", 103),
        (["Created", "Running", "-Suspended:PyTorchJobResumed"], "Running", 101),
        (["Created", "Restarting", "Failed"], "Failed", 100),
    ],
)
def test_the_state_follows_from_true_conditions_in_any_order(conditions, state, exit_code):
    for order in itertools.permutations(conditions):
        status = job_status(snapshot(*order))
        assert (status.state, status.exit_code) == (state, exit_code)
        assert status.ref == REF


def test_pods_that_end_are_unready_before_their_job_counts_them():
    started = [make_pod("master-0", terminated={"exitCode": 0}), make_pod("worker-0", running={})]
    assert job_status(snapshot("Created", pods=started)).state is JobState.RUNNING
    crashed = [make_pod("master-0", terminated={"exitCode": 1})]
    assert job_status(snapshot("Created", pods=crashed)).state is JobState.CREATED


def test_reason_message_and_times():
    times = {"startTime": at("01:00"), "completionTime": at("02:00")}
    status = job_status(snapshot("Created", "Failed:Why:what", **times))
    assert (status.reason, status.message) == ("Why", "what")
    assert status.created == datetime(2026, 1, 1, tzinfo=UTC)
    assert (status.finished - status.started).total_seconds() == 60


def test_a_job_that_ended_without_a_completion_time_ended_when_its_condition_came():
    """The operator leaves it out where the ExitCode policy gives up."""
    finished = job_status(snapshot("Failed:Why:what")).finished
    assert finished == datetime(2026, 1, 1, 0, 9, tzinfo=UTC)
    assert job_status(snapshot("Running")).finished is None


def test_replicas():
    reason = Reason(3, rank=1, message="it broke\nbadly").encode()
    pods = [
        make_pod("master-0", running={}),
        make_pod(
            "worker-0",
            restarts=2,
            waiting={"reason": "CrashLoopBackOff", "message": "back-off"},
            last={"exitCode": 3, "reason": "Error", "message": reason},
        ),
        make_pod("worker-1", dying=True, running={}),
        make_pod("worker-2", "Failed", terminated={"exitCode": 1, "message": "one\ntwo\n"}),
    ]
    master, crashing, dying, failed = job_status(snapshot("Running", pods=pods)).replicas
    assert (master.name, master.phase) == ("master-0", "Running")
    assert (master.node, master.exit_code, master.reason) == ("node-1", None, "")
    assert (crashing.name, crashing.reason) == ("worker-0", "CrashLoopBackOff")
    assert (crashing.restarts, crashing.exit_code, crashing.message) == (2, 3, "it broke")
    assert dying.phase == "Terminating"
    assert (failed.exit_code, failed.message) == (1, "two")


def test_a_pod_that_carries_the_labels_of_a_job_and_is_not_its_own():
    mine = {"ownerReferences": [{"uid": "u", "controller": True}], "creationTimestamp": at("00:01")}
    ours = make_pod("master-0", meta=mine, running={})
    later = {"creationTimestamp": at("00:09")}
    foreign = [
        make_pod(name, "Failed", meta=later, terminated={"exitCode": 1})
        for name in ("master-0", "master-abc", "evil sh-1", "worker-" + "9" * 5000)
    ]
    job = snapshot("Running").job
    assert own_pods(job, [*foreign, ours]) == (ours,)


def waiting_pod(*, phase="Pending", conditions=(), inits=(), **state):
    pod = make_pod("worker-0", phase, **state)
    pod["status"] |= {"conditions": list(conditions), "initContainerStatuses": list(inits)}
    if not state:
        del pod["status"]["containerStatuses"]
    return pod


def init(restarts=0, **state):
    return {"name": "init-pytorch", "restartCount": restarts, "state": state}


DONE = init(terminated={"exitCode": 0})
PULL = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
FAILED = {"exitCode": 1, "reason": "Error"}
UNSCHEDULABLE = condition("-PodScheduled:Unschedulable:0/3 nodes are available")
STARTING = {"waiting": {"reason": "PodInitializing"}}
CRASHES = {"waiting": {"reason": "CrashLoopBackOff"}}


@pytest.mark.parametrize(
    ("pod", "situation", "message", "restarts"),
    [
        (waiting_pod(conditions=[UNSCHEDULABLE]), "Unschedulable", "0/3 nodes are available", 0),
        (waiting_pod(inits=[init(running={})], **STARTING), "Init:0/1", "", 0),
        (waiting_pod(inits=[DONE, init(running={})], **STARTING), "Init:1/2", "", 0),
        (
            waiting_pod(inits=[init(waiting=PULL)], **STARTING),
            "Init:ImagePullBackOff",
            "Back-off pulling image",
            0,
        ),
        (waiting_pod(inits=[init(3, terminated=FAILED)], **STARTING), "Init:Error", "", 3),
        (waiting_pod(inits=[DONE], waiting=PULL), "ImagePullBackOff", "Back-off pulling image", 0),
        (waiting_pod(phase="Running", **CRASHES), "CrashLoopBackOff", "", 0),
        (waiting_pod(phase="Running", terminated=FAILED), "Error", "", 0),  # others keep it running
        # What a Pod waited for before it failed is past.
        (waiting_pod(phase="Failed", waiting={"reason": "ContainerCreating"}), "Failed", "", 0),
        (waiting_pod(phase="Failed", conditions=[UNSCHEDULABLE]), "Failed", "", 0),
        (waiting_pod(phase="Running", running={}), "Running", "", 0),
        (waiting_pod(), "Pending", "", 0),
    ],
)
def test_what_a_replica_waits_for(pod, situation, message, restarts):
    status = job_status(snapshot("Running", pods=[pod]))
    (replica,) = status.replicas
    assert (replica.situation, replica.message, replica.restarts) == (situation, message, restarts)
    assert status.counts == {situation: 1}


def test_a_pod_whose_init_container_failed_has_failed():
    ended = init(terminated={"exitCode": 3, "reason": "Error", "message": "no data"})
    pod = waiting_pod(phase="Failed", inits=[ended], **STARTING)
    (replica,) = job_status(snapshot("Running", pods=[pod])).replicas
    assert (replica.situation, replica.reason) == ("Failed", "Init:Error")
    assert replica.message == "no data"


@pytest.mark.parametrize(
    ("condition", "counted", "counts"),
    [
        ("Created", {}, {"Pending": 3}),
        ("Running", {"Master": {"active": 1}, "Worker": {}}, {"Running": 1, "Pending": 2}),
        ("Succeeded", {"Master": {"succeeded": 1}, "Worker": {"failed": 1}}, None),
        ("Suspended", {"Master": {}, "Worker": {}}, {}),
    ],
)
def test_counts_without_pods_are_the_operators(condition, counted, counts):
    status = job_status(snapshot(condition, replicaStatuses=counted))
    assert status.counts == ({"Succeeded": 1, "Failed": 1} if counts is None else counts)


def test_a_job_whose_deletion_was_requested_does_not_run():
    doomed = snapshot("Created", "Running", pods=running("master-0"))
    doomed.job.raw["metadata"] |= {"deletionTimestamp": at("09:00")}
    status = job_status(doomed)
    assert (status.state, status.exit_code) == (JobState.DELETING, 103)
    assert not status.state.finished
    assert (status.reason, status.message) == ("", "the job is being deleted")
    doomed.job.raw["metadata"]["finalizers"] = ["foregroundDeletion", "example.com/keep"]
    detail = "the job is being deleted; it is waiting for its finalizers: "
    assert job_status(doomed).message == detail + "foregroundDeletion, example.com/keep"


def test_a_job_that_has_ended_keeps_its_state_while_it_is_deleted():
    doomed = snapshot("Created", "Failed:Why:what")
    doomed.job.raw["metadata"]["deletionTimestamp"] = at("09:00")
    assert (job_status(doomed).state, job_status(doomed).message) == (JobState.FAILED, "what")


def test_a_pod_that_is_recreated_counts_as_a_restart():
    """Under ExitCode the operator replaces the pod, and the new one has restarted nothing."""

    def created(name, **count):
        return {"reason": "SuccessfulCreatePod", "message": f"Created pod: job-{name}", **count}

    events = [
        created("master-0", count=3),
        created("worker-0", count=1),
        created("worker-1", series={"count": 2}),
        created("worker-1"),
    ]
    pods = [make_pod("master-0", restarts=1), make_pod("worker-0"), make_pod("worker-1")]
    for event in events:
        event["lastTimestamp"] = at("05:00")
    status = job_status(snapshot("Running", pods=pods, events=events))
    assert [replica.restarts for replica in status.replicas] == [3, 0, 2]
    resumed = snapshot("Running", pods=pods, events=events)
    condition = {"type": "Suspended", "status": "False", "lastTransitionTime": at("05:10")}
    resumed.job.raw["status"]["conditions"].append(condition)
    assert [replica.restarts for replica in job_status(resumed).replicas] == [1, 0, 0]
