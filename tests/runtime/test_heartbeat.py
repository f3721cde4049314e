"""What is seen of a rank's process from within, and the hangs that this explains; real ranks are in
tests/dist.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import Mock

import pytest

from k8sjob.contract import ExitCode
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.event_lines import start_phase
from k8sjob.runtime.base.hangs import decode_ranks, encode_ranks, hang_of
from k8sjob.runtime.base.heartbeat import (
    HeartbeatMonitor,
    Observer,
    Seen,
    StallClock,
    _is_watched,
    read_seen,
)

NOT_YET, RUNS = Seen(), Seen(runs=True)
IMPORTS = Seen(runs=True, torch=True, importing=True)
TRAINS = Seen(runs=True, torch=True)


@pytest.mark.parametrize(
    ("ranks", "phase"),
    [
        ([NOT_YET, NOT_YET], "python"),
        ([NOT_YET, IMPORTS], "python"),
        ([IMPORTS, TRAINS], "importing"),
        ([TRAINS, TRAINS], "running"),
        ([RUNS], "running"),  # without torch
    ],
)
def test_the_phase_is_that_of_the_process_furthest_behind(ranks, phase):
    assert start_phase(ranks) == phase


@pytest.fixture
def torch(monkeypatch):
    """A module of that name, as it is while it is being imported."""
    module = types.ModuleType("torch")
    module.__spec__ = ModuleSpec("torch", None)
    module.__spec__._initializing = True
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_an_observer_tells_an_import_from_its_end(torch, tmp_path):
    observer = Observer(tmp_path / "seen", 1, 0)
    assert read_seen(tmp_path / "seen") == NOT_YET
    observer.write()
    assert read_seen(tmp_path / "seen") == IMPORTS
    torch.__spec__._initializing = False
    observer.write()
    seen = read_seen(tmp_path / "seen")
    assert (seen.torch, seen.importing) == (True, False)


@pytest.mark.parametrize(("size", "ranks"), [("1", 1), ("4", 4), ("four", 2)])
def test_a_group_that_is_gone_had_the_size_that_the_script_has_set(monkeypatch, size, ranks):
    c10d = types.SimpleNamespace(is_initialized=lambda: False, _default_pg_init_method="env://")
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
    monkeypatch.setenv("WORLD_SIZE", size)
    observer = Observer(None, 2, 0)
    assert observer.look().ranks == ranks
    monkeypatch.setenv("WORLD_SIZE", "9")
    assert observer.look().ranks == ranks


def test_a_full_disk_is_no_hang(monkeypatch, tmp_path):
    file = tmp_path / "seen"
    observer = Observer(file, 1, 0)
    observer.write()
    os.utime(file, (0, 0))
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    monkeypatch.setattr(Observer, "watched", True)
    observer.write()
    assert file.stat().st_mtime > 0


STUCK = Seen(torch=True, ranks=3, step=7, where="main.py:9 in train", waited=600, stuck=True)
WAITS = Seen(torch=True, ranks=3, step=7, where="main.py:9 in train", waited=20)
WORKS = Seen(torch=True, ranks=3, step=7, where="main.py:5 in load")
BUSY = replace(WORKS, works=True)


class TestHangOf:
    @pytest.mark.parametrize(
        "seen",
        [
            {},
            {0: Seen(), 1: Seen()},
            {0: WAITS, 1: WORKS},
            {0: STUCK, 1: Seen(ranks=3, step=90, where="main.py:5 in load", steps_on=True)},
            {0: STUCK, 1: BUSY, 2: WORKS},
        ],
    )
    def test_none(self, seen):
        assert hang_of(seen) is None

    def test_those_that_do_not_wait_are_to_blame(self):
        why = hang_of({0: STUCK, 1: WORKS, 2: WAITS, 3: Seen()})
        assert (why.exit_code, why.type, why.step) == (ExitCode.HUNG, "Hang", 7)
        assert (why.rank, why.culprits, why.where) == (1, (1,), "main.py:5")
        assert why.message == (
            "rank 1 is at main.py:5 in load;"
            " rank 0 has waited 600 s in a collective, main.py:9 in train"
        )

    def test_a_rank_that_works_is_waited_for_as_long_as_torch_would(self):
        from torch.distributed.constants import default_pg_timeout

        assert 0.95 < TIMEOUTS.patience / default_pg_timeout.total_seconds() < 1
        why = hang_of({0: replace(STUCK, waited=1790), 1: BUSY})
        assert (why.exit_code, why.type, why.culprits) == (ExitCode.HUNG, "Late", (1,))
        assert why.message.startswith("rank 1 works at main.py:5 in load; rank 0 has waited 1790 s")

    def test_all_wait(self):
        why = hang_of({0: STUCK, 1: WAITS})
        assert (why.rank, why.culprits, why.where) == (0, (), "main.py:9")
        assert "so have all others, in the same line: their calls there differ" in why.message
        assert hang_of({0: STUCK}).message.endswith("; no rank is known that does not wait")

    def test_a_rank_that_stopped_before_it_reported_its_group_is_the_cause(self):
        why = hang_of({0: STUCK, 1: WAITS, 2: Seen(torch=True)})
        assert (why.rank, why.culprits) == (2, (2,))
        assert why.message.startswith("rank 2 is in no known line; rank 0 has waited")

    def test_all_wait_in_different_lines(self):
        other = Seen(ranks=3, step=7, where="main.py:20 in test", waited=601)
        assert hang_of({0: STUCK, 1: other}).message.endswith(
            "; so have all others, in different lines:"
            " rank 0 is at main.py:9 in train, rank 1 is at main.py:20 in test"
        )


class TestRanksOfOtherNodes:
    def test_those_that_matter_arrive(self):
        told = decode_ranks(encode_ranks({0: WAITS, 1: STUCK, 2: WORKS, 3: WAITS}))
        assert told == {1: STUCK, 2: WORKS}

    @pytest.mark.parametrize(
        "text", ["", "[]", "{", '{"x": {}}', '{"1": 2}', '{"1": {"other": 1}}']
    )
    def test_what_is_none_says_nothing(self, text):
        assert decode_ranks(text) == {}


def test_a_process_without_a_group_does_not_wait():
    clock = StallClock(0.01)
    for _ in range(3):
        assert clock.look(0) == (0, False)
        time.sleep(0.01)
    assert clock.where == ""


def test_a_session_watches_itself_while_it_lasts(monkeypatch):
    from k8sjob.runtime import Run, Stopped  # noqa: F401 - a script may name them without a session
    from k8sjob.runtime.base.env import dist_env
    from k8sjob.runtime.comm.watchdog import Watchdog

    pair = types.SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", pair)
    assert _is_watched()
    watchdog = Watchdog(None, dist_env({}), timeout=60)
    assert not _is_watched()
    watchdog.close()
    assert _is_watched(), "a group that the script makes after its session"


def test_steps_count_on_from_the_checkpoint_that_was_resumed(monkeypatch):
    """Else a start that got further would look like the one before it, ended at the same step."""
    import torch

    seer = Observer(None, 1, 0)
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    assert seer.look().step == -1
    monkeypatch.setattr(Observer, "resumed", 40)
    assert seer.look().step == -1
    optimizer.step()
    assert seer.look().step == 40


class TestHeartbeat:
    def test_only_a_file_that_stops_changing_is_stale(self, tmp_path):
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

    def test_a_step_of_the_wall_clock_ends_no_job(self, tmp_path):
        file = tmp_path / "beat"
        file.touch()
        os.utime(file, (0, 0))
        monitor = HeartbeatMonitor([file], timeout=5)
        assert monitor.stale([0]) == ()
