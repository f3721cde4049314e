"""HTTP servers of this process, on the loopback interface."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit


class Server(ThreadingHTTPServer):
    """Serves from now on, until it is stopped.

    Args:
        handler: the class of its handlers.
        port: 0: one that is free.
        address: where it listens.
        tls: an SSLContext; None: it speaks plain HTTP.
        attributes: of the handlers.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, handler, *, port=0, address="127.0.0.1", tls=None, **attributes):
        super().__init__((address, port), type("Handler", (handler,), attributes))
        if tls:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.host = f"{address}:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_):
        """A client that goes away is what tests do."""

    def stop(self):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Tests say what they saw by themselves."""

    def reply(self, status, content=b"", headers=None):
        """Answer with bytes."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def reply_json(self, status, content, headers=None):
        """Answer with JSON."""
        kind = {"Content-Type": "application/json"}
        self.reply(status, json.dumps(content).encode(), kind | (headers or {}))


@contextmanager
def served(answer):
    """A server's URL; `answer(method, path, query, body)` gives status, JSON, and maybe headers."""
    server = Server(_Played, play=staticmethod(answer))
    try:
        yield f"http://{server.host}"
    finally:
        server.stop()


class _Played(Handler):
    """Of an apiserver that a test plays."""

    play = None

    def handle_one(self):
        url, sent = urlsplit(self.path), self.body()
        body = json.loads(sent) if sent else None
        self.reply_json(*self.play(self.command, url.path, dict(parse_qsl(url.query)), body))

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":  # as kubectl sends it
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    # The names that http.server calls.
    do_GET = do_POST = do_DELETE = do_PATCH = handle_one  # noqa: N815
