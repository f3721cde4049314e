"""Heartbeat files, and the monitor of their age."""

from __future__ import annotations

import os
import time

from k8sjob.runtime.base.heartbeat import Heartbeat, HeartbeatMonitor


def test_a_beat_renews_the_file_and_is_cheap(tmp_path):
    file = tmp_path / "beat"
    heartbeat = Heartbeat(file, timeout=600)
    heartbeat.beat(100.0)
    os.utime(file, (1, 1))
    heartbeat.beat(100.5)
    assert file.stat().st_mtime == 1, "more than once a second"
    heartbeat.beat(101.1)
    assert file.stat().st_mtime > 1
    heartbeat.close()
    assert not file.exists()
    heartbeat.beat(101.2)
    assert file.exists(), "it begins again, and at once"


def test_without_an_agent_there_is_no_file():
    heartbeat = Heartbeat(None, timeout=1)
    heartbeat.beat(1.0)
    heartbeat.close()


def test_only_a_file_that_stops_changing_is_stale(tmp_path):
    files = [tmp_path / name for name in ("alive", "dead", "none")]
    files[0].touch()
    files[1].touch()
    monitor = HeartbeatMonitor(files, timeout=0.1)
    end = time.monotonic() + 1.5
    stale = ()
    while time.monotonic() < end:
        files[0].touch()
        stale = monitor.stale([0, 1, 2])
        time.sleep(0.01)
    assert stale == (1,)
    assert monitor.stale([0]) == (), "only the living are looked at"
    files[1].unlink()
    assert monitor.stale([0, 1]) == (), "closed"


def test_a_step_of_the_wall_clock_ends_no_job(tmp_path):
    file = tmp_path / "beat"
    file.touch()
    os.utime(file, (0, 0))
    monitor = HeartbeatMonitor([file], timeout=5)
    assert monitor.stale([0]) == ()


def test_there_is_no_watch_without_a_timeout(tmp_path):
    monitor = HeartbeatMonitor([tmp_path / "beat", None], timeout=0)
    assert monitor.interval == float("inf")
    assert monitor.stale([0, 1]) == ()
