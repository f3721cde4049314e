import math

import pytest

from k8sjob.contract import NO_PROGRESS, Event, EventKind
from k8sjob.observe.training import MAX_POINTS, Progress, Training


def training_of(*events):
    return Training.of(events)


def progress(epoch, step, steps=20, *, loss=0.5, time=0.0, **data):
    known = {"epoch": epoch, "step": step, "steps": steps, "loss": loss}
    return Event(EventKind.PROGRESS, {**known, **data}, time)


def test_a_group_that_met_again_replaces_what_it_repeats():
    losses = {(0, 10): 5, (0, 20): 4, (1, 10): 3}, {(0, 20): 4.5, (1, 10): 3.5}
    reports = (progress(*at, loss=loss) for start in losses for at, loss in start.items())
    training = training_of(*reports)
    assert training.curve == [(0.5, 5.0), (1.0, 4.5), (1.5, 3.5)]


def test_epochs_are_counted_from_one():
    now = training_of(progress(0, 5, epochs=4)).progress
    assert (now.epoch, now.epochs, now.step, now.steps) == (1, 4, 5, 20)
    assert now.fraction == 0.25 / 4
    assert not now.ends_epoch
    assert Progress.of({"epoch": 0, "step": 20, "steps": 20}).ends_epoch


def test_nonsense_is_not_known():
    now = Progress.of({"epoch": "x", "step": None, "steps": -1, "loss": "low", "slowest": {}})
    assert now == Progress()
    assert not now.is_placed
    assert Progress.of({"step_s": 2.0, "wait_s": 0.5}).waited == 0.25
    for step, wait in ((1.0, 2.0), (float("inf"), 1.0), (0.0, 0.0), (1.0, None)):
        assert Progress.of({"step_s": step, "wait_s": wait}).waited is None


def test_a_long_training_keeps_its_ends():
    count = 3 * MAX_POINTS
    curve = training_of(
        *(progress(0, step, count, loss=step) for step in range(1, count + 1))
    ).curve
    assert len(curve) <= MAX_POINTS
    assert curve[0] == (1 / count, 1.0)
    assert curve[-1] == (1.0, count)
    assert curve == sorted(curve)


def test_what_is_logged_has_its_last_value_and_a_test_its_curve():
    logged = [Event(EventKind.METRICS, {"test_loss": value, "note": "a"}) for value in (3.0, 2.0)]
    training = training_of(progress(0, 10), logged[0], progress(0, 20, loss=0.25), logged[1])
    assert training.logged == {"test_loss": 2.0, "note": "a"}
    assert training.metrics == {"loss": 0.25, **training.logged}
    assert training.test_curves == {"test_loss": [(0.5, 3.0), (1.0, 2.0)]}
    training.add(progress(0, 10))
    training.add(logged[1])
    assert training.test_curves == {"test_loss": [(0.5, 2.0)]}  # a restart repeats


def test_what_a_script_without_epochs_logs_is_counted():
    logged = [{"score": 1.0, "epoch": 3}, {"score": math.nan, "note": "a"}, {"score": 2.0}]
    training = training_of(*(Event(EventKind.METRICS, data) for data in logged))
    assert (training.curves, training.counts_epochs) == ({"score": [(0.0, 1.0), (2.0, 2.0)]}, False)
    many = Event(EventKind.METRICS, {f"m{number}": number for number in range(99)})
    curves = training_of(many, progress(0, 1)).curves
    assert (len(curves), list(curves)[-1]) == (61, "loss")


def test_a_checkpoint_that_was_resumed_was_not_written():
    resumed = Event(EventKind.RESUMED, {"path": "/c/2"})
    training = training_of(Event(EventKind.CHECKPOINT, {"path": "/c/1"}), resumed)
    assert (training.checkpoint, training.written) == ("/c/2", "/c/1")


@pytest.mark.parametrize("kind", [EventKind.RESTARTING, EventKind.STARTED, EventKind.PROGRESS])
def test_restarts_within_a_container_count(kind):
    assert training_of(Event(kind, {"restart": 2}), progress(0, 1)).restarts == 2


@pytest.mark.parametrize("kind", [EventKind.STARTING, EventKind.RESTARTING])
def test_another_start_has_nothing_of_the_earlier_one(kind):
    stopping = Event(EventKind.STOPPING, {"signal": "SIGTERM"}, 8.5)
    again = {"phase": "python", "restart": 1}
    group = Event(EventKind.STARTED, {"world_size": 2}, 7.0)
    now = training_of(group, progress(1, 5, time=8.0), stopping, Event(kind, again, 9.0))
    assert (now.stopping, now.progress, now.restarts) == (False, Progress(), 1)
    assert (now.group, now.last_group) == ({}, {"world_size": 2})
    late = training_of(progress(1, 5, time=8.0), stopping, Event(kind, again, 7.0))
    assert (late.stopping, late.progress.epoch) == (True, 2)


def test_a_group_that_waits_has_no_time_left_until_it_continues():
    waits = Event(EventKind.WARNING, {"reason": NO_PROGRESS, "seconds": 60.0}, 1.0)
    over = Event(EventKind.WARNING, {"reason": NO_PROGRESS, "over": True}, 2.0)
    now = training_of(progress(1, 5, eta_s=9.0), waits, Event(EventKind.STOPPING))
    assert (now.progress.epoch, now.progress.eta_s, now.hang) == (2, None, waits)
    for ends in (over, progress(1, 6), Event(EventKind.METRICS, {"loss": 1.0}), Event("new")):
        assert training_of(waits, ends).hang is None


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
        ([starting("of a later version")], ""),
        ([starting("waiting", missing="x", ranks=3)], ""),
        ([starting("waiting", world_size=99, missing=98, ranks=[1, "2", None])],
         "waiting for 98 of 99 processes: ranks 1, ..."),
    ],
)  # fmt: skip
def test_what_keeps_a_job_from_training(events, detail):
    assert training_of(*events).starting == detail
