"""What the attempts of a job did, and what happened in them."""

from datetime import timedelta

from trainings import BEGIN, at, finished, job, line, met, pod, step

from k8sjob.backends.api import Snapshot
from k8sjob.contract import Event, EventKind
from k8sjob.observe.attempts import attempts
from k8sjob.targets.jobs import job_of


def told(made, pods, lines, now=1000):
    """The phases of each attempt with their seconds, and its marks."""
    snapshot = Snapshot(job_of(made), pods, at=BEGIN + timedelta(seconds=now))
    begin = BEGIN.timestamp()
    for attempt in attempts(snapshot, lines):
        phases = [(s.phase, s.begin - begin, s.end - begin, s.waits) for s in attempt.segments]
        yield phases, [(mark.kind, mark.time - begin, mark.text) for mark in attempt.marks]


def test_a_job_that_failed_once_and_was_trained_to_its_end():
    master = pod("master-0", 100, 330)
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": at(210)}}
    master["status"]["containerStatuses"][0] |= {"lastState": killed, "restartCount": 1}
    saved = Event(EventKind.CHECKPOINT, {"path": "/checkpoints/step-1"}, 1.0)
    first = [line(120), met(140), step(150, 1), line(155, saved), step(180, 2, wait=0.5), line(200)]
    second = [line(230, attempt=1), met(240, 1), step(250, 3, 1), step(260, 4, 1), finished(270, 1)]
    before, after = told(job(end=330, workers=0), [master], [*first, *second])
    assert before == (
        [
            ("queued", 0, 100, 0),
            ("pulling", 100, 120, 0),
            ("importing", 120, 140, 0),
            ("first step", 140, 150, 0),
            ("training", 150, 200, 0.3),
            ("restart", 200, 230, 0),
        ],
        [("checkpoint", 155, "step-1"), ("fault", 210, "master-0: OOMKilled, exit code 137")],
    )
    assert [phase for phase, *_ in after[0]] == ["importing", "first step", "training", "stop"]


def test_a_job_without_output_waits_for_a_node_or_is_suspended():
    ((phases, _),) = told(job(state="Created"), [], [], now=60)
    assert phases == [("queued", 0, 60, 0)]
    suspended = job(end=40, state="Suspended")
    suspended["status"].pop("completionTime")
    suspended["metadata"]["generation"] = 2
    ((phases, _),) = told(suspended, [], [line(10)], now=60)
    assert phases == [("unknown", 0, 10, 0), ("running", 10, 40, 0), ("suspended", 40, 60, 0)]
