"""Where running jobs stand, by the end of one replica's output."""

import json
import time
from types import SimpleNamespace

import pytest
import trainings

from k8sjob.backends.api import JobRef, LogLine, Snapshot
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError
from k8sjob.observe.logs import MOST_AT_ONCE, TAIL_LINES
from k8sjob.targets.jobs import job_of
from k8sjob.view import json_output as module
from k8sjob.view.json_output import progress_of


def job(name="job", state="Running"):
    return Snapshot(job_of(trainings.job(end=1, state=state, name=name)))


def written(*events):
    lines = [event.encode() if isinstance(event, Event) else event for event in events]
    return [LogLine("master-0", 0, "2026-01-01T00:00:00Z", line) for line in lines]


def backend(*events):
    """One whose jobs have all written the same; it counts what it was asked."""
    asked = []

    def logs(ref, replica, *, tail, stop, pods):
        asked.append((ref.name, replica, tail))
        yield from written(*events)

    return SimpleNamespace(logs=logs, asked=asked)


def only(*events):
    found = progress_of([(backend(*events), job())])
    return found.get(JobRef("job", "team", "job"))


def starting(phase, **data):
    return Event(EventKind.STARTING, {"phase": phase, **data}, time.time())


def now(event):
    return Event(event.kind, event.data, time.time())


def test_the_newest_progress_is_shown(progress):
    found = only("a line", now(progress(0, 1)), "another", now(progress(1, 5, loss=0.25)))
    assert str(found) == "epoch 2/2  step 5/20  loss 0.25  1,234 samples/s  ETA 1:15"
    data = found.as_dict()
    assert data.pop("time") == pytest.approx(time.time(), abs=60)
    position = {"phase": "training", "epoch": 2, "epochs": 2, "step": 5, "steps": 20, "restarts": 0}
    assert data.pop("metrics") == {"loss": 0.25}
    assert data == {**position, "loss": 0.25, "samples_per_s": 1234.5, "eta_s": 75.0}


def test_numbers_that_json_cannot_express_are_null(progress):
    found = only(now(progress(1, 5, loss=float("nan"), eta_s=float("inf"))))
    assert "loss nan" in str(found)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["loss"] is None


def test_what_keeps_it_from_training_is_shown():
    assert str(only(starting("importing"))) == "importing torch"
    met = Event(EventKind.STARTED, {"world_size": 3, "backend": "gloo"}, time.time())
    assert str(only(starting("importing"), met)) == "3 processes joined: over gloo"
    assert only(starting("importing")).as_dict()["phase"] == "importing torch"


def test_old_numbers_have_their_age_and_a_script_that_tells_nothing_has_none(progress):
    old = str(only(progress(1, 5, time=time.time() - 125)))
    assert old.endswith("(2:05 ago)")
    assert "ETA" not in old
    assert only("a line", "another") is None


def test_only_jobs_that_run_are_read_and_not_too_many(progress):
    place = backend(now(progress()))
    assert progress_of([(place, job(state=state)) for state in ("Created", "Succeeded")]) == {}
    assert place.asked == []
    assert len(progress_of([(place, job(f"j{n}")) for n in range(99)])) == MOST_AT_ONCE
    assert sorted(place.asked) == sorted(
        (f"j{n}", "master-0", TAIL_LINES) for n in range(MOST_AT_ONCE)
    )


def test_a_job_that_has_succeeded_ends_with_its_loss_and_first_metrics(progress):
    logged = {"epoch": 2, "test_loss": 0.31, "best": "yes", "lr": 0.1}
    place = backend(now(progress(1, 20, loss=0.25)), Event(EventKind.METRICS, logged, time.time()))
    jobs = [(place, job("done", "Succeeded")), *((place, job(f"j{n}")) for n in range(31))]
    names = {ref.name: ended for ref, ended in progress_of(jobs, succeeded=True).items()}
    ended = names["done"]
    assert str(ended) == "loss 0.25  test_loss 0.31  best yes"
    data = ended.as_dict()
    assert (data["phase"], data["eta_s"], data["metrics"]["lr"]) == ("ended", None, 0.1)
    # No more are read than of running ones, and those come first.
    jobs.append((place, job("j31")))
    assert "done" not in {ref.name for ref in progress_of(jobs, succeeded=True)}


def test_a_job_that_cannot_be_read_hides_no_other(progress, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.5)

    def fails(*_, **__):
        raise BackendError("may not be read")

    def hangs(*_, stop, **__):
        stop.wait(60)
        return iter(())

    places = [SimpleNamespace(logs=fails), SimpleNamespace(logs=hangs), backend(now(progress()))]
    jobs = [(place, job(f"j{n}")) for n, place in enumerate(places)]
    assert [ref.name for ref in progress_of(jobs)] == ["j2"]
