"""What a rank's process shows of itself, with a session or without one, to the agent of its node.

A thread looks four times a second whether a process group was made, and whether the main thread is
blocked in a collective. Optimizer steps are counted by torch's own hook. A script is not changed by
it, and torch is not imported for it.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from k8sjob.runtime.stuck import Waiting

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Observer", "Seen", "decode_ranks", "encode_ranks", "read_seen"]

_EVERY_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a rank.

    Attributes:
        runs: whether it has come as far as the observer.
        torch: whether it has imported torch, or begun to.
        importing: whether it is importing torch now.
        ranks: size of the largest process group that it was in; 0 before the first.
        step: optimizer steps done, also those of a checkpoint that a session resumed; -1 before
            the first of this process.
        where: its place in the user's code; empty where nobody watches for a hang.
        waited: whole seconds that it has been blocked in a collective; 0: it is not.
        stuck: whether that is too long.
        steps_on: whether it has done a step lately.
    """

    runs: bool = False
    torch: bool = False
    importing: bool = False
    ranks: int = 0
    step: int = -1
    where: str = ""
    waited: int = 0
    stuck: bool = False
    steps_on: bool = False


class Observer:
    """Looks at the process that it runs in, and writes what it sees to a file.

    Attributes:
        resumed: steps of the checkpoint that this process resumed.
    """

    resumed: ClassVar[int] = 0

    def __init__(self, file: Path | None, world_size: int, hang_timeout: float) -> None:
        """An observer; start() begins.

        Args:
            file: where the agent reads it; None: no agent asks.
            world_size: size of a group that was made and gone between two looks.
            hang_timeout: see RuntimeConfig.
        """
        self._waiting = Waiting(hang_timeout)
        self._file, self._world_size = file, world_size
        self._seen, self._written = Seen(), Seen()
        self._steps, self._counting = 0, False

    @property
    def seen(self) -> Seen:
        """What there is to see now."""
        self._look()
        return self._seen

    def start(self) -> None:
        """Look from now on, until the process ends."""
        if self._file is not None:
            threading.Thread(target=self._watch, daemon=True, name="k8sjob-observer").start()

    def write(self) -> None:
        """Look, and write down what has changed."""
        seen = self.seen
        if self._file is None or seen == self._written:
            return
        draft = self._file.with_suffix(".new")
        with suppress(OSError):
            draft.write_text(json.dumps(asdict(seen)))
            draft.replace(self._file)
            self._written = seen

    def _watch(self) -> None:
        tick = threading.Event()
        while True:
            self.write()
            tick.wait(_EVERY_S)

    def _look(self) -> None:
        torch = sys.modules.get("torch")
        # importlib's own mark of a module that is not complete yet; it has no public form.
        importing = bool(getattr(getattr(torch, "__spec__", None), "_initializing", False))
        if torch and not self._counting:
            self._count_steps()
        step = self.resumed + self._steps - 1 if self._steps else -1
        self._waiting.look(self._steps)
        self._seen = Seen(
            runs=True,
            torch=torch is not None,
            importing=importing,
            ranks=max(self._seen.ranks, self._ranks()),
            step=step,
            where=self._waiting.where,
            waited=self._waiting.seconds,
            stuck=self._waiting.too_long,
            steps_on=self._waiting.steps_on,
        )

    def _ranks(self) -> int:
        # While another thread imports torch these modules are there and not yet complete.
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        initialized = getattr(c10d, "is_initialized", None)
        if initialized is None:
            return 0
        with suppress(Exception):  # the group may be destroyed at this very moment
            if initialized():
                return int(c10d.get_world_size())
        gone = getattr(c10d, "_default_pg_init_method", None) is not None
        return self._world_size if gone else 0

    def _count_steps(self) -> None:
        optimizer = sys.modules.get("torch.optim.optimizer")
        register = getattr(optimizer, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(self._count)
            self._counting = True

    def _count(self, *_: Any) -> None:
        self._steps += 1


def read_seen(file: Path | None) -> Seen:
    """What an observer wrote; nothing seen where it wrote nothing."""
    try:
        return Seen(**json.loads(file.read_text())) if file else Seen()
    except (OSError, ValueError, TypeError):
        return Seen()


def encode_ranks(seen: Mapping[int, Seen]) -> str:
    """What the agents of other nodes must know where a group may hang.

    That is each rank that does not wait, and one of those that do: there may be thousands.
    """
    late = max(seen, key=lambda rank: (seen[rank].stuck, seen[rank].waited, -rank), default=None)
    told = {rank: one for rank, one in seen.items() if rank == late or not one.waited}
    return json.dumps({rank: asdict(one) for rank, one in told.items()})


def decode_ranks(text: str) -> dict[int, Seen]:
    """What encode_ranks() encoded; empty where another program did.

    A Seen of values of the wrong types is none.
    """
    with suppress(ValueError, TypeError, AttributeError, RecursionError):
        found = {int(rank): Seen(**one) for rank, one in json.loads(text).items()}
        if all(
            type(getattr(one, name)) is type(default)
            for one in found.values()
            for name, default in asdict(Seen()).items()
        ):
            return found
    return {}
