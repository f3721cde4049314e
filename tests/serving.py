"""An HTTP server in this process, on the loopback interface, and faults of its answers.

An answer is a status, maybe content and headers. The content is bytes, text, JSON, or a function of
what writes a piece of a chunked body, which returns whether the body is whole. In place of an
answer there may be a fault: a function of the handler, such as those at the end of this module.
"""

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit


class Request:
    """What a client asks for.

    Attributes:
        method, headers: as they came.
        target: path and query as they came.
        path: the path alone.
        query: the last value of each parameter.
        length: bytes of the body that are announced.
    """

    def __init__(self, handler):
        self.method, self.target, self.headers = handler.command, handler.path, handler.headers
        self.path = urlsplit(self.target).path
        self.query = dict(parse_qsl(urlsplit(self.target).query))
        self.length = int(self.headers.get("Content-Length") or 0)
        self.read = handler.rfile.read
        self._line, self._body = handler.rfile.readline, None

    @property
    def body(self):
        """The whole body, or as much of it as the client sent."""
        if self._body is None:
            self._body = self._whole()
        return self._body

    def _whole(self):
        if self.headers.get("Transfer-Encoding") != "chunked":  # as kubectl sends it
            return self.read(self.length)
        body = b""
        while size := int(self._line(), 16):
            body += self.read(size)
            self._line()
        self._line()
        return body

    @property
    def json(self):
        """The body as JSON; None where there is none."""
        return json.loads(self.body) if self.body else None


class Server(ThreadingHTTPServer):
    """Serves from now on, until it is stopped; as a context, until that ends.

    Args:
        answer: the answer to a Request; an exception ends the connection.
        port: 0: one that is free.
        address: where it listens.
        tls: the files of a certificate and its key, or of both; whoever speaks plain HTTP is told.

    Attributes:
        ahead: seconds by which its clock is ahead.
    """

    daemon_threads = True
    request_queue_size = 64
    ahead = 0.0

    def __init__(self, answer, *, port=0, address="127.0.0.1", tls=()):
        super().__init__((address, port), _Handler)
        self.answer, self.connections, self.tls = answer, set(), None
        if tls:
            self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.tls.load_cert_chain(*tls)
        self.host = f"{address}:{self.server_port}"
        self.url = f"http{'s' if tls else ''}://{self.host}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *_):
        self.stop()

    def handle_error(self, *_):
        """A client that goes away is what tests do."""

    def stop(self):
        """As if it were killed: connections break."""
        self.shutdown()
        self.server_close()
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        tls, self.answers = self.server.tls, self.server.answer
        if tls and self.request.recv(1, socket.MSG_PEEK) == b"\x16":
            self.request = tls.wrap_socket(self.request, server_side=True)
        elif tls:
            self.answers = lambda _: (400, b"Client sent an HTTP request to an HTTPS server.\n")
        self.server.connections.add(self.request)
        super().setup()

    def finish(self):
        self.server.connections.discard(self.connection)
        super().finish()
        if isinstance(self.connection, ssl.SSLSocket):  # the server itself closes others
            self.connection.close()

    def handle_any(self):
        request = Request(self)
        answer = self.answers(request)
        if callable(answer):
            self.close_connection = True
            answer(self)
        else:
            request.body  # noqa: B018 - so that the next request of the connection follows
            self.reply(*answer)

    # The names that http.server calls.
    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815

    def reply(self, status, content=b"", headers=None):
        headers = dict(headers or {})
        if isinstance(content, dict | list):
            headers.setdefault("Content-Type", "application/json")
            content = json.dumps(content)
        if callable(content):
            headers["Transfer-Encoding"] = "chunked"
        else:
            content = content.encode() if isinstance(content, str) else content
            headers.setdefault("Content-Length", str(len(content)))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if callable(content):
            self.close_connection = not content(self.write_piece)
            if not self.close_connection:
                self.write_piece(b"")
        elif self.command != "HEAD":
            self.wfile.write(content)

    def write_piece(self, piece):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))

    def date_time_string(self, timestamp=None):
        return super().date_time_string((timestamp or time.time()) + self.server.ahead)

    def log_message(self, *_):
        """Tests say what they saw by themselves."""


class Inbox(Server):
    """A webhook.

    Attributes:
        bodies: what was sent to it.
        codes: its next answers; then 200. With 0 the connection ends without an answer.
        came: set when something was sent to it.
    """

    def __init__(self, **options):
        self.bodies, self.codes, self.came = [], [], threading.Event()
        super().__init__(self._take, **options)

    def _take(self, request):
        self.bodies.append(request.json)
        self.came.set()
        code = self.codes.pop(0) if self.codes else 200
        return (code, {}, {"Retry-After": "86400"}) if code else hang_up


# --- faults ---------------------------------------------------------------------------------------


def hang_up(_handler):
    """The connection ends without an answer."""


def reset(handler):
    """The connection is reset, as by a crash."""
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.connection.close()


def cut(status, content, headers):
    """Half of the content that is announced, and then a reset."""

    def send(handler):
        size = {"Content-Length": str(len(content))}
        handler.reply(status, content[: len(content) // 2], size | headers)
        reset(handler)

    return send


def trickle(start, more=b"x", ended=None):
    """These bytes, whether they are HTTP or not, and more of them until the client goes away.

    Args:
        start: what comes at once.
        more: what comes 50 times a second.
        ended: an Event that is set when the client has gone away.
    """

    def send(handler):
        handler.connection.settimeout(0.02)
        with contextlib.suppress(ConnectionError):
            handler.connection.sendall(start)
            while True:
                try:
                    if not handler.connection.recv(65536):
                        break
                except TimeoutError:
                    handler.connection.sendall(more)
        if ended:
            ended.set()

    return send
