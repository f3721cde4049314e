"""The check that all ranks make the same collective calls, in the same order.

Where they do not, gloo aborts the process, or all wait forever. So a call waits in the store until
all ranks have come to the same one, before any data of it is sent. A training step has no such
check: it is counted, and a rank that waits for one that steps sees that by the number. The
watchdog's thread publishes each rank's last call once a second.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.contract import ExitCode
from k8sjob.runtime.base import frames
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.errors import PeerLost, ranks_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._C._distributed_c10d import Store

    from k8sjob.runtime.comm.process_group import Group

LEAVING: Final = "leave"
"""The name of the call that ends a session."""
_OFTEN: Final = 16
"""Calls of a kind that are all checked; after them, those whose number is a power of two."""
_MAX_KINDS: Final = 1000
_FIRST_PAUSE_S: Final = 0.0001


class CallOrderError(RuntimeError):
    """Ranks made different calls where all have to make the same."""

    exit_code: Final = ExitCode.USER_ERROR


class Call(NamedTuple):
    """A collective call of one rank."""

    number: int  # how many came before it on this rank
    name: str  # "run.step", "job.reduce", ...
    detail: str  # what has to be equal on all ranks, in words; may be empty
    file: str  # the user's file that called; empty if there is none
    line: int

    @property
    def what(self) -> tuple[str, str]:
        """The properties that all ranks must have in common."""
        return self.name, self.detail

    def in_words(self, *, detailed: bool) -> str:
        """The call and its line."""
        action = "left runtime.session" if self.name == LEAVING else f"called {self.name}"
        detail = f" with {self.detail}" if detailed and self.detail else ""
        return action + detail + (f" ({self.file}:{self.line})" if self.file else "")


class CallOrder:
    """One rank's calls, compared with those of the others."""

    def __init__(
        self, group: Group, first_rank: int, timeout: float, alert: Callable[[], None]
    ) -> None:
        """A record of the ranks that train together, the first of which is `first_rank` of all.

        They wait `timeout` seconds for each other; `alert` raises when a rank is known to be gone.
        """
        self._group, self._first, self._timeout, self._alert = group, first_rank, timeout, alert
        self._rank = first_rank + group.rank
        self._last = Call(0, "runtime.session", "", "", 0)
        self._seen: Counter[tuple[tuple[str, str], ...]] = Counter()
        self._store: Store | None = None
        self._keys: tuple[str, ...] = ()

    def note(self, name: str, detail: str = "") -> Call:
        """Count a call that begins now. Costs two microseconds."""
        file, line = frames.caller(sys._getframe(1))  # noqa: SLF001 - documented
        self._last = Call(self._last.number + 1, name, detail, file, line)
        return self._last

    def check(self, name: str, detail: str = "") -> None:
        """Count a call, and wait until all ranks have come to the same one.

        Raises:
            CallOrderError: ranks made another call.
            PeerLost: ranks are gone, or did not come in time.
        """
        self.wait(self.note(name, detail))

    def check_often(self, name: str, detail: str = "") -> None:
        """The same for a call that may come many times a step: the more often, the less checked.

        Whether it is checked has to be the same on all ranks. Their lines may differ, so that
        depends only on this call and the one before it.
        """
        before = self._last.what
        call = self.note(name, detail)
        # Shapes may differ in each step. All ranks forget at the same call, so that they still
        # agree.
        if len(self._seen) >= _MAX_KINDS:
            self._seen.clear()
        kind = before, call.what
        self._seen[kind] += 1
        times = self._seen[kind]
        if times <= _OFTEN or not times & (times - 1):
            self.wait(call)

    def wait(self, call: Call) -> None:
        """Wait until all ranks have come to a call that was noted; see check()."""
        world = self._group.world_size
        if self._group.rendezvous is None or world == 1:
            return
        if self._store is None:
            # A store's client serves one thread at a time, and the other threads have theirs.
            self._store = self._group.rendezvous.again()
        key = f"calls/{self._first}/{call.number}"
        # Ranks at another call count under another key, and neither number becomes the world size.
        arrivals = f"{key}/{'/'.join(call.what)}"
        with self._group.waiting():
            if self._store.add(arrivals, 1) == world:
                self._store.set(key, "")
                for old in self._keys:  # no rank waits for these any more
                    self._store.delete_key(old)
            else:
                self._await(key, call, self._store)
        self._keys = (key, arrivals)

    def _await(self, key: str, call: Call, store: Store) -> None:
        began = time.monotonic()
        pause, look = _FIRST_PAUSE_S, TIMEOUTS.look_at_calls
        while not store.check([key]):
            self._alert()
            waited = time.monotonic() - began
            if waited > self._timeout:
                name = "the end of the session" if call.name == LEAVING else call.name
                raise PeerLost(
                    f"not all ranks reached {name} within {self._timeout:g} s", late=True
                )
            if waited > look:
                # To look costs a request for each rank, so it is done ever more rarely.
                look *= 2
                message = disagreement(self._rank, call, self._published(store))
                # All may have come while their calls were read.
                if message and not store.check([key]):
                    raise CallOrderError(message)
            time.sleep(pause)
            # The first pauses are short: ranks in step come within a fraction of a millisecond.
            pause = min(pause * 1.5, TIMEOUTS.poll)

    def publish(self, store: Store) -> None:
        """Publish this rank's last call; for the watchdog's thread, with its store."""
        if self._group.world_size > 1:
            store.set(f"call/{self._rank}", json.dumps(_shown(self._last)))

    def _published(self, store: Store) -> dict[int, Call]:
        ranks = range(self._first, self._first + self._group.world_size)
        published = [rank for rank in ranks if store.check([f"call/{rank}"])]
        return {rank: Call(*json.loads(store.get(f"call/{rank}"))) for rank in published}


def disagreement(rank: int, mine: Call, calls: Mapping[int, Call]) -> str:
    """The calls of other ranks for which `rank` waits in vain at `mine`; empty: they may yet come.

    `calls` has the last ones of all ranks; they may have made more by now.
    """
    mine = _shown(mine)
    waiting = {member: call for member, call in calls.items() if call.number >= mine.number}
    waiting[rank] = mine
    # No rank goes past a call to which not all have come, except by making another call.
    if all(call[:3] == mine[:3] for call in waiting.values()):
        return ""
    alike = len({call[:2] for call in waiting.values()}) == 1
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for member, call in sorted(waiting.items()):
        groups[call.in_words(detailed=alike)].append(member)
    groups_in_words = (f"{ranks_in_words(ranks)} {words}" for words, ranks in groups.items())
    text = " where ".join(groups_in_words)
    if alike:
        return f"{text}; it must be the same on all ranks"
    return (
        f"{text}; all ranks must make the same calls in the same order, also where only rank 0 "
        "uses the result: check the code under `if job.is_main:`"
    )


def _shown(call: Call) -> Call:
    """With the file as its author knows it, below the working directory without that."""
    folder = f"{os.getcwd()}{os.sep}"  # noqa: PTH109 - a string
    return call._replace(file=frames.with_user_paths(call.file).removeprefix(folder))
