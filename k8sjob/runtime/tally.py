"""What each rank has done of a matter, told to rank 0 through the store.

For threads: a collective of theirs would run into those of the training.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from k8sjob.runtime.process_group import Group

__all__ = ["AbandonedError", "Tally"]

_LOOK_S: Final = 0.01


class AbandonedError(Exception):
    """Nobody waits for the others any more."""


class Tally:
    """One rank's side of it; for one thread at a time."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._store: Store | None = None
        self._abandoned = threading.Event()

    def tell(self, matter: str, text: str, *, failed: bool = False) -> None:
        """Say what this rank has done.

        Args:
            matter: a name that comes once in a group's life, the same on all ranks.
            text: what rank 0 is to know.
            failed: whether the text says why it could not be done.
        """
        self._client().set(_key(matter, self._group.rank), json.dumps([failed, text]))

    def hear(self, matter: str) -> list[str]:
        """On rank 0: wait for the other ranks; what ranks 1, 2, ... told.

        Raises:
            OSError: ranks could not do it; what they said.
            AbandonedError: abandon() was called meanwhile.
        """
        keys = [_key(matter, rank) for rank in range(1, self._group.world_size)]
        told: list[str] = []
        failures: list[str] = []
        for rank, key in enumerate(keys, 1):
            while not self._client().check([key]):
                if self._abandoned.wait(_LOOK_S):
                    raise AbandonedError(f"rank {rank} did not say that its part is written")
            failed, text = json.loads(self._client().get(key))
            (failures if failed else told).append(f"rank {rank}: {text}" if failed else text)
            self._client().delete_key(key)
        if failures:
            raise OSError("; ".join(failures))
        return told

    def abandon(self) -> None:
        """Let hear() end, whoever waits in it."""
        self._abandoned.set()

    def _client(self) -> Store:
        if self._store is None:
            if self._group.meeting is None:
                raise RuntimeError("one process alone has nobody to tell")
            # A store's client answers one thread at a time, and the others have theirs.
            self._store = self._group.meeting.again()
        return self._store


def _key(matter: str, rank: int) -> str:
    return f"done/{matter}/{rank}"
