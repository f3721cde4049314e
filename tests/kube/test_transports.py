"""What both transports must do alike, against a server that answers as it is told."""

import gzip
import json
import threading
import time
from contextlib import suppress
from urllib.parse import parse_qsl, urlsplit

import pytest
from serving import Server
from waiting import until

from k8sjob.kube.client.transport import MAX_LINE, ApiError, lines, skew_by

PODS = "/api/v1/namespaces/team/pods"
STATUS = {
    "kind": "Status",
    "apiVersion": "v1",
    "metadata": {},
    "status": "Failure",
    "message": 'pods "a" already exists',
    "reason": "AlreadyExists",
    "details": {"name": "a", "kind": "pods"},
    "code": 409,
}


def asked_for(target):
    """Path and query of a request."""
    parts = urlsplit(target)
    return parts.path, dict(parse_qsl(parts.query))


@pytest.fixture
def stop():
    event = threading.Event()
    yield event
    event.set()


def test_requests_and_responses(transport, apiserver):
    apiserver.on((200, {"kind": "PodList", "items": []}))
    there = transport()
    assert (there.context, there.namespace, there.server) == ("here", "default", apiserver.url)
    query = {"labelSelector": "a in (b,c)", "limit": "5"}
    assert there.request("GET", PODS, query=query) == {"kind": "PodList", "items": []}
    ((method, path, headers, _),) = apiserver.asked
    assert method == "GET"
    assert asked_for(path) == (PODS, {"labelSelector": "a in (b,c)", "limit": "5"})
    assert headers["Authorization"] == "Bearer first-token"


@pytest.mark.parametrize("ahead", [0, -900, 3600])
def test_the_servers_clock_is_that_of_its_answers(transport, apiserver, ahead):
    apiserver.on((200, {"kind": "PodList", "items": []}))
    apiserver.ahead, there = ahead, transport()
    there.request("GET", PODS)
    assert there.skew == pytest.approx(ahead, abs=60 if ahead else 0)


@pytest.mark.parametrize("date", [None, "", "yesterday", "Sat, 99 Nov 2026 03:00:00 GMT"])
def test_an_answer_without_a_usable_date_leaves_the_clock_alone(date):
    assert skew_by(date) == 0


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_an_object_is_sent(transport, apiserver, method):
    apiserver.on((201, {"kind": "Pod"}))
    body = {"kind": "Pod", "metadata": {"name": "ü\n"}}
    assert transport().request(method, PODS, body=body, query={"dryRun": "All"})["kind"] == "Pod"
    ((asked, path, _, sent),) = apiserver.asked
    assert asked == method
    assert asked_for(path) == (PODS, {"dryRun": "All"})
    assert json.loads(sent) == body


def refused(transport, method="GET", **options):
    """The error that a request raises."""
    with pytest.raises(ApiError) as told:
        transport().request(method, PODS, **options)
    return told.value


def test_a_refusal_is_reported_as_the_server_says_it(transport, apiserver):
    apiserver.on((409, STATUS))
    error = refused(transport, "POST", body={"kind": "Pod"})
    assert (error.code, error.reason) == (409, "AlreadyExists")
    assert error.detail == 'pods "a" already exists'
    assert len(apiserver.asked) == 1, "what changes something is asked for once"


def test_the_fields_that_are_wrong_are_read(transport, apiserver):
    causes = [{"field": f"spec.{x}", "message": f"Invalid value: {x}: no"} for x in "ab"]
    invalid = {**STATUS, "reason": "Invalid", "code": 422, "message": "is invalid"}
    apiserver.on((422, {**invalid, "details": {"kind": "Pod", "name": "a", "causes": causes}}))
    error = refused(transport, "POST", body={"kind": "Pod"})
    assert (error.code, error.reason) == (422, "Invalid")
    assert list(error.causes) == [(f"spec.{x}", f"Invalid value: {x}: no") for x in "ab"]


def test_credentials_that_are_not_taken(transport, apiserver):
    apiserver.on((401, {**STATUS, "code": 401, "reason": "Unauthorized", "message": "no"}))
    error = refused(transport)
    assert error.code == 401
    assert "does not accept the credentials of context here" in str(error)
    assert "first-token" not in str(error)


def test_a_server_that_is_not_there(transport, apiserver):
    apiserver.on((200, {}))
    there = transport(server="http://127.0.0.1:1")
    for attempt in (there.request, lambda _, path: list(there.stream(path))):
        with pytest.raises(ApiError) as told:
            attempt("GET", PODS)
        assert (told.value.code, told.value.detail) == (0, "Connection refused")
        assert "http://127.0.0.1:1 (context here) cannot be reached" in str(told.value)


def test_a_certificate_that_is_not_trusted(transport, apiserver):
    apiserver.on((200, {}))
    there = transport(**{"tls-server-name": "elsewhere.example"})
    with pytest.raises(ApiError, match=r"a certificate that is not trusted: .*elsewhere") as told:
        there.request("GET", PODS)
    assert (told.value.code, told.value.reason) == (0, "Untrusted")
    assert apiserver.asked == []


def test_credentials_never_go_over_a_connection_that_anybody_can_read(transport):
    asked = []

    def answer(request):
        asked.append(request.headers["Authorization"])
        return (200,)

    with Server(answer) as server:
        assert transport(server=server.url).request("GET", PODS) == {}
    assert set(asked) == {None}


def test_lines_come_as_they_are_written(transport, apiserver, stop):
    more = threading.Event()

    def body(piece):
        piece(b'{"a": 1}\n{"b"')
        more.wait(60)
        piece(b": 2}\nend")
        return True

    apiserver.on((200, body))
    found = transport().stream(PODS, query={"watch": "true"}, stop=stop)
    assert next(found) == b'{"a": 1}\n', "before the rest is there"
    more.set()
    assert list(found) == [b'{"b": 2}\n', b"end"]


def test_a_stream_that_breaks_is_seen_to(transport, apiserver, stop):
    def body(piece):
        piece(b"one\n")
        return False

    apiserver.on((200, body))
    found = transport().stream(PODS, stop=stop)
    assert next(found) == b"one\n"
    with pytest.raises(ApiError) as told:
        list(found)
    assert (told.value.code, told.value.reason) == (0, "Unreachable")


def test_a_stream_ends_when_it_is_requested_to(transport, apiserver, stop):
    silent, ended = threading.Event(), []

    def body(piece):
        piece(b"one\n")
        silent.wait(90)
        return True

    def read():
        ended.extend(transport().stream(PODS, stop=stop))

    apiserver.on((200, body))
    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.5)
    stop.set()
    reader.join(60)
    alive = reader.is_alive()
    silent.set()
    assert not alive
    assert ended in ([b"one\n"], []), "kubectl may not have begun yet"


def test_a_silence_that_is_too_long_is_a_break(transport, apiserver, stop):
    silent = threading.Event()

    def body(piece):
        piece(b"one\n")
        silent.wait(30)
        return True

    apiserver.on((200, body))
    with pytest.raises(ApiError, match="does not respond in time"):
        list(transport().stream(PODS, idle=1.0, stop=stop))
    silent.set()


def test_an_answer_that_is_too_late(transport, apiserver):
    slow = threading.Event()

    def body(piece):
        slow.wait(30)
        return True

    apiserver.on((200, body))
    with pytest.raises(ApiError, match="does not respond in time") as told:
        transport().request("GET", PODS, timeout=1.0)
    slow.set()
    assert told.value.code == 0


def test_a_stream_that_is_closed_closes_the_connection(transport, apiserver):
    gone = threading.Event()

    def body(piece):
        try:
            while True:
                piece(b"line\n")
                time.sleep(0.01)
        except OSError:
            gone.set()
        return True

    apiserver.on((200, body))
    found = transport().stream(PODS)
    next(found)
    found.close()
    until(gone.is_set)


def test_a_stream_that_is_refused(transport, apiserver):
    apiserver.on((410, {**STATUS, "code": 410, "reason": "Expired", "message": "too old"}))
    with pytest.raises(ApiError) as told:
        list(transport().stream(PODS, query={"watch": "true"}))
    assert (told.value.code, told.value.reason) == (410, "Expired")


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], []),
        ([b"a\nb\n"], [b"a\n", b"b\n"]),
        ([b"a", b"b\n", b"\nc"], [b"ab\n", b"\n", b"c"]),
        ([b"\xff\r\n"], [b"\xff\r\n"]),
    ],
)
def test_pieces_become_lines(chunks, expected):
    assert list(lines(chunks)) == expected


def endless(piece):
    """A body that ends when nobody reads it."""
    with suppress(OSError):
        for _ in range(10_000):
            piece(b"[" + b"0," * 32_000)


def test_an_answer_without_an_end_is_not_read_on(transport, apiserver, monkeypatch):
    monkeypatch.setattr("k8sjob.kube.client.transport.MAX_ANSWER", 1 << 20)
    apiserver.on((200, endless))
    assert refused(transport).detail == "an answer of more than 1 MiB"


def test_a_small_answer_that_becomes_large_is_not_read_on(transport, apiserver, monkeypatch):
    monkeypatch.setattr("k8sjob.kube.client.transport.MAX_ANSWER", 1 << 20)
    packed = gzip.compress(b" " * (64 << 20))

    def body(piece):
        piece(packed)
        return True

    apiserver.on((200, body, {"Content-Encoding": "gzip"}))
    assert refused(transport).detail == "an answer of more than 1 MiB"


def test_an_answer_that_is_nested_too_deep_is_one_error(transport, apiserver):
    apiserver.on((200, '{"a":' * 10_000 + "1" + "}" * 10_000))
    assert refused(transport).detail == (
        "JSON that is not read: it is nested deeper than 100 levels"
    )


def test_a_line_that_never_ends_is_read_in_linear_time_and_cut():
    bar = b"50%|#####     |\r" * 4096
    chunks = [bar] * (2 * MAX_LINE // len(bar))  # copied whole for each chunk: hours
    first, last = lines([*chunks, b"\nnext\n"])
    assert first.startswith(bar)
    assert first.endswith(b" more bytes of this line are left out]\n")
    assert len(first) < MAX_LINE + 100
    assert last == b"next\n"
