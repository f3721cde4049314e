"""Several collections, each followed by a thread of its own, as one thing to wait for."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from k8sjob.backends.cluster.reflect import Kind, reflect
from k8sjob.backends.transport import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from k8sjob.backends.api import Json
    from k8sjob.backends.cluster.reflect import Change
    from k8sjob.backends.transport import Transport

__all__ = ["Mirror", "Notice", "Source"]

SPARE_SECONDS: Final = 1.0
"""How long what may be missing is waited for at the beginning."""


@dataclass(frozen=True, slots=True)
class Source:
    """One collection.

    Attributes:
        path: where it is.
        query: selectors.
        keep: which of its objects are wanted.
        spare: whether the rest is of use without it: a refusal is told, and that is all.
    """

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    keep: Callable[[Json], bool] = lambda _: True
    spare: bool = False


@dataclass(frozen=True, slots=True)
class Notice:
    """Something about the connection that whoever waits should know.

    Attributes:
        reason: one word: "ConnectionLost", "ConnectionRestored", "NotReadable".
        message: a sentence.
        time: seconds since the epoch.
    """

    reason: str
    message: str
    time: float


class Mirror:
    """The objects of several sources, kept up to date while the `with` block lasts.

    Args:
        transport: carries the requests.
        sources: by a name of their own.
    """

    def __init__(self, transport: Transport, sources: Mapping[str, Source]) -> None:
        self._transport, self._sources = transport, sources
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._begun = time.monotonic()
        # All of the following under the condition's lock.
        self._objects: dict[str, dict[str, Json]] = {name: {} for name in sources}
        self._unsynced = set(sources)
        self._lost: set[str] = set()
        self._lost_at = 0.0
        self._notices: list[Notice] = []
        self._error: BaseException | None = None
        self._changed = True

    def __enter__(self) -> Self:
        for name in self._sources:
            threading.Thread(target=self._run, args=(name,), name=name, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # the threads end by themselves; one may wait for an answer still

    def changed(self, within: float) -> bool:
        """Whether there is anything new since the last call; waits for it, at most so long.

        Nothing counts as new before all sources have told what was there.

        Args:
            within: seconds.

        Raises:
            ApiError: a source that is not spare cannot be read.
        """
        with self._news:
            self._news.wait_for(lambda: self._error or (self._changed and self._ready()), within)
            if self._error:
                raise self._error
            if not (self._changed and self._ready()):
                return False
            self._changed = False
            return True

    def objects(self, source: str) -> list[Json]:
        """The objects of a source, in no order; a list of one's own."""
        with self._news:
            return list(self._objects[source].values())

    def notices(self) -> Sequence[Notice]:
        """What was to be told until now, oldest first."""
        with self._news:
            return tuple(self._notices)

    def _ready(self) -> bool:
        needed = {name for name in self._unsynced if not self._sources[name].spare}
        late = time.monotonic() - self._begun > SPARE_SECONDS
        return not needed if late else not self._unsynced

    def _run(self, name: str) -> None:
        source = self._sources[name]
        try:
            for change in reflect(
                self._transport, source.path, source.query, stop=self._stop, keep=source.keep
            ):
                with self._news:
                    self._apply(name, change)
                    self._news.notify_all()
        except Exception as error:  # noqa: BLE001 - raised where the mirror is looked into
            with self._news:
                self._fail(name, error)
                self._news.notify_all()

    def _apply(self, name: str, change: Change) -> None:
        match change.kind:
            case Kind.ADDED | Kind.MODIFIED:
                self._objects[name][change.object["metadata"]["uid"]] = change.object
            case Kind.DELETED:
                self._objects[name].pop(change.object["metadata"]["uid"], None)
            case Kind.SYNCED:
                self._unsynced.discard(name)
            case Kind.LOST:
                self._gone(name, change.why)
            case Kind.RESTORED:
                self._back(name)
        self._changed = True

    def _gone(self, name: str, why: ApiError | None) -> None:
        if not self._lost:
            self._lost_at = time.monotonic()
            said = f"the connection to the cluster is lost ({why and why.said}); trying again"
            self._notices.append(Notice("ConnectionLost", said, time.time()))
        self._lost.add(name)

    def _back(self, name: str) -> None:
        self._lost.discard(name)
        if not self._lost:
            seconds = time.monotonic() - self._lost_at
            said = f"the connection to the cluster is back after {seconds:.0f} s"
            self._notices.append(Notice("ConnectionRestored", said, time.time()))

    def _fail(self, name: str, error: Exception) -> None:
        if not (self._sources[name].spare and isinstance(error, ApiError)):
            self._error = self._error or error
            return
        self._unsynced.discard(name)
        self._lost.discard(name)
        said = f"{name} cannot be read: {error}"
        if not any(notice.reason == "NotReadable" for notice in self._notices):
            self._notices.append(Notice("NotReadable", said, time.time()))
        self._changed = True
