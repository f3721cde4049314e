"""Saving and resuming as all ranks do it together: rank 0 has the files, everybody the state."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from k8sjob.contract import EventKind
from k8sjob.runtime import rng
from k8sjob.runtime.checkpoint import decode

if TYPE_CHECKING:
    from k8sjob.runtime.checkpoint import Checkpoints
    from k8sjob.runtime.process_group import Group
    from k8sjob.runtime.report import Reporter

__all__ = ["Saved", "Saves"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that was read.

    Attributes:
        path: its file, on rank 0.
        step: optimizer steps done.
        state: what was stored.
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


class Saves:
    """The checkpoints of a group. Only rank 0 touches the disk, so no volume has to be shared."""

    def __init__(self, checkpoints: Checkpoints, group: Group, reporter: Reporter) -> None:
        self._checkpoints, self._group, self._reporter = checkpoints, group, reporter

    def store(
        self,
        kind: str,
        step: int,
        state: dict[str, Any],
        *,
        stream: int | None = None,
        **position: int,
    ) -> None:
        """Write rank 0's state with the random numbers of all ranks; all ranks call it.

        A failed write is told and does not end the run: the older checkpoints are whole.

        Args:
            kind: tells one form of state from another.
            step: optimizer steps done.
            state: see Checkpoints.save.
            stream: ranks with the same number draw the same random numbers; None: the rank.
            position: more about where the run is, for the event.
        """
        began = time.monotonic()
        mine = rng.capture(self._group.device)
        random = {name: torch.stack(self._group.gather(value)) for name, value in mine.items()}
        streams = self._streams(stream)
        if self._group.rank != 0:
            return
        ranks = {"world_size": self._group.world_size, "streams": streams}
        whole = {**state, "kind": kind, "step": step, "random": random, **ranks}
        try:
            path = self._checkpoints.save(step, whole)
        except OSError as error:
            self._reporter.warn(
                f"no checkpoint at step {step}: {error}; training goes on and the older ones are "
                f"whole: make room in {self._checkpoints.folder}, or let it be written"
            )
            return
        seconds = round(time.monotonic() - began, 3)
        self._reporter.emit(
            EventKind.CHECKPOINT, path=str(path), step=step, seconds=seconds, **position
        )

    def newest(self, kind: str) -> Saved | None:
        """The newest whole checkpoint, on all ranks; None where there is none.

        Raises:
            OSError: none can be saved there.
            ValueError: it was stored by another kind of loop.
        """
        found = refusal = None
        if self._group.rank == 0:
            refusal = self._checkpoints.refusal()
            found = self._checkpoints.newest(self._reporter.warn)
            with suppress(OSError):
                self._checkpoints.tidy()
        if said := self._group.broadcast_bytes(refusal.encode() if refusal else None):
            raise OSError(said.decode())
        name = self._group.broadcast_bytes(str(found[0]).encode() if found else None)
        content = self._group.broadcast_bytes(found[1] if found else None)
        if name is None or content is None:
            return None
        state, path = decode(content), name.decode()
        if state.get("kind") != kind:
            raise ValueError(
                f"{path} holds {state.get('kind', 'something else')!r}, not {kind!r}: "
                "resume it with the code that saved it, or choose another checkpoint.dir"
            )
        return Saved(path, state["step"], state, self)

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
