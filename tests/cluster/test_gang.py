"""Gangs of the coscheduling plugin; those of Volcano are recorded, see situations/volcano.yaml."""

import time

import pytest

from k8sjob.observe.findings import findings

GPUS = 8
UNSEEN = "the scheduler 'coscheduling' has not looked at its PodGroup"


@pytest.fixture
def explained(desk, eventually):
    """Submits a job of two nodes with a gang, and waits until `why` says so; returns the id."""

    def explain(name, words, gpus, **fields):
        gang = {"scheduler": "coscheduling"}
        file = desk.file(name=name, gang=gang, resources={"gpus": gpus, "cpu": "20m"}, **fields)
        begun = time.monotonic()
        _, warnings = desk.call("submit", str(file))
        assert "gang" not in warnings

        def finding():
            snapshot = desk.backend.snapshot(desk.backend.find(name))
            return next((f for f in findings(desk.backend, snapshot) if words in f.message), None)

        explanation = eventually(finding, words)
        assert time.monotonic() - begun < 30
        return explanation.id

    return explain


def test_why_a_gang_waits(bed, coscheduling, desk, explained, eventually):
    bed.fake_gpus(GPUS)
    file = desk.file(name="holder", gang={"scheduler": "coscheduling"}, resources={"gpus": 2})
    desk.call("submit", str(file))
    eventually(lambda: desk.status("holder").state == "Running", "a gang that fits")
    assert explained("waits", "all nodes together lack 2 nvidia.com/gpu", 3) == "queued"
    assert explained("large", "10 nvidia.com/gpu of 8", 5) == "no-queue"
    lost = {"node_selector": {"gpu": "none"}}
    assert explained("lost", "lacks the labels that it requires", 1, **lost) == "unschedulable"
    bed.kill("coscheduling")
    assert explained("unseen", UNSEEN, 1) == "no-queue"
    bed.start("coscheduling")
    bed.fake_gpus(0)


def test_a_gang_scheduler_that_is_not_there(desk):
    file = desk.file(gang={"scheduler": "volcano", "queue": "research"})
    _, warnings = desk.call("submit", str(file))
    assert "its gang scheduler is not installed" in warnings
