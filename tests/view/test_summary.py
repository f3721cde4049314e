import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.contract import Event, EventKind
from k8sjob.view.summary import MAX_POINTS, JobSummary


def summary_of(events):
    summary = JobSummary("x")
    for event in events:
        summary.add(event)
    return summary


def test_a_life_adds_up(life):
    summary = summary_of(life)
    assert summary.state == "Succeeded"
    assert summary.exit_code == 0
    assert list(summary.replicas) == ["master-0", "worker-0"]
    assert {replica.phase for replica in summary.replicas.values()} == {"Succeeded"}
    assert summary.metrics == {"epoch": 2.0, "accuracy": 0.97}
    assert summary.checkpoint == "/checkpoints/step-40.pt"
    assert summary.curve == [(0.5, 2.0), (1.0, 1.0), (2.0, 0.25)]
    now = summary.progress
    assert (now.epoch, now.epochs, now.step, now.steps, now.fraction) == (2, 2, 20, 20, 1.0)


def test_a_group_that_met_again_replaces_what_it_repeats(progress):
    summary = summary_of(
        progress(epoch, step, loss=loss)
        for epoch, step, loss in ((0, 10, 5), (0, 20, 4), (1, 10, 3), (0, 20, 4.5), (1, 10, 3.5))
    )
    assert summary.curve == [(0.5, 5.0), (1.0, 4.5), (1.5, 3.5)]


def test_a_loss_that_is_no_number_is_not_drawn(progress):
    summary = summary_of(
        [progress(loss=math.nan), progress(step=11, loss=None), progress(step=12, loss="x")]
    )
    assert summary.curve == []


def test_a_long_training_keeps_its_ends(progress):
    count = 3 * MAX_POINTS
    summary = summary_of(progress(0, step, count, loss=step) for step in range(1, count + 1))
    assert len(summary.curve) <= MAX_POINTS
    assert summary.curve[0] == (1 / count, 1.0)
    assert summary.curve[-1] == (1.0, count)
    assert summary.curve == sorted(summary.curve)


def test_findings_are_kept_with_their_lines(failure):
    (finding,) = summary_of(failure).findings
    assert finding.replica == "worker-0"
    assert finding.message == "the script raised ValueError: no\nat main.py:3"


def test_stopping_ends_with_the_next_state():
    stopping = Event(EventKind.STOPPING, {"signal": "SIGTERM"})
    assert summary_of([stopping]).stopping
    assert not summary_of([stopping, Event(EventKind.JOB, {"state": "Stopped"})]).stopping


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
        (
            [starting("waiting", world_size=99, missing=98, ranks=[1, "2", None])],
            "waiting for 98 of 99 processes: ranks 1, ...",
        ),
    ],
)
def test_what_keeps_a_job_from_training(events, detail):
    assert summary_of(events).starting == detail


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
COUNTS = st.sampled_from(
    ["epoch", "epochs", "step", "steps", "restarts", "exit_code", "world_size"]
)
NUMBERS = st.sampled_from(["loss", "samples_per_s", "eta_s", "accuracy"])
TEXTS = st.sampled_from(["state", "reason", "message", "phase", "node", "path", "text", "cause"])
ANY_EVENT = st.builds(
    Event,
    st.sampled_from([str(kind) for kind in EventKind]) | st.text(),
    st.dictionaries(COUNTS | NUMBERS | TEXTS | st.text(), JSON, max_size=8),
    st.floats(0, 2e9),
    st.sampled_from(["", "master-0", "worker-0"]) | st.text(),
)


@given(st.lists(ANY_EVENT, max_size=10))
def test_no_event_can_break_it(events):
    summary = summary_of(events)
    assert 0 <= (summary.progress.fraction or 0) <= 1
    assert summary.curve == sorted(summary.curve)
    assert all(math.isfinite(loss) for _, loss in summary.curve)
