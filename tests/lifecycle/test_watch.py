import time

import pytest

from k8sjob.contract import Event
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.lifecycle.watch import SETTLE_SECONDS, watch


def told(events, kind):
    return [event for event in events if event.kind == kind]


def test_a_job_is_told_once_each_and_its_end_last(script, snapshot, make_pod, line, ref):
    running = [make_pod("master-0", running={})]
    snapshots = [
        snapshot("Created"),
        snapshot("Created", "Running", pods=running),
        snapshot("Created", "Running", pods=running),
        snapshot("Created", "-Running", "Succeeded"),
    ]
    lines = [line("master-0", f"line {n}") for n in range(300)]
    events = list(watch(script(snapshots, lines), ref))
    assert [event.data["state"] for event in told(events, "job")] == [
        "Created",
        "Running",
        "Succeeded",
    ]
    assert events[-1].data["exit_code"] == 0
    assert [event.data["text"] for event in told(events, "log")] == [one.text for one in lines]
    (replica,) = told(events, "replica")
    assert (replica.replica, replica.data["phase"]) == ("master-0", "Running")


def test_events_of_the_runtime_are_decoded_from_the_output(script, snapshot, line, ref):
    progress = Event("progress", {"epoch": 1}, 12.5)
    lines = [line("master-0", f"bar 10%|{progress.encode()}"), line("worker-0", "k8sjob/1 {no")]
    events = list(watch(script([snapshot("Succeeded")], lines), ref))
    assert told(events, "progress") == [Event("progress", {"epoch": 1}, 12.5, "master-0")]
    (ordinary,) = told(events, "log")
    assert ordinary.data["text"] == "k8sjob/1 {no"
    assert ordinary.time == pytest.approx(1767225600)


def test_a_failed_job_ends_with_its_findings(script, snapshot, make_pod, line, ref):
    end = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
    pods = [make_pod("worker-1", "Failed", terminated=end)]
    lines = [line("worker-1", "ValueError: the cause")]
    events = list(watch(script([snapshot("Failed", pods=pods)], lines), ref))
    job, finding = events[-2:]
    assert job.data["state"] == "Failed"
    assert (finding.kind, finding.replica) == ("finding", "worker-1")
    assert "the cause" in finding.data["message"]


def test_a_deleted_job_ends_the_watch(script, snapshot, line, ref):
    backend = script([snapshot("Running")], [line("master-0", "last")], gone=True)
    events = list(watch(backend, ref))
    assert [event.data["text"] for event in told(events, "log")] == ["last"]
    assert events[-1].data["state"] == "Deleted"
    assert events[-1].data["exit_code"] == 103


def test_a_suspended_job_is_not_over(script, snapshot, ref):
    snapshots = [snapshot("Running"), snapshot("Suspended"), snapshot("Succeeded")]
    events = list(watch(script(snapshots), ref))
    states = [event.data["state"] for event in told(events, "job")]
    assert states == ["Running", "Suspended", "Succeeded"]


def test_warnings_are_told_once_with_their_replica(script, snapshot, make_pod, ref):
    def event(uid, name, reason, kind="Warning", count=1):
        return {
            "metadata": {"uid": uid},
            "involvedObject": {"name": name},
            "type": kind,
            "reason": reason,
            "message": f"{reason}!",
            "count": count,
        }

    pods = [make_pod("worker-1", "Pending")]
    first = [
        event("1", "job-worker-1", "FailedScheduling"),
        event("2", "job", "TooFewGPUs"),
        event("3", "job-worker-1", "BackOff"),
        event("4", "job", "Created", "Normal"),
    ]
    again = [event("1", "job-worker-1", "FailedScheduling", count=2), *first[1:]]
    snapshots = [
        snapshot("Created", pods=pods, events=first),
        snapshot("Created", pods=pods, events=first),
        snapshot("Succeeded", pods=pods, events=again),
    ]
    warnings = told(watch(script(snapshots), ref), "warning")
    assert [(w.replica, w.data["message"]) for w in warnings] == [
        ("worker-1", "FailedScheduling!"),
        ("", "TooFewGPUs!"),
        ("worker-1", "FailedScheduling!"),
    ]


def test_output_that_cannot_be_read_is_a_warning_and_not_the_end(script, snapshot, line, ref):
    backend = script(
        [snapshot("Succeeded")],
        [line("master-0", "well")],
        errors={"worker-0": BackendError("no permission")},
    )
    events = list(watch(backend, ref))
    (warning,) = told(events, "warning")
    assert "no permission" in warning.data["message"]
    assert [event.data["text"] for event in told(events, "log")] == ["well"]


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
    assert [event.data["text"] for event in told(events, "log")] == ["last"]
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
    assert [event.data["text"] for event in told(found, "log")] == [one.text for one in lines]
    assert found[-1].data["state"] == "Succeeded"


def test_leaving_a_watch_ends_its_readers(script, snapshot, ref):
    backend = script([snapshot("Running")])
    events = watch(backend, ref)
    next(events)
    events.close()
    _soon(lambda: backend.stopped == ["watch"])


def test_without_logs_no_output_is_read(script, snapshot, line, ref):
    backend = script([snapshot("Succeeded")], [line("master-0", "text")])
    assert not told(watch(backend, ref, logs=False), "log")


def _soon(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
