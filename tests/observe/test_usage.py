"""Where the hours of a job went; in each case the uses sum to the whole."""

import json
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed import RECORDED, make_pod, reported
from trainings import BEGIN, at, finished, job, line, met, pod, step

from k8sjob.backends.api import TOO_FEW_GPUS, Snapshot
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError
from k8sjob.observe.usage import Use, read_usage, shown_hours, slow_nodes, usage
from k8sjob.targets.jobs import job_of


def split(made, pods, lines, **options):
    now = BEGIN + timedelta(seconds=1000)
    found = usage(Snapshot(job_of(made), pods, at=now), lines, **options)
    return {str(use): round(seconds, 3) for use, seconds in found.seconds.items()}


def test_a_job_from_the_queue_to_its_end():
    pods = [pod("master-0", 100, 230), pod("worker-0", 110, 220)]
    lines = [line(120), met(140), step(150, 1), step(180, 2, wait=0.5), finished(200), line(210)]
    assert split(job(end=230), pods, lines) == {
        "queued": 100 + 110,
        "starting": 50 + 40,
        "training": 2 * (15 + 20),
        "waiting": 2 * 15,
        "idle": 30 + 20,
    }


def test_a_second_of_rounding_is_no_queue():
    pods = [pod("master-0", 1, 10), pod("worker-0", 2, 10)]
    found = split(job(end=10), pods, [line(2), step(4, 1), finished(10)])
    assert found == {"queued": 2, "starting": 4 + 2, "training": 6 + 6}


def test_devices_are_counted_and_cpus_where_there_is_no_gpu():
    pods = [pod("master-0", 0, 100), pod("worker-0", 0, 100)]
    eight = usage(
        Snapshot(job_of(job(end=100, gpus=8)), pods), [line(0), step(0, 1), finished(100)]
    )
    assert (eight.device, eight.seconds[Use.TRAINING]) == ("GPU", 1600)
    none = usage(Snapshot(job_of(job(end=100, gpus=0)), pods), [line(0), step(0, 1), finished(100)])
    assert (none.device, none.seconds[Use.TRAINING]) == ("CPU", 400)


def test_gpus_that_this_machine_lacks_are_not_counted():
    pods, lines = [pod("master-0", 0, 100)], [line(0), step(0, 1), finished(100)]
    event = {"type": "Warning", "reason": TOO_FEW_GPUS}
    found = usage(Snapshot(job_of(job(end=100, gpus=8, workers=0)), pods, [event]), lines)
    assert (found.device, found.seconds) == ("CPU", {Use.TRAINING: 100})


@pytest.mark.parametrize("attempt", [0, 1])  # again within the container, or in a new start of it
def test_what_a_later_start_does_again_is_repeated(attempt):
    lines = [line(0), met(10), step(20, 1), step(30, 2), step(40, 3), line(42, "error")]
    lines += [met(60, attempt), step(70, 2, attempt), step(80, 4, attempt), finished(90, attempt)]
    found = split(job(end=90, workers=0), [pod("master-0", 0, 90)], lines)
    assert found == {"starting": 20 + 28, "training": 10 + 10, "repeated": 10 + 10 + 2}


def test_a_start_after_a_failure_begins_when_processes_are_started():
    python = Event(EventKind.STARTING, {"phase": "python"}, 1.0)
    importing = Event(EventKind.STARTING, {"phase": "importing"}, 1.0)
    lines = [line(0), line(1, python), met(10), step(20, 1), step(30, 2), line(32, "error")]
    lines += [line(40, python), line(50, importing), met(60), step(70, 3), finished(80)]
    found = split(job(end=80, workers=0), [pod("master-0", 0, 80)], lines)
    assert found == {"starting": 20 + 38, "training": 10 + 2 + 10}


def test_output_before_a_new_start_ends_the_one_before():
    class Output:
        def logs(self, _ref, replica):
            assert replica == "master-0"
            yield from [line(0), met(10), step(20, 1), step(21, 2), line(321, "hung")]
            yield from [met(330), step(340, 3), finished(350)]
            raise BackendError("the rest is gone")

    made = Snapshot(job_of(job(end=350, workers=0)), [pod("master-0", 0, 350)])
    found = read_usage(Output(), made).seconds
    assert found == {"starting": 20 + 19, "training": 1 + 10, "stalled": 300}


def test_an_older_checkpoint_repeats_what_all_starts_before_did():
    lines = [line(0), met(0), step(0, 1), step(10, 2), step(20, 3), line(20, "error")]
    lines += [met(20, 1), step(20, 4, 1), step(30, 5, 1), line(30, "error", 1)]
    lines += [met(30, 2), step(30, 2, 2), step(40, 6, 2), finished(40, 2)]
    found = split(job(end=40, workers=0), [pod("master-0", 0, 40)], lines)
    assert found == {"training": 10, "repeated": 10 + 10 + 10}


def test_a_job_that_is_suspended_waits_until_now():
    lines = [line(0), met(10), step(20, 1), step(120, 2)]
    made = job(workers=0)
    condition = {"type": "Suspended", "status": "True", "lastTransitionTime": at(125)}
    made["status"]["conditions"] = [condition]
    found = split(made, [], lines)
    assert found == {"starting": 20, "training": 100, "queued": 880}


def resumed(made, seconds, generation=3):
    made["metadata"]["generation"] = generation
    made["status"]["conditions"].append(
        {"type": "Suspended", "status": "False", "lastTransitionTime": at(seconds)}
    )
    return made


def deleted(seconds):
    return {"reason": "SuccessfulDelete", "message": "Deleted pod: x", "lastTimestamp": at(seconds)}


def workload(evictions, requeued, ran):
    return {
        "kind": "Workload",
        "metadata": {"ownerReferences": [{"uid": "job"}]},
        "status": {
            "accumulatedPastExecutionTimeSeconds": ran,
            "schedulingStats": {"evictions": [{"reason": "Preempted", "count": evictions}]},
            "conditions": [
                {"type": kind, "status": status, "lastTransitionTime": at(requeued)}
                for kind, status in (("Evicted", "False"), ("Requeued", "True"))
            ],
        },
    }


class TestSuspension:
    """A job that runs again since 600 s, and trains from 620 to 1000; its earlier Pods are gone."""

    NOW: ClassVar = {"starting": 20, "training": 380}

    def split(self, made, *, lines=(), events=(), related=()):
        pods = [pod("master-0", 600, 1000)]
        lines = [*lines, line(600, attempt=1), step(620, 5, 1), step(1000, 9, 1), finished(1000, 1)]
        snapshot = Snapshot(job_of(made), pods, tuple(events))
        found = usage(snapshot, lines, related=related)
        seconds = {str(use): round(value, 3) for use, value in found.seconds.items()}
        assert sum(seconds.values()) == 1000
        assert found.held == 1000 - seconds.get("queued", 0) - seconds.get("unknown", 0)
        return seconds

    def test_without_a_trace_of_an_earlier_run_nothing_is_known(self):
        made = resumed(job(end=1000, workers=0), 600)
        assert self.split(made) == {**self.NOW, "unknown": 600}

    def test_a_job_whose_only_change_is_its_resume_waited(self):
        made = resumed(job(end=1000, workers=0), 600, generation=2)
        assert self.split(made) == {**self.NOW, "queued": 600}

    def test_the_deletion_of_its_pods_is_the_begin_of_the_suspension(self):
        made = resumed(job(end=1000, workers=0), 600)
        events = [deleted(400), deleted(450), deleted(1000)]
        assert self.split(made, events=events) == {**self.NOW, "unknown": 450, "queued": 150}

    def test_earlier_output_tells_what_ran(self):
        made = resumed(job(end=1000, workers=0), 600)
        lines = [line(10), met(20), step(30, 1), step(430, 4)]
        found = self.split(made, lines=lines, events=[deleted(440)])
        used = {"starting": 20 + 20, "training": 400 + 380}
        assert found == {"unknown": 10, "queued": 170, **used}
        lost = self.split(made, lines=lines, events=[deleted(530)])
        assert lost == {**found, "queued": 70, "unknown": 10 + 100}

    def test_the_workload_of_a_job_that_was_never_evicted(self):
        made = resumed(job(end=1000, workers=0), 600, generation=4)
        admitted = workload(0, 0, None)
        admitted["status"]["conditions"] = []
        assert self.split(made, related=[admitted]) == {**self.NOW, "queued": 600}
        admitted["metadata"]["creationTimestamp"] = at(500)  # Kueue has replaced the first one
        assert self.split(made, related=[admitted]) == {**self.NOW, "unknown": 600}

    def test_the_workload_of_a_job_that_was_preempted_once(self):
        made = resumed(job(end=1000, workers=0), 600, generation=4)
        found = self.split(made, related=[workload(1, 350, 300)])
        assert found == {**self.NOW, "unknown": 300, "queued": 50 + 250}

    def test_the_workload_of_a_job_that_was_preempted_more_often(self):
        made = resumed(job(end=1000, workers=0), 600, generation=6)
        found = self.split(made, related=[workload(2, 350, 300)])
        assert found == {**self.NOW, "unknown": 600}

    def test_a_job_that_is_suspended_now(self):
        made = job(workers=0)
        made["status"]["conditions"] = [
            {"type": "Suspended", "status": "True", "lastTransitionTime": at(700)}
        ]
        assert split(made, [], []) == {"unknown": 700, "queued": 300}
        made["metadata"]["generation"] = 1
        assert split(made, [], []) == {"queued": 1000}

    def test_kueue_is_read_only_where_nothing_else_shows_it(self):
        asked = []

        class Output:
            def logs(self, *_args, **_options):
                return iter(())

            def related(self, _snapshot):
                asked.append(1)
                return [workload(1, 350, 300)]

        for generation, calls in ((2, 0), (4, 1)):
            made = resumed(job(end=1000, workers=0), 600, generation)
            made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
            found = read_usage(Output(), Snapshot(job_of(made), [pod("master-0", 600, 1000)]))
            assert found.seconds[Use.QUEUED] == (600 if generation == 2 else 300)
            assert len(asked) == calls


def test_a_job_that_has_ended_without_a_trace_was_not_in_a_queue():
    assert split(job(end=100, workers=0), [], []) == {"unknown": 100}


def test_a_hang_is_a_stall_up_to_the_end_of_its_start():
    lines = [line(0), met(10), step(20, 1), step(21, 2), line(321, "hung")]
    lines += [line(330, attempt=1), met(340, 1), step(350, 3, 1), finished(360, 1)]
    found = split(job(end=360, workers=0), [pod("master-0", 0, 360)], lines)
    assert found == {"starting": 20 + 29, "training": 1 + 10, "stalled": 300}


def test_a_job_that_runs_is_counted_until_now():
    lines = [line(0), met(10), step(20, 1), step(990, 2)]
    found = split(job(workers=0), [pod("master-0", 0)], lines)
    assert found == {"starting": 20, "training": 980}
    stalled = split(job(workers=0), [pod("master-0", 0)], [*lines[:3], step(21, 2)])
    assert stalled == {"starting": 20, "training": 1, "stalled": 979}


def test_a_script_that_reports_no_steps():
    found = split(job(end=100, workers=0), [pod("master-0", 10, 100)], [line(20), line(90)])
    assert found == {"queued": 10, "starting": 10, "running": 80}


def test_a_script_of_a_session_with_a_loop_of_its_own():
    logged = line(60, Event(EventKind.METRICS, {"loss": 1.0}, 1.0))
    made, pods = job(end=100, workers=0), [pod("master-0", 10, 100)]
    lines = [line(20), met(30), logged, finished(100)]
    assert split(made, pods, lines) == {"queued": 10, "starting": 20, "running": 70}
    assert split(made, pods, lines[:2]) == {"queued": 10, "starting": 90}


def test_where_pods_are_gone_the_output_tells_what_was_held():
    lines = [line(40), met(50), step(60, 1), step(70, 2), finished(80)]
    found = split(job(end=100, workers=0), [], lines)
    assert found == {"unknown": 40, "starting": 20, "training": 20}


def test_only_the_time_since_a_moment():
    lines = [line(0), met(10), step(20, 1), step(120, 2), finished(120)]
    since = BEGIN + timedelta(seconds=70)
    found = split(job(end=120, workers=0), [pod("master-0", 0, 120)], lines, since=since)
    assert found == {"training": 50}


def test_nodes_that_others_wait_for():
    pods = [pod("master-0", 0, 100, "a"), pod("worker-0", 0, 100, "b")]
    lines = [line(0), step(0, 1), step(50, 2, wait=0.4, slowest=1), step(100, 3), finished(100)]
    ones = [
        usage(Snapshot(job_of(job(end=100, name=name)), pods), lines) for name in ("one", "two")
    ]
    assert ones[0].slowed == {"b": 40}
    assert ones[0].nodes["a"][Use.WAITING] == 20
    assert slow_nodes(ones) == {"b": ones}
    assert slow_nodes(ones[:1]) == {}
    alone = [pod("master-0", 0, 100, "b"), pod("worker-0", 0, 100, "b")]
    same = [usage(Snapshot(job_of(job(end=100)), alone), lines)] * 2
    assert slow_nodes(same) == {}


def test_nodes_that_a_preflight_refused():
    end = reported(4, 0, "Preflight", "node b (rank 1): slow", culprits=[1], nodes=["b"])
    pods = [make_pod("master-0", "Failed", terminated=end)]
    assert usage(Snapshot(job_of(job(end=100)), pods), []).refused == {"b": "node b (rank 1): slow"}


def test_the_largest_avoidable_part_is_named_with_what_helps():
    lines = [line(0), met(10), step(80, 1), step(100, 2), finished(100)]
    found = usage(Snapshot(job_of(job(end=100, workers=0)), [pod("master-0", 0, 100)]), lines)
    assert found.avoidable is Use.STARTING
    assert found.note.startswith("0.0222 GPU hours (80%) went to starting; `why --timing`")
    fine = [line(0), step(1, 1), step(100, 2), finished(100)]
    assert not usage(
        Snapshot(job_of(job(end=100, workers=0)), [pod("master-0", 0, 100)]), fine
    ).note


SPANS = json.loads(Path(__file__).with_name("recorded_usage.json").read_text())
"""Device seconds by use of the jobs in recorded/, computed by hand from their Pods' times."""


@pytest.mark.parametrize("name", sorted(SPANS))
def test_a_recorded_job_without_its_output(name):
    seen = RECORDED[name]
    now = datetime.fromisoformat(seen["now"])
    snapshot = Snapshot(job_of(seen["job"]), seen.get("pods", []), seen.get("events", []), at=now)
    assert usage(snapshot, []).seconds == SPANS[name]


def started(made, seconds, before=()):
    """A Pod whose container has started, perhaps after another start, from and to such seconds."""
    (status,) = made["status"]["containerStatuses"]
    for state in status["state"].values():
        state["startedAt"] = at(seconds)
    if before:
        times = {"startedAt": at(before[0]), "finishedAt": at(before[1])}
        status |= {"restartCount": 1, "lastState": {"terminated": times}}
    return made


def made_at(seconds, made):
    made["metadata"]["creationTimestamp"] = at(seconds)
    return made


def never_started(made):
    waiting = {"waiting": {"reason": "ImagePullBackOff"}}
    made["status"] |= {"phase": "Pending"}
    made["status"]["containerStatuses"][0]["state"] = waiting
    return made


EVICTED = pod("master-0", 0, 100)
EVICTED["status"] |= {"phase": "Failed", "containerStatuses": []}
EVICTED["status"]["conditions"].append({"type": "Ready", "lastTransitionTime": at(300)})


@pytest.mark.parametrize(
    ("pods", "lines", "end", "expected"),
    [
        # Both Pods were replaced at 900, and what was before is gone with them.
        (
            [made_at(900, started(pod("master-0", 902), 910))],
            [],
            None,
            {"unknown": 900, "queued": 2, "starting": 8, "running": 90},
        ),
        # A Job keeps a Pod that failed beside the one that replaces it.
        (
            [pod("master-0", 0, 400), made_at(410, started(pod("master-0", 420), 430))],
            [],
            None,
            {"running": 400 + 570, "queued": 10 + 10, "starting": 10},
        ),
        (
            [started(pod("master-0", 0), 600, before=(10, 200))],
            [],
            None,
            {"starting": 10 + 400, "running": 190 + 400},
        ),
        ([never_started(pod("master-0", 5))], [], None, {"queued": 5, "starting": 995}),
        ([never_started(pod("master-0", 5))], [], 700, {"queued": 5, "starting": 695, "idle": 300}),
        ([EVICTED], [], None, {"running": 300}),
        # Left running after the end.
        (
            [pod("master-0", 0)],
            [line(0), met(0), step(0, 1), finished(390)],
            400,
            {"training": 390, "idle": 610},
        ),
        # Ended after the job, by its clean-up.
        ([pod("master-0", 0, 430)], [], 400, {"running": 400, "idle": 30}),
    ],
)
def test_spans_of_pods_that_are_there(pods, lines, end, expected):
    found = split(job(end=end, workers=0), pods, lines)
    assert found == expected


def test_a_worker_that_never_started_does_not_run_because_another_replica_does():
    pods = [pod("master-0", 0), never_started(pod("worker-0", 0))]
    assert split(job(), pods, [line(0)]) == {"running": 1000, "starting": 1000}


def test_workers_that_the_clean_up_removed_are_not_known_to_have_waited():
    assert split(job(end=400), [pod("master-0", 0, 400)], []) == {"running": 400, "unknown": 400}


def test_pods_that_are_refused_are_queued():
    refused = {"reason": "FailedCreatePod", "firstTimestamp": at(1), "lastTimestamp": at(900)}
    pods = [pod("master-0", 0), made_at(900, pod("worker-0", 900))]
    seen = Snapshot(job_of(job()), pods, [refused], at=BEGIN + timedelta(seconds=1000))
    assert usage(seen, []).seconds == {Use.RUNNING: 1100, Use.QUEUED: 900}


def test_no_advice_rests_on_what_is_not_known():
    replaced = [made_at(900, pod("master-0", 900))]
    snapshot = Snapshot(job_of(job(workers=0)), replaced, at=BEGIN + timedelta(seconds=1000))
    assert (usage(snapshot, []).avoidable, usage(snapshot, []).held) == (None, 100)


moments = st.integers(0, 1000)
event_lines = st.tuples(
    moments,
    st.sampled_from([EventKind.STARTED, EventKind.PROGRESS, EventKind.FINISHED, "text"]),
    st.integers(0, 3),
    st.integers(0, 5),
    st.floats(allow_nan=True),
)


@given(
    st.lists(event_lines, max_size=30),
    st.lists(st.tuples(moments, moments), min_size=2, max_size=2),
    st.none() | st.integers(1, 1000),
    st.none() | moments,
)
def test_every_second_has_exactly_one_use(said, times, end, since):
    lines = []
    attempts = 0
    for moment, kind, attempt, number, wait in sorted(said, key=lambda one: (one[0], str(one[1]))):
        attempts = max(attempts, attempt)  # the kubelet counts upwards
        data = {"epoch": 0, "step": number, "step_s": 1.0, "wait_s": wait, "slowest": number}
        event = "text" if kind == "text" else Event(kind, data, 1.0)
        lines.append(line(moment, event, attempts))
    pods = [
        pod(name, min(pair), max(pair) + 1 if end else None)
        for name, pair in zip(("master-0", "worker-0"), times, strict=True)
    ]
    made = job(end=end) if end else job()
    now = BEGIN + timedelta(seconds=end or 1000)
    begin = BEGIN + timedelta(seconds=since) if since is not None else None
    found = usage(Snapshot(job_of(made), pods, at=now), lines, since=begin)
    assert all(seconds > 0 for seconds in found.seconds.values())
    last = max(now, BEGIN + timedelta(seconds=1001)) if end else now
    longest = 2 * max((last - max(begin or BEGIN, BEGIN)).total_seconds(), 0)
    assert found.total <= longest + 1e-6
    by_node = sum(sum(uses.values()) for uses in found.nodes.values())
    assert by_node == pytest.approx(found.total)
    held_ends = [max(pair) + 1 if end else 1000 for pair in times]
    if not lines and since is None:
        assert found.total == pytest.approx(sum(held_ends))


def test_a_thousand_replicas_of_which_each_was_the_slowest_once():
    pods = [pod("master-0", 0, 1000), *(pod(f"worker-{n}", 0, 1000, "n") for n in range(999))]
    reports = [step(number, number, wait=0.5, slowest=number) for number in range(1, 1000)]
    began = time.process_time()
    found = usage(Snapshot(job_of(job(end=1000, workers=999)), pods), [line(0), *reports])
    assert time.process_time() - began < 10
    assert found.total == pytest.approx(1000 * 1000)
    assert found.slowed == {"n": pytest.approx(998 * 1000 / 2)}


@pytest.mark.parametrize(
    ("hours", "shown"), [(0.01234, "0.0123"), (999, "999"), (1000, "1000"), (8047.2, "8047")]
)
def test_hours_have_no_exponent(hours, shown):
    assert shown_hours(hours * 3600) == shown
