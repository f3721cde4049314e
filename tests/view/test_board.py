"""Many jobs: a row for each change."""

import io
import json
import re
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from view.conftest import ANY_DATA

from k8sjob.contract import Event, EventKind
from k8sjob.view.follow import follow_all
from k8sjob.view.lines import JobRows
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


def test_people_get_a_row_for_each_change():
    out = io.StringIO()
    JobRows(out).show(LIFE)
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


KEYS = ("namespace", "name", "state", "counts", "message", "created", "started", "finished")
DATA = st.fixed_dictionaries(dict.fromkeys(KEYS, ANY_DATA))


@given(st.lists(DATA, max_size=5))
def test_whatever_a_cluster_says_is_text(found):
    out = io.StringIO()
    JobRows(out).show([Event(EventKind.JOB, data) for data in found])
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", out.getvalue())


def test_many_jobs_are_followed_until_the_reader_leaves(capsys):
    assert follow_all(iter(LIFE), output="plain") == 0
    assert capsys.readouterr().out.count("\n") == 4
    with pytest.raises(KeyError):
        follow_all(_broken(), output="plain")


def _broken():
    yield LIFE[0]
    raise KeyError("the apiserver")
