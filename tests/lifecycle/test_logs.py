from datetime import UTC, datetime

import pytest

from k8sjob.errors import BackendError, JobNotFound
from k8sjob.lifecycle.logs import instant, last_lines, logs, replica_of_rank, select


@pytest.fixture
def backend(script, snapshot, line):
    lines = [
        line("master-0", "m0", 0),
        line("worker-0", "a", 1),
        line("master-0", "m2", 2),
        line("worker-0", "b", 3, attempt=1),
        line("worker-1", "c", 4),
    ]
    return script([snapshot("Running")], lines)


def texts(lines):
    return [line.text for line in lines]


def test_all_replicas_in_the_order_of_time(backend, ref):
    assert texts(logs(backend, ref)) == ["m0", "a", "m2", "b", "c"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"replicas": ["master-0"]}, ["m0", "m2"]),
        ({"replicas": ["Worker"]}, ["a", "b", "c"]),
        ({"ranks": [1]}, ["a", "b"]),
        ({"ranks": [0], "replicas": ["worker-1"]}, ["m0", "m2", "c"]),
        ({"tail": 1}, ["m2", "b", "c"]),
        ({"tail": 0}, []),
        ({"since": datetime(2026, 1, 1, 0, 0, 3, tzinfo=UTC)}, ["b", "c"]),
        ({"previous": True, "replicas": ["worker-0"]}, ["a"]),
    ],
)
def test_choices(backend, ref, options, expected):
    assert texts(logs(backend, ref, **options)) == expected
    followed = logs(backend, ref, follow=True, **options)
    assert sorted(texts(followed)) == sorted(expected)


def test_what_is_not_there_is_refused_by_name(backend, ref, script):
    with pytest.raises(BackendError, match="'worker-7' is no replica of this job; it has master-0"):
        list(logs(backend, ref, replicas=["worker-7"]))
    with pytest.raises(BackendError, match="rank 3 is not in this job; 3 replicas x 1 processes"):
        list(logs(backend, ref, ranks=[3]))
    with pytest.raises(JobNotFound):
        list(logs(script([]), ref))


def test_an_error_of_one_replica_is_an_error_of_the_command(backend, ref):
    backend.errors["worker-1"] = BackendError("no permission")
    for follow in (False, True):
        with pytest.raises(BackendError, match="no permission"):
            list(logs(backend, ref, follow=follow))
    assert set(last_lines(backend, ref, backend.snapshot(ref).job)) == {"master-0", "worker-0"}


@pytest.mark.parametrize(
    ("nproc", "rank", "replica"),
    [
        ("1", 2, "worker-1"),
        ("4", 3, "master-0"),
        ("4", 4, "worker-0"),
        ("4", 11, "worker-1"),
        ("auto", 1, "worker-0"),
    ],
)
def test_the_replica_of_a_rank(make_job, nproc, rank, replica):
    assert replica_of_rank(make_job(nproc=nproc), rank) == replica


def test_select_keeps_the_jobs_order(make_job):
    assert select(make_job(), ["worker-1", "master-0"]) == ("master-0", "worker-1")


@pytest.mark.parametrize(
    "text",
    ["2026-01-01T00:00:01Z", "2026-01-01T00:00:01.000000000Z", "2026-01-01T00:00:01.0000001Z"],
)
def test_instant(text):
    assert instant(text) == datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert instant("2026-01-01T00:00:01.25Z").microsecond == 250_000
