import email.utils
import socket
import threading
import time
from contextlib import suppress

import pytest
from registries import free_port

from k8sjob.errors import ImageError
from k8sjob.image import pools
from k8sjob.image.access import Access, _challenges
from k8sjob.image.content import RemoteContent
from k8sjob.image.manifest import Descriptor
from k8sjob.image.parallel import at_once, begin
from k8sjob.image.pools import host_of, is_loopback
from k8sjob.image.reference import Reference
from k8sjob.image.session import Session
from k8sjob.image.wire import Answer, Broken, Patience, Wire, _seconds


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("localhost:5000", True),
        ("127.0.0.1:5000", True),
        ("127.8.8.8", True),
        ("127.evil.example", False),
        ("127.0.0.1.example:80", False),
        ("localhost.example", False),
        ("10.0.0.1", False),
    ],
)
def test_this_machine_is_known_by_its_address_alone(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize("url", ["ftp://reg.example/x", "http:///x", "nothing"])
def test_what_is_no_registry(url):
    with pytest.raises(ImageError, match="is no URL of a registry"):
        Wire().send("GET", url)


@pytest.mark.parametrize(
    "url",
    [r"http://evil.example\@localhost/", "http://localhost\t@evil.example/", "http://127.999.1.1/"],
)
def test_the_host_is_the_one_that_the_request_goes_to(url):
    with pytest.raises(ImageError, match=r"(evil.example|127.999.1.1) is to be asked without TLS"):
        Wire().send("GET", url)
    assert not is_loopback(host_of(url))


@pytest.fixture
def trickling():
    """trickling(start): the address of a server that sends this, and then a byte now and then."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve(start):
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(4096)
            connection.sendall(start)
            while not ended.wait(0.02):
                connection.sendall(b"x")

    def begin_serving(start):
        threading.Thread(target=serve, args=(start,), daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield begin_serving
    ended.set()
    listener.close()


OK = b"HTTP/1.1 200 OK\r\n"


def test_an_answer_that_comes_byte_by_byte(trickling):
    wire = Wire(patience=Patience(answer=0.1))
    with pytest.raises(ImageError, match="answers too slowly"):
        wire.send("GET", trickling(OK + b"Content-Length: 999999\r\n\r\n"))


def test_headers_that_come_byte_by_byte(trickling, monkeypatch):
    monkeypatch.setattr(pools, "HEADERS_LIMIT", 0.1)
    with pytest.raises(Broken, match="no answer in time"):
        Wire().send("GET", trickling(OK))


@pytest.mark.parametrize(
    ("size", "patience", "message"),
    [
        (10, Patience(), "more came than its 10 bytes"),
        (999, Patience(answer=0.1), r"of 999 bytes came in 0 s, which is too slow"),
    ],
)
def test_a_blob_has_its_size_and_comes_in_time(trickling, size, patience, message):
    base = trickling(OK + b"\r\n")
    session = Session(Wire(patience=patience), "reg", "reg", lambda: None)
    session._base = base
    blob = Descriptor("sha256:" + "0" * 64, size)
    with pytest.raises(ImageError, match=message):
        list(RemoteContent(session, Reference.parse("reg.example/x:1"), blob).blocks(0))


def test_nobody_else_is_asked_in_plain():
    with pytest.raises(ImageError, match=r"reg.example:80 is to be asked without TLS") as caught:
        Wire().send("GET", "http://user:secret@reg.example:80/v2/")
    assert "secret" not in str(caught.value)


def test_a_pause_is_what_the_other_side_asks_for():
    assert _seconds(None) == _seconds("soon") == 0
    assert _seconds("3") == 3
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 90 < _seconds(date) <= 100
    assert _seconds(email.utils.formatdate(0)) < 0
    assert _seconds("Mon, 01 Jan 0001 00:00:00 -0000") <= 0


def test_why_there_is_no_connection():
    with pytest.raises(Broken, match=r"^127\.0\.0\.1:\d+: Connection refused$"):
        Wire().send("GET", f"http://127.0.0.1:{free_port()}/v2/")


def test_nothing_is_tried_again_after_the_time_for_an_answer():
    wire = Wire(patience=Patience(tries=10**9, pause=0, answer=0))
    with pytest.raises(Broken, match="Connection refused"):
        wire.ask("GET", f"http://127.0.0.1:{free_port()}/v2/")


@pytest.mark.parametrize(
    "proxy", ["http://[::1", "socks5://me:secret@127.0.0.1:9", "http://127.0.0.1:99999"]
)
def test_a_proxy_that_is_none(proxy, monkeypatch):
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(ImageError, match=r"is no http://\[USER:PASSWORD@\]HOST:PORT: ") as caught:
        Wire().send("GET", "https://reg.example/v2/")
    assert "secret" not in str(caught.value)


def test_addresses_of_a_registry_that_are_none():
    session = Session(Wire(), "reg.example", "reg.example", lambda: None)
    with pytest.raises(ImageError, match=r"reg.example leads to 'http://\[x', which is no URL"):
        session.url("http://[x")
    challenge = Answer("", 401, {"WWW-Authenticate": 'Bearer realm="http://[x"'})
    with pytest.raises(ImageError, match=r"its tokens come from 'http://\[x', which is no URL"):
        Access(Wire(), "reg.example", lambda: None).renew(challenge, None)


def test_pauses_grow():
    started = time.monotonic()
    Patience(pause=0.001).wait(6)
    assert time.monotonic() - started >= 0.75 * 0.032


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Docker-Content-Digest": "d", "Content-Length": "9"}, True),
        ({"Docker-Content-Digest": "e", "Content-Length": "5"}, False),
        ({"Content-Length": "5"}, True),
        ({"Content-Length": "6"}, False),
        ({}, False),
    ],
)
def test_an_answer_must_speak_of_what_was_asked_for(headers, expected):
    assert Answer("u", 200, headers).has("d", 5) is expected
    assert not Answer("u", 404, headers).has("d", 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Basic realm="x"', {"basic": {"realm": "x"}}),
        (
            'Bearer realm="https://a.example/t?x=1,2",service=s, scope="repository:a/b:pull,push"',
            {
                "bearer": {
                    "realm": "https://a.example/t?x=1,2",
                    "service": "s",
                    "scope": "repository:a/b:pull,push",
                }
            },
        ),
        (
            'bearer Realm="r", Basic realm="x"',
            {"bearer": {"realm": "r"}, "basic": {"realm": "x"}},
        ),
        ("Negotiate", {}),
        ("", {}),
    ],
)
def test_challenges(text, expected):
    assert _challenges(text) == expected


def test_results_come_in_order():
    pauses = [0.02, 0.0, 0.01]
    work = [lambda n=n, pause=pause: (time.sleep(pause), n)[1] for n, pause in enumerate(pauses)]
    assert at_once(work, 2) == [0, 1, 2]
    assert at_once([], 2) == []
    assert begin(lambda: 7)() == 7


def test_the_first_failure_ends_it():
    begun, go = [], threading.Event()

    def fails():
        raise ImageError("no")

    def waits():
        begun.append(1)
        go.wait(30)

    with pytest.raises(ImageError, match="no"):
        at_once([waits, fails, *[waits] * 50], 2)
    assert len(begun) < 4
    go.set()
    with pytest.raises(ImageError, match="no"):
        begin(fails)()
