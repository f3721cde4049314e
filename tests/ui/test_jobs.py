"""The list of a cluster's jobs, kept by what its watch reports."""

import queue
import time
from types import SimpleNamespace

import pytest
from inmemory import JobsInMemory
from ui.conftest import job

from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError
from k8sjob.kube.client.listwatch import CollectionChange, Kind
from k8sjob.observe import training
from k8sjob.ui import jobs as module
from k8sjob.ui import rows as rows_module
from k8sjob.ui.details import JobNews
from k8sjob.ui.jobs import Jobs
from k8sjob.ui.rows import Rows


class Cluster(JobsInMemory):
    """A cluster whose watch reports what a test puts into it; an error ends the watch."""

    namespace = "team"
    transport = SimpleNamespace(skew=3600.4)

    def __init__(self):
        super().__init__()
        self.changes = queue.Queue()

    def watch_jobs(self, *, stop, all_namespaces):
        assert not all_namespaces
        while not stop.is_set():
            try:
                change = self.changes.get(timeout=0.02)
            except queue.Empty:
                continue
            if isinstance(change, BackendError):
                raise change
            yield change

    def put(self, kind, *names, why=""):
        for name in names or [""]:
            self.changes.put(CollectionChange(kind, job(name) if name else {}, why=why))


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def listed(cluster, monkeypatch):
    """`listed()` is what a reader has seen by now; with an argument it waits until that holds."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)
    jobs = Jobs(None, cluster)
    jobs.start()
    seen, names, state = {}, set(), {}

    def look(until):
        deadline = time.monotonic() + 10
        while True:
            news = jobs.news(seen)
            names.difference_update(key.removeprefix("cluster:uid-") for key in news["gone"])
            names.update(row["name"] for row in news["jobs"])
            state.update(news)
            if until(names, state):
                return
            assert time.monotonic() < deadline, (names, state)
            time.sleep(0.01)

    look.jobs = jobs
    yield look
    jobs.close()


def test_jobs_come_and_go(cluster, listed):
    listed(lambda names, state: names == set() and state["unread"] == ["cluster"])
    cluster.put(Kind.ADDED, "one", "two")
    cluster.put(Kind.SYNCED)
    listed(lambda names, state: names == {"one", "two"} and state["unread"] == [])
    news = listed.jobs.news({})  # and the page counts their ages by the clock of the cluster
    assert [(row["at"], row["skew"]) for row in news["jobs"]] == [(None, 3600)] * 2
    cluster.put(Kind.DELETED, "one")
    listed(lambda names, _: names == {"two"})


def test_a_lost_connection_is_named_until_it_is_back(cluster, listed):
    cluster.put(Kind.ADDED, "one")
    cluster.put(Kind.SYNCED)
    cluster.put(Kind.LOST, why="connection refused")
    lost = "the connection is lost, trying again: connection refused"
    listed(lambda names, state: names == {"one"} and state["problems"] == {"cluster": lost})
    cluster.put(Kind.RESTORED)
    listed(lambda names, state: names == {"one"} and state["problems"] == {})


def test_after_a_refusal_the_list_is_read_again(cluster, listed):
    cluster.put(Kind.ADDED, "one", "two")
    cluster.put(Kind.SYNCED)
    cluster.changes.put(BackendError("you cannot list pytorchjobs"))
    refused = {"cluster": "you cannot list pytorchjobs"}
    listed(lambda names, state: names == {"one", "two"} and state["problems"] == refused)
    cluster.put(Kind.ADDED, "two", "three")
    cluster.put(Kind.SYNCED)
    listed(lambda names, state: names == {"two", "three"} and state["problems"] == {})


def test_a_job_that_has_ended_has_no_time_left(cluster, listed):
    report = {"epoch": 0, "step": 1, "loss": 0.5, "eta_s": 60.0}
    cluster.write("one", Event(EventKind.PROGRESS, report, time.time() + 3600))
    cluster.put(Kind.ADDED, "one")
    cluster.put(Kind.SYNCED)
    listed(lambda names, _: names == {"one"})
    rows, key = Rows(listed.jobs), "cluster:uid-one"
    assert rows.of([key])[key]["progress"]["text"] == "epoch 1  step 1  loss 0.5  ETA 1:00"
    cluster.changes.put(CollectionChange(Kind.MODIFIED, job("one", "Succeeded"), why=""))
    listed(lambda _, state: state["jobs"])
    assert rows.of([key])[key]["progress"] == {"text": "loss 0.5", "fraction": None}
    cluster.lines.clear()  # with its Pods
    ended = job("one", "Succeeded")
    ended["status"]["replicaStatuses"] = {"Master": {"succeeded": 1}}
    cluster.changes.put(CollectionChange(Kind.MODIFIED, ended, why=""))
    listed(lambda _, state: state["jobs"])
    assert rows.of([key])[key]["progress"]["text"] == "loss 0.5"


def test_a_cause_that_could_not_be_read_is_read_again(cluster, listed, monkeypatch):
    monkeypatch.setattr(rows_module, "_WHY_SECONDS", 0)
    ended = job("one", "Failed", "no room")
    cluster.changes.put(CollectionChange(Kind.ADDED, ended, why=""))
    listed(lambda names, _: names == {"one"})
    rows, key = Rows(listed.jobs), "cluster:uid-one"
    assert rows.of([key])[key]["why"] == ""
    cluster.there["one"] = ended
    assert rows.of([key])[key]["why"] == "the job failed: no room"


def test_a_reader_is_sent_the_points_of_a_curve_that_changed(monkeypatch):
    monkeypatch.setattr(training, "MAX_POINTS", 8)
    news, summary, curve = JobNews(), training.Training(), []
    for steps in (range(1, 4), range(2, 6), (), range(6, 40), (40,)):  # the second repeats some
        reports = ({"epoch": 0, "step": step, "steps": 64, "loss": len(steps)} for step in steps)
        events = [Event(EventKind.PROGRESS, report, 1.0) for report in reports]
        for event in events:
            summary.add(event)
        points = news.after(events)["points"]
        assert bool(points) == bool(events)
        for remain, *added in points.values():
            curve[remain:] = zip(*added, strict=True)
        assert curve == summary.curve
    assert len(curve) <= 8
