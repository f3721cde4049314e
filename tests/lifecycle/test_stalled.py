"""Trouble that stands is told, once, and what passes is not."""

import pytest

from k8sjob.contract import EventKind
from k8sjob.lifecycle.status import job_status
from k8sjob.lifecycle.watch import Stalled, watch

ABSENT = {"reason": "CreateContainerConfigError", "message": 'secret "hf" not found'}


@pytest.fixture
def stuck(snapshot, make_pod):
    """A job whose Worker lacks its secret."""
    pods = [make_pod("master-0", running={}), make_pod("worker-0", "Pending", waiting=ABSENT)]
    return snapshot("Created", pods=pods, replicas={"Master": 1, "Worker": 1})


@pytest.fixture
def well(snapshot, make_pod):
    """The same, as it runs at last, after the Worker had crashed once."""
    crash = {"exitCode": 1, "finishedAt": "2026-01-01T00:05:00Z"}
    pods = [make_pod("master-0", running={}), make_pod("worker-0", last=crash, running={})]
    return snapshot("Running", pods=pods, replicas={"Master": 1, "Worker": 1})


def looks(standing, *moments):
    """What is told at which second."""
    return [
        (now, event.data)
        for now, seen in moments
        for event in standing.look(seen, job_status(seen), {}, now)
    ]


def test_what_stands_is_told_once_with_its_next_step(stuck):
    ((now, said),) = looks(Stalled(10), *((second, stuck) for second in range(60)))
    assert now == 10
    assert said["reason"] == "secret"
    assert said["message"].startswith("worker-0: there is no secret 'hf' in namespace ns; next: ")


def test_what_passes_is_not_told(stuck, well):
    turns = [well if second % 8 == 0 else stuck for second in range(60)]
    assert looks(Stalled(10), *enumerate(turns)) == []


def test_the_past_of_a_job_that_runs_is_not_its_trouble(well):
    assert looks(Stalled(0), (0, well), (1, well)) == []


@pytest.mark.parametrize("state", ["Suspended", "Failed"])
def test_what_the_state_says_is_not_said_again(snapshot, state):
    seen = snapshot("Created", state)
    assert looks(Stalled(0), (0, seen), (1, seen)) == []


def test_a_silent_operator_is_told_though_nothing_ever_changes(script, snapshot, ref):
    events = watch(script([snapshot()]), ref, patience=0.2)
    first = next(event for event in events if event.kind == EventKind.WARNING)
    events.close()
    assert first.data["reason"] == "operator-silent"
    assert "the training operator has not touched the job" in first.data["message"]


def test_a_watch_that_is_patient_says_nothing_of_it(script, snapshot, ref):
    backend = script([snapshot(), snapshot("Succeeded")])
    assert [e for e in watch(backend, ref, patience=60) if e.kind == EventKind.WARNING] == []
