import pytest
from view.conftest import summary_of

from k8sjob.contract import Event, EventKind

STOPPING = Event(EventKind.STOPPING, {"signal": "SIGTERM"}, 8.5)


def test_stopping_ends_with_the_next_state():
    running, stopped = (Event(EventKind.JOB, {"state": name}) for name in ("Running", "Stopped"))
    shown = [summary_of(events).shown_state for events in ([], [running, STOPPING])]
    assert shown == ["Starting", "Stopping"]
    assert summary_of([running, STOPPING, stopped]).shown_state == "Stopped"


@pytest.mark.parametrize(
    ("change", "waits"),
    [
        (Event(EventKind.REPLICA, {"phase": "Failed"}, 0, "master-0"), False),
        (Event(EventKind.JOB, {"state": "Suspended"}), False),
        (Event(EventKind.JOB, {"state": "Running"}), True),
    ],
)
def test_what_does_not_run_waits_for_no_processes(change, waits):
    data = {"phase": "waiting", "world_size": 4, "missing": 2, "ranks": [1, 3]}
    missing = Event(EventKind.STARTING, data, 0.0, "master-0")
    assert bool(summary_of([missing, change]).starting) == waits
