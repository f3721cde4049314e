import contextlib
import email.utils
import gzip
import threading
import time

import pytest
from registries import free_port
from serving import Server, trickle

from k8sjob.errors import ImageError
from k8sjob.image.registry.blob_content import RemoteContent
from k8sjob.image.registry.client import Authorizer, RegistryClient, parse_challenges
from k8sjob.image.registry.http_client import (
    HttpClient,
    Response,
    RetryPolicy,
    TransportError,
    Zone,
    _retry_after,
    is_loopback,
)
from k8sjob.image.registry.manifest import Descriptor, ImageReference
from k8sjob.threads import run_parallel, start


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost:5000", True),
        ("127.0.0.1:5000", True),
        ("127.evil.example", False),
        ("localhost.example", False),
    ],
)
def test_this_machine_is_known_only_by_its_address(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("address", "zone"),
    [
        ("8.8.8.8", Zone.PUBLIC),
        ("10.1.2.3", Zone.PRIVATE),
        ("100.64.0.1", Zone.PRIVATE),
        ("fd00:ec2::254", Zone.PRIVATE),
        ("::1", Zone.LOOPBACK),
        ("0.0.0.0", Zone.LOOPBACK),
        ("::ffff:127.0.0.1", Zone.LOOPBACK),
        ("169.254.169.254", Zone.LINK_LOCAL),
        ("fe80::1%eth0", Zone.LINK_LOCAL),
    ],
)
def test_where_an_address_is(address, zone):
    assert Zone.of(address) is zone


def test_a_host_whose_name_no_folder_can_have_is_not_reached(home):
    (home / ".docker/certs.d").mkdir(parents=True)
    with pytest.raises(TransportError):
        HttpClient(retry=RetryPolicy(tries=1)).send("GET", f"https://{'a.' * 150}/")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://reg.example/x", "is not the URL of a registry"),
        ("http:///x", "is not the URL of a registry"),
        ("nothing", "is not the URL of a registry"),
        # clients do not agree on the host
        (r"http://evil.example\@localhost/", "is not the URL of a registry"),
        ("http://localhost\t@evil.example/", "^evil.example would be accessed without TLS"),
        ("http://127.999.1.1/", "^127.999.1.1 would be accessed without TLS"),
        ("http://user:secret@reg.example:80/v2/", "^reg.example:80 would be accessed without TLS"),
    ],
)
def test_hosts_without_a_request(url, message):
    with pytest.raises(ImageError, match=message) as caught:
        HttpClient().send("GET", url)
    assert "secret" not in str(caught.value)


@pytest.fixture
def trickling():
    """trickling(start): the address of a server that sends this, and then a byte now and then."""
    with contextlib.ExitStack() as started:
        yield lambda start: started.enter_context(Server(lambda _: trickle(start))).url


OK = b"HTTP/1.1 200 OK\r\n"
SCOPE = "r:a/b:pull,push"


def test_an_answer_that_comes_byte_by_byte(trickling):
    wire = HttpClient(retry=RetryPolicy(answer=0.1))
    with pytest.raises(ImageError, match="responds too slowly"):
        wire.send("GET", trickling(OK + b"Content-Length: 999999\r\n\r\n"))


@pytest.mark.parametrize(
    ("size", "patience", "message"),
    [
        (10, RetryPolicy(), "received more than its 10 bytes"),
        (999, RetryPolicy(answer=0.1), r"of 999 bytes received in 0 s, which is too slow"),
    ],
)
def test_a_blob_has_its_size_and_comes_in_time(trickling, size, patience, message):
    base = trickling(OK + b"\r\n")
    session = RegistryClient(HttpClient(retry=patience), "reg", "reg", lambda: None)
    session._base = base
    blob = Descriptor("sha256:" + "0" * 64, size)
    with pytest.raises(ImageError, match=message):
        list(RemoteContent(session, ImageReference.parse("reg.example/x:1"), blob).blocks())


def test_a_pause_is_what_the_other_side_asks_for():
    assert _retry_after(None) == _retry_after("soon") == 0
    assert _retry_after("3") == 3
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert 90 < _retry_after(date) <= 100
    assert _retry_after(email.utils.formatdate(0)) == 0
    assert _retry_after("Mon, 01 Jan 0001 00:00:00 -0000") == 0


def test_what_a_registry_gives_is_left_as_it_is():
    targets, body = [], gzip.compress(b"content")
    answer = 200, body, {"Content-Encoding": "gzip"}
    with Server(lambda request: targets.append(request.target) or answer) as server:
        url = f"{server.url}/a b?sig=%2F+~'|\xe9#part"
        assert HttpClient().send("GET", url).body == body
    assert targets == ["/a%20b?sig=%2F+~'|%E9"]  # what HTTP needs is quoted


def test_each_challenge_may_have_a_header_of_its_own():
    challenges = {"WWW-Authenticate": 'Basic realm="x"', "www-authenticate": 'Bearer realm="r"'}
    with Server(lambda _: (401, b"", challenges)) as server:
        answer = HttpClient().send("GET", server.url)
    assert parse_challenges(answer.headers["WWW-Authenticate"]).keys() == {"basic", "bearer"}


def test_why_there_is_no_connection():
    with pytest.raises(TransportError, match=r"^127\.0\.0\.1:\d+: Connection refused$"):
        HttpClient().send("GET", f"http://127.0.0.1:{free_port()}/v2/")


def test_nothing_is_tried_again_after_the_time_for_an_answer():
    wire = HttpClient(retry=RetryPolicy(tries=10**9, pause=0, answer=0))
    with pytest.raises(TransportError, match="Connection refused"):
        wire.request("GET", f"http://127.0.0.1:{free_port()}/v2/")


@pytest.mark.parametrize(
    "proxy", ["http://[::1", "socks5://me:secret@127.0.0.1:9", "http://127.0.0.1:99999"]
)
def test_a_proxy_that_is_none(proxy, monkeypatch):
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(ImageError, match=r"is not http://\[USER:PASSWORD@\]HOST:PORT; ") as caught:
        HttpClient().send("GET", "https://reg.example/v2/")
    assert "secret" not in str(caught.value)


def test_addresses_of_a_registry_that_are_none():
    session = RegistryClient(HttpClient(), "reg.example", "reg.example", lambda: None)
    with pytest.raises(ImageError, match=r"reg.example redirects to 'http://\[x', which is not"):
        session.url("http://[x")
    challenge = Response("", 401, {"WWW-Authenticate": 'Bearer realm="http://[x"'})
    with pytest.raises(ImageError, match=r"its tokens come from 'http://\[x', which is not a URL"):
        Authorizer(HttpClient(), "reg.example", lambda: None).renew(challenge, None)


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
def test_a_response_must_match_its_request(headers, expected):
    assert Response("u", 200, headers).describes("d", 5) is expected
    assert not Response("u", 404, headers).describes("d", 5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Basic realm="x"', {"basic": {"realm": "x"}}),
        (
            'Bearer realm="https://a.example/t?x=1,2",service=s, scope="r:a/b:pull,push"',
            {"bearer": {"realm": "https://a.example/t?x=1,2", "service": "s", "scope": SCOPE}},
        ),
        ('bearer Realm="r", Basic realm="x"', {"bearer": {"realm": "r"}, "basic": {"realm": "x"}}),
        ("Negotiate", {}),
        ("", {}),
    ],
)
def test_challenges(text, expected):
    assert parse_challenges(text) == expected


def test_results_come_in_order():
    pauses = [0.02, 0.0, 0.01]
    work = [lambda n=n, pause=pause: (time.sleep(pause), n)[1] for n, pause in enumerate(pauses)]
    assert run_parallel(work, 2) == [0, 1, 2]
    assert run_parallel([], 2) == []
    assert start(lambda: 7).result() == 7


def test_the_first_failure_ends_it():
    begun, go = [], threading.Event()

    def fails():
        raise ImageError("no")

    def waits():
        begun.append(1)
        go.wait(30)

    with pytest.raises(ImageError, match="no"):
        run_parallel([waits, fails, *[waits] * 50], 2)
    assert len(begun) < 4
    go.set()
    with pytest.raises(ImageError, match="no"):
        start(fails).result()
