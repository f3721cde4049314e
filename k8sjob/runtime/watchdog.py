"""Ends a group that makes no progress, and says which rank is to blame.

Each rank beats: `beat(step, "compute")` before a collective, `beat(step, "sync")` in it, any other
phase (checkpoint, evaluate) where time passes otherwise. A rank whose last beat is too old raises
the alarm in the store; every rank then writes its Python stacks into the log, reads all beats,
names the culprit and ends with ExitCode.HUNG.

Three failures need three observers. A rank asleep in Python is noticed by its own thread. One in a
C call that holds the interpreter's lock, or one that somebody stopped, is named by its peers and
ended by the agent of its node, which sees the heartbeat file grow old. And a store that does not
answer must not keep a rank from noticing: the thread that watches the clock never touches it.

A script that never beats is not watched; its collectives end at their own timeout.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.contract import ExitCode, Reason
from k8sjob.runtime.heartbeat import Heartbeat, settle
from k8sjob.runtime.last_words import by_rank, leave_reason

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import NoReturn, Protocol

    from k8sjob.runtime.env import DistEnv

    class Store(Protocol):
        """What is used of torch.distributed.Store."""

        def set(self, key: str, value: str, /) -> None:
            """Set a key."""

        def get(self, key: str, /) -> bytes:
            """The value of a key that is there."""

        def check(self, keys: list[str], /) -> bool:
            """Whether all keys are there."""


__all__ = ["SYNC", "Beat", "Watchdog", "culprits", "explain"]

SYNC: Final = "sync"
"""The phase of a rank that waits for the others in a collective."""
_ALARM: Final = "watchdog/alarm"


@dataclass(frozen=True, slots=True)
class Beat:
    """The last beat of a rank, as others see it.

    Attributes:
        step: the optimizer step, counted by the rank.
        phase: "start" before the first beat, SYNC in a collective, else what it does.
        age: seconds since the beat, when it was published.
        answered: published after the alarm, so the rank's threads still run.
    """

    step: int
    phase: str
    age: float
    answered: bool

    def encode(self) -> str:
        """As a store's value."""
        return json.dumps([self.step, self.phase, round(self.age, 1), self.answered])

    @classmethod
    def decode(cls, text: bytes) -> Beat:
        """From a store's value."""
        return cls(*json.loads(text))


class Watchdog:
    """Watches one rank's progress, and the others' alarm. A beat costs 0.2 microseconds."""

    def __init__(
        self,
        store: Store | None,
        env: DistEnv,
        *,
        timeout: float,
        agent_file: Path | None = None,
        error_file: Path | None = None,
    ) -> None:
        """Start to watch; the first beat is due within `timeout` from now.

        Args:
            store: a connection of its own: a TCPStore's client answers one thread at a time, and
                the main one may wait in it. None with one process.
            env: this rank's place in the group.
            timeout: seconds without a beat after which the group is ended; it must cover the
                longest step, checkpoint or evaluation. 0: nothing is watched.
            agent_file: config.heartbeat_file(), for the agent of the node.
            error_file: config.error_file(), likewise.
        """
        self._store = store if env.world_size > 1 else None
        self._env, self._timeout, self._error_file = env, timeout, error_file
        self._heartbeat = Heartbeat(agent_file if timeout > 0 else None, timeout)
        self._last = ("start", 0, time.monotonic())
        self._closed = threading.Event()
        self._alarm = threading.Event()
        self._informed = threading.Event()
        self._beats: dict[int, Beat | None] = {}
        self._period = max(0.02, min(1.0, timeout / 20))
        self._settle = settle(timeout)
        self._threads = [self._watch_clock, *([self._watch_store] if self._store else [])]
        if timeout > 0:
            self._heartbeat.beat(self._last[2])
            for target in self._threads:
                threading.Thread(target=target, daemon=True, name="k8sjob-watchdog").start()

    def beat(self, step: int, phase: str = "compute") -> None:
        """Say that this rank makes progress.

        Args:
            step: the optimizer step, the same number on all ranks for the same step.
            phase: what comes now: SYNC before a collective, else anything.
        """
        now = time.monotonic()
        self._last = (phase, step, now)
        self._heartbeat.beat(now)

    def close(self) -> None:
        """End the watch, by this rank's threads and by the agent; the other ranks go on."""
        self._closed.set()
        self._heartbeat.close()

    # --- the thread that watches the clock, and never waits for anybody --------------------------

    def _watch_clock(self) -> None:
        while not self._closed.is_set():
            if time.monotonic() - self._last[2] > self._timeout:
                self._alarm.set()
            if self._alarm.wait(self._period) and not self._closed.is_set():
                self._end_process()

    def _end_process(self) -> NoReturn:
        age = time.monotonic() - self._last[2]
        guilty, words = self._find_culprits()
        message = f"no progress for {age:.0f} s: {words}"
        self._write_stacks(message)
        leave_reason(
            Reason(
                exit_code=ExitCode.HUNG,
                rank=self._env.rank,
                type="Hang",
                message=message,
                time=time.time(),
                culprits=guilty,
            ),
            self._error_file,
        )
        # Whoever leaves breaks the others' connections: first let all write. Rank 0 has the store.
        time.sleep(self._settle * (2 if self._env.rank == 0 else 1))
        os._exit(ExitCode.HUNG)

    def _find_culprits(self) -> tuple[tuple[int, ...], str]:
        """The ranks to blame, and why, in words."""
        if self._store is None:
            phase, step, _ = self._last
            return (self._env.rank,), f"rank {self._env.rank} is at step {step} in {phase}"
        if not self._informed.wait(2 * self._settle):
            return (0,), "the store does not answer; rank 0, its host, is stopped or out of reach"
        guilty = culprits(self._beats)
        return guilty, explain(self._beats, guilty)

    def _write_stacks(self, message: str) -> None:
        """All threads' Python stacks to the log, as one piece and with the rank on each line."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            stacks = file.read().decode(errors="replace")
        sys.stderr.write(by_rank(self._env.rank, f"k8sjob: {message}\n{stacks}"))
        sys.stderr.flush()

    # --- the thread that talks to the store ------------------------------------------------------

    def _watch_store(self) -> None:
        store = self._store
        if store is None:
            return
        try:
            while not (self._alarm.wait(self._period) or self._closed.is_set()):
                self._publish(store)
                if store.check([_ALARM]):
                    self._alarm.set()
            if self._alarm.is_set():
                self._answer_alarm(store)
        except RuntimeError:
            return  # the store is gone, and rank 0 with it: the main thread meets that by itself

    def _answer_alarm(self, store: Store) -> None:
        store.set(_ALARM, "")
        self._publish(store)
        time.sleep(self._settle)
        keys = {rank: _key(rank) for rank in range(self._env.world_size)}
        self._beats = {
            rank: Beat.decode(store.get(key)) if store.check([key]) else None
            for rank, key in keys.items()
        }
        self._informed.set()

    def _publish(self, store: Store) -> None:
        phase, step, since = self._last
        beat = Beat(step, phase, time.monotonic() - since, answered=self._alarm.is_set())
        store.set(_key(self._env.rank), beat.encode())


def culprits(beats: Mapping[int, Beat | None]) -> tuple[int, ...]:
    """The ranks that the others wait for; empty where that cannot be told.

    Those that did not answer the alarm cannot even run a thread. If all answered, it is whoever is
    behind, and not itself waiting for others.

    Args:
        beats: by rank; None for a rank that never published one.
    """
    silent = tuple(rank for rank, beat in beats.items() if beat is None or not beat.answered)
    if silent:
        return silent
    known = {rank: beat for rank, beat in beats.items() if beat is not None}
    behind = min((beat.step for beat in known.values()), default=0)
    return tuple(rank for rank, beat in known.items() if beat.step == behind and beat.phase != SYNC)


def explain(beats: Mapping[int, Beat | None], guilty: tuple[int, ...]) -> str:
    """Who is to blame, in words."""
    if guilty:
        return ", ".join(f"rank {rank} {_state(beats[rank])}" for rank in guilty[:10])
    return (
        "all ranks wait in a collective, at steps "
        f"{', '.join(sorted({str(beat.step) for beat in beats.values() if beat}))}; they called "
        "different ones, or different numbers of them (compare the stacks)"
    )


def _state(beat: Beat | None) -> str:
    if beat is None:
        return "never came so far"
    place = f"at step {beat.step} in {beat.phase}"
    if beat.answered:
        return f"is {place}"
    return f"does not answer (it is stopped, or in C code), last heard of {place}"


def _key(rank: int) -> str:
    return f"watchdog/{rank}"
