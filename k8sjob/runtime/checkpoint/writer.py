"""Checkpoints of a group: all ranks save together while training continues, and resume together."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from k8sjob.contract import EventKind
from k8sjob.runtime.base.heartbeat import Observer
from k8sjob.runtime.checkpoint import integrity
from k8sjob.runtime.checkpoint.format import gathered, on_host
from k8sjob.runtime.checkpoint.store import FROM_SCRATCH, check_state, remove, write
from k8sjob.runtime.comm import rng

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch._C._distributed_c10d import Store

    from k8sjob.runtime.base.event_lines import Reporter
    from k8sjob.runtime.checkpoint.shards import Plans, RankPart
    from k8sjob.runtime.checkpoint.store import Checkpoints
    from k8sjob.runtime.comm.process_group import Group

_POLL_S: Final = 0.1
_REPORT_POLL_S: Final = 0.01
_ROUND_S: Final = 0.2
"""Seconds without progress after which ranks that wait for a save ask each other again."""
_ABANDONED_S: Final = 0.5
"""Seconds in which a save that is abandoned may still report why it failed."""
_STATE: Final = "k8sjob/own/1"
"""Tells a state that Job.save() was given, of this form, from others."""


class Background:
    """One function at a time in a thread, whose result is handled on the main thread.

    While it is waited for, beat() is called whenever the number progress() has changed.
    """

    def __init__(self, progress: Callable[[], int], beat: Callable[[], None]) -> None:
        self._progress, self._beat = progress, beat
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._then: Callable[[Any], None] | None = None
        self._outcome: Any = None

    @property
    def busy(self) -> bool:
        """Whether there is work whose outcome was not taken."""
        return self._then is not None

    def begin(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Start work() in a daemon thread; take() calls then(its result, or its exception)."""
        self._done.clear()
        self._then = then

        def run() -> None:
            try:
                self._outcome = work()
            except Exception as error:  # noqa: BLE001 - handled on the main thread
                self._outcome = error
            self._done.set()

        # A daemon: one that is abandoned, as on a dead file server, must not keep the process
        # alive.
        self._thread = threading.Thread(target=run, daemon=True, name="k8sjob-save")
        self._thread.start()

    def take(self) -> None:
        """Handle the outcome, if there is one; costs nothing otherwise."""
        if self._then is not None and self._thread is not None and self._done.is_set():
            # Joined: torch objects that a thread frees while the process exits would abort it.
            self._thread.join()
            then, outcome = self._then, self._outcome
            self._then = self._outcome = None
            then(outcome)

    def finish(self, patience: float | None = None) -> bool:
        """Wait until the work is done, and handle its outcome; False if it was given up.

        It is given up after `patience` seconds without progress.
        """
        progress, since = -1, time.monotonic()
        # Progress is counted in bytes, so that a slow disk is waited for and a dead one is not.
        while self._then is not None and not self._done.wait(_POLL_S):
            if (now := self._progress()) != progress:
                progress, since = now, time.monotonic()
                self._beat()
            elif patience is not None and time.monotonic() > since + patience:
                return False
        self.take()
        return True


class SaveReports:
    """One rank's reports to rank 0 through the store; for one thread at a time.

    A collective in a thread would interfere with those of the training.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._store: Store | None = None
        self._abandoned = threading.Event()

    def report(self, matter: str, text: str, *, failed: bool = False) -> None:
        """Report what this rank has done, or why it failed.

        `matter` is a name that is used once in a group's life, the same on all ranks.
        """
        self._client().set(f"done/{matter}/{self._group.rank}", json.dumps([failed, text]))

    def collect(self, matter: str) -> list[str]:
        """On rank 0: wait for the other ranks; the reports of ranks 1, 2, ...

        Raises:
            OSError: ranks failed, with their errors; or abandon() was called meanwhile.
        """
        reports, failures = list[str](), list[str]()
        for rank in range(1, self._group.world_size):
            key = f"done/{matter}/{rank}"
            while not self._client().check([key]):
                if self._abandoned.wait(_REPORT_POLL_S):
                    raise OSError(f"rank {rank} did not report that its part is written")
            failed, text = json.loads(self._client().get(key))
            (failures if failed else reports).append(f"rank {rank}: {text}" if failed else text)
            # Each save has keys of its own, and the store would keep them all in rank 0's memory.
            self._client().delete_key(key)
        if failures:
            raise OSError("; ".join(failures))
        return reports

    def abandon(self) -> None:
        """End a collect() that waits in another thread."""
        self._abandoned.set()

    def _client(self) -> Store:
        if self._store is None:
            if self._group.rendezvous is None:
                raise RuntimeError("a single process has no other ranks")
            # A store's client serves one thread at a time, and the other threads have theirs.
            self._store = self._group.rendezvous.again()
        return self._store


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was read; its state has a Stored for a tensor that can be read in part."""

    path: str
    step: int
    state: dict[str, Any]


@dataclass(slots=True)
class _Save:
    """One save, from its beginning to its event."""

    step: int
    began: float
    position: dict[str, int]
    common: dict[str, Any]
    stall: float = 0.0


class Checkpointer:
    """The checkpoints of a group.

    Rank 0 writes one file, so that no volume has to be shared; or each rank writes its part of a
    folder that all of them see. Either is written in the background, one at a time, and rank 0
    reports the result.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        group: Group,
        reporter: Reporter,
        *,
        form: str = "auto",
        must_share: bool = False,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """The checkpoints of a group; beat() is called while a rank waits for a save.

        `form` is "full", "sharded", or "auto": parts where the ranks have different ones. With
        `must_share` all ranks must see one folder, since any may be rank 0 next.
        """
        self._checkpoints, self._group, self._reporter = checkpoints, group, reporter
        self._form, self._must_share, self._beat = form, must_share, beat
        self._leads = group.rank == 0
        # Several ranks count as apart until _look() has seen the folder.
        self._shared = group.world_size == 1
        self._looked = self._warned = self._abandoned = False
        self._background = Background(self._written, beat)
        self._reports = SaveReports(group)
        self._plans: Plans | None = None
        self._draft: Path | None = None
        self._count = 0

    # --- saving ---------------------------------------------------------------------------------

    def save(
        self,
        kind: str,
        step: int,
        state: dict[str, Any],
        *,
        whole: Callable[[], dict[str, Any]] = dict,
        parts: Callable[[], dict[str, Any]] | None = None,
        sharded: bool = False,
        describes: bool = True,
        rng_stream: int | None = None,
        **position: int,
    ) -> None:
        """Begin to write a state with the random numbers of all ranks; all ranks call it.

        The state is copied at once. A failed write is a warning and does not end the run: the older
        checkpoints are whole.

        Args:
            kind: tells one form of state from another.
            step: optimizer steps done.
            state: of rank 0: nested dicts, lists and tuples of tensors and plain values.
            whole: gives more of it, which nothing changes any more, so that it needs no copy.
            parts: gives each rank's part of the same; see shards.Plans.stage.
            sharded: whether the ranks have different parts.
            describes: see shards.Plans.stage.
            rng_stream: ranks with the same number draw the same random numbers; None: the rank.
            position: more about where the run is, for the event.

        Raises:
            TypeError: the state holds something that could not be loaded again safely.
            OSError: none can be saved there, or not in the form that was asked for.
        """
        # All ranks take the same branch: it depends on the settings, and on what _look() has sent
        # to all ranks.
        divided = parts if parts and self._writes_parts(sharded=sharded) else None
        mine = (divided or whole)()
        save = self._begin(kind, step, state, rng_stream, position)
        if divided:
            self._save_parts(save, mine, describes=describes)
        elif self._leads:  # the other ranks go on training while it writes
            everything = {**save.common, **mine}
            check_state(everything)
            if draft := self._new_draft(save, folder=False):
                self._write(save, draft, lambda: write(draft, everything))

    def _writes_parts(self, *, sharded: bool) -> bool:
        """Whether each rank is to write its part; the same on all ranks."""
        asked = self._form == "sharded" or (self._form == "auto" and sharded)
        if asked and not self._looked:
            self._look()
        if asked and not self._shared and not self._warned:
            self._warned = True
            self._reporter.warn(
                f"checkpoint.dir {self._checkpoints.folder} is not shared by all ranks: rank 0"
                " gathers the whole state and writes it; mount one volume there in all replicas,"
                " and each rank writes its own part"
            )
        return asked and self._shared

    def _save_parts(self, save: _Save, parts: dict[str, Any], *, describes: bool) -> None:
        from k8sjob.runtime.checkpoint.shards import Plans  # imports much of torch.distributed

        self._plans = self._plans or Plans(self._group)
        part = self._plans.stage(parts, describes=describes)
        if self._leads:
            check_state({**save.common, **part.marked})
        mine = self._new_draft(save, folder=True) if self._leads else None
        # None: rank 0 has no room for a draft, and has logged it; training continues on all ranks.
        name = self._group.broadcast_bytes(mine.name.encode() if mine else None)
        if name is None:
            return
        draft = self._checkpoints.folder / name.decode()
        # The ranks count alike, so this names the save in the store.
        self._count += 1
        matter = f"save/{self._count}"
        self._write(save, draft, lambda: self._write_part(part, draft, save, matter))

    def _new_draft(self, save: _Save, *, folder: bool) -> Path | None:
        """An empty file or folder; None, after a warning, if it cannot be made."""
        try:
            return self._checkpoints.draft(save.step, folder=folder)
        except OSError as error:
            self._report(save, error)
            return None

    def _write(self, save: _Save, draft: Path, fill: Callable[[], None]) -> None:
        """Fill a draft in the background; rank 0 publishes it or removes it, and reports that."""

        def work() -> Path | None:
            try:
                fill()
                return self._checkpoints.publish(draft, save.step) if self._leads else None
            except Exception:
                if self._leads:
                    remove(draft)
                raise

        self._draft = draft
        save.stall = time.monotonic() - save.began
        self._background.begin(work, lambda outcome: self._report(save, outcome))

    def poll(self) -> None:
        """Report the last save if it is done; costs nothing otherwise."""
        self._background.take()

    def settle(self, patience: float | None = None) -> None:
        """Wait for the last save; after `patience` seconds without progress abandon it."""
        if self._abandoned or self._background.finish(patience):
            return
        self._abandoned = True
        # Rank 0's thread may wait for a rank that is gone: this ends that wait, with an error.
        self._reports.abandon()
        self._background.finish(_ABANDONED_S)

    def _settle_together(self) -> None:
        """Settle on all ranks; a lost rank is noticed, and not waited for."""

        def waits() -> torch.Tensor:
            return torch.tensor(int(self._background.busy and not self._abandoned))

        # The collective fails where a rank is lost; a plain wait for the thread would never end.
        while int(self._group.all_reduce(waits(), "max")):
            self._background.finish(_ROUND_S)

    def _begin(
        self,
        kind: str,
        step: int,
        state: dict[str, Any],
        rng_stream: int | None,
        position: dict[str, int],
    ) -> _Save:
        """Begin a checkpoint with the state that all have, after the one before is written."""
        began = time.monotonic()
        self._settle_together()
        mine = rng.capture(self._group.device)
        # Random numbers of all ranks are in rank 0's file, also where each rank writes its part.
        random = {name: torch.stack(self._group.gather(value)) for name, value in mine.items()}
        streams = self._rng_streams(rng_stream)
        if not self._leads:
            return _Save(step, began, position, {})
        ranks = {"world_size": self._group.world_size, "streams": streams}
        common = {**on_host(state), "kind": kind, "step": step, "random": random, **ranks}
        return _Save(step, began, position, common)

    def _write_part(self, part: RankPart, draft: Path, save: _Save, matter: str) -> None:
        """Write this rank's part, in the thread; rank 0 waits for all, and describes the whole."""
        written, failure = "", None
        try:
            written = part.write(draft)
        except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 must not wait forever
            failure = error
        if not self._leads:
            self._reports.report(matter, str(failure) if failure else written, failed=bool(failure))
            return
        results = self._reports.collect(matter) if self._group.world_size > 1 else []
        if failure:
            raise failure  # the results of the others are taken before
        part.finish(draft, save.common, [written, *results])

    def _report(self, save: _Save, outcome: Path | Exception | None) -> None:
        if isinstance(outcome, Exception):
            self._reporter.warn(
                f"no checkpoint at step {save.step}: {outcome}; training continues, and older ones"
                f" are intact: free some space in {self._checkpoints.folder}, or make it writable"
            )
            return
        self._reporter.emit(
            EventKind.CHECKPOINT,
            path=str(outcome),
            step=save.step,
            seconds=round(time.monotonic() - save.began, 3),
            stall_s=round(save.stall, 3),
            **save.position,
        )

    def _written(self) -> int:
        """Bytes of what is being written."""
        # Called on the main thread while the other one writes: files come and go.
        draft = self._draft
        try:
            if draft is None or not draft.is_dir():
                return 0 if draft is None else draft.stat().st_size
            return sum(file.stat().st_size for file in draft.iterdir())
        except OSError:
            return 0

    # --- resuming -------------------------------------------------------------------------------

    def newest(self, kind: str) -> Saved | None:
        """The newest whole checkpoint, on all ranks; None if there is none.

        Raises:
            OSError: none can be saved there, or not in the form that was asked for.
            ValueError: it was stored by another kind of loop.
        """
        self.settle()
        self._look()
        newest = integrity.newest_whole(
            self._checkpoints,
            self._group,
            shared=self._shared,
            warn=self._reporter.warn,
            beat=self._beat,
        )
        if self._leads:
            with suppress(OSError):
                # Now, as no rank saves yet: later these could be drafts of this run.
                self._checkpoints.remove_partial()
        if newest is None:
            return None
        path, state = newest
        # Refused, not skipped: from step 0 on, the run would replace the checkpoints of another
        # one.
        if state.get("kind") != kind:
            raise ValueError(
                f"{path} holds {state.get('kind', 'something else')!r}, not {kind!r}: "
                f"resume it with the code that saved it, or {FROM_SCRATCH}"
            )
        Observer.resumed = state["step"]
        return Saved(str(path), state["step"], state)

    def _look(self) -> None:
        """See whether checkpoints can be there, and whether all ranks see the same ones."""
        refusal = self._checkpoints.refusal() if self._leads else None
        if message := self._group.broadcast_bytes(refusal.encode() if refusal else None):
            raise OSError(message.decode())
        self._shared = integrity.sees_one_folder(self._checkpoints, self._group)
        ranks = f"{self._checkpoints.folder} is not shared by all {self._group.world_size}"
        if self._must_share and not self._shared:
            raise OSError(
                f"checkpoint.dir {ranks} ranks, and in an elastic job any of them may have to"
                " resume from it: mount one volume there in all replicas"
            )
        if self._form == "sharded" and not self._shared:
            raise OSError(
                f"checkpoint.format: sharded, but checkpoint.dir {ranks} ranks: mount one volume"
                " there in all replicas, or leave checkpoint.format at auto"
            )
        self._looked = True

    def restore_random(self, saved: Saved, rng_stream: int | None = None) -> None:
        """Restore each rank's random numbers, if the ranks divide the data as they did then."""
        state = saved.state
        then, now = state["world_size"], self._group.world_size
        ranks = ""
        # The samples continue with any number of ranks, since their order depends on the epoch
        # alone.
        if then != now:
            ranks = f"saved by {then} ranks, resumed by {now}"
        elif self._rng_streams(rng_stream) != state.get("streams", list(range(then))):
            ranks = "saved by ranks that divided the data differently"
        if ranks:
            self._reporter.warn(
                f"{ranks}: the samples continue in their order, random numbers (dropout,"
                " augmentation) do not"
            )
            return
        # Cloned: torch.set_rng_state crashes on a tensor that begins in the middle of its storage.
        random = state["random"]
        mine = {name: values[self._group.rank].clone() for name, values in random.items()}
        rng.restore(mine, self._group.device)

    def _rng_streams(self, rng_stream: int | None) -> list[int]:
        """The number of each rank's random numbers, by rank."""
        mine = self._group.rank if rng_stream is None else rng_stream
        return [int(number) for (number,) in self._group.table([mine])]

    # --- the state of a loop written by hand ----------------------------------------------------

    def save_state(self, step: int, state: dict[str, Any]) -> None:
        """See Job.save."""
        if self._leads:
            check_state(state)
        first, divided = self._leads, self._agree_on_divided(state)
        self.save(
            _STATE,
            step,
            {} if divided or self._form == "sharded" else {"state": state},
            whole=lambda: {"state": _model_state().whole(state, keep=first)} if divided else {},
            parts=lambda: {"state": state if first else _model_state().only_distributed(state)},
            sharded=divided,
            describes=first,
        )

    def load_state(self, like: dict[str, Any] | None) -> dict[str, Any] | None:
        """See Job.load."""
        saved = self.newest(_STATE)
        if saved is None:
            return None
        self._reporter.emit(EventKind.RESUMED, path=saved.path, step=saved.step)
        self.restore_random(saved)
        state = saved.state["state"]
        loaded: dict[str, Any] = (
            gathered(state) if like is None else _model_state().placed(state, like)
        )
        return loaded

    def _agree_on_divided(self, state: dict[str, Any]) -> bool:
        """Whether there are distributed tensors in a state; on all ranks or on none."""
        # Whoever has such tensors has imported them.
        mine = "torch.distributed.tensor" in sys.modules and _model_state().is_divided(state)
        without = [rank for rank, (has,) in enumerate(self._group.table([mine])) if not has]
        if 0 < len(without) < self._group.world_size:
            raise ValueError(
                f"job.save: rank(s) {', '.join(map(str, without[:8]))} gave no distributed tensors"
                " and the others did: give their parts on all ranks"
            )
        return not without


def _model_state() -> Any:
    from k8sjob.runtime.checkpoint import model_state

    return model_state
