"""A proxy before a real registry that does one thing wrong at one request, or at all of them."""

import contextlib
import http.client
import socket
import threading
import time

import serving
from serving import Server, hang_up, reset

HANG = 4.0  # seconds; longer than the patience of who tests it
UPSTREAM = 120.0  # seconds for the registry, which may wait for a busy disk


class FaultyRegistry(Server):
    """Passes requests on to a registry.

    Attributes:
        fault: a name of ANSWERS or of a function below; None is honest.
        at: number of the request it happens at, from 1; 0 is all of them.
        seen: method and path of the requests so far.
    """

    def __init__(self, registry):
        self.upstream = registry
        self.fault, self.at, self.seen, self.has_cut = None, 0, [], False
        self._lock = threading.Lock()
        super().__init__(self._pass)

    def arm(self, fault, at=0):
        with self._lock:
            self.fault, self.at, self.seen, self.has_cut = fault, at, [], False

    def _pass(self, request):
        if request.path == "/token":  # for those who were told that theirs has expired
            return 200, {"token": str(time.time())}
        with self._lock:
            self.seen.append(f"{request.method} {request.path}")
            fault = self.fault if self.at in {0, len(self.seen)} else None
        if fault is None:
            return self.forward(request)
        if fault in ANSWERS:
            return ANSWERS[fault]
        return FAULTS[fault](self, request)

    def begin(self, request):
        """A request to the real registry, whose body is still to come."""
        upstream = http.client.HTTPConnection(self.upstream.host, timeout=UPSTREAM)
        with contextlib.ExitStack() as unless_begun:
            unless_begun.callback(upstream.close)
            upstream.putrequest(
                request.method, request.target, skip_host=True, skip_accept_encoding=True
            )
            for name, value in request.headers.items():
                if name.lower() not in {"content-length", "transfer-encoding", "authorization"}:
                    upstream.putheader(name, value)  # Host too, so that locations lead back here
            upstream.putheader("Content-Length", str(request.length))
            upstream.endheaders()
            unless_begun.pop_all()
        return upstream

    def forward(self, request, body=None):
        """Ask the real registry."""
        body = request.body if body is None else body
        with contextlib.closing(self.begin(request)) as upstream:
            if body:
                upstream.send(body)
            response = upstream.getresponse()
            headers = {
                name: value
                for name, value in response.headers.items()
                if name.lower() not in {"connection", "date"}
            }
            return response.status, response.read(), headers


# --- what can go wrong ------------------------------------------------------------------


def code(text):
    return {"errors": [{"code": text}]}


ANSWERS = {
    "refused": reset,
    "is_down": (500,),
    "is_busy": (429, code("TOOMANYREQUESTS"), {"Retry-After": "0"}),
    "forbidden": (403, {"errors": [{"code": "DENIED", "message": "not yours"}]}),
    "says_html": (
        200,
        "<html>sign in to the network</html>",
        {"Content-Type": "text/html"},
    ),
}


def cut_request(proxy, request):
    """Half of the body arrives; the registry keeps what it got."""
    half = request.read(request.length // 2)
    if request.length:
        with contextlib.closing(proxy.begin(request)) as upstream:
            upstream.send(half)
            upstream.sock.shutdown(socket.SHUT_WR)
            while upstream.sock.recv(1 << 16):
                pass  # its refusal, which comes when it has closed its file
    return reset


def cut_first_large(proxy, request):
    """The same, of the first large blob that is sent."""
    if request.method == "PUT" and request.length > 1_000_000 and not proxy.has_cut:
        proxy.has_cut = True
        return cut_request(proxy, request)
    return proxy.forward(request)


def restarts(proxy, request):
    """The registry is killed when half of the body has arrived, and comes up again."""
    with contextlib.closing(proxy.begin(request)) as upstream:
        upstream.send(request.read(request.length // 2))
        proxy.upstream.stop()
    proxy.upstream.start()
    return reset


def lost_answer(proxy, request):
    """All is done, and nobody hears of it."""
    proxy.forward(request)
    return reset


def cut_answer(proxy, request):
    return serving.cut(*proxy.forward(request))


def hangs(_proxy, request):
    request.body  # noqa: B018
    time.sleep(HANG)
    return hang_up


def expired(proxy, _request):
    realm = f'Bearer realm="{proxy.url}/token",service="x",scope="a:b:pull"'
    return 401, b"", {"WWW-Authenticate": realm}


def other_digest(proxy, request):
    """What it says that it has is not what it was given."""
    status, body, headers = proxy.forward(request)
    if "Docker-Content-Digest" in headers:
        headers["Docker-Content-Digest"] = f"sha256:{'0' * 64}"
    return status, body, headers


def flipped(body):
    return bytes([body[0] ^ 1]) + body[1:] if body else body


def other_content(proxy, request):
    """A flipped bit on the way back."""
    status, body, headers = proxy.forward(request)
    return status, flipped(body), headers


def corrupts(proxy, request):
    """A flipped bit on the way there."""
    return proxy.forward(request, flipped(request.body))


def no_mounts(proxy, request):
    return ANSWERS["forbidden"] if "mount=" in request.target else proxy.forward(request)


def no_such_upload(_proxy, request):
    return 404, code("BLOB_UPLOAD_UNKNOWN") if "/uploads/" in request.target else b""


def knows_no_blob(proxy, request):
    """What it says of a manifest while it notes one of its blobs for another who pushes it."""
    if request.method != "PUT" or "/manifests/" not in request.target:
        return proxy.forward(request)
    return 400, code("MANIFEST_BLOB_UNKNOWN")


def nowhere(proxy, request):
    status, body, headers = proxy.forward(request)
    headers.pop("Location", None)
    return status, body, headers


FAULTS = {
    fault.__name__: fault
    for fault in (
        cut_request, cut_first_large, restarts, lost_answer, cut_answer, hangs, expired,
        other_digest, other_content, corrupts, no_mounts, no_such_upload, knows_no_blob, nowhere,
    )
}  # fmt: skip
