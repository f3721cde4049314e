"""What the loop makes of everything that an apiserver does to a watch."""

import json
import threading
from itertools import islice

import pytest
from clusters import Cluster
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from k8sjob.kube.client.listwatch import Kind, reflect
from k8sjob.kube.client.transport import ApiError

PODS = "/api/v1/namespaces/team/pods"


def pod(name, version, uid=None):
    meta = {"name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {}}


def event(kind, name, version, uid=None):
    return {"type": kind, "object": pod(name, version, uid)}


def bookmark(version):
    return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}


def expired(code=410):
    status = {"kind": "Status", "code": code, "reason": "Expired", "message": "too old"}
    return {"type": "ERROR", "object": status}


@pytest.fixture
def changes(script):
    """The first changes of the collection, as (kind, name)."""
    stop = threading.Event()

    def first(count, **options):
        found = reflect(script, PODS, {"labelSelector": "a=b"}, stop=stop, pause=0.001, **options)
        told = list(islice(found, count))
        stop.set()
        return [(str(c.kind), c.object.get("metadata", {}).get("name", "")) for c in told]

    yield first
    stop.set()


def versions(script):
    return [query["resourceVersion"] for query in script.of("WATCH")]


def test_what_is_there_then_what_happens(script, changes, listed):
    script.on("GET", PODS, listed(5, pod("a", 3)))
    script.watched(
        PODS, [event("MODIFIED", "a", 6), event("ADDED", "b", 7), event("DELETED", "a", 8)]
    )
    assert changes(5) == [
        ("ADDED", "a"),
        ("SYNCED", ""),
        ("MODIFIED", "a"),
        ("ADDED", "b"),
        ("DELETED", "a"),
    ]
    (query,) = script.of("WATCH")
    assert query["labelSelector"] == "a=b"
    assert query["allowWatchBookmarks"] == "true"
    assert versions(script) == ["5"]


def test_a_watch_that_ends_continues_at_the_last_bookmark_without_a_list(script, changes, listed):
    script.on("GET", PODS, listed(5))
    script.watched(PODS, [bookmark(9)], [event("ADDED", "a", 12)])
    assert changes(2) == [("SYNCED", ""), ("ADDED", "a")]
    assert versions(script) == ["5", "9"]
    assert len(script.of("GET")) == 1


def test_a_watch_that_was_silent_is_followed_by_a_list(script, changes, listed):
    # So a version from the future is found out, which an apiserver answers with silence.
    script.on("GET", PODS, listed(900), listed(7, pod("a", 7)))
    script.watched(PODS, [])
    assert changes(2) == [("SYNCED", ""), ("ADDED", "a")]
    assert versions(script) == ["900"]


@pytest.mark.parametrize("code", [410, 500, 504])
def test_after_an_error_event_the_list_tells_what_was_missed(script, changes, listed, code):
    script.on(
        "GET", PODS, listed(5, pod("a", 1), pod("b", 2)), listed(20, pod("b", 2), pod("c", 9))
    )
    script.watched(PODS, [expired(code)], [event("MODIFIED", "c", 21)])
    assert changes(6) == [
        ("ADDED", "a"),
        ("ADDED", "b"),
        ("SYNCED", ""),
        ("ADDED", "c"),
        ("DELETED", "a"),
        ("MODIFIED", "c"),
    ]
    assert versions(script) == ["5", "20"]


@pytest.mark.parametrize("failures", [0, 1])
def test_a_break_that_is_mended_at_once_is_not_reported(script, changes, listed, error, failures):
    script.on("GET", PODS, listed(5), *[error()] * failures, listed(6, pod("a", 6)))
    script.watched(PODS, [error()])
    assert changes(2) == [("SYNCED", ""), ("ADDED", "a")]


@pytest.mark.parametrize("code", [0, 401, 429, 500, 503, 403, 404])
def test_a_lost_connection_and_its_return_are_reported_once(script, changes, listed, error, code):
    script.on("GET", PODS, listed(5), error(code), error(code), error(), listed(6, pod("a", 6)))
    script.watched(PODS, [error()])
    assert changes(4) == [("SYNCED", ""), ("LOST", ""), ("ADDED", "a"), ("RESTORED", "")]


def test_a_break_in_the_middle_of_an_event(script, changes, listed):
    script.on("GET", PODS, listed(5), listed(6, pod("a", 6)))
    script.watched(PODS, [b'{"type": "ADD'])
    assert changes(2) == [("SYNCED", ""), ("ADDED", "a")]


def test_one_recreated_under_its_old_name_is_another_one(script, changes, listed):
    script.on("GET", PODS, listed(5, pod("a", 1, "first")), listed(9, pod("a", 8, "second")))
    script.watched(PODS, [expired()])
    assert changes(4) == [("ADDED", "a"), ("SYNCED", ""), ("ADDED", "a"), ("DELETED", "a")]


def test_pages_are_reported_as_they_come(script, changes, listed):
    script.on("GET", PODS, listed(5, pod("a", 1), more="next"), listed(5, pod("b", 2)))
    assert changes(3) == [("ADDED", "a"), ("ADDED", "b"), ("SYNCED", "")]
    assert [query.get("continue") for query in script.of("GET")] == [None, "next"]


def test_what_is_not_wanted_is_never_reported(script, changes, listed):
    script.on("GET", PODS, listed(5, pod("a", 1), pod("b", 2)))
    script.watched(
        PODS, [event("MODIFIED", "a", 6), event("DELETED", "a", 7), event("MODIFIED", "b", 8)]
    )
    wanted = changes(3, keep=lambda item: item["metadata"]["name"] == "b")
    assert wanted == [("ADDED", "b"), ("SYNCED", ""), ("MODIFIED", "b")]


@pytest.mark.parametrize("code", [0, 401, 403, 404])
def test_what_cannot_be_read_in_the_beginning_is_an_error(script, changes, error, code):
    script.on("GET", PODS, error(code))
    with pytest.raises(ApiError) as told:
        changes(1)
    assert told.value.code == code


def test_a_refusal_that_stays_is_an_error_in_the_end(script, changes, listed, error):
    script.on("GET", PODS, listed(5), error(403, "Forbidden", "no"))
    script.watched(PODS, [error()])
    with pytest.raises(ApiError, match="no"):
        changes(9, patience=0.01)


def test_of_what_is_known_no_more_is_kept_than_a_deletion_tells(script, listed):
    stop = threading.Event()
    script.on("GET", PODS, listed(5, pod("a", 1)), listed(6))
    script.watched(PODS, [expired()])
    told = list(islice(reflect(script, PODS, stop=stop, pause=0.001), 3))
    assert told[-1].object == {"metadata": {"name": "a", "uid": "uid-a", "resourceVersion": "1"}}
    stop.set()


class History(Cluster):
    """A collection with a past: it can be listed now, and watched from any version until a cut."""

    def __init__(self, steps, cuts):
        super().__init__()
        self.steps, self.cuts = steps, iter(cuts)
        self.now = 0
        self.stop = threading.Event()

    def state(self, version=None):
        found = {}
        for number, (name, alive) in enumerate(
            self.steps[: self.now if version is None else version], 1
        ):
            if alive:
                found[name] = pod(name, number)
            else:
                found.pop(name, None)
        return found

    def answer(self, *_):
        if self._cut() == "refuse":
            return ApiError("down", code=503, reason="ServiceUnavailable")
        items = list(self.state().values())
        return {"metadata": {"resourceVersion": str(self.now)}, "items": items}

    def stream(self, path, *, query=None, stop=None, **options):
        at = int(query["resourceVersion"])
        while at < len(self.steps):
            cut = self._cut()
            if cut == "miss":  # it happens while nobody watches
                self.now = min(self.now + 3, len(self.steps))
                raise ApiError("reset")
            if cut == "expire":
                yield json.dumps(expired()).encode()
                return
            if cut in ("end", "refuse"):
                return
            name, alive = self.steps[at]
            there = name in self.state(at)
            at += 1
            self.now = max(self.now, at)
            if alive or there:
                kind = ("MODIFIED" if there else "ADDED") if alive else "DELETED"
                yield json.dumps(event(kind, name, at)).encode()
        self.stop.set()

    def _cut(self):
        return next(self.cuts, None)


@examples(150)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=25),
    st.lists(st.sampled_from([None, None, None, "miss", "expire", "end", "refuse"]), max_size=25),
)
def test_whatever_breaks_the_end_is_the_servers_state(steps, cuts):
    server = History(steps, [None, *cuts])  # the first list is answered
    seen = {}
    for change in reflect(server, PODS, stop=server.stop, pause=0.0001):
        name = change.object.get("metadata", {}).get("name")
        if change.kind is Kind.ADDED:
            assert name not in seen
        if change.kind is Kind.MODIFIED:
            assert name in seen
        if change.kind in (Kind.ADDED, Kind.MODIFIED):
            seen[name] = change.object["metadata"]["resourceVersion"]
        elif change.kind is Kind.DELETED:
            del seen[name]
    expected = {n: p["metadata"]["resourceVersion"] for n, p in server.state().items()}
    assert seen == expected
