"""What replicas have in common is shown once, and what differs is shown whole."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.contract import Event, EventKind
from k8sjob.view.repeats import Repeats
from k8sjob.view.views import PlainView

TRACE = [
    "Traceback (most recent call last):",
    '  File "main.py", line 3, in <module>',
    "ValueError: no",
]
CHAIN = [*TRACE, "", "During handling of the above exception, another exception occurred:", ""]
CHAIN += ["Traceback (most recent call last):", "TypeError: never", "a second line"]
ENDED = "ValueError: no (main.py:3), exit code 1"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def log(replica, text):
    return Event(EventKind.LOG, {"text": text, "attempt": 0}, 0.0, replica)


def by_rank(rank, lines, replica=None):
    return [log(replica or f"worker-{rank}", f"[rank {rank}] {line}") for line in lines]


def closing(rank, said=ENDED):
    return log(f"worker-{rank}", f"k8sjob: rank {rank}: {said}")


def lines(events):
    return [(event.replica, event.data["text"]) for event in events]


def all_of(*events):
    repeats = Repeats(Clock())
    return lines([*repeats.without(events), *repeats.rest()])


@pytest.mark.parametrize("trace", [TRACE, CHAIN])
def test_one_traceback_stays_of_those_that_are_the_same(trace):
    first = [*by_rank(0, trace), closing(0)]
    others = [event for rank in (1, 2) for event in (*by_rank(rank, trace), closing(rank))]
    assert all_of(*first, *others) == [
        *lines(first),
        ("", "worker-1, worker-2: the same error as worker-0"),
    ]


@pytest.mark.parametrize(
    "other",
    [
        [*TRACE[:-1], "ValueError: yes"],
        TRACE[:-1],
        CHAIN,
    ],
)
def test_a_traceback_that_differs_is_shown_whole_and_in_its_order(other):
    events = [*by_rank(0, TRACE), closing(0), *by_rank(1, other), closing(1, "another end")]
    assert all_of(*events) == lines(events)


def test_a_rank_that_fails_in_the_same_way_again_is_shown_again():
    events = [*by_rank(0, TRACE), closing(0), log("worker-0", "starts"), *by_rank(0, TRACE)]
    assert all_of(*events) == lines(events)


def test_an_end_without_a_traceback_is_told_once():
    assert all_of(closing(0), closing(1), closing(2, "killed by SIGKILL")) == [
        *lines([closing(0), closing(2, "killed by SIGKILL")]),
        ("", "worker-1: the same error as worker-0"),
    ]


def test_of_many_replicas_some_are_named():
    told = all_of(*(closing(rank) for rank in range(100)))
    names = ", ".join(f"worker-{rank}" for rank in range(1, 6))
    assert told[1:] == [("", f"{names} and 94 more: the same error as worker-0")]


def test_nothing_is_held_back_for_long():
    clock = Clock()
    repeats = Repeats(clock)
    assert repeats.without(by_rank(1, TRACE[:2])) == []
    clock.now = 1.5
    assert lines(repeats.without([])) == lines(by_rank(1, TRACE[:2]))


def test_the_last_state_comes_after_what_was_held_back():
    ended = Event(EventKind.JOB, {"state": "Failed"})
    repeats = Repeats(Clock())
    events = [*by_rank(0, TRACE), ended]
    assert list(repeats.without(events)) == events


def test_the_end_of_a_replica_does_not_say_again_what_its_agent_said():
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
def test_no_words_are_lost(written):
    events = [log(replica, text) for replica, text in written]
    shown = all_of(*events)
    assert {text for _, text in written} <= {text for _, text in shown}
    for replica in {replica for replica, _ in written}:
        own = [text for name, text in shown if name == replica]
        rest = iter(text for name, text in written if name == replica)
        assert all(text in rest for text in own)  # in its own order
