"""Which of an Event's times is the last one."""

from datetime import UTC, datetime

import pytest

from k8sjob.kube.objects import event_time, moment

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
