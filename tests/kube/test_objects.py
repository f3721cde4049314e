"""Which of an Event's times is the last one, and what is kept of a job in a list."""

from datetime import UTC, datetime

import pytest

from k8sjob.kube.objects import event_time, moment, outline

OLD, NEW = "2026-01-01T00:01:00Z", "2026-01-01T00:02:00.500000Z"


@pytest.mark.parametrize(
    "event",
    [
        {"lastTimestamp": NEW, "firstTimestamp": OLD},
        {"lastTimestamp": None, "eventTime": NEW, "metadata": {"creationTimestamp": OLD}},
        {"series": {"lastObservedTime": NEW}, "eventTime": OLD},
        {"series": {"lastObservedTime": NEW}, "lastTimestamp": OLD},
        {"series": {"lastObservedTime": OLD}, "lastTimestamp": NEW},
        {"firstTimestamp": NEW, "series": None},
        {"metadata": {"creationTimestamp": NEW}},
    ],
)
def test_an_event_happened_when_it_was_last_seen(event):
    assert event_time(event) == moment(NEW)


def test_an_event_without_a_time_is_older_than_any_other():
    assert event_time({}) < event_time({"lastTimestamp": OLD})


def test_a_moment_has_its_time_zone():
    assert moment(OLD) == datetime(2026, 1, 1, 0, 1, tzinfo=UTC)
    assert moment("") is moment(None) is None


def test_an_outline_has_what_a_list_shows_of_containers():
    container = {"name": "pytorch", "image": "x:1", "env": [{"name": "A", "value": "1"}]}
    pods = {"containers": [container | {"args": ["a"], "volumeMounts": []}], "volumes": [{}]}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": pods | {"restartPolicy": "Never"}}
    spec = {"suspend": True, "replicatedJobs": [{"name": "node", "template": template}]}
    kept = outline({"metadata": {"managedFields": []}, "spec": spec, "status": {"active": 1}})
    assert template["spec"] == {"containers": [container], "restartPolicy": "Never"}
    assert kept == {"metadata": {}, "spec": spec, "status": {"active": 1}}
