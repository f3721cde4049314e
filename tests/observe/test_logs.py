import json
from datetime import UTC, datetime

import pytest
from observed import REF, WORKER, Script, ended, line, make_job, make_pod, snapshot

from k8sjob.backends.api import Snapshot
from k8sjob.contract import CONFIG_ENV
from k8sjob.errors import BackendError
from k8sjob.observe import logs as observe_logs
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.logs import (
    MOST_AT_ONCE,
    TAIL_LINES,
    last_lines,
    replica_of_rank,
    select,
)
from k8sjob.observe.status import reporting_replica
from k8sjob.targets.jobs import job_of


@pytest.fixture
def backend():
    lines = [
        line("master-0", "m0", 0),
        line("worker-0", "a", 1),
        line("master-0", "m2", 2),
        line("worker-0", "b", 3, attempt=1),
        line("worker-1", "c", 4),
    ]
    return Script([snapshot("Running")], lines)


def logs(backend, replicas=(), ranks=(), **options):
    chosen = select(backend.snapshot(REF).job, replicas, ranks)
    return observe_logs.logs(backend, REF, chosen, **options)


def texts(lines):
    return [line.text for line in lines]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["m0", "a", "m2", "b", "c"]),
        ({"replicas": ["master-0"]}, ["m0", "m2"]),
        ({"replicas": ["Worker"]}, ["a", "b", "c"]),
        ({"ranks": [1]}, ["a", "b"]),
        ({"ranks": [0], "replicas": ["worker-1"]}, ["m0", "m2", "c"]),
        ({"tail": 1}, ["m2", "b", "c"]),
        ({"tail": 0}, []),
        ({"since": datetime(2026, 1, 1, 0, 0, 3, tzinfo=UTC)}, ["b", "c"]),
        ({"fits": lambda line: line.text in "m0ac"}, ["m0", "a", "c"]),
        ({"fits": lambda line: line.text in "m0ac", "tail": 1}, ["m0", "a", "c"]),
        ({"previous": True, "replicas": ["worker-0"]}, ["a"]),
    ],
)
def test_choices(backend, options, expected):
    assert texts(logs(backend, **options)) == expected
    followed = logs(backend, follow=True, **options)
    assert sorted(texts(followed)) == sorted(expected)


def test_what_is_not_there_is_refused_by_name(backend):
    with pytest.raises(BackendError, match="'worker-7' is not a replica of this job; it has"):
        list(logs(backend, replicas=["worker-7"]))
    with pytest.raises(BackendError, match="rank 3 is not in this job; 3 replicas x 1 process"):
        list(logs(backend, ranks=[3]))


def test_an_error_of_one_replica_is_an_error_of_the_command(backend):
    backend.errors["worker-1"] = BackendError("no permission")
    for follow in (False, True):
        with pytest.raises(BackendError, match="no permission"):
            list(logs(backend, follow=follow))
    assert set(last_lines(backend, backend.snapshot(REF))) == {"master-0", "worker-0"}


def test_no_more_is_requested_than_is_wanted(backend):
    since = datetime(2026, 1, 1, tzinfo=UTC)
    list(logs(backend, tail=2, since=since))
    assert {asked[1:] for asked in backend.asked} == {(False, 2, since)}
    backend.asked.clear()
    last_lines(backend, backend.snapshot(REF))
    assert {asked[1:] for asked in backend.asked} == {(False, TAIL_LINES, None)}


def test_following_the_last_lines_continues_after_them():
    lines = [line("worker-0", text, second) for text, second in (("a", 1), ("b", 2), ("c", 2))]
    backend = Script([snapshot("Running", replicas=WORKER)], lines)
    followed = logs(backend, follow=True, tail=2)
    assert [next(followed).text for _ in range(2)] == ["b", "c"]
    # Written meanwhile: in the same instant, later, and by a new pod on a slow clock.
    backend.lines += [line("worker-0", text, n) for text, n in (("d", 2), ("e", 3), ("f", 1))]
    assert texts(followed) == ["d", "e", "f"]
    begin = datetime.fromisoformat(lines[-1].timestamp)
    assert backend.asked[-1] == ("worker-0", True, None, begin)


def test_following_from_now_on_only():
    backend = Script([snapshot("Running", replicas=WORKER)], [line("worker-0", "old", 1)])
    backend.errors["worker-0"] = BackendError("no permission")
    with pytest.raises(BackendError, match="no permission"):
        list(logs(backend, follow=True, tail=0))
    backend.errors.clear()
    assert list(logs(backend, follow=True, tail=0)) == []


@pytest.fixture
def many():
    """A job of hundreds of replicas, each with two lines."""
    names = [f"worker-{n}" for n in range(10 * MOST_AT_ONCE)]
    lines = [line(name, f"{name} {when}", when) for when in (1, 2) for name in names]
    return Script([snapshot("Running", replicas={"Worker": len(names)})], lines)


def test_of_hundreds_of_replicas_some_are_followed(many):
    followed = {line.replica for line in logs(many, follow=True)}
    assert followed == {f"worker-{n}" for n in range(MOST_AT_ONCE)}
    wanted = [f"worker-{n}" for n in range(40, 50)]
    assert {line.replica for line in logs(many, follow=True, replicas=wanted)} == set(wanted)


def test_hundreds_of_replicas_come_one_after_the_other(many):
    lines = list(logs(many))
    assert lines[:3] == [many.lines[0], many.lines[10 * MOST_AT_ONCE], many.lines[1]]
    assert len(lines) == len(many.lines)
    ends = list(logs(many, tail=1))
    assert [line.text for line in ends] == [line.text for line in many.lines[10 * MOST_AT_ONCE :]]


def test_the_last_lines_of_those_that_failed_first_are_read(many):
    failures = [(n, 1, "05:00") for n in range(200)]
    failures += [(250, 1, "04:59"), (300, 137, "06:00")]
    pods = [
        make_pod(f"worker-{n}", "Failed", terminated=ended(code, time=time))
        for n, code, time in failures
    ]
    job = many.snapshot(REF).job
    read = last_lines(many, Snapshot(job, pods))
    assert len(read) == MOST_AT_ONCE
    assert read["worker-250"] == ["worker-250 1", "worker-250 2"]
    assert "worker-300" in read  # as the only one with this exit code
    with pytest.raises(BackendError, match=r"it has worker-0, worker-1 and 318 more$"):
        select(job, ["master"])


def test_what_was_written_after_a_restart_does_not_explain_it():
    error = ["Traceback (most recent call last):", '  File "x"', "KeyError: 'lr'"]
    lines = [line("worker-0", text, 50) for text in error]
    lines.append(line("worker-0", "epoch 0 loss 0.5", 55, 1))
    pod = make_pod("worker-0", running={}, last=ended(1, time="00:50"))
    seen = snapshot("Running", pods=[pod], replicas=WORKER, deadline=None)
    found = last_lines(Script([seen], lines), seen)
    (finding,) = diagnose(seen, found)
    assert "exit code 1: KeyError: 'lr'" in finding.message
    (finding,) = diagnose(seen, {"worker-0": found["worker-0"][3:]})  # where it is not there
    assert finding.message.startswith("worker-0: exit code 1, ")


@pytest.mark.parametrize(
    ("nproc", "rank", "replica"),
    [("4", 3, "master-0"), ("4", 11, "worker-1"), ("auto", 1, "worker-0")],
)
def test_the_replica_of_a_rank(nproc, rank, replica):
    assert replica_of_rank(job_of(make_job(nproc=nproc)), rank) == replica


@pytest.fixture
def served():
    """A coordinator and two servers in the Master, two Workers with two trainers each."""
    job = make_job(nproc="2")
    config = {"strategy": "parameter_server", "options": {"servers": 2}}
    env = [{"name": CONFIG_ENV, "value": json.dumps(config)}]
    template = {"spec": {"containers": [{"name": "pytorch", "env": env}]}}
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        replica["template"] = template
    return job_of(job)


def test_the_processes_of_a_master_that_serves_are_counted(served):
    found = [replica_of_rank(served, rank) for rank in range(7)]
    assert found == ["master-0"] * 3 + ["worker-0"] * 2 + ["worker-1"] * 2
    assert [reporting_replica(served), reporting_replica(job_of(make_job()))] == [
        "worker-0",
        "master-0",
    ]
    with pytest.raises(BackendError, match="3 processes of master-0 and 2 x 2 others give ranks 0"):
        replica_of_rank(served, 7)
