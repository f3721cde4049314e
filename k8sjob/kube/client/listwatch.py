"""Lists and watches of collections: page by page, then each change, over every break.

A watch always starts at the version of a list: without one, or with one from the future, an
apiserver sends nothing. What was deleted while no watch was open shows in the next list, and is
reported as a deletion then.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.kube.client.transport import ApiError, malformed, refusal
from k8sjob.kube.json_text import parsed
from k8sjob.kube.objects import Object, without_managed_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from threading import Event

    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json, Trim

    Query = Mapping[str, str] | None

PAGE: Final = 500
"""Objects in one answer, as kubectl has it: 4 MB of jobs, parsed before the next ones come."""
MAX_PAGES: Final = 4000
"""Of one list: a million objects, of which etcd has never held as many of a kind."""
WATCH_SECONDS: Final = 120
"""When the server is to end a watch by itself; it is resumed where it ended."""
IDLE_SECONDS: Final = 150.0
"""A silence that a working connection cannot have."""
PAUSE_SECONDS: Final = 0.4
"""The first pause between two attempts; each is about twice the one before."""
MAX_SECONDS: Final = 3.0
"""The longest pause: an apiserver that is back is seen within it."""
STEADY_SECONDS: Final = 10.0
"""Duration of a list and a watch after which the pauses start again at the shortest."""
LOST_LISTS: Final = 2
"""How many lists in a row must fail until the connection counts as lost."""
REFUSED_SECONDS: Final = 30.0
"""An apiserver that was just started may not know a role or a CRD yet."""
LOOK_SECONDS: Final = 0.2
"""How long a merged watch waits until it looks whether it is to stop."""
_REFUSALS: Final = frozenset({400, 403, 404, 405, 422})


# --- lists ----------------------------------------------------------------------------------------


class CollectionPage(NamedTuple):
    """A collection at one moment, or a page of it; a watch can start from its version."""

    items: list[Json]
    version: str


def list_all(
    transport: Transport, path: str, query: Query = None, trim: Trim = without_managed_fields
) -> CollectionPage:
    """All objects of a collection that the query selects, or what `trim` leaves of each.

    Raises:
        ApiError: the server refuses, or cannot be reached.
    """
    try:
        # Pages are of one moment, whose data etcd removes after five minutes (compaction).
        listed = list(pages(transport, path, query, trim))
    except ApiError as error:
        if error.code != 410:
            raise
        # The first pages were too old for the next one: all at once, as kubectl does it.
        listed = list(pages(transport, path, query, trim, size=0))
    return CollectionPage([item for page in listed for item in page.items], listed[-1].version)


def pages(
    transport: Transport,
    path: str,
    query: Query,
    trim: Trim = without_managed_fields,
    size: int = PAGE,
) -> Iterator[CollectionPage]:
    """A collection page by page, all as of one moment; at least one page; all in one of size 0.

    Raises:
        ApiError: as for list_all; 410 where reading took so long that the rest has expired.
    """
    asked = {**(query or {}), **({"limit": str(size)} if size else {})}
    tokens: set[str] = set()
    while True:
        page = transport.request("GET", path, query=asked)
        # The items of a list have no kind of their own: theirs is Pod in a PodList.
        kind = str(page.get("kind", "")).removesuffix("List")
        named = {"apiVersion": page.get("apiVersion", ""), "kind": kind}
        meta = page.get("metadata") or {}
        items = [trim({**named, **item}) for item in page.get("items") or []]
        yield CollectionPage(items, str(meta.get("resourceVersion", "")))
        if not meta.get("continue"):
            return
        tokens.add(asked.get("continue", ""))
        asked["continue"] = str(meta["continue"])
        # A page may be empty: the server filters after it has read. But a list has an end.
        if asked["continue"] in tokens or len(tokens) > MAX_PAGES:
            raise malformed(f"a list of {path} that does not end after {len(tokens):,} pages")


# --- changes --------------------------------------------------------------------------------------


class Kind(StrEnum):
    """The kinds of CollectionChange."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    """The object was deleted; of one that was missed, there is only the metadata."""
    SYNCED = "SYNCED"
    """All objects that were there at the beginning have been reported."""
    LOST = "LOST"
    """The connection broke and could not be restored at once; attempts continue."""
    RESTORED = "RESTORED"
    """The connection is back, and what was missed has been reported."""


@dataclass(frozen=True, slots=True)
class CollectionChange:
    """One change of a collection, or of the connection to it.

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
) -> Iterator[CollectionChange]:
    """The objects of a collection and each change of them, until `stop` is set.

    Survives ends of the watch, broken connections, versions that are too old, an apiserver that is
    away for any time, and credentials that have to be renewed. After `stop` it ends within a
    second, unless a request is waiting for its answer. Only objects that `keep` holds of are
    reported; the first repetition comes after `pause` seconds, and for `patience` seconds a refusal
    may be that of an apiserver which is just starting.

    Raises:
        ApiError: the collection cannot be read at the beginning, or is refused for longer later.
    """
    reflection = _Reflection(transport, path, dict(query or {}), stop, keep)
    tries = 0
    # Each round is a list and the watches that follow it. After any break the next round lists
    # again: a watch from an old version may be refused, and one from the future, as after a
    # restored etcd, is silent for ever.
    while not stop.is_set():
        begun = time.monotonic()
        try:
            yield from reflection.changes()
        except ApiError as error:
            yield from reflection.failed(error, patience)
        # A list that succeeds says little about an overloaded apiserver; one that was followed by a
        # watch of some seconds does.
        tries = 0 if time.monotonic() - begun > STEADY_SECONDS else tries + 1
        longest = min(pause * 2 ** min(tries, 10), max(MAX_SECONDS, pause))
        # At random, so that many watchers do not come back all at once.
        stop.wait(longest * random.uniform(0.5, 1))  # noqa: S311 - no secret


def merged(
    reflections: Sequence[Iterator[CollectionChange]], *, stop: Event
) -> Iterator[CollectionChange]:
    """The changes of several collections as those of one, until `stop` is set.

    A collection that is not there at the beginning, or may not be read, is left out, unless none
    can be read.

    Raises:
        ApiError: no collection can be read, or one can no longer be read.
    """
    changes: SimpleQueue[tuple[int, CollectionChange | Exception]] = SimpleQueue()

    def run(number: int, reflection: Iterator[CollectionChange]) -> None:
        try:
            for change in reflection:
                changes.put((number, change))
        except Exception as error:  # noqa: BLE001 - raised by the merger
            changes.put((number, error))

    for number, reflection in enumerate(reflections):
        # Daemons: a request that waits for its answer must not keep the command from ending.
        threading.Thread(target=run, args=(number, reflection), daemon=True).start()
    unsynced, readable, lost = set(range(len(reflections))), len(reflections), set[int]()
    # Such a change of one collection is one of all when none is left here.
    pending = {Kind.SYNCED: unsynced, Kind.RESTORED: lost}
    while not stop.is_set():
        with suppress(Empty):
            number, change = changes.get(timeout=LOOK_SECONDS)
            if isinstance(change, Exception):
                absent = isinstance(change, ApiError) and change.code in {403, 404}
                readable -= 1
                # A kind that is not served, or forbidden, is left out at the beginning alone: later
                # its loss is an error, and so is a cluster where nothing can be read.
                if number not in unsynced or not absent or not readable:
                    raise change
                # What is left out counts as complete, or the others would wait for it.
                change = CollectionChange(Kind.SYNCED)
            # The collections lose their connection one after the other: the first LOST and the last
            # RESTORED are reported.
            is_connected, unfinished = not lost, pending.get(change.kind, set())
            unfinished.discard(number)
            if change.kind is Kind.LOST:
                lost.add(number)
            if not unfinished and (is_connected or change.kind is not Kind.LOST):
                yield change


class _Reflection:
    """The state of a collection. Only what a deletion must report is kept of its objects."""

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
        self._synced = self._lost = self._watching = False
        self._failed = 0
        self._refused_since: float | None = None

    def changes(self) -> Iterator[CollectionChange]:
        """List the collection, then watch it for as long as the version is valid."""
        self._watching = False
        uids: set[str] = set()
        for page in pages(self._transport, self._path, self._query):
            version = page.version
            for item in page.items:
                uids.add(Object(item).uid)
                yield from self._seen(item)
        # What was deleted while no watch was open is missing from the list. Objects are known by
        # their uid: of the same name there may be a new one.
        for uid in self._known.keys() - uids:
            yield CollectionChange(Kind.DELETED, self._known.pop(uid))
        if not self._synced:
            yield CollectionChange(Kind.SYNCED)
        elif self._lost:
            yield CollectionChange(Kind.RESTORED)
        self._synced = self._watching = True
        # A whole list has succeeded; the watch that follows may fail as often as it will.
        self._lost, self._failed, self._refused_since = False, 0, None
        yield from self._watched(version)

    def failed(self, error: ApiError, patience: float) -> Iterator[CollectionChange]:
        """Raise where waiting would not help; report a loss that was not repaired at once."""
        if not self._synced:
            raise error
        # An apiserver that has just started knows no RBAC rules and CRDs for a moment, and refuses
        # what it accepts a second later.
        if error.code in _REFUSALS:
            self._refused_since = self._refused_since or time.monotonic()
            if time.monotonic() - self._refused_since > patience:
                raise error
        # A watch that breaks is repaired by the next list or the one after it, if at all at once.
        self._failed += not self._watching and error.code != 410
        if self._failed >= LOST_LISTS and not self._lost:
            self._lost = True
            yield CollectionChange(Kind.LOST, why=error)

    def _watched(self, version: str) -> Iterator[CollectionChange]:
        """The changes since a version, over as many watches as needed."""
        while not self._stop.is_set():
            heard = False
            for event in self._events(version):
                heard = True
                kind, item = event["type"], event["object"]
                # HTTP status 200 and then 410 (too old), 500 or 504 as an event: for each of them a
                # new list is the answer.
                if kind == "ERROR":
                    raise refusal(int(item.get("code") or 500), item)
                version = str(Object(item).metadata.get("resourceVersion") or version)
                if kind == Kind.DELETED:
                    # A deletion is reported only of what was reported before: `keep` may have left
                    # the object out.
                    if self._known.pop(Object(item).uid, None):
                        yield CollectionChange(Kind.DELETED, without_managed_fields(item))
                elif kind != "BOOKMARK":
                    yield from self._seen(without_managed_fields(item))
            if not heard:
                return  # a version from the future brings silence, too; a list shows what it is

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
                event = parsed(line)
            except ValueError:
                raise ApiError("the watch broke in the middle of an event") from None
            yield event

    def _seen(self, item: Json) -> Iterator[CollectionChange]:
        if not self._keep(item):
            return
        meta, uid = Object(item).metadata, Object(item).uid
        before = self._known.get(uid)
        version = meta.get("resourceVersion")
        # A new list repeats what has not changed.
        if before and Object(before).metadata.get("resourceVersion") == version:
            return
        # Whoever needs the objects keeps them; whole ones here, too, would double the memory of a
        # watch of 10,000 Pods.
        reported = ("name", "namespace", "uid", "resourceVersion")
        self._known[uid] = {"metadata": {key: meta[key] for key in reported if key in meta}}
        yield CollectionChange(Kind.MODIFIED if before else Kind.ADDED, item)
