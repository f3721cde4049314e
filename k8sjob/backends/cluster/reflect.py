"""A collection as it changes: list, watch from there, and list again after every break.

A watch is never begun without the version of a list: with none, or with one from the future, an
apiserver answers with silence. What went away while nobody watched shows in the next list, and is
told as a deletion.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.cluster.listing import pages, slim
from k8sjob.backends.transport import ApiError, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from threading import Event

    from k8sjob.backends.api import Json
    from k8sjob.backends.transport import Transport

__all__ = ["Change", "Kind", "reflect"]

WATCH_SECONDS: Final = 120
"""When the server is to end a watch by itself; it is begun again where it ended."""
IDLE_SECONDS: Final = 150.0
"""A silence that a living connection cannot have."""
PAUSE_SECONDS: Final = 0.4
"""The first pause between two tries; each is about twice the one before."""
MOST_SECONDS: Final = 3.0
"""The longest pause: an apiserver that is back is seen within it."""
STEADY_SECONDS: Final = 10.0
"""A list and a watch that together lasted so long were good ones: the pauses begin anew."""
LOST_LISTS: Final = 2
"""So many lists must fail in a row until the connection counts as lost."""
REFUSED_SECONDS: Final = 30.0
"""A role or a CRD may not be known yet to an apiserver that was just started."""
_REFUSALS: Final = frozenset({400, 403, 404, 405, 422})


class Kind(StrEnum):
    """What a Change tells."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    """Of one that was missed, the object has its metadata alone."""
    SYNCED = "SYNCED"
    """All objects that were there at the beginning have been told."""
    LOST = "LOST"
    """The connection broke and could not be made again at once; it is tried again and again."""
    RESTORED = "RESTORED"
    """It is there again, and what was missed has been told."""


@dataclass(frozen=True, slots=True)
class Change:
    """One step of a collection.

    Attributes:
        kind: what it is.
        object: the object that it is about; empty for the last three kinds.
        why: of LOST.
    """

    kind: Kind
    object: Json = field(default_factory=dict)
    why: ApiError | None = None


def reflect(
    transport: Transport,
    path: str,
    query: Mapping[str, str] | None = None,
    *,
    stop: Event,
    keep: Callable[[Json], bool] = lambda _: True,
    pause: float = PAUSE_SECONDS,
    patience: float = REFUSED_SECONDS,
) -> Iterator[Change]:
    """The objects of a collection and whatever happens to them, until `stop` is set.

    Survives ends of the watch, broken connections, versions that are too old, an apiserver that is
    away for however long, and credentials that have to be renewed.

    Args:
        transport: carries the requests.
        path: of the collection.
        query: selectors.
        stop: set from another thread to end the iteration within a second, unless a request is
            waiting for its answer.
        keep: which objects are told of.
        pause: seconds before the first repetition.
        patience: seconds for which a refusal may be that of an apiserver which is just starting.

    Raises:
        ApiError: the collection cannot be read at the beginning, or is refused for longer later.
    """
    reflection = _Reflection(transport, path, dict(query or {}), stop, keep)
    tries = 0
    while not stop.is_set():
        begun = time.monotonic()
        try:
            yield from reflection.changes()
        except ApiError as error:
            yield from reflection.failed(error, patience)
        tries = 0 if time.monotonic() - begun > STEADY_SECONDS else tries + 1
        stop.wait(_pause(pause, tries))


class _Reflection:
    """What is known of a collection. Of its objects no more is kept than a deletion must tell."""

    def __init__(
        self,
        transport: Transport,
        path: str,
        query: dict[str, str],
        stop: Event,
        keep: Callable[[Json], bool],
    ) -> None:
        self._transport, self._path, self._query = transport, path, query
        self._stop, self._keep = stop, keep
        self._known: dict[str, Json] = {}
        self._synced = self._lost = False
        self._watching = False
        self._failed = 0
        self._refused_since: float | None = None

    def changes(self) -> Iterator[Change]:
        """From a list to the end of what can be watched from there on."""
        self._watching = False
        there: set[str] = set()
        for page in pages(self._transport, self._path, self._query):
            version = page.version
            for item in page.items:
                there.add(_uid(item))
                yield from self._seen(item)
        for uid in self._known.keys() - there:
            yield Change(Kind.DELETED, self._known.pop(uid))
        if not self._synced:
            yield Change(Kind.SYNCED)
        elif self._lost:
            yield Change(Kind.RESTORED)
        self._synced = self._watching = True
        self._lost, self._failed, self._refused_since = False, 0, None
        yield from self._watched(version)

    def failed(self, error: ApiError, patience: float) -> Iterator[Change]:
        """A break: raised where waiting would not help, told where it was not mended at once."""
        if not self._synced:
            raise error
        if error.code in _REFUSALS:
            self._refused_since = self._refused_since or time.monotonic()
            if time.monotonic() - self._refused_since > patience:
                raise error
        # A watch that breaks is mended by the next list, or the one after it, if at all at once.
        self._failed += not self._watching and error.code != 410
        if self._failed >= LOST_LISTS and not self._lost:
            self._lost = True
            yield Change(Kind.LOST, why=error)

    def _watched(self, version: str) -> Iterator[Change]:
        """What happens from a version on, over as many watches as it takes."""
        while not self._stop.is_set():
            heard = False
            for event in self._events(version):
                heard = True
                kind, item = event["type"], event["object"]
                if kind == "ERROR":
                    raise refusal(int(item.get("code") or 500), item)
                version = item["metadata"]["resourceVersion"]
                if kind != "BOOKMARK":
                    yield from self._happened(kind, item)
            if not heard:
                return  # a version from the future brings silence, too: a list will tell

    def _events(self, version: str) -> Iterator[Any]:
        query = {
            **self._query,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        for line in self._transport.stream(
            self._path, query=query, idle=IDLE_SECONDS, stop=self._stop
        ):
            try:
                event = json.loads(line)
            except ValueError:
                raise ApiError("the watch broke in the middle of an event") from None
            yield event

    def _happened(self, kind: str, item: Json) -> Iterator[Change]:
        if kind != Kind.DELETED:
            yield from self._seen(slim(item))
        elif self._known.pop(_uid(item), None):
            yield Change(Kind.DELETED, slim(item))

    def _seen(self, item: Json) -> Iterator[Change]:
        if not self._keep(item):
            return
        meta, uid = item["metadata"], _uid(item)
        before = self._known.get(uid)
        if before and before["metadata"]["resourceVersion"] == meta.get("resourceVersion"):
            return
        told = ("name", "namespace", "uid", "resourceVersion")
        self._known[uid] = {"metadata": {key: meta[key] for key in told if key in meta}}
        yield Change(Kind.MODIFIED if before else Kind.ADDED, item)


def _uid(item: Json) -> str:
    return str(item["metadata"]["uid"])


def _pause(first: float, tries: int) -> float:
    """Seconds, at random between a half and all: many watchers must not come all at once."""
    most: float = min(first * 2 ** min(tries, 10), max(MOST_SECONDS, first))
    return most * random.uniform(0.5, 1)  # noqa: S311 - no secret
