"""What `why` says of jobs; recorded ones are in test_recorded.py, output in test_output.py."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed import (
    MASTER,
    NOW,
    PAIR,
    WORKER,
    about,
    about_job,
    at,
    ended,
    make_pod,
    reported,
    running,
    snapshot,
    unplaced,
)

from k8sjob.backends.api import Snapshot
from k8sjob.cli.find_job import warn_of_clock
from k8sjob.contract import Event, Reason
from k8sjob.kube.objects import stamp
from k8sjob.observe.diagnose import Cause, as_data, diagnose
from k8sjob.observe.diagnose.finding import without_replica
from k8sjob.observe.diagnose.output import since_training
from k8sjob.targets.jobs import job_of

ALL = ("master-0", "worker-0", "worker-1")
PAST = "Failed:x:Job j has failed because"
TOO_LATE = f"{PAST} it was active longer than specified deadline"
SHORT = (
    "0/4 nodes are available: 4 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available"
)


def why(*conditions, logs=None, related=(), now=NOW, **job):
    """The findings about a job of these conditions, Pods and Events."""
    return diagnose(snapshot(*conditions, **job), logs or {}, related, now=now)


def causes(*conditions, **options):
    return [finding.id for finding in why(*conditions, **options)]


def only(*conditions, **options):
    (finding,) = why(*conditions, **options)
    return finding


def test_a_replica_that_is_ended_with_its_job_is_not_the_cause():
    meta = {"deletionTimestamp": at("05:02"), "deletionGracePeriodSeconds": 2}
    killed = make_pod("master-0", "Running", meta=meta, terminated=ended(137, time="05:02"))
    crashed = make_pod("worker-0", "Running", meta=meta, terminated=ended(1, "no", time="04:59"))
    failed = f"{PAST} it has reached the specified backoff limit"
    assert causes("Created", failed, pods=[killed, crashed]) == ["crash"]
    assert causes("Created", failed, pods=[killed]) == ["restart-limit"]
    before = make_pod("master-0", "Running", meta=meta, terminated=ended(137, time="04:59"))
    assert causes("Created", failed, pods=[before]) == ["killed"]


def test_where_the_output_is_gone_the_next_step_keeps_it():
    failed = f"{PAST} it has reached the specified backoff limit"
    gone = only("Created", failed)
    assert "their output with them" in gone.next_step
    assert "policy.restart_policy Never" in gone.next_step
    pod = make_pod("master-0", "Running", dying=True)
    assert "output with" not in only("Created", failed, pods=[pod]).next_step


def test_nothing_is_wrong_with_a_job_that_runs_or_ended_well():
    for state in ("Created", "Running"):
        assert why(state, pods=running(*ALL)) == []
    ended_well = [make_pod("master-0", "Succeeded", terminated=ended(0))]
    assert why("Succeeded", pods=ended_well) == []


@pytest.mark.parametrize(
    ("condition", "cause", "step"),
    [
        ("Suspended", "suspended", "k8sjob resume ns/job"),
        ("Failed:PyTorchJobStopped:job was stopped: Ctrl-C.", "stopped", "run the job again"),
        ("Failed:PyTorchJobSupervisorGone:lost", "supervisor-gone", "run the job again"),
        (TOO_LATE, "deadline", "active_deadline"),
        (f"{PAST} it has reached the specified backoff limit", "restart-limit", "max_restarts"),
        (f"{PAST} w failed 2 times and max_restarts is 1", "restart-limit", "max_restarts"),
        ("Failed:Why:jobset failed due to reaching max number of restarts", "restart-limit", ""),
        ("Failed:Why:the referenced runtime is not supported", "failed", "k8sjob logs ns/job"),
    ],
)
def test_the_job_itself(condition, cause, step):
    finding = only("Created", condition)
    assert (finding.id, finding.replica) == (cause, "")
    assert step in finding.next_step
    if cause in {"restart-limit", "failed"}:
        assert condition.split(":")[2] in finding.message


ENDS = json.loads(Path(__file__).with_name("ends.json").read_text())
"""How containers ended, with their last output; `expected` has the cause and a part of the message,
whose end is a `$`; `step` a part of the next step."""


def end_of(row):
    if reason := row.get("reason"):
        return reported(row["exit"], **reason)
    return ended(row["exit"], row.get("left", ""), row.get("why", "Error"))


@pytest.mark.parametrize("row", ENDS, ids=[f"{row['expected'][:40]}" for row in ENDS])
def test_a_container_that_ended(row):
    end, tail, expected = end_of(row), row["output"], row["expected"]
    pods = [make_pod("master-0", "Succeeded"), make_pod("worker-0", "Failed", terminated=end)]
    finding = only("Failed:x:why", pods=pods, logs={"worker-0": tail})
    cause, _, note = expected.partition(" | ")
    assert (finding.id, finding.replica) == (cause, "worker-0")
    assert note in finding.message + "$"
    assert row.get("step", "") in finding.next_step
    assert finding.next_step


def test_replicas_that_ended_with_their_supervisor_are_no_cause():
    killed = make_pod("worker-0", "Failed", **ended(137, reason="ContainerStatusUnknown"))
    assert causes("Failed:PyTorchJobSupervisorGone:lost", pods=[killed]) == ["supervisor-gone"]


def test_the_first_cause_is_not_its_consequences():
    ends = {
        "master-0": ended(138, Reason(138, 0, "PeerLost", "gone", time=1.0).encode()),
        "worker-0": ended(1, Reason(1, 1, "ValueError", "not this one", time=4.0).encode()),
        "worker-1": ended(1, Reason(1, 2, "ValueError", "the cause", time=3.0).encode()),
        "worker-2": ended(143),
    }
    pods = [make_pod(name, "Failed", terminated=end) for name, end in ends.items()]
    finding = only("Failed", pods=pods)
    assert finding.replica == "worker-1"
    assert "the cause" in finding.message


def test_a_finished_rank_does_not_join_a_new_rendezvous():
    lost = reported(138, 0, "PeerLost", "2 of 3 came", culprits=(1,))
    master = make_pod("master-0", "Failed", terminated=lost)
    done = make_pod("worker-0", "Succeeded", terminated={"exitCode": 0})
    finding = why("Failed", pods=[master, done])[0]
    assert (finding.id, finding.replica) == ("left-early", "worker-0")
    assert finding.message.startswith("worker-0 (rank 1) had ended with exit code 0")
    assert finding.next_step.startswith("submit the job again")


def failure(replica, message, time="05:00", code=1):
    """The operator's Event about a container that failed in a Pod that lives on."""
    text = f"Error pod job-{replica} container pytorch exitCode: {code} terminated message: "
    return about_job("Error", text + message, time=time)


def test_a_deleted_pod_is_explained_by_its_events():
    whole = failure("worker-1", reported(1, 2, "ValueError", "long " * 300)["message"])
    for event in (whole, {**whole, "message": whole["message"][:1024]}):  # the apiserver's limit
        finding = only("Failed", events=[event])
        assert (finding.id, finding.replica) == ("crash", "worker-1")
        assert finding.message.startswith("worker-1, rank 2: exit code 1: ValueError: long long")


@pytest.mark.parametrize("size", range(150, 200))
def test_a_report_may_be_cut_anywhere(size):
    event = failure("worker-1", reported(1, 2, "ValueError", '\u4e2d\\"' * 50)["message"])
    assert causes("Failed", events=[{**event, "message": event["message"][:size]}]) == ["crash"]


@pytest.mark.parametrize("numbers", ['9999, "rank": 1', '1, "rank": 99999999'])
def test_a_cut_report_that_no_container_can_have_written(numbers):
    note = f'{{"exit_code": {numbers}, "type": "ValueError", "message": "forged'
    finding = only("Failed", events=[failure("worker-1", note)])
    assert finding.message.startswith("worker-1: exit code 1")


def test_a_newer_end_of_a_replica_counts():
    pod = make_pod("master-0", "Failed", terminated=ended(139, time="08:00"))
    assert causes("Failed", pods=[pod], events=[failure("master-0", "old")]) == ["killed"]


def restarted(code, kind, message, rank=1):
    """The output of a replica whose agent started its rank again, and what came after that."""
    reason = json.loads(Reason(code, rank, kind, message).encode())
    moment = datetime.fromisoformat(at("05:00")).timestamp()
    event = Event("restarting", {"restart": 1, "reason": reason}, moment)
    return ["text", event.encode(), "step 3", "KeyError: handled"]


HUNG = {"master-0": restarted(140, "Hang", "in train.py:7", rank=0)}


def test_a_restart_in_place_has_a_cause_too():
    pods = running("master-0", "worker-0")
    found = only("Running", pods=pods, replicas=PAIR, logs=HUNG)
    assert found.id == "hung"
    assert "in train.py:7" in found.message
    assert found.message.endswith("5 min ago; it is running again")
    full = ["RuntimeError: posix_fallocate failed", *restarted(135, "Signal", "")]
    logs = {"worker-0": full}
    assert causes("Running", pods=pods, replicas=PAIR, logs=logs) == ["shared-memory"]
    pending = [
        *running("master-0"),
        make_pod("worker-0", "Pending", waiting={"reason": "ContainerCreating"}),
    ]
    found = [one.id for one in why("Running", pods=pending, replicas=PAIR, logs=HUNG)]
    assert found == ["waiting", "hung"]


@pytest.mark.parametrize(("finished", "more"), [("09:00", ["hung"]), ("59:00", [])])
def test_a_hang_may_be_why_a_job_was_stopped(finished, more):
    pods = [make_pod("master-0", "Failed", terminated=ended(143, time=finished))]
    job = {"pods": pods, "replicas": MASTER, "completionTime": at(finished)}
    found = why("Failed:PyTorchJobStopped:x", logs=HUNG, **job)
    assert [one.id for one in found] == ["stopped", *more]
    assert all("5 min ago" in one.message for one in found[1:])


def test_a_restart_in_place_that_does_not_matter():
    later = make_pod("master-0", "Failed", terminated=ended(1, "ValueError: no", time="05:30"))
    crashed = make_pod("worker-0", "Failed", terminated=ended(1, "ValueError: no", time="05:30"))
    done = make_pod("master-0", "Succeeded", terminated=ended(0, time="05:20"))
    for pods in ([later], [done, crashed]):
        assert causes("Failed:x:y", pods=pods, replicas=PAIR, logs=HUNG) == ["crash"]
    assert causes("Succeeded", pods=[done], logs=HUNG) == []
    assert causes(f"Failed:x:{TOO_LATE}", pods=[done], logs=HUNG) == ["deadline"]
    assert "hung" not in causes("Running", pods=[done, *running("worker-0")], logs=HUNG)
    resumed = {"pods": running(*ALL), "startTime": at("06:00"), "deadline": None}
    assert causes("Running", logs=HUNG, **resumed) == []
    forged = {"master-0": restarted(0, "Hang", "")}
    assert causes("Running", pods=running(*ALL), logs=forged) == []


def test_the_newest_failure_of_a_replica_counts():
    again = make_pod("master-0", restarts=1, running={}, last=ended(139, time="04:00"))
    found = only("Running", pods=[again, *running("worker-0")], replicas=PAIR, logs=HUNG)
    assert (found.id, "1 more" in found.message) == ("hung", False)


def test_the_output_before_a_newer_failure_is_not_that_before_a_restart():
    bare = reported(1, 1, "Exit", "exited with code 1", time="40:00")
    again = make_pod("master-0", restarts=1, running={}, last=bare)
    tail = ["RuntimeError: posix_fallocate failed", *restarted(135, "Signal", "")[1:]]
    tail += ["Traceback (most recent call last):", '  File "t.py", line 1, in <module>']
    tail += ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]
    pods = [again, *running("worker-0")]
    job = {"pods": pods, "replicas": PAIR, "deadline": None, "now": NOW + timedelta(hours=1)}
    assert causes("Running", logs={"worker-0": tail}, **job) == ["gpu-memory"]


def test_the_lost_peer_of_a_restart_in_place():
    logs = {"master-0": restarted(138, "PeerLost", "another rank is gone", rank=0)}
    again = make_pod("worker-0", restarts=1, running={}, last=ended(137))
    for worker, cause in ((running("worker-0"), "connection"), ([again], "killed")):
        pods = [*running("master-0"), *worker]
        assert causes("Running", pods=pods, replicas=PAIR, logs=logs) == [cause]


def test_runtime_events_are_not_output():
    pod = make_pod("worker-0", "Failed", terminated=ended(1))
    tail = ["RuntimeError: it", Event("progress", {"x": "ValueError"}).encode()]
    finding = only("Failed", pods=[pod], logs={"worker-0": tail})
    assert finding.message.endswith("RuntimeError: it")


@given(
    code=st.integers(1, 255),
    message=st.text() | st.just('{"exit_code": 1, "message": "cut'),
    reason=st.sampled_from(["Error", "OOMKilled", "StartError", ""]),
    tail=st.lists(st.text(), max_size=3),
)
def test_any_output_gives_one_finding(code, message, reason, tail):
    pod = make_pod("worker-0", "Failed", terminated=ended(code, message, reason))
    finding = only("Failed", pods=[pod], logs={"worker-0": tail})
    assert finding.message.startswith("worker-0")
    assert set(as_data(finding)) == {"cause", "message", "next_step", "replica", "replicas"}


def test_every_cause_is_in_the_reference():
    page = Path(__file__).resolve().parents[2] / "docs/reference/states.md"
    listed = re.findall(r"^\| `([a-z-]+)` \|", page.read_text(), re.MULTILINE)
    assert {*listed} ^ {*Cause} == set(), f"a row for each cause: {page}"
    assert len(listed) == len(Cause)


# --- what a cluster shows


def test_the_same_problem_of_many_replicas_is_one_finding():
    absent = {"reason": "ErrImagePull", "message": "x: not found"}
    names = ["master-0", *(f"worker-{n}" for n in range(1200))]
    pods = [make_pod(name, "Pending", waiting=absent) for name in names]
    pods[3] = make_pod("worker-2", running={})
    finding = only("Created", pods=pods, replicas={"Master": 1, "Worker": 1200})
    assert finding.message.startswith("master-0, worker-0 and 1198 more: there is no image")
    assert len(finding.replicas) == 1200
    assert as_data(finding)["replicas"][-1] == "worker-1199"


def test_pod_identifiers_do_not_split_a_finding():
    pods = []
    for name, digit in zip(ALL, "123", strict=True):
        uid = f"{digit * 8}-2222-3333-4444-555555555555"
        note = f'container has runAsNonRoot (pod: "job-{name}_ns({uid})", container: x)'
        waiting = {"reason": "CreateContainerConfigError", "message": note}
        pods.append(make_pod(name, "Pending", waiting=waiting))
    finding = only("Created", pods=pods)
    assert finding.replicas == ALL
    assert finding.message.endswith("container has runAsNonRoot")


def test_names_of_pods_do_not_split_a_finding():
    """Pods of an Indexed Job end with five random characters."""
    pods, events = [], []
    for replica, name in (("master-0", "job-0-x7k2p"), ("worker-0", "job-1-9fbzq")):
        pods.append(make_pod(replica, "Pending"))
        pods[-1]["metadata"] |= {"name": name, "uid": name}
        note = f'failed to set up network: plugin type="calico" failed: pod "ns_{name}"'
        events.append(about("Pod", name, "FailedCreatePodSandBox", note, uid=name))
    finding = only("Created", pods=pods, events=events, replicas=PAIR)
    assert finding.replicas == ("master-0", "worker-0")


def node(name, labels=None, **allocatable):
    ready = {"type": "Ready", "status": "True"}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels or {}},
        "status": {"allocatable": allocatable, "conditions": [ready]},
    }


def test_gpus_in_use_are_not_free():
    def container(gpus):
        return [{"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": gpus}}}]

    waiting = unplaced("worker-1", "Unschedulable", SHORT, containers=container("4"))
    h100 = {"nvidia.com/gpu.product": "H100"}
    nodes = [node(f"node-{n}", h100, **{"nvidia.com/gpu": "4"}) for n in range(4)]
    nodes[3]["spec"] = {"unschedulable": True}
    other = {
        "kind": "Pod",
        "metadata": {"name": "other"},
        "spec": {"nodeName": "node-0", "containers": container(3)},
        "status": {"phase": "Running"},
    }
    pods = [*running("master-0", "worker-0"), waiting]
    finding = only("Running", pods=pods, related=[*nodes, other])
    assert finding.message == (
        "worker-1: none of 4 nodes accepts it: 4 have too little nvidia.com/gpu free (it requests"
        " 4): there are 4 nodes of H100 with 4, 9 free in all, for 60 s"
    )
    assert "meanwhile 2 replicas hold what they have" in finding.next_step


def test_the_reasons_of_other_schedulers():
    cordoned = (
        "0/2 nodes are available: 1 Too many pods, 1 node(s) were unschedulable. no new claims to"
        " deallocate, preemption: not helpful"
    )
    pods = [
        unplaced("worker-0", "Unschedulable", "3/4 tasks in gang unschedulable"),
        unplaced("worker-1", "Unschedulable", cordoned),
    ]
    full = "none of 2 nodes accepts it: 1 is full of pods; 1 is cordoned, for 60 s"
    assert why("Created", pods=pods)[-1].message == f"worker-0 and worker-1: {full}"
    alone = why("Created", pods=pods[:1])[-1].message  # of others of its gang nothing is known
    assert alone == "worker-0: no node accepts it: 3/4 tasks in gang unschedulable, for 60 s"


def test_a_silent_operator():
    created = datetime(2026, 1, 1, tzinfo=UTC)
    waits = only(now=created + timedelta(seconds=2))
    assert waits.id == "waiting"
    assert waits.message == "the job has no pods yet, 2 s after it was created"
    deployment = {
        "kind": "Deployment",
        "metadata": {"name": "training-operator", "namespace": "kubeflow"},
        "spec": {"replicas": 1},
        "status": {},
    }
    finding = only(related=[deployment], now=created + timedelta(seconds=9))
    assert finding.id == "operator-silent"
    assert "not acted on the job for 9 s" in finding.message
    assert "kubeflow/training-operator has 0 of 1 pods ready" in finding.message

    lost = {"pods": [make_pod("master-0", running={}), make_pod("worker-0")]}
    finding = only("Running", **lost)
    assert (finding.id, finding.replicas) == ("operator-silent", ("worker-1",))
    killing = about("Pod", "job-worker-1", "Killing", "Stopping", time="09:55")
    assert why("Running", events=[killing], **lost) == []
    assert why("Running", now=created + timedelta(minutes=9, seconds=20), **lost) == []


def refused(message, time="05:00"):
    return about_job("FailedCreatePod", f"Error creating: {message}", time=time)


def test_a_past_refusal_is_not_reported():
    gpus = "requests.nvidia.com/gpu"
    quota = f'pods "job-worker-1" is forbidden: exceeded quota: q, requested: {gpus}=2, used: '
    refusal = refused(f"{quota}{gpus}=7, limited: {gpus}=8")
    there = running("master-0", "worker-0")
    assert only("Running", pods=there, events=[refusal]).message == (
        "worker-1: the namespace's quota 'q' has no room: requests.nvidia.com/gpu (2 requested, 7"
        " of 8 used)"
    )
    assert why("Running", pods=running(*ALL), events=[refusal]) == []
    made = about_job("SuccessfulCreatePod", "Created pod: job-worker-1", time="09:50")
    assert why("Running", pods=there, events=[refusal, made]) == []


def test_the_newest_refusal_counts():
    exists = 'pods "job-master-0" already exists'
    events = [refused(exists, "05:00"), refused(f"object is being deleted: {exists}", "05:01")]
    assert only(events=events).message.endswith("of an earlier job, is still being deleted")


@pytest.mark.parametrize(
    "note",
    [
        'jobs.batch "job-node-0" already exists',
        'admission webhook "mjob.kb.io" denied the request: JobSet.jobset.x-k8s.io "job" not found',
    ],
)
def test_a_job_that_its_jobset_has_made_after_all_is_no_problem(note):
    message = f'job "job-node-0" creation failed with error: {note}'
    refusal = about("JobSet", "job", "JobCreationFailed", message, time="09:59")
    meta = {"name": "job", "namespace": "ns", "uid": "u", "creationTimestamp": at("09:58")}
    job = {"kind": "JobSet", "metadata": {**meta, "labels": {}}, "spec": {}, "status": {}}
    child = {"metadata": {"name": "job-node-0"}, "spec": {"completions": 2}, "status": {}}
    refused_alone = diagnose(Snapshot(job_of(job), (), (refusal,)), {}, (), now=NOW)
    assert [finding.id for finding in refused_alone] in (["name-taken"], ["webhook"])
    made = diagnose(Snapshot(job_of({**job, "child": child}), (), (refusal,)), {}, (), now=NOW)
    assert {finding.id for finding in made} <= {"waiting", "operator-silent"}


def test_refusals_that_differ_by_the_replica_s_name_are_one_finding():
    note = 'pods "job-worker-{}" is forbidden: no PriorityClass with name p'
    events = [refused(note.format(n)) for n in range(9)]
    finding = only(events=events, replicas={"Worker": 9})
    assert finding.message.startswith("worker-0, worker-1 and 7 more: the apiserver refuses it")
    assert len(finding.replicas) == 9


def test_a_deadline_that_the_operator_has_not_noticed():
    late = {"pods": running(*ALL), "startTime": at("06:00")}
    finding = only("Running", **late)
    assert finding.id == "deadline"
    assert "its deadline of 60 s passed 3 min ago" in finding.message
    assert "kubectl label pytorchjob job -n ns" in finding.next_step
    assert why("Running", now=datetime(2026, 1, 1, 0, 7, 2, tzinfo=UTC), **late) == []


def test_the_cause_of_a_deadline_comes_first():
    waiting = {"reason": "ErrImagePull", "message": "x: not found"}
    pods = [make_pod("master-0", "Pending", waiting=waiting)]
    assert causes(TOO_LATE, pods=pods) == ["image-missing", "deadline", "leftover"]
    just_now = datetime(2026, 1, 1, 0, 9, 5, tzinfo=UTC)  # 5 s after: its pods may still be ending
    assert causes(TOO_LATE, pods=pods, now=just_now) == ["image-missing", "deadline"]
    killed = make_pod("master-0", "Failed", terminated=ended(143))
    assert causes(TOO_LATE, pods=[killed]) == ["deadline"]
    # Its kubelet's clock is ahead of the operator's, or the backoffLimit is 0.
    killed["status"]["reason"] = "DeadlineExceeded"
    for limit, expected in ((540, ["deadline"]), (60, ["killed"])):
        killed["spec"]["activeDeadlineSeconds"] = limit
        failed = f"{PAST} it has reached the specified backoff limit"
        assert causes(failed, pods=[killed], deadline=540) == expected


def test_endless_recreation_of_a_pod_is_reported():
    event = about_job("ExitedWithCode", "Pod: ns.job-worker-0 exited with code 137", count=34)
    job = snapshot("Running", pods=running("worker-0"), events=[event], replicas=WORKER)
    job.job.raw["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = "ExitCode"
    (finding,) = diagnose(job, {}, now=NOW)
    assert finding.message.endswith("it is running again; its pod was recreated 34 times")
    assert "policy.max_restarts" in finding.next_step
    assert "or one of its processes ran out of memory" in finding.next_step


def gone(replica, reason, message, time):
    """An Event about a Pod that is there no more."""
    return about("Pod", f"job-{replica}", reason, message, time=time, uid=f"old {replica}")


@pytest.mark.parametrize(
    ("reason", "message", "step"),
    [
        ("Unhealthy", "Liveness probe failed: command timed out", "correct the probe"),
        ("Unhealthy", "Startup probe failed:", "correct the probe"),
        ("FailedPostStartHook", "PostStartHook failed", "lifecycle.postStart"),
        ("DeadlineExceeded", "Pod was active on the node longer than", "policy.active_deadline"),
    ],
)
@pytest.mark.parametrize("uid", ["old worker-0", "new"])
def test_what_the_kubelet_ends_by_itself_was_not_deleted(reason, message, step, uid):
    field = {"fieldPath": "spec.containers{pytorch}"}
    events = [
        gone("worker-0", reason, message, "04:58"),
        gone("worker-0", "Killing", "Stopping container pytorch", "05:00"),
    ]
    for event in events:
        event["involvedObject"] |= {"uid": uid, **field}
    pod = make_pod("worker-0", "Failed", meta={"uid": "new"}, terminated=ended(137, "hello"))
    finding = only("Running", pods=[pod], events=events, replicas=WORKER)
    assert finding.id == "killed"
    assert finding.message == f"worker-0: the kubelet ended it: {message.strip(':')}"
    assert step in finding.next_step
    for event in events:  # another container's, or of an end before
        event["involvedObject"]["fieldPath"] = "spec.containers{logger}"
    assert "kubelet" not in why("Running", pods=[pod], events=events, replicas=WORKER)[-1].message


def test_the_kubelet_writes_no_more_events_of_a_pod_that_it_ends_again_and_again():
    events = [
        gone("worker-0", "Unhealthy", "Liveness probe failed", "01:00"),
        gone("worker-0", "Killing", "failed liveness probe, will be restarted", "01:00"),
    ]
    waits = {"waiting": {"reason": "CrashLoopBackOff"}, "last": ended(137)}
    pod = make_pod("worker-0", meta={"uid": "old worker-0"}, restarts=13, **waits)
    assert "SIGKILL" in only("Running", pods=[pod], events=events, replicas=WORKER).message
    events[0]["count"] = 7
    assert "probe" in only("Running", pods=[pod], events=events, replicas=WORKER).message


@pytest.mark.parametrize(
    ("code", "why", "says"),
    [(137, "OOMKilled", "out of memory"), (3, "Error", "exit code 3"), (143, "Error", "")],
)
def test_a_container_that_fails_beside_the_main_one(code, why, says):
    pod = make_pod("master-0", running={})
    pod["spec"]["containers"] = [{"name": "pytorch"}, {"name": "loader"}]
    end = {"name": "loader", "state": {"terminated": ended(code, reason=why)}}
    pod["status"]["containerStatuses"].append(end)
    findings = diagnose(snapshot("Running", replicas=MASTER, pods=[pod]), {}, now=NOW)
    assert [f.id for f in findings if says in f.message] == ["sidecar"] * bool(says)


def test_a_probe_that_failed_is_not_always_why_a_pod_ended():
    probe = gone("worker-0", "Unhealthy", "Startup probe failed: exit 1", "02:00")
    options = {"events": [probe, KILLING, KILLED], "replicas": WORKER}
    assert causes("Running", pods=running("worker-0"), **options) == ["pod-deleted"]
    probe["lastTimestamp"] = at("04:58")
    events = [gone("worker-0", "Killing", "", "04:59"), probe]
    pod = make_pod("worker-0", "Failed", terminated=ended(137, reason="OOMKilled"))
    assert causes("Running", pods=[pod], events=events, replicas=WORKER) == ["memory"]


def test_a_namespace_that_is_deleted_takes_its_jobs_along():
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/1 nodes are available",
    }
    pod = make_pod("worker-0", "Failed", dying=True)
    pod["status"]["conditions"] = [unschedulable]
    namespace = {"kind": "Namespace", "metadata": {"name": "ns", "deletionTimestamp": at("00:00")}}
    found = why("Created", pods=[pod], related=[namespace])
    assert [one.id for one in found] == ["deleting", "waiting"]
    assert "namespace ns is being deleted, for" in found[0].message
    assert why("Succeeded", related=[namespace]) == []


def test_a_sidecar_that_runs_delays_nothing():
    pod = with_init(make_pod("worker-0", "Pending"), "prep", running={})
    pod["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    event = about("Pod", "job-worker-0", "Pulling", 'Pulling image "x"')
    finding = only("Created", pods=[pod], events=[event], replicas=WORKER)
    assert "is pulling the image x" in finding.message


ADDS = "pod triggered scale-up: [{gke-gpu-pool 0->1 (max: 4)}]"
ADDS_NONE = "pod didn't trigger scale-up: 1 max node group size reached"


@pytest.mark.parametrize(
    ("reason", "note", "what", "step"),
    [
        ("TriggeredScaleUp", ADDS, "is adding a node ([{gke-gpu-pool 0->1 (max: 4)}])", "wait: a"),
        ("Nominated", "Pod should schedule on: nodeclaim/x", "(Pod should schedule on", "wait: a"),
        (
            "NotTriggerScaleUp",
            ADDS_NONE,
            "adds no node: 1 max node group size reached",
            "wait until",
        ),
    ],
)
def test_what_an_autoscaler_does_about_a_pod_is_said(reason, note, what, step):
    """Where a pool has no nodes yet, no node offers its GPUs."""
    short = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    pod = unplaced("worker-0", "Unschedulable", short)
    pod["metadata"]["uid"] = "p"
    job = {"pods": [pod], "replicas": WORKER, "deadline": None}
    nodes = [{"kind": "Node", "metadata": {"name": "cpu-1"}, "status": {"allocatable": {}}}]

    def event(time):
        return about("Pod", "job-worker-0", reason, note, uid="p", time=time)

    finding = only("Created", events=[event("09:00")], **job)
    assert finding.id == "unschedulable"
    assert what in finding.message
    assert finding.next_step.startswith(step)
    assert "device plugin" in only("Created", related=nodes, **job).next_step
    during = only("Created", events=[event("09:00")], related=nodes, **job)
    assert "device plugin" not in during.next_step
    later = only("Created", events=[event("00:00")], now=NOW + timedelta(minutes=6), **job)
    assert what not in later.message


def test_a_sidecar_that_runs_again_is_no_problem():
    pod = with_init(make_pod("worker-0", running={}), "gcsfuse", running={})
    crashed = {"terminated": ended(1)}
    pod["status"]["initContainerStatuses"][0]["lastState"] = crashed
    assert only("Running", pods=[pod], replicas=WORKER).id == "init"
    pod["spec"]["initContainers"][0]["restartPolicy"] = "Always"
    assert only("Running", pods=[pod], replicas=WORKER).id == "init"  # it may never be ready
    pod["status"]["initContainerStatuses"][0]["started"] = True
    assert why("Running", pods=[pod], replicas=WORKER, deadline=None) == []


TAINT = about("Pod", "job-worker-0", "TaintManagerEviction", "Marking", time="05:00")  # no uid
KILLING = gone("worker-0", "Killing", "Stopping container pytorch", "05:01")
KILLED = about_job("ExitedWithCode", "Pod: ns.job-worker-0 exited with code 137", time="05:31")


def test_the_end_of_an_earlier_jobs_pod_is_not_this_jobs():
    taken = refused('object is being deleted: pods "job-worker-0" already exists')
    made = about_job("SuccessfulCreatePod", "Created pod: job-worker-0")
    assert causes("Created", events=[taken, KILLING], replicas=WORKER) == ["name-taken"]
    assert "pod-deleted" in causes("Created", events=[made, taken, KILLING], replicas=WORKER)


def test_a_past_problem_hides_no_newer_one():
    events = [TAINT, KILLING, KILLED]
    meta = {"creationTimestamp": at("05:40"), "uid": "new"}
    crash = reported(1, 0, "ValueError", "no", time="08:00")
    pod = make_pod("worker-0", "Failed", meta=meta, terminated=crash)
    assert "crash" in causes("Failed:x:y", pods=[pod], events=events, replicas=WORKER)
    # It runs again, and another replica cannot be pulled.
    absent = {"reason": "ErrImagePull", "message": "x: not found"}
    pods = [make_pod("master-0", "Pending", waiting=absent), *running("worker-0")]
    found = causes("Running", pods=pods, events=events, replicas=PAIR)
    assert found == ["image-missing", "evicted"]


def test_what_keeps_the_successor_of_a_deleted_pod_from_starting_comes_first():
    absent = {"reason": "ErrImagePull", "message": "x: not found"}
    pod = make_pod("worker-0", "Pending", waiting=absent, meta={"uid": "new"})
    killing = gone("worker-0", "Killing", "Stopping container pytorch", "05:01")
    found = causes("Running", pods=[pod], events=[killing], replicas=WORKER)
    assert found == ["image-missing", "pod-deleted"]
    found = causes("Running", pods=[pod], events=[TAINT, killing], replicas=WORKER)
    assert found == ["evicted", "image-missing"]


def test_the_newest_displacement_comes_first():
    late = gone("worker-1", "Evicted", "The node was low on resource: memory", "05:31")
    pods = [make_pod(name, "Pending", waiting={"reason": "x"}) for name in ALL[1:]]
    found = why("Running", pods=pods, events=[TAINT, late], replicas={"Worker": 2})
    assert [one.replica for one in found] == ["worker-1", "worker-0"]


def test_an_eviction_that_repeats_says_how_often_and_for_how_long():
    """Each Pod of a replica is evicted once: a node whose disk is full takes it again and again."""
    low = "The node was low on resource: ephemeral-storage. "
    events = [
        {**gone(f"worker-{n % 2}", "Evicted", low, f"0{n}:00"), "metadata": {"uid": f"e{n}"}}
        for n in range(2, 10)
    ]
    for number, event in enumerate(events):
        event["involvedObject"]["uid"] = f"pod-{number}"
    [finding] = why(
        "Running", pods=running("worker-0", "worker-1"), events=events, replicas={"Worker": 2}
    )
    assert (finding.id, finding.replicas) == ("evicted", ("worker-1", "worker-0"))
    assert ", 4 times in" in finding.message
    once = why(
        "Running", pods=running("worker-0", "worker-1"), events=events[:2], replicas={"Worker": 2}
    )
    assert " times in" not in once[0].message


def test_pods_that_the_operator_deletes_are_no_problem():
    assert causes("Suspended", events=[KILLING, KILLED], replicas=WORKER) == ["suspended"]
    resumed = {"startTime": at("07:00"), "replicas": WORKER, "deadline": None}
    assert causes("Running", events=[KILLED], pods=running("worker-0"), **resumed) == []
    assert why("Running", pods=running("worker-0"), events=[KILLING], **resumed) == []


def test_a_deleted_pods_exit_code_is_no_failure():
    pod = make_pod("worker-0", dying=True, terminated=ended(137))
    finding = only("Running", pods=[pod], replicas=WORKER)
    assert finding.message.startswith("worker-0: its pod is terminating")


def test_output_that_differs_by_rank_and_address_is_one_finding():
    note = "pod:3:3 [4] x.c:1 NCCL WARN NET/IB : Got completion from peer 10.2.2.{}<5486{}> with"
    logs = {name: [f"{note.format(n, n)} status=12 opcode=0"] for n, name in enumerate(ALL)}
    assert only("Running", pods=running(*ALL), logs=logs).replicas == ALL


def with_init(pod, name, **state):
    """The Pod with an init container in this state."""
    pod["spec"]["initContainers"] = [{"name": name, "image": "alpine"}]
    pod["status"]["initContainerStatuses"] = [{"name": name, "state": state}]
    return pod


def awaiting():
    """Workers whose init container looks for the Master's name."""
    return [with_init(make_pod(name, "Pending"), "init-pytorch", running={}) for name in ALL[1:]]


@pytest.mark.parametrize(
    ("master", "cause"),
    [
        (unplaced("master-0", "Unschedulable", SHORT), "unschedulable"),
        (make_pod("master-0", "Pending", waiting={"reason": "ErrImagePull"}), "image"),
        (make_pod("master-0", waiting={"reason": "CrashLoopBackOff"}, last=ended(1)), "crash"),
    ],
)
def test_workers_that_wait_for_a_failing_master_are_left_out(master, cause):
    finding = only("Created", pods=[master, *awaiting()])
    assert (finding.replica, finding.id) == ("master-0", cause)


def test_an_unresolved_name_is_reported_although_the_master_had_crashed():
    """It runs again: its crash does not explain that its name cannot be found now."""
    master = make_pod("master-0", restarts=1, last=ended(1, "no"), running={})
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": at("06:00")}
    master["status"]["conditions"] = [ready]
    awaited, crash = why("Running", pods=[master, *awaiting()])
    assert (awaited.id, crash.id) == ("master-awaited", "crash")
    assert "check the cluster's DNS" in awaited.next_step
    assert crash.message == "master-0: exit code 1: no, 5 min ago; it is running again"


def test_what_a_slow_job_waits_for():
    creating = {"reason": "ContainerCreating"}
    pulling = make_pod("master-0", "Pending", waiting=creating, meta={"uid": "m"})
    event = about("Pod", "job-master-0", "Pulling", 'Pulling image "r/x:1"', uid="m")
    dying = make_pod("worker-0", dying=True, running={})
    found = why("Created", pods=[pulling, dying, make_pod("worker-1")], events=[event])
    assert [f"{one.id} | {one.message}" for one in found] == [
        "waiting | master-0: its node is pulling the image r/x:1, for 5 min",
        "waiting | worker-0: its pod is terminating, for 10 min",
    ]


def test_of_a_recreated_pod_only_the_exit_code_is_known():
    note = "Pod: ns.job-worker-1 exited with code"
    events = [about_job("ExitedWithCode", f"{note} {code}") for code in (0, 143, 137, 0)]
    finding = only("Running", pods=running(*ALL), events=events)
    assert finding.message == "worker-1: ended by SIGKILL, 5 min ago; it is running again"
    sidecar = "Error pod job-worker-1 container proxy exitCode: 1 terminated message: x"
    assert why("Running", pods=running(*ALL), events=[about_job("Error", sidecar)]) == []


def test_the_log_of_an_init_container_is_that_of_an_existing_pod():
    """Pods of an Indexed Job are not named like its replicas."""
    names = {"master-0": "job-0-x7k2p", "worker-0": "job-1-9fbzq"}
    pods = [
        with_init(make_pod(replica, "Pending", meta={"name": name}), "mine", terminated=ended(6))
        for replica, name in names.items()
    ]
    finding = only("Created", pods=pods, replicas=PAIR)
    assert finding.replicas == ("master-0", "worker-0")
    assert finding.next_step == "see what it wrote: kubectl logs -n ns job-0-x7k2p -c mine"


@pytest.mark.parametrize(
    ("phase", "keeps", "end", "step"),
    [
        ("Running", [], "09:10", "wait: it can save its state until the end of its grace period"),
        (
            "Running",
            [],
            "05:00",
            "delete pod --force -n ns job-worker-0 removes it by force",
        ),
        ("Running", ["x/keep"], "05:00", "its node node-1 has not ended it"),
    ],
)
def test_what_keeps_a_pod_that_is_being_deleted(phase, keeps, end, step):
    meta = {"finalizers": keeps, "deletionTimestamp": at(end)}
    pod = make_pod("worker-0", phase, meta=meta, running={})
    finding = only("Running", pods=[*running("master-0"), pod], replicas=PAIR)
    assert finding.message.startswith("worker-0: its pod is terminating")
    assert step in finding.next_step


def doomed(*conditions, finalizer, **options):
    """The findings about a job whose deletion was asked for."""
    job = snapshot(*conditions, **options)
    job.job.raw["metadata"] |= {"deletionTimestamp": at("09:14"), "finalizers": [finalizer]}
    return diagnose(job, {}, now=NOW)


def test_the_operator_is_not_silent_about_a_job_that_is_being_deleted():
    """The operator ignores such a job: that is not its silence."""
    (finding,) = doomed("Running", finalizer="example.com/keep")
    assert finding.id == "deleting"
    assert finding.message == (
        "the job is being deleted; it is waiting for its finalizers: example.com/keep, for 46 s"
    )
    assert "whoever set example.com/keep must remove it" in finding.next_step
    assert "kubectl get pytorchjob job -n ns -o yaml" in finding.next_step


def test_pods_of_a_job_that_is_being_deleted_are_what_it_waits_for():
    pods = [make_pod("master-0", dying=True, running={})]
    deletion, pod = doomed("Running", pods=pods, finalizer="foregroundDeletion")
    assert "wait until its pods have ended (kubectl get pods -n ns -l" in deletion.next_step
    assert pod.message == "master-0: its pod is terminating, for 10 min"


# --- training that is not what it seems


def left(rank, *culprits, step=9):
    """What the agent says of a rank that waited for ranks that were done."""
    return Reason(138, rank, "Left", "they had ended", "t.py:3", culprits=culprits, step=step)


LOST = Reason(138, 1, "PeerLost", "rank 0 is gone", time=1767226131.0)  # 00:08:51


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (LOST, "master-0 (rank 0) had ended with exit code 0, and worker-0, rank 1 still waited"),
        (left(1, 0), "rank 0 had ended with exit code 0, and worker-0, rank 1 still"),
    ],
)
def test_a_failed_replica_of_a_job_that_succeeded(reason, words):
    master = make_pod("master-0", "Succeeded", terminated=ended(0, time="08:50"))
    event = failure("worker-0", reason.encode(), "08:51", 138)
    worker = make_pod("worker-0", terminated=ended(138, reason.encode(), time="08:51"))
    for pods, events in (([master, worker], []), ([master], [event]), ([], [event])):
        finding = why("Succeeded", pods=pods, events=events, replicas=PAIR)[0]
        assert finding.message.startswith(f"the job succeeded, but {words}")
        assert (finding.id, finding.replica) == ("left-early", "master-0")
        assert "same number of steps" in finding.next_step


def test_failures_before_a_success_are_not_reported():
    events = [failure("worker-0", "no"), TAINT, KILLING]
    master = make_pod("master-0", "Succeeded", terminated=ended(0))
    well = make_pod("worker-0", "Succeeded", restarts=1, terminated=ended(0), last=ended(1))
    cleaned = make_pod("worker-0", dying=True, terminated=ended(143))
    for pods in ([master], [master, well], [master, cleaned]):
        assert why("Succeeded", pods=pods, events=events, replicas=PAIR) == []


def test_ranks_that_ended_early_while_others_wait():
    done = make_pod("worker-0", "Succeeded", terminated=ended(0))
    job = {"pods": [*running("master-0"), done], "replicas": PAIR, "nproc": "2", "deadline": None}
    finding = only("Running", **job)
    assert finding.message.startswith("worker-0 (ranks 2-3) ended with exit code 0, 5 min ago")
    assert why("Running", now=datetime(2026, 1, 1, 0, 5, 20, tzinfo=UTC), **job) == []


def test_a_replica_that_is_killed_with_another_is_no_independent_cause():
    ends = {
        "master-0": reported(1, 0, "ModuleNotFoundError", "No module named 'wandb'\nmore"),
        "worker-0": ended(137, time="05:30"),
        "worker-1": reported(138, 2, "PeerLost", "another rank is gone", time="05:10"),
    }
    pods = [make_pod(name, "Failed", terminated=end) for name, end in ends.items()]
    assert causes("Failed:x:y", pods=pods) == ["missing-module"]


def test_all_replicas_that_ended_alike_are_concerned():
    waited = Reason(138, 1, "Left", "it waited for rank 0, which had ended with exit code 0: lost")
    note = waited._replace(culprits=(0,), step=41).encode()
    pods = [make_pod(name, "Failed", terminated=ended(138, note)) for name in ALL[1:]]
    finding = only("Succeeded", pods=pods)
    assert finding.replicas == ALL
    assert finding.message == (
        "the job succeeded, but rank 0 had ended with exit code 0, and worker-0, rank 1 still"
        " waited for it after step 41: lost; 1 more ended with the same exit code"
    )
    twice = note.replace("it waited", "after rank 0 had ended with exit code 0: it waited")
    pods = [make_pod("master-0", "Failed", terminated=ended(138, twice))]
    message = only("Failed:x:y", pods=pods).message
    assert message.endswith("still waited for it after step 41: lost")


WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE,"
    " Numel=1) ran for 600020 milliseconds before"
)
UNJOINED = "DistStoreError: Timed out after 6 seconds waiting for clients. 1/2 clients joined"


@pytest.mark.parametrize(
    ("end", "tail"),
    [
        (reported(140, 0, "Hang", "all ranks wait in a collective"), []),
        (ended(1), [UNJOINED]),
        (ended(134), [WATCHDOG]),
    ],
)
def test_an_early_end_explains_the_wait_of_other_ranks(end, tail):
    def first(time):
        done = make_pod("worker-0", "Succeeded", terminated=ended(0, time=time))
        pods = [make_pod("master-0", "Failed", terminated=end), done]
        return why("Failed:x:y", pods=pods, replicas=PAIR, logs={"master-0": tail})[0]

    assert (first("04:00").id, first("04:00").replica) == ("left-early", "worker-0")
    assert first("05:30").id != "left-early"


@pytest.mark.parametrize("state", ["Succeeded", "Failed:x:y", "Running"])
def test_replicas_that_trained_alone(state):
    unmet = reported(0, -1, "Unmet", "no process group")
    master = make_pod("master-0", "Succeeded", terminated=unmet)
    line = Event("unmet", {"world_size": 2, "replicas": 2}).encode()
    for pods, logs in (([master], {}), ([], {"master-0": [line]})):
        found = {one.id: one for one in why(state, pods=pods, replicas=PAIR, logs=logs)}
        assert "each of them trained a separate model" in found["no-group"].message


def test_a_launcher_that_the_script_starts_comes_before_the_missing_group():
    command = "/usr/bin/python3 -m torch.distributed.run --nproc_per_node=2"
    warning = Event("warning", {"reason": "own-launcher", "command": command}).encode()
    pods = running("master-0", "worker-0")
    finding = only("Running", pods=pods, replicas=PAIR, logs={"worker-0": [warning, "text"]})
    assert (finding.id, command in finding.message) == ("own-launcher", True)
    joined = [warning, Event("started", {"world_size": 2}).encode()]
    assert why("Running", pods=pods, replicas=PAIR, logs={"worker-0": joined}) == []


def losses(*values, kind="progress", **data):
    """The findings about a job that succeeded after it had reported these losses."""
    events = (Event(kind, {"step": n, "loss": x, **data}) for n, x in enumerate(values))
    tail = ["text", *(event.encode() for event in events)]
    return why("Succeeded", replicas=MASTER, logs={"master-0": tail})


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_throughout(loss):
    (finding,) = losses(loss, loss, epoch=1)
    assert finding.id == "nan-loss"
    assert finding.message.startswith(f"the loss has been {loss} since epoch 2, step 0")
    for fine in ((loss, 0.5), (loss, 1), (), ("x",), (None,), (0.5, loss)):
        assert losses(*fine, epoch=1) == []
    (finding,) = losses(loss, 0.5, loss, loss, epoch=1)  # it does not recover
    assert finding.message.startswith(f"the loss has been {loss} since epoch 2, step 2 or earlier")


def test_a_loss_that_a_loop_of_ones_own_logs_counts_too():
    nan = float("nan")
    (finding,) = losses(0.5, nan, nan, kind="metrics", epoch=3, step=None)
    assert finding.message.startswith("the loss has been nan since epoch 3 or earlier:")
    assert losses(nan, 0.5, kind="metrics", epoch=3) == []


def test_a_wait_is_reported_until_training_continues():
    """Whether it is a hang is not known before run.hang_timeout."""

    def warning(**data):
        told = {"message": "no progress for 60 s: rank 2 is at step 4", "reason": "no-progress"}
        return Event("warning", {**told, **data}, NOW.timestamp() - 90).encode()

    def found(*lines, state="Running", pods=()):
        return why(state, pods=pods or running(*ALL), deadline=None, logs={"master-0": lines})

    stays = (warning(rank=2), "text", warning(reason="other"), Event("checkpoint", {}).encode())
    (finding,) = found(*stays)
    assert (finding.id, finding.replica) == ("no-progress", "worker-1")
    assert finding.message == "no progress for 60 s: rank 2 is at step 4 (reported 90 s ago)"
    for rank in ("2", True, -1, None, 99):
        assert found(warning(rank=rank))[0].replica == ""
    assert found(warning(), warning(over=True)) == []
    for kind in ("progress", "metrics", "restarting"):
        assert found(warning(), Event(kind, {"step": 5}).encode()) == []
    assert "no-progress" not in [one.id for one in found(*stays, state="Failed:x:y")]
    crashed = [make_pod("master-0", last=ended(140)), *running(*ALL[1:])]
    assert "no-progress" not in [one.id for one in found(*stays, pods=crashed)]


def test_in_an_elastic_group_the_replica_that_wrote_last_has_rank_0():
    def line(kind, at, **data):
        return Event(kind, data, NOW.timestamp() - at).encode()

    waits = line("warning", 30, message="no progress for 60 s", reason="no-progress")
    starts = [line("starting", 10, phase="running")]
    logs = {"master-0": [line("progress", 90, step=3), *starts], "worker-0": [waits]}
    seen = snapshot("Running", pods=running(*ALL), deadline=None)
    assert diagnose(seen, logs, now=NOW) == []
    seen.job.raw["spec"]["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 3}
    (finding,) = diagnose(seen, logs, now=NOW)
    assert finding.id == "no-progress"
    logs["master-0"].append(line("progress", 20, step=4))  # rank 0 is there now
    assert diagnose(seen, logs, now=NOW) == []


def claim(phase="Pending", **annotations):
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data", "annotations": annotations},
        "status": {"phase": phase},
    }


def about_claim(reason, message):
    return about("PersistentVolumeClaim", "data", reason, message)


def test_a_volume_without_a_provisioner_is_reported_although_the_scheduler_is_silent():
    volumes = [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]
    silent = make_pod("master-0", "Pending")
    silent["spec"] = {"volumes": volumes}
    event = about_claim("ExternalProvisioning", "Waiting for a volume to be created")
    gave_up = 'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded'
    retried = unplaced("master-0", "SchedulerError", gave_up, volumes=volumes)
    finding = only("Created", pods=[retried], replicas=MASTER, related=[claim(), event])
    assert finding.message.startswith("master-0: the claim 'data' has no volume: Waiting for a")
    chosen = claim(**{"volume.kubernetes.io/selected-node": "node-3"})
    finding = only("Created", pods=[silent], replicas=MASTER, related=[chosen])
    assert "it waits for its volume on node node-3" in finding.message
    first = "waiting for first consumer to be created before binding"
    early = about_claim("WaitForFirstConsumer", first)
    for related in ([claim("Bound"), event], [claim(), early], [claim()], []):
        assert causes("Created", pods=[silent], replicas=MASTER, related=related) == ["waiting"]


@pytest.mark.parametrize(
    ("reasons", "cause"),
    [
        (["FailedMount"], "volume"),
        (["FailedMount", "FailedCreatePodSandBox"], "sandbox"),
        (["FailedCreatePodSandBox", "FailedMount"], "volume"),
        (["FailedMount", "Pulling"], "waiting"),
        (["FailedCreatePodSandBox", "Pulling"], "waiting"),
    ],
)
def test_a_step_of_the_kubelet_that_succeeded_later_is_no_cause(reasons, cause):
    pod = make_pod("master-0", "Pending", waiting={"reason": "ContainerCreating"})
    events = [
        about("Pod", "job-master-0", reason, "tried", time=f"0{minute}:00")
        for minute, reason in enumerate(reasons)
    ]
    assert causes("Created", pods=[pod], events=events, replicas=MASTER) == [cause]


@pytest.mark.parametrize(
    ("count", "seconds", "cause"), [(1, 4, "waiting"), (2, 4, "volume"), (1, 20, "volume")]
)
def test_a_mount_that_the_kubelet_has_not_retried_is_no_cause(count, seconds, cause):
    pod = make_pod("master-0", "Pending", waiting={"reason": "ContainerCreating"})
    time = f"09:{60 - seconds}"
    event = about("Pod", "job-master-0", "FailedMount", "no token", time=time, count=count)
    assert causes("Created", pods=[pod], events=[event], replicas=MASTER) == [cause]


@pytest.mark.parametrize("container", ["pytorch", "main"])  # the only one may have any name
def test_of_past_ends_the_newest_failure_is_reported(container):
    old = reported(1, 0, "ValueError", "old") | {"finishedAt": "2025-12-31T22:00:00Z"}
    ends = {
        "master-0": old,
        "worker-0": reported(1, 1, "ValueError", "new", time="07:00"),
        "worker-1": reported(138, 2, "PeerLost", "its peer", time="06:59"),
    }
    pods = [make_pod(name, restarts=1, running={}, last=end) for name, end in ends.items()]
    for pod in pods:
        pod["status"]["containerStatuses"][0]["name"] = container
    message = "worker-0, rank 1: exit code 1: ValueError: new, 3 min ago; it is running again"
    assert only("Running", pods=pods).message == message


def test_a_lost_rank_is_the_cause_although_it_is_running_again():
    crash = reported(1, 1, "ValueError", "the cause")
    lost = reported(138, 0, "PeerLost", "rank 1 is gone")
    waiting = {"reason": "CrashLoopBackOff"}
    pods = [
        make_pod("master-0", restarts=1, last=lost, waiting=waiting),
        make_pod("worker-0", restarts=1, running={}, last=crash),
    ]
    finding = only("Running", pods=pods, replicas=PAIR)
    assert finding.message.startswith("worker-0, rank 1: exit code 1: ValueError: the cause")


@pytest.mark.parametrize("part", ["a.", "epoch ", "9%", "worker-", "Error ", "1.", "[a]: ", "a-"])
def test_lines_of_any_length_are_read_in_linear_time(part):
    """With a pattern that starts anew at each character this would take minutes."""
    text = part * 2**18
    assert without_replica(text)
    assert since_training([text, "last"])[-1] == "last"


@pytest.mark.parametrize(("nproc", "replica"), [("1", "worker-0"), ("auto", "master-0")])
def test_a_failure_reported_by_the_master_is_that_of_its_rank(nproc, replica):
    """Where the number of processes is not known, nor are the ranks of a replica."""
    crash = reported(1, 1, "ValueError", "the cause")
    master = make_pod("master-0", "Failed", terminated=crash)
    finding = why("Failed:x:y", pods=[master], replicas=PAIR, nproc=nproc)[0]
    assert (finding.replica, finding.replicas) == (replica, (replica,))


@pytest.mark.parametrize(("skew", "causes"), [(0.0, ["deadline"]), (-900.0, [])])
def test_a_deadline_is_by_the_clock_of_the_cluster(skew, causes, capsys):
    """A laptop whose clock is 15 minutes ahead; its user was advised to delete a healthy job."""
    begun = stamp(datetime.now(UTC) - timedelta(seconds=960))
    pods = running("master-0")
    seen = snapshot("Running", pods=pods, deadline=300, replicas=MASTER, startTime=begun)
    seen = seen._replace(skew=skew)
    findings = diagnose(seen, {})
    assert [finding.id for finding in findings] == causes
    assert not any("delete" in finding.next_step for finding in findings)
    warn_of_clock(seen)
    assert ("900 s ahead of the cluster's" in capsys.readouterr().err) == bool(skew)
