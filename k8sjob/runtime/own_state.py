"""The checkpoints of a loop of one's own: its state on one rank, or divided over all."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import EventKind
from k8sjob.runtime.checkpoint import check_state
from k8sjob.runtime.shards import gathered

if TYPE_CHECKING:
    from k8sjob.runtime.process_group import Group
    from k8sjob.runtime.report import Reporter
    from k8sjob.runtime.saves import Saves

__all__ = ["load", "save"]

_KIND: Final = "k8sjob/own/1"


def save(saves: Saves, group: Group, step: int, state: dict[str, Any]) -> None:
    """See Job.save."""
    first = group.rank == 0
    if first:
        check_state(state)
    divided = _agree_on_divided(group, state)
    if saves.divides(parted=divided):
        parts = {"state": state if first else _full_state().divided_alone(state)}
        saves.store_parts(_KIND, step, {}, parts, describes=first)
    elif divided:
        saves.store(_KIND, step, {}, held={"state": _full_state().whole(state, keep=first)})
    else:
        saves.store(_KIND, step, {"state": state})


def load(saves: Saves, reporter: Reporter, like: dict[str, Any] | None) -> dict[str, Any] | None:
    """See Job.load."""
    saved = saves.newest(_KIND)
    if saved is None:
        return None
    reporter.emit(EventKind.RESUMED, path=saved.path, step=saved.step)
    saved.restore_random()
    state = saved.state["state"]
    found: dict[str, Any] = gathered(state) if like is None else _full_state().placed(state, like)
    return found


def _agree_on_divided(group: Group, state: dict[str, Any]) -> bool:
    """Whether there are distributed tensors in a state.

    Raises:
        ValueError: some ranks have them and others do not.
    """
    # Whoever has such tensors has imported them; nobody else needs to.
    mine = "torch.distributed.tensor" in sys.modules and _full_state().is_divided(state)
    without = [rank for rank, (has,) in enumerate(group.table([mine])) if not has]
    if 0 < len(without) < group.world_size:
        raise ValueError(
            f"job.save: rank(s) {', '.join(map(str, without[:8]))} gave no distributed tensors"
            " and the others did: give their parts on all ranks"
        )
    return not without


def _full_state() -> Any:
    from k8sjob.runtime import full_state  # imports much of torch.distributed

    return full_state
