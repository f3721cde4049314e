"""Hangs: the ranks that a group waits for, and where these are.

Watchdogs of sessions publish beats, and observers see the ranks that have no session; one rule
names the culprits from both.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.contract import ExitCode, Reason
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.heartbeat import Seen

if TYPE_CHECKING:
    from collections.abc import Mapping

SYNC: Final = "sync"
"""The phase of a rank that waits for the others in a collective."""
START: Final = "start"
END: Final = "end"
_MAX_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class Beat:
    """The last beat of a rank, as others see it."""

    step: int  # the optimizer step, counted by the rank
    # "start" before the training, "end" after it, SYNC in a collective, else the activity
    phase: str
    answered: bool = True  # published after the alarm, so the rank's threads still run
    # once it is late, its main thread's place in the user's code, as file:line in function
    where: str = ""

    def encode(self) -> str:
        """Encode it as a store's value."""
        return json.dumps([self.step, self.phase, self.answered, self.where])

    @classmethod
    def decode(cls, text: bytes) -> Beat:
        """Decode it from a store's value."""
        return cls(*json.loads(text))


def culprits(beats: Mapping[int, Beat | None], *, by_step: bool = True) -> tuple[int, ...]:
    """The ranks that the others wait for, in their order; empty if that is not known.

    Those that did not respond to the alarm cannot even run a thread. If all answered, they are the
    ranks that do not wait for others; of several those that are behind, where the steps of ranks
    can be compared. A rank that never published a beat has None.
    """
    # Only an answer shows that a rank still runs Python.
    silent = [rank for rank, beat in beats.items() if beat is None or not beat.answered]
    present = {rank: beat for rank, beat in beats.items() if beat is not None}
    behind = min((beat.step for beat in present.values()), default=0)
    elsewhere = {rank: beat.step for rank, beat in present.items() if beat.phase != SYNC}
    last = [rank for rank, step in elsewhere.items() if by_step and step == behind]
    return tuple(sorted(silent or last or elsewhere))


def reason(
    beats: Mapping[int, Beat | None],
    guilty: tuple[int, ...],
    message: str,
    *,
    rank: int,
    kind: str = "Hang",
) -> Reason:
    """The reason of a hang that `rank` reports, at the place of the first culprit.

    Where nothing is known of the culprits, it is that of the first rank that has a beat.
    """
    present = (beat for rank in (*guilty, *beats) if (beat := beats.get(rank)) is not None)
    beat = next(present, Beat(-1, ""))
    return Reason(
        exit_code=ExitCode.HUNG,
        rank=rank,
        type=kind,
        message=message,
        where=beat.where.partition(" ")[0],
        time=time.time(),
        culprits=guilty,
        step=beat.step,
    )


def explain(beats: Mapping[int, Beat | None], guilty: tuple[int, ...]) -> str:
    """The state of the culprits, in words."""
    if guilty:
        return ", ".join(f"rank {rank} {_state(beats[rank])}" for rank in guilty[:10])
    return (
        "all ranks wait in a collective, at steps "
        f"{', '.join(sorted({str(beat.step) for beat in beats.values() if beat}))}; they called "
        f"different ones, or different numbers of them{_places(beats)}"
    )


def _places(beats: Mapping[int, Beat | None]) -> str:
    """The ranks' places, where these are different lines of the user's code."""
    ranks_at: defaultdict[str, list[str]] = defaultdict(list)
    for rank, beat in beats.items():
        if beat is not None and beat.where:
            ranks_at[beat.where].append(str(rank))
    if len(ranks_at) < 2:
        return " (compare the stacks)"
    first = list(ranks_at.items())[:4]
    shown = [f"rank {', '.join(ranks[:4])} in {place}" for place, ranks in first]
    return f": {'; '.join(shown)}"


def _state(beat: Beat | None) -> str:
    if beat is None:
        return "does not respond, and never did (it is stopped, or in C code)"
    idle = {START: "before its training", END: "after its training"}
    place = idle.get(beat.phase, f"at step {beat.step} in {beat.phase}")
    if beat.answered:
        return f"is {place}, {beat.where}" if beat.where else f"is {place}"
    return f"does not respond (it is stopped, or in C code), last heard of {place}"


# --- ranks without a session ----------------------------------------------------------------------


def hang_of(ranks: Mapping[int, Seen]) -> Reason | None:
    """Why a group without a session hangs, and which ranks cause it; None: no rank waits too long.

    Args:
        ranks: by rank, the state of all ranks that still run.
    """
    late = min((rank for rank, state in ranks.items() if state.stuck), default=None)
    # Where a rank still steps, the group works: the others wait for something else, such as rank
    # 0's evaluation.
    if late is None or any(state.steps_on for state in ranks.values()):
        return None
    beats = {
        rank: Beat(ranks[rank].step, SYNC if ranks[rank].waited else "", where=ranks[rank].where)
        for rank in (late, *sorted(ranks))
        # A rank that stopped at once has not yet reported the size of its group.
        if ranks[rank].waited or ranks[rank].ranks > 1 or rank < ranks[late].ranks
    }
    # Torch's hook counts the steps of all optimizers, of which ranks may have different numbers.
    guilty = culprits(beats, by_step=False)
    works = any(ranks[rank].works for rank in guilty)
    if works and ranks[late].waited < TIMEOUTS.patience:
        return None  # it prepares data: torch would let the others wait, too
    message = f"rank {late} has waited {ranks[late].waited} s in a collective, {ranks[late].where}"
    if guilty:
        message = f"{places(ranks, guilty)}; {message}"
    elif len({state.where for state in ranks.values()}) > 1:
        message += f"; so have all others, in different lines: {places(ranks, tuple(ranks))}"
    elif len(ranks) > 1:
        message += "; so have all others, in the same line: their calls there differ, in kind,"
        message += " source or shape, or one rank has made more of them before"
    else:
        message += "; no rank is known that does not wait"
    rank = guilty[0] if guilty else late
    return reason(beats, guilty, message, rank=rank, kind="Late" if works else "Hang")


def places(states: Mapping[int, Seen], ranks: tuple[int, ...]) -> str:
    """Where the ranks are in the user's code, in words; of many, the first."""
    shown = [(rank, states[rank]) for rank in ranks[:_MAX_SHOWN]]
    return ", ".join(
        f"rank {rank} {'works' if state.works else 'is'}"
        f" {f'at {state.where}' if state.where else 'in no known line'}"
        for rank, state in shown
    )


def encode_ranks(ranks: Mapping[int, Seen]) -> str:
    """The ranks that other nodes' agents must know to explain a hang.

    They are each rank that does not wait, and one of those that do: there may be thousands.
    """
    late = max(ranks, key=lambda rank: (ranks[rank].stuck, ranks[rank].waited, -rank), default=None)
    needed = ((rank, state) for rank, state in ranks.items() if rank == late or not state.waited)
    return json.dumps({rank: asdict(state) for rank, state in needed})


def decode_ranks(text: str) -> dict[int, Seen]:
    """Decode the text of encode_ranks(); empty for other text."""
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        return {int(rank): Seen(**fields) for rank, fields in json.loads(text).items()}
    # Nothing is known of ranks whose agent has another version.
    return {}
