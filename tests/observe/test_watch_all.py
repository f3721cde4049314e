import copy

import pytest

from k8sjob.kube.client.listwatch import Change, Kind
from k8sjob.kube.client.transport import ApiError
from k8sjob.observe.watch_all import watch_all


@pytest.fixture
def change(make_job):
    """A change of a job: change("ADDED", "a", "Running", active=2)."""

    def make(kind, name, *conditions, active=0):
        job = make_job(*conditions, replicaStatuses={"Worker": {"active": active}})
        job["metadata"] |= {"name": name, "uid": f"uid-{name}"}
        return Change(Kind(kind), job)

    return make


def states(events):
    return [(e.data["name"], e.data["state"]) for e in events if e.kind == "job"]


def test_jobs_that_go_on_and_then_whatever_changes(change):
    changes = [
        change("ADDED", "a", "Running", active=2),
        change("ADDED", "over", "Succeeded"),
        Change(Kind.SYNCED),
        change("MODIFIED", "a", "Running", active=2),  # another field
        change("MODIFIED", "a", "Running", active=3),
        change("ADDED", "b", "Created"),
        change("MODIFIED", "over", "Succeeded"),
        change("MODIFIED", "a", "Failed:BackoffLimitExceeded:too often"),
        change("DELETED", "b"),
    ]
    events = list(watch_all(changes))
    assert states(events) == [
        ("a", "Running"),
        ("a", "Running"),
        ("b", "Created"),
        ("a", "Failed"),
        ("b", "Deleted"),
    ]
    assert events[0].data["counts"] == {"Running": 2, "Pending": 1}
    assert events[0].data["namespace"] == "ns"
    assert events[3].data["message"] == "too often"
    assert (events[4].data["exit_code"], events[4].data["counts"]) == (103, {})


def test_a_job_of_the_same_name_is_another_one(change):
    second = copy.deepcopy(change("ADDED", "a", "Running"))
    second.object["metadata"]["uid"] = "second"
    changes = [change("ADDED", "a", "Running"), change("DELETED", "a"), second]
    assert states(watch_all([Change(Kind.SYNCED), *changes])) == [
        ("a", "Running"),
        ("a", "Deleted"),
        ("a", "Running"),
    ]


def test_a_lost_connection_is_said(change):
    changes = [
        Change(Kind.SYNCED),
        Change(Kind.LOST, why=ApiError("connection refused")),
        Change(Kind.RESTORED),
    ]
    lost, back = (event.data["message"] for event in watch_all(changes))
    assert lost == "the connection to the cluster is lost, trying again: connection refused"
    assert back == "the connection to the cluster is back after 0 s"


def test_what_is_over_takes_no_memory(change):
    import tracemalloc

    def lives():
        yield Change(Kind.SYNCED)
        for number in range(3000):
            name = f"job-{number}"
            yield change("ADDED", name, "Running")
            yield change("MODIFIED", name, "Succeeded")
            yield change("DELETED", name)

    events = watch_all(lives())
    for _ in range(900):
        next(events)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    assert sum(1 for _ in events) == 8100
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000
