"""Saving and resuming as all ranks do it together, while the training goes on."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from k8sjob.contract import EventKind
from k8sjob.runtime import rng, shards
from k8sjob.runtime.background import Background
from k8sjob.runtime.checkpoint import FROM_SCRATCH, check_state, remove
from k8sjob.runtime.observer import Observer
from k8sjob.runtime.resuming import newest_whole, sees_one_folder
from k8sjob.runtime.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from k8sjob.runtime.checkpoint import Checkpoints
    from k8sjob.runtime.process_group import Group
    from k8sjob.runtime.report import Reporter
    from k8sjob.runtime.shard_writing import Part, Plans

__all__ = ["Saved", "Saves"]


_ROUND_S: Final = 0.2
"""Seconds without progress after which ranks that wait for a save ask each other again."""
_LAST_WORD_S: Final = 0.5
"""Seconds in which a save that is left alone says so."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was read.

    Attributes:
        path: the file or folder, on rank 0.
        step: optimizer steps done.
        state: what was stored; with a shards.Stored for each tensor of which a part may be read.
    """

    path: str
    step: int
    state: dict[str, Any]
    _saves: Saves

    def restore_random(self, stream: int | None = None) -> None:
        """Give each rank its random numbers back, if the ranks divide the data as they did then.

        Args:
            stream: see Saves.store.
        """
        self._saves.restore_random(self.state, stream)


@dataclass(slots=True)
class _Save:
    """One save, from its beginning to its event."""

    step: int
    began: float
    position: dict[str, int]
    others: dict[str, Any]
    stall: float = 0.0


class Saves:
    """The checkpoints of a group.

    Rank 0 writes one file, so no volume has to be shared; or each rank its part of a folder, where
    all of them see it. Either is written beside the training, one at a time, while rank 0 tells
    what came of the one before.
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
        """The checkpoints of a group.

        Args:
            checkpoints: where they are.
            group: the ranks.
            reporter: told of each one.
            form: "full": always one file; "sharded": parts wherever the state can be divided;
                "auto": parts where the ranks have different ones anyhow.
            must_share: whether all ranks must see one folder, since any may be rank 0 next.
            beat: called while a rank waits for a checkpoint that is being written.
        """
        self._checkpoints, self._group, self._reporter = checkpoints, group, reporter
        self._form, self._must_share, self._beat = form, must_share, beat
        self._shared = group.world_size == 1
        self._told_apart = self._looked = False
        self._background, self._tally = Background(), Tally(group)
        self._plans: Plans | None = None
        self._draft: Path | None = None
        self._count, self._left = 0, False

    def divides(self, *, parted: bool) -> bool:
        """Whether each rank is to write its part; the same on all ranks, which all call it.

        Args:
            parted: whether the ranks have different parts of the state.

        Raises:
            OSError: none can be saved there, or not in the form that was asked for.
        """
        wanted = self._form == "sharded" or (self._form == "auto" and parted)
        if wanted and not self._looked:
            self._look()
        if wanted and not self._shared and not self._told_apart:
            self._told_apart = True
            self._reporter.warn(
                f"checkpoint.dir {self._checkpoints.folder} is not one folder for all ranks: rank 0"
                " gathers the whole state and writes it; mount one volume there in all replicas,"
                " and each rank writes its own part"
            )
        return wanted and self._shared

    # --- saving ---------------------------------------------------------------------------------

    def store(
        self,
        kind: str,
        step: int,
        state: dict[str, Any],
        *,
        held: dict[str, Any] | None = None,
        stream: int | None = None,
        **position: int,
    ) -> None:
        """Begin to write rank 0's state with the random numbers of all ranks; all ranks call it.

        What is to be written is copied at once. A failed write is told and does not end the run:
        the older checkpoints are whole.

        Args:
            kind: tells one form of state from another.
            step: optimizer steps done.
            state: see Checkpoints.save.
            held: more of the state, which nobody changes any more, so that it needs no copy.
            stream: ranks with the same number draw the same random numbers; None: the rank.
            position: more about where the run is, for the event.
        """
        save = self._begin(kind, step, state, stream, position)
        if self._group.rank != 0:
            return
        whole = {**save.others, **(held or {})}
        check_state(whole)
        try:
            draft = self._checkpoints.draft(step, folder=False)
        except OSError as error:
            self._tell(save, error)
            return
        self._draft = draft
        save.stall = time.monotonic() - save.began
        self._background.begin(
            lambda: self._checkpoints.fill(draft, step, whole),
            lambda outcome: self._tell(save, outcome),
        )

    def store_parts(
        self,
        kind: str,
        step: int,
        state: dict[str, Any],
        parts: dict[str, Any],
        *,
        describes: bool,
        stream: int | None = None,
        **position: int,
    ) -> None:
        """The same with what each rank has of the model and the optimizer, where divides() says so.

        Args:
            kind: see store.
            step: see store.
            state: the rest, rank 0's; see store.
            parts: see shard_writing.Plans.stage.
            describes: see shard_writing.Plans.stage.
            stream: see store.
            position: see store.
        """
        from k8sjob.runtime.shard_writing import Plans  # imports much of torch.distributed

        save = self._begin(kind, step, state, stream, position)
        self._plans = self._plans or Plans(self._group)
        part = self._plans.stage(parts, describes=describes)
        if self._group.rank == 0:
            check_state({**save.others, **part.marked})
        draft = self._common_draft(save)
        if draft is None:
            return
        self._draft, self._count = draft, self._count + 1
        matter = f"save/{self._count}"
        save.stall = time.monotonic() - save.began
        self._background.begin(
            lambda: self._write_part(part, draft, save, matter),
            lambda outcome: self._tell(save, outcome),
        )

    def poll(self) -> None:
        """Tell what came of the last save, if that is known by now; costs nothing else."""
        self._background.take()

    def settle(self, patience: float | None = None) -> None:
        """Wait until the last save is done, and tell what came of it.

        Args:
            patience: seconds in which nothing more is written after which it is left alone; None:
                never, which is for the watchdog to judge.
        """
        if self._left or self._background.finish(self._written, self._beat, patience):
            return
        self._left = True
        self._tally.abandon()
        self._background.finish(self._written, self._beat, patience=_LAST_WORD_S)

    def _settle_together(self) -> None:
        """The same on all ranks: one that is gone is noticed, and not waited for."""

        def waits() -> torch.Tensor:
            return torch.tensor(int(self._background.busy and not self._left))

        while int(self._group.all_reduce(waits(), "max")):
            self._background.finish(self._written, self._beat, patience=_ROUND_S)

    def _begin(
        self,
        kind: str,
        step: int,
        state: dict[str, Any],
        stream: int | None,
        position: dict[str, int],
    ) -> _Save:
        """What every checkpoint has; waits for the one before."""
        began = time.monotonic()
        self._settle_together()
        mine = rng.capture(self._group.device)
        random = {name: torch.stack(self._group.gather(value)) for name, value in mine.items()}
        streams = self._streams(stream)
        if self._group.rank != 0:
            return _Save(step, began, position, {})
        ranks = {"world_size": self._group.world_size, "streams": streams}
        others = {**shards.on_host(state), "kind": kind, "step": step, "random": random, **ranks}
        return _Save(step, began, position, others)

    def _common_draft(self, save: _Save) -> Path | None:
        """The folder that all ranks write into; None, which is told, where it cannot be made."""
        name = None
        if self._group.rank == 0:
            try:
                name = self._checkpoints.draft(save.step, folder=True).name.encode()
            except OSError as error:
                self._tell(save, error)
        found = self._group.broadcast_bytes(name)
        return None if found is None else self._checkpoints.folder / found.decode()

    def _write_part(self, part: Part, draft: Path, save: _Save, matter: str) -> Path | None:
        """In the thread: write this rank's part; rank 0 waits for all, and publishes the whole."""
        told, failure = "", None
        try:
            told = part.write(draft)
        except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 must not wait for ever
            failure = error
        if self._group.rank != 0:
            self._tally.tell(matter, str(failure) if failure else told, failed=bool(failure))
            return None
        try:
            others = self._tally.hear(matter) if self._group.world_size > 1 else []
            if failure:
                raise failure  # noqa: TRY301 - what the others wrote is to be heard before
            part.finish(draft, save.others, [told, *others])
            return self._checkpoints.publish(draft, save.step)
        except Exception:
            remove(draft)
            raise

    def _tell(self, save: _Save, outcome: Path | Exception | None) -> None:
        if isinstance(outcome, Exception):
            self._reporter.warn(
                f"no checkpoint at step {save.step}: {outcome}; training goes on and the older ones"
                f" are whole: make room in {self._checkpoints.folder}, or let it be written"
            )
            return
        seconds = round(time.monotonic() - save.began, 3)
        self._reporter.emit(
            EventKind.CHECKPOINT,
            path=str(outcome),
            step=save.step,
            seconds=seconds,
            stall_s=round(save.stall, 3),
            **save.position,
        )

    def _written(self) -> int:
        """Bytes of what is being written."""
        draft = self._draft
        try:
            if draft is None or not draft.is_dir():
                return 0 if draft is None else draft.stat().st_size
            return sum(file.stat().st_size for file in draft.iterdir())
        except OSError:
            return 0

    # --- resuming -------------------------------------------------------------------------------

    def newest(self, kind: str) -> Saved | None:
        """The newest whole checkpoint, on all ranks; None where there is none.

        Raises:
            OSError: none can be saved there, or not in the form that was asked for.
            ValueError: it was stored by another kind of loop.
        """
        self.settle()
        self._look()
        found = newest_whole(
            self._checkpoints,
            self._group,
            shared=self._shared,
            warn=self._reporter.warn,
            beat=self._beat,
        )
        if self._group.rank == 0:
            with suppress(OSError):
                self._checkpoints.tidy()
        if found is None:
            return None
        path, state = found
        if state.get("kind") != kind:
            raise ValueError(
                f"{path} holds {state.get('kind', 'something else')!r}, not {kind!r}: "
                f"resume it with the code that saved it, or {FROM_SCRATCH}"
            )
        Observer.resumed = state["step"]
        return Saved(str(path), state["step"], state, self)

    def _look(self) -> None:
        """See whether checkpoints can be there, and whether all ranks see the same ones."""
        refusal = self._checkpoints.refusal() if self._group.rank == 0 else None
        if said := self._group.broadcast_bytes(refusal.encode() if refusal else None):
            raise OSError(said.decode())
        self._shared = sees_one_folder(self._checkpoints, self._group)
        self._refuse_apart()
        self._looked = True

    def _refuse_apart(self) -> None:
        """Folders of their own, where the job cannot do with them."""
        if self._must_share and not self._shared:
            raise OSError(
                f"checkpoint.dir {self._checkpoints.folder} is not one folder for all"
                f" {self._group.world_size} ranks, and in an elastic job any of them may have to go"
                " on from it: mount one volume there in all replicas"
            )
        if self._form == "sharded" and not self._shared:
            raise OSError(
                f"checkpoint.format: sharded, but checkpoint.dir {self._checkpoints.folder} is not"
                f" one folder for all {self._group.world_size} ranks: mount one volume there in all"
                " replicas, or leave checkpoint.format at auto"
            )

    def restore_random(self, state: dict[str, Any], stream: int | None) -> None:
        """See Saved."""
        then, now = state["world_size"], self._group.world_size
        if then != now:
            self._reporter.warn(
                f"saved by {then} ranks, resumed by {now}: the samples go on in their order, "
                "random numbers (dropout, augmentation) do not"
            )
            return
        if self._streams(stream) != state.get("streams", list(range(then))):
            self._reporter.warn(
                "saved by ranks that divided the data in another way: the samples go on in their "
                "order, random numbers (dropout, augmentation) do not"
            )
            return
        # Cloned: torch.set_rng_state crashes on a tensor that begins in the middle of its storage.
        random = state["random"]
        mine = {name: values[self._group.rank].clone() for name, values in random.items()}
        rng.restore(mine, self._group.device)

    def _streams(self, stream: int | None) -> list[int]:
        """The number of each rank's random numbers, by rank."""
        mine = self._group.rank if stream is None else stream
        return [int(other) for other in self._group.gather(torch.tensor(mine))]
