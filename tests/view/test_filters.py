"""Errors are shown once and without the frames of libraries, the end of an epoch is one line."""

import io
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.contract import Event, EventKind
from k8sjob.view.filters import Epochs, Errors
from k8sjob.view.final_report import report
from k8sjob.view.lines import phrase, unstyled
from k8sjob.view.views import PlainView


@pytest.fixture
def clock(monkeypatch):
    """The time, which stands still at `now`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("k8sjob.view.filters.time.monotonic", lambda: clock.now)
    return clock


def log(text, replica="master-0"):
    return Event(EventKind.LOG, {"text": text, "attempt": 0}, 0.0, replica)


# --- the same error of several replicas

SCRIPT = [
    "Traceback (most recent call last):",
    '  File "main.py", line 3, in <module>',
    "ValueError: no",
]
CHAIN = [*SCRIPT, "", "During handling of the above exception, another exception occurred:", ""]
CHAIN += ["Traceback (most recent call last):", "TypeError: never", "a second line"]
ENDED = "ValueError: no (main.py:3), exit code 1"


def by_rank(rank, lines, replica=None):
    return [log(f"[rank {rank}] {line}", replica or f"worker-{rank}") for line in lines]


def closing(rank, detail=ENDED):
    return log(f"k8sjob: rank {rank}: {detail}", f"worker-{rank}")


def written(events):
    return [(event.replica, event.data["text"]) for event in events]


def all_of(*events):
    errors = Errors()
    return written([*errors.take(events), *errors.rest()])


@pytest.mark.parametrize("trace", [SCRIPT, CHAIN])
def test_one_traceback_stays_of_those_that_are_the_same(trace):
    first = [*by_rank(0, trace), closing(0)]
    others = [event for rank in (1, 2) for event in (*by_rank(rank, trace), closing(rank))]
    assert all_of(*first, *others) == [
        *written(first),
        ("", "worker-1 and worker-2: the same error as worker-0"),
    ]


@pytest.mark.parametrize("other", [[*SCRIPT[:-1], "ValueError: yes"], SCRIPT[:-1], CHAIN])
def test_a_traceback_that_differs_is_shown_whole_and_in_its_order(other):
    events = [*by_rank(0, SCRIPT), closing(0), *by_rank(1, other), closing(1, "another end")]
    assert all_of(*events) == written(events)


def test_a_rank_that_fails_in_the_same_way_again_is_shown_again():
    events = [*by_rank(0, SCRIPT), closing(0), log("starts", "worker-0"), *by_rank(0, SCRIPT)]
    assert all_of(*events) == written(events)


def test_an_end_without_a_traceback_is_shown_once():
    assert all_of(closing(0), closing(1), closing(2, "killed by SIGKILL")) == [
        *written([closing(0), closing(2, "killed by SIGKILL")]),
        ("", "worker-1: the same error as worker-0"),
    ]


def test_of_many_replicas_some_are_named():
    shown = all_of(*(closing(rank) for rank in range(100)))
    assert shown[1:] == [("", "worker-1, worker-2 and 97 more: the same error as worker-0")]


def test_nothing_is_held_back_for_long(clock):
    errors = Errors()
    assert errors.take(by_rank(1, SCRIPT[:2])) == []
    clock.now = 1.5
    assert written(errors.take([])) == written(by_rank(1, SCRIPT[:2]))


def test_the_last_state_comes_after_what_was_held_back():
    ended = Event(EventKind.JOB, {"state": "Failed"})
    errors = Errors()
    events = [*by_rank(0, SCRIPT), ended]
    assert list(errors.take(events)) == events


def test_the_end_of_a_replica_does_not_repeat_its_agents_message():
    out = io.StringIO()
    view = PlainView(out, "x")
    failed = {"phase": "Failed", "exit_code": 1, "message": "no"}
    view.show([closing(0), *(Event(EventKind.REPLICA, failed, 0, f"worker-{i}") for i in (0, 1))])
    failed |= {"message": "of another kind"}
    view.show([Event(EventKind.REPLICA, failed, 0, "worker-2")])
    view.close()
    assert out.getvalue().splitlines()[1:] == [
        "worker-0 | Failed, exit code 1",
        "worker-1 | Failed, exit code 1",
        "worker-2 | Failed, exit code 1: of another kind",
    ]


LINES = st.sampled_from([*CHAIN, "", "other"]).map(lambda line: f"[rank 0] {line}")
WRITTEN = st.tuples(st.sampled_from(["master-0", "worker-0", "worker-1"]), LINES | st.just("plain"))


@given(st.lists(WRITTEN, max_size=60))
def test_no_words_are_lost(pairs):
    events = [log(text, replica) for replica, text in pairs]
    shown = all_of(*events)
    assert {text for _, text in pairs} <= {text for _, text in shown}
    for replica in {replica for replica, _ in pairs}:
        own = [text for name, text in shown if name == replica]
        rest = iter(text for name, text in pairs if name == replica)
        assert all(text in rest for text in own)  # in its own order


# --- the frames of libraries

TORCH = "/usr/lib/python3.12/site-packages/torch/nn/modules"
HEAD = "Traceback (most recent call last):"
STEP = ['  File "/home/me/train.py", line 8, in <module>', "    run.step(x, y)", "    ^^^^^"]
RUN = [
    '  File "/state/jobs/t-1/runtime/k8sjob/runtime/training_run.py", line 224, in step',
    "    loss = self.backward()",
    '  File "/opt/k8sjob/k8sjob/runtime/training_run.py", line 9, in backward',
    "    return value()",
    *(f'  File "{TORCH}/module.py", line {line}, in _call_impl' for line in (17, 18)),
    "  [Previous line repeated 3 more times]",
]
FORWARD = ['  File "/home/me/net.py", line 3, in forward', "    return self.a(x)"]
LINEAR = [f'  File "{TORCH}/linear.py", line 134, in forward', "    return F.linear()"]
ERROR = "torch.OutOfMemoryError: CUDA out of memory"
TRACE = [HEAD, *STEP, *RUN, *FORWARD, *LINEAR, ERROR]
SHORT = [HEAD, *STEP, "  ... 4 frames in k8sjob, torch", *FORWARD, "  ... 1 frame in torch", ERROR]
END = "k8sjob: rank 0: OutOfMemoryError: CUDA out of memory (/home/me/net.py:3), exit code 1"


def shortened(lines):
    errors = Errors()
    shown = [*errors.take(map(log, lines)), *errors.rest()]
    return [event.data["text"] for event in shown]


def test_frames_of_libraries_become_a_count():
    assert shortened(TRACE) == SHORT
    assert shortened([f"[rank 3] {line}" for line in TRACE]) == [f"[rank 3] {x}" for x in SHORT]


def test_two_ranks_may_write_at_once():
    both = [f"[rank {rank}] {line}" for line in TRACE for rank in (0, 1)]
    found = shortened(both)
    for rank in (0, 1):
        mine = [line for line in found if line.startswith(f"[rank {rank}]")]
        assert mine == [f"[rank {rank}] {line}" for line in SHORT]


LIKE_A_LIBRARY = ['  File "/home/me/k8sjob/runtime/train.py", line 1, in f', "    f()"]
LIKE_A_LIBRARY += ['  File "/home/me/lib/python/torch/x.py", line 1, in g', "    g()"]


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param([HEAD, *RUN, *LINEAR, ERROR], id="of libraries alone"),
        pytest.param([HEAD, *STEP, *LINEAR], id="breaks off"),
        pytest.param([HEAD, *LIKE_A_LIBRARY, ERROR], id="of a project named like a library"),
    ],
)
def test_a_traceback_that_stays_whole(trace):
    assert shortened(trace) == trace


def shown(events, **options):
    out = io.StringIO()
    view = PlainView(out, "t", **options)
    view.show(events)
    view.close()
    text = out.getvalue() + "\n".join(line.plain for line in report(view.summary))
    return text.replace("master-0 | ", "")


@pytest.mark.parametrize("detail", ["", ": " + "torch tried to allocate 2 GiB, " * 3])
def test_an_error_of_any_length_is_named_by_its_traceback_and_as_the_cause(detail):
    trace, end = [*TRACE[:-1], ERROR + detail], END.replace(" (/home", f"{detail} (/home")
    again = "[rank 1] OutOfMemoryError: CUDA out of memory: the same traceback as another rank's"
    failed = {"phase": "Failed", "exit_code": 1, "message": "CUDA out of memory"}
    why = {"message": f"exit code 1: {end[16:-13]}", "next_step": "less"}
    events = [
        *(log(f"[rank 0] {line}") for line in trace),
        log(again),
        log(end),
        Event(EventKind.REPLICA, failed, 0.0, "master-0"),
        Event(EventKind.FINDING, why, 0.0, "master-0"),
    ]
    text = shown(events)
    assert text.count("CUDA out of memory") == 2
    assert "[rank 0]   ... 4 frames in k8sjob, torch\n" in text
    assert "Failed, exit code 1\n" in text
    cause = f"OutOfMemoryError: CUDA out of memory{detail}"
    assert f"why: master-0: exit code 1: {cause} (/home/me/net.py:3)" in text
    assert "module.py" in shown(events, verbose=True)


def test_another_error_of_the_same_class_is_shown():
    other = "k8sjob: rank 1: ValueError: two (/home/me/net.py:3), exit code 1"
    events = [log(line) for line in (HEAD, *FORWARD, "ValueError", other)]
    assert other in shown(events)


LIBRARY_LINE = st.sampled_from([*TRACE, "plain", "    indented", "", END])


@given(st.lists(LIBRARY_LINE, max_size=40))
def test_only_frames_of_libraries_are_left_out(lines):
    hidden = {line for line in (*TRACE, "    indented") if line.startswith("    ")}
    hidden |= {*RUN, *LINEAR}
    kept = [line for line in shortened(lines) if not line.startswith("  ... ")]
    rest = iter(lines)
    assert all(line in rest for line in kept)  # in their order
    assert [x for x in kept if x not in hidden] == [x for x in lines if x not in hidden]


# --- epochs


def metrics(replica="master-0", **data):
    return Event(EventKind.METRICS, data, 0.0, replica)


def checkpoint(step):
    return Event(EventKind.CHECKPOINT, {"path": f"/c/step-{step}.pt"}, 0.0, "master-0")


def texts(*events, pace=False):
    lines = Epochs(pace=pace)
    found = [shown for event in events for shown in (*lines.take(event), *lines.late())]
    return [unstyled(phrase(one) or [(one.kind, "")]) for one in (*found, *lines.rest())]


def test_an_epoch_has_one_line(progress):
    assert texts(
        progress(0, 20, loss=9.0, epoch_loss=0.5),
        metrics(epoch=1, test_loss=0.25),
        checkpoint(20),
        progress(1, 20, loss=0.125),
        metrics(test_loss=0.0625),
    ) == [
        "epoch 1/2  loss 0.5  test_loss 0.25  checkpoint step-20.pt",
        "epoch 2/2  loss 0.125  test_loss 0.0625",
    ]
    assert texts(progress(0, 20), pace=True) == ["epoch 1/2  loss 0.5  samples/s 1,234  ETA 1:15"]


def test_a_checkpoint_that_is_late_is_in_the_next_line(progress):
    assert texts(progress(0, 20), progress(1, 5), checkpoint(20), progress(1, 20)) == [
        "epoch 1/2  loss 0.5",
        "progress",
        "epoch 2/2  loss 0.5  checkpoint step-20.pt",
    ]


def test_a_checkpoint_waits_for_seconds_and_an_epoch_for_a_minute(progress, clock):
    lines = Epochs(pace=False)
    assert list(lines.take(checkpoint(3))) == []
    clock.now = 9.0
    assert list(lines.late()) == []
    clock.now = 10.0
    assert [event.kind for event in lines.late()] == [EventKind.CHECKPOINT]
    assert list(lines.take(progress(0, 20))) == []
    clock.now = 69.0
    assert list(lines.late()) == []
    clock.now = 70.0
    assert [event.kind for event in lines.late()] == [EventKind.METRICS]
    assert [event.kind for event in lines.take(metrics(test_loss=1))] == [EventKind.METRICS]


def test_the_order_of_lines_stays(progress):
    """Lines of other replicas do not wait, those of the same come after the epoch's."""
    assert texts(progress(0, 20), log("other", "worker-0"), log("own"), metrics(x=1)) == [
        "other",
        "epoch 1/2  loss 0.5",
        "own",
        "x 1",
    ]
    assert texts(progress(0, 20), Event(EventKind.JOB, {"state": "Failed"})) == [
        "epoch 1/2  loss 0.5",
        "Failed",
    ]


def test_what_is_logged_by_another_replica_or_again_is_not_mixed_in(progress):
    assert texts(progress(0, 20), metrics("worker-0", x=1)) == ["epoch 1/2  loss 0.5", "x 1"]
    assert texts(progress(0, 20), metrics(test_loss=1), metrics(d=3, g=2), metrics(d=5, g=4)) == [
        "epoch 1/2  loss 0.5  test_loss 1  d 3  g 2",
        "d 5  g 4",
    ]
