"""Reports of all ranks to rank 0 through the store, for threads.

A collective in a thread would interfere with those of the training.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from k8sjob.runtime.comm.process_group import Group

__all__ = ["AbandonedError", "Tally"]

_LOOK_S: Final = 0.01


class AbandonedError(Exception):
    """The wait for the others was given up."""


class Tally:
    """One rank's reports; for one thread at a time."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._store: Store | None = None
        self._abandoned = threading.Event()

    def tell(self, matter: str, text: str, *, failed: bool = False) -> None:
        """Report what this rank has done, or why it failed.

        `matter` is a name that is used once in a group's life, the same on all ranks.
        """
        self._client().set(_key(matter, self._group.rank), json.dumps([failed, text]))

    def hear(self, matter: str) -> list[str]:
        """On rank 0: wait for the other ranks; the reports of ranks 1, 2, ...

        Raises:
            OSError: ranks failed; with their errors.
            AbandonedError: abandon() was called meanwhile.
        """
        keys = [_key(matter, rank) for rank in range(1, self._group.world_size)]
        reports: list[str] = []
        failures: list[str] = []
        for rank, key in enumerate(keys, 1):
            while not self._client().check([key]):
                if self._abandoned.wait(_LOOK_S):
                    raise AbandonedError(f"rank {rank} did not report that its part is written")
            failed, text = json.loads(self._client().get(key))
            (failures if failed else reports).append(f"rank {rank}: {text}" if failed else text)
            self._client().delete_key(key)
        if failures:
            raise OSError("; ".join(failures))
        return reports

    def abandon(self) -> None:
        """End a hear() that waits in another thread."""
        self._abandoned.set()

    def _client(self) -> Store:
        if self._store is None:
            if self._group.rendezvous is None:
                raise RuntimeError("one process alone has no other ranks")
            # A store's client serves one thread at a time, and the other threads have theirs.
            self._store = self._group.rendezvous.again()
        return self._store


def _key(matter: str, rank: int) -> str:
    return f"done/{matter}/{rank}"
