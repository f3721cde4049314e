"""Many jobs: rows for a pipe, a table for a terminal."""

import io
import json
import re
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from view.conftest import ANY_DATA

from k8sjob.contract import Event, EventKind
from k8sjob.view.follow import follow_all
from k8sjob.view.live import LiveBoard, PlainBoard
from k8sjob.view.views import board


def job(name, state, counts=None, now=0.0, **data):
    found = {"namespace": "ns", "name": name, "state": state, "counts": counts or {}}
    return Event(EventKind.JOB, found | data, now)


LIFE = [
    job("a", "Running", {"Running": 3, "Pending": 1}, started=935.0, now=1e3),
    job("b", "Created", {"Pending": 2}),
    Event(EventKind.WARNING, {"message": "the connection is lost"}),
    job("a", "Failed", {}, started=0.0, finished=65.0, message="the Master failed"),
]


def test_a_pipe_gets_a_row_a_change():
    out = io.StringIO()
    PlainBoard(out).show(LIFE)
    assert out.getvalue().splitlines() == [
        "ns/a                      Running     3 Running, 1 Pending        1:05",
        "ns/b                      Created     2 Pending",
        "warning: the connection is lost",
        "ns/a                      Failed                                  1:05  the Master failed",
    ]


def test_programs_get_json(capsys):
    with closing(board("json")) as view:
        view.show(LIFE)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == ["job", "job", "warning", "job"]
    assert lines[0]["data"]["counts"] == {"Running": 3, "Pending": 1}


def drawn(events, width=80, height=24):
    """The last lines that a terminal shows, and those that scrolled by above them."""
    terminal = io.StringIO()
    view = LiveBoard(Console(file=terminal, width=width, height=height, force_terminal=True))
    view.show(events)
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", terminal.getvalue())
    return plain.replace("\r", "").splitlines()


def test_a_terminal_shows_those_that_continue_and_ends_scroll_by():
    lines = drawn(LIFE)
    assert lines[0] == "warning: the connection is lost"
    assert lines[1].startswith("ns/a")
    assert "Failed" in lines[1]
    assert lines[2:] == ["1 Created, 1 Failed", "ns/b                      Created     2 Pending"]


def test_a_name_that_scrolls_by_is_whole():
    name = "a-name-of-more-than-twenty-four-columns"
    assert drawn([job(name, "Failed")], width=30)[0].startswith(f"ns/{name}  Failed")


def test_more_jobs_than_lines_are_counted_and_those_that_stand_still_come_first():
    events = [job(f"job-{n:03}", "Running", {"Running": 1}) for n in range(100)]
    events[77] = job("job-077", "Restarting")
    title, first, second, *_ = lines = drawn(events, height=10)
    assert title == "99 Running, 1 Restarting; 94 more"
    assert first.startswith("ns/job-077")
    assert second.startswith("ns/job-000")
    assert len(lines) == 7


def test_a_narrow_terminal_shows_states_and_how_many_more_there_are():
    events = [job(f"resnet-{n:03}-of-the-sweep", "Running", {"Running": 1}) for n in range(100)]
    events[7] = job("short", "Restarting")
    title, first, second, *_ = lines = drawn(events, width=30, height=10)
    assert title == "99 Running, 1 Resta…; 94 more"
    assert first == "ns/short           Restarting"
    assert second.startswith("ns/resnet-000-of…  Running")
    assert all(cell_len(line) < 30 for line in lines)


def test_a_deleted_job_that_had_ended_is_not_counted_again():
    lines = drawn([*LIFE, job("a", "Deleted"), job("b", "Deleted")])
    assert lines[-1] == "1 Failed, 1 Deleted"


KEYS = ("namespace", "name", "state", "counts", "message", "created", "started", "finished")
DATA = st.fixed_dictionaries(dict.fromkeys(KEYS, ANY_DATA))


@given(st.lists(DATA, max_size=5), st.integers(10, 150), st.integers(4, 40))
def test_whatever_a_cluster_says_is_text_within_the_terminal(found, width, height):
    events = [Event(EventKind.JOB, data) for data in found]
    out = io.StringIO()
    PlainBoard(out).show(events)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", out.getvalue())
    terminal = io.StringIO()
    view = LiveBoard(Console(file=terminal, width=width, height=height))
    view.show(events)
    rows = [row.plain for row in view._rows(width, height)]
    assert len(rows) <= max(height - 3, 1)
    assert all(cell_len(row) < width and "\n" not in row and "\x1b" not in row for row in rows)


def test_many_jobs_are_followed_until_the_reader_leaves(capsys):
    assert follow_all(iter(LIFE), output="plain") == 0
    assert capsys.readouterr().out.count("\n") == 4
    with pytest.raises(KeyError):
        follow_all(_broken(), output="plain")


def _broken():
    yield LIFE[0]
    raise KeyError("the apiserver")
