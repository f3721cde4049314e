"""The card of a job in a notebook, without a kernel: what is published, how often, and escaped."""

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from view.conftest import ANY_EVENTS

from k8sjob.contract import Event
from k8sjob.view import views as module
from k8sjob.view.views import NotebookView, PlainView, close_with_report, notebook, viewer


@pytest.fixture
def published():
    return []


@pytest.fixture
def publish(published):
    def show(data, _metadata, *, transient, update):
        published.append((data["text/html"], transient["display_id"], update))

    return show


def test_a_kernel_gets_a_card_and_other_shells_lines(monkeypatch, publish):
    assert notebook() is None
    terminal = SimpleNamespace(get_ipython=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert isinstance(viewer("auto", job="x"), PlainView)
    shell = SimpleNamespace(kernel=None, display_pub=SimpleNamespace(publish=publish))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert isinstance(viewer("auto", job="x"), NotebookView)
    assert isinstance(viewer("plain", job="x"), PlainView)


def test_a_card_is_drawn_in_its_place_and_not_too_often(publish, published, life, capsys):
    view = NotebookView(publish, "digits")
    for event in life:
        for _ in range(50):
            view.show([event])
    close_with_report(view)
    view.close()
    assert 2 <= len(published) < 10
    assert len({shown[1] for shown in published}) == 1
    assert [shown[2] for shown in published] == [False] + [True] * (len(published) - 1)
    assert capsys.readouterr().out == ""


def test_a_card_shows_the_training_and_the_end_of_its_output(publish, published, progress):
    view = NotebookView(publish, "digits")
    lines = [Event("log", {"text": f"line {at}"}, replica="master-0") for at in range(5000)]
    tests = [Event("metrics", {"test_loss": value}, 1.0, "master-0") for value in (0.7, 0.6)]
    trained = [progress(step=5), tests[0], progress(step=10), tests[1]]
    view.show([Event("job", {"state": "Running"}), *trained, *lines])
    view.close()
    page = published[-1][0]
    assert "epoch 1/2  step 10/20  loss 0.5" in page
    assert page.count("<polyline") == 2
    assert "test_loss: 0.7 to 0.6, lowest 0.6" in page
    assert "line 4999" in page
    assert "line 4800" not in page
    assert "<details open>" in page
    view.show([Event("job", {"state": "Succeeded"})])
    view.close()
    assert "<details open>" not in published[-1][0]
    assert len(page) < 20_000


def test_a_card_of_a_failure_says_why(publish, published, failure):
    view = NotebookView(publish, "digits")
    view.show(failure)
    view.close()
    assert "why:" in published[-1][0]
    assert "next:" in published[-1][0]


@given(ANY_EVENTS)
def test_no_event_becomes_markup_or_breaks_a_card(events):
    published = []
    view = NotebookView(lambda data, _meta, **_: published.append(data["text/html"]), "<script>")
    view.show(events)
    view.close()
    for page in published:
        page.encode()
        for mark in ("<script", "<img", "<b onload", "\x1b", "\u202e", "\x00"):
            assert mark not in page


def test_a_card_that_did_not_change_is_not_sent_again(publish, published, monkeypatch):
    monkeypatch.setattr(module, "DRAW_S", 0.0)
    view = NotebookView(publish, "digits")
    done = {"state": "Succeeded", "created": 1.0, "started": 2.0, "finished": 3.0}
    view.show([Event("job", done)])
    before = len(published)
    for _ in range(10):
        view.show([])
    assert len(published) == before
