"""A proxy before a real registry that does one thing wrong at one request, or at all of them."""

import contextlib
import http.client
import json
import socket
import struct
import threading
import time
import urllib.parse

from serving import Handler, Server

HANG = 4.0  # seconds; longer than the patience of who tests it
UPSTREAM = 120.0  # seconds for the registry, which may wait for a busy disk


class FaultyRegistry:
    """Passes requests on to a registry.

    Attributes:
        fault: name of a method of _Handler below; None is honest.
        at: number of the request it happens at, from 1; 0 is all of them.
        seen: method and path of the requests so far.
    """

    def __init__(self, registry):
        self.upstream = registry
        self.fault, self.at, self.seen, self.has_cut = None, 0, [], False
        self._lock = threading.Lock()
        server = Server(_Handler, proxy=self)
        self.host, self.stop = server.host, server.stop

    def arm(self, fault, at=0):
        with self._lock:
            self.fault, self.at, self.seen, self.has_cut = fault, at, [], False

    def note(self, what):
        """Count a request; the fault for it, or None."""
        with self._lock:
            self.seen.append(what)
            return self.fault if self.at in {0, len(self.seen)} else None


class _Handler(Handler):
    proxy = None

    def handle_any(self):
        if self.place == "/token":  # for those who were told that theirs has expired
            return self.answer(200, {}, json.dumps({"token": str(time.time())}).encode())
        length = int(self.headers.get("Content-Length") or 0)
        fault = self.proxy.note(f"{self.command} {self.place}")
        if fault is None:
            return self.answer(*self.forward(self.rfile.read(length)))
        return getattr(self, fault)(length)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815 - http.server's names

    @property
    def place(self):
        return urllib.parse.urlsplit(self.path).path

    def begin(self, length):
        """A request to the real registry, whose body is still to come."""
        upstream = http.client.HTTPConnection(self.proxy.upstream.host, timeout=UPSTREAM)
        with contextlib.ExitStack() as unless_begun:
            unless_begun.callback(upstream.close)
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in {"content-length", "transfer-encoding", "authorization"}:
                    upstream.putheader(name, value)  # Host too, so that locations lead back here
            upstream.putheader("Content-Length", str(length))
            upstream.endheaders()
            unless_begun.pop_all()
        return upstream

    def forward(self, body):
        """Ask the real registry."""
        with contextlib.closing(self.begin(len(body))) as upstream:
            if body:
                upstream.send(body)
            response = upstream.getresponse()
            return response.status, dict(response.headers.items()), response.read()

    def cut(self, upstream, body):
        """Send less of a body than was announced; returns when the registry has written that."""
        with contextlib.closing(upstream):
            upstream.send(body)
            upstream.sock.shutdown(socket.SHUT_WR)
            while upstream.sock.recv(1 << 16):
                pass  # its refusal, which comes when it has closed its file

    def answer(self, status, headers, body):
        self.send_response(status)
        size = headers.pop("Content-Length", None) if self.command == "HEAD" else None
        for name, value in headers.items():
            if name.lower() not in {"content-length", "connection", "date"}:
                self.send_header(name, value)
        self.send_header("Content-Length", size or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def hang_up(self):
        """Reset the connection, as a crash does."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True

    # --- what can go wrong ------------------------------------------------------------------

    def refused(self, length):
        self.hang_up()

    def cut_request(self, length):
        """Half of the body arrives; the registry keeps what it got."""
        half = self.rfile.read(length // 2)
        if length:
            self.cut(self.begin(length), half)
        self.hang_up()

    def cut_first_large(self, length):
        """The same, of the first large blob that is sent."""
        if self.command == "PUT" and length > 1_000_000 and not self.proxy.has_cut:
            self.proxy.has_cut = True
            return self.cut_request(length)
        return self.answer(*self.forward(self.rfile.read(length)))

    def restarts(self, length):
        """The registry is killed when half of the body has arrived, and comes up again."""
        with contextlib.closing(self.begin(length)) as upstream:
            upstream.send(self.rfile.read(length // 2))
            self.proxy.upstream.stop()
        self.proxy.upstream.start()
        self.hang_up()

    def lost_answer(self, length):
        """All is done, and nobody hears of it."""
        self.forward(self.rfile.read(length))
        self.hang_up()

    def cut_answer(self, length):
        status, headers, body = self.forward(self.rfile.read(length))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.hang_up()

    def hangs(self, length):
        self.rfile.read(length)
        time.sleep(HANG)
        self.hang_up()

    def is_down(self, length):
        self.rfile.read(length)
        self.answer(500, {}, b"")

    def is_busy(self, length):
        self.rfile.read(length)
        self.answer(429, {"Retry-After": "0"}, b'{"errors": [{"code": "TOOMANYREQUESTS"}]}')

    def expired(self, length):
        self.rfile.read(length)
        realm = f'Bearer realm="http://{self.proxy.host}/token",service="x",scope="a:b:pull"'
        self.answer(401, {"WWW-Authenticate": realm}, b"")

    def forbidden(self, length):
        self.rfile.read(length)
        self.answer(403, {}, b'{"errors": [{"code": "DENIED", "message": "not yours"}]}')

    def other_digest(self, length):
        """What it says that it has is not what it was given."""
        status, headers, body = self.forward(self.rfile.read(length))
        if "Docker-Content-Digest" in headers:
            headers["Docker-Content-Digest"] = f"sha256:{'0' * 64}"
        self.answer(status, headers, body)

    def other_content(self, length):
        """A flipped bit on the way back."""
        status, headers, body = self.forward(self.rfile.read(length))
        self.answer(status, headers, bytes([body[0] ^ 1]) + body[1:] if body else body)

    def corrupts(self, length):
        """A flipped bit on the way there."""
        body = self.rfile.read(length)
        self.answer(*self.forward(bytes([body[0] ^ 1]) + body[1:] if body else body))

    def no_mounts(self, length):
        if "mount=" in self.path:
            return self.forbidden(length)
        return self.answer(*self.forward(self.rfile.read(length)))

    def no_such_upload(self, length):
        self.rfile.read(length)
        if "/uploads/" in self.path:
            return self.answer(404, {}, b'{"errors": [{"code": "BLOB_UPLOAD_UNKNOWN"}]}')
        return self.answer(404, {}, b"")

    def knows_no_blob(self, length):
        """What it says of a manifest while it notes one of its blobs for another who pushes it."""
        body = self.rfile.read(length)
        if self.command != "PUT" or "/manifests/" not in self.path:
            return self.answer(*self.forward(body))
        return self.answer(400, {}, b'{"errors": [{"code": "MANIFEST_BLOB_UNKNOWN"}]}')

    def says_html(self, length):
        self.rfile.read(length)
        self.answer(200, {"Content-Type": "text/html"}, b"<html>sign in to the network</html>")

    def nowhere(self, length):
        status, headers, body = self.forward(self.rfile.read(length))
        headers.pop("Location", None)
        self.answer(status, headers, body)
