"""The monitor of the age of heartbeat files."""

from __future__ import annotations

import os
import time

from k8sjob.runtime.base.heartbeat import HeartbeatMonitor


def test_only_a_file_that_stops_changing_is_stale(tmp_path):
    files = [tmp_path / "alive", tmp_path / "dead", tmp_path / "unseen", None]
    files[0].touch()
    files[1].touch()
    monitor = HeartbeatMonitor(files, timeout=0.1)
    end = time.monotonic() + 1.5
    stale = ()
    while time.monotonic() < end:
        files[0].touch()
        stale = monitor.stale([0, 1, 2])
        time.sleep(0.01)
    assert stale == (1, 2)
    files[0].touch()  # this process may have stood still meanwhile
    assert monitor.stale([0]) == (), "only the watched are looked at"
    assert monitor.stale([0, 1]) == (), "from when it is watched again"


def test_a_step_of_the_wall_clock_ends_no_job(tmp_path):
    file = tmp_path / "beat"
    file.touch()
    os.utime(file, (0, 0))
    monitor = HeartbeatMonitor([file], timeout=5)
    assert monitor.stale([0]) == ()


def test_there_is_no_watch_without_a_timeout(tmp_path):
    monitor = HeartbeatMonitor([tmp_path / "beat", None], timeout=0)
    assert monitor.stale([0, 1]) == ()
