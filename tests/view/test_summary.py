from dataclasses import replace

import pytest
from view.conftest import summary_of

from k8sjob.contract import Event, EventKind
from k8sjob.view.summary import MAX_POINTS


def test_a_group_that_met_again_replaces_what_it_repeats(progress):
    summary = summary_of(
        progress(epoch, step, loss=loss)
        for epoch, step, loss in ((0, 10, 5), (0, 20, 4), (1, 10, 3), (0, 20, 4.5), (1, 10, 3.5))
    )
    assert summary.curve == [(0.5, 5.0), (1.0, 4.5), (1.5, 3.5)]


def test_epochs_are_counted_from_one(progress):
    now = summary_of([progress(epoch=0, step=5, steps=20, epochs=4)]).progress
    assert (now.epoch, now.epochs, now.step, now.steps) == (1, 4, 5, 20)
    assert now.fraction == 0.25 / 4


def test_a_long_training_keeps_its_ends(progress):
    count = 3 * MAX_POINTS
    summary = summary_of(progress(0, step, count, loss=step) for step in range(1, count + 1))
    assert len(summary.curve) <= MAX_POINTS
    assert summary.curve[0] == (1 / count, 1.0)
    assert summary.curve[-1] == (1.0, count)
    assert summary.curve == sorted(summary.curve)


def test_stopping_ends_with_the_next_state():
    stopping = Event(EventKind.STOPPING, {"signal": "SIGTERM"})
    assert summary_of([stopping]).stopping
    assert not summary_of([stopping, Event(EventKind.JOB, {"state": "Stopped"})]).stopping


@pytest.mark.parametrize("kind", [EventKind.STARTING, EventKind.RESTARTING])
def test_another_start_shows_nothing_of_the_earlier_one(progress, kind):
    again = Event(kind, {"phase": "python", "restart": 1}, 9.0, "master-0")
    before = [Event(EventKind.JOB, {"state": "Running"}), replace(progress(1, 5), time=8.0)]
    before.append(Event(EventKind.STOPPING, {"signal": "SIGTERM"}, 8.5))
    now = summary_of([*before, again])
    assert (now.shown_state, now.progress.epoch, now.progress.eta_s) == ("Running", 0, None)
    late = summary_of([*before, replace(again, time=7.0, replica="worker-0")])
    assert (late.shown_state, late.progress.epoch) == ("Stopping", 2)


def test_a_group_that_waits_has_no_time_left(progress):
    warning = Event(EventKind.WARNING, {"reason": "no-progress", "seconds": 60.0})
    now = summary_of([progress(1, 5), warning]).progress
    assert (now.epoch, now.eta_s) == (2, None)


def starting(phase, replica="master-0", **data):
    return Event(EventKind.STARTING, {"phase": phase, **data}, 0.0, replica)


MISSING = starting("waiting", world_size=4, missing=2, ranks=[1, 3])
WAITS = "waiting for 2 of 4 processes: ranks 1, 3"


@pytest.mark.parametrize(
    ("events", "detail"),
    [
        ([], ""),
        ([starting("python")], "starting Python"),
        ([starting("python"), starting("importing", "worker-0")], "importing torch"),
        ([starting("importing"), starting("running")], ""),
        ([starting("importing", "worker-0"), starting("running"), MISSING], WAITS),
        ([MISSING, starting("waiting", world_size=4, missing=0, ranks=[])], ""),
        ([MISSING, starting("python")], "starting Python"),
        ([MISSING, starting("running", "worker-0")], WAITS),
        ([starting("importing"), MISSING, Event(EventKind.STARTED, {"world_size": 4})], ""),
        ([MISSING, Event(EventKind.REPLICA, {"phase": "Failed"}, 0, "master-0")], ""),
        ([MISSING, Event(EventKind.JOB, {"state": "Suspended"})], ""),
        ([MISSING, Event(EventKind.JOB, {"state": "Running"})], WAITS),
        ([starting("of a later version")], ""),
        ([starting("waiting", missing="x", ranks=3)], ""),
        ([starting("waiting", world_size=99, missing=98, ranks=[1, "2", None])],
         "waiting for 98 of 99 processes: ranks 1, ..."),
    ],
)  # fmt: skip
def test_what_keeps_a_job_from_training(events, detail):
    assert summary_of(events).starting == detail
