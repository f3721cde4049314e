"""An apiserver that a test plays, served over HTTP on the loopback interface."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit


@contextmanager
def served(answer):
    """A server's URL; it gives the status and JSON of `answer(method, path, query, body)`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(answer))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(answer):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self):
            url, sent = urlsplit(self.path), self.body()
            body = json.loads(sent) if sent else None
            code, found = answer(self.command, url.path, dict(parse_qsl(url.query)), body)
            content = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

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

        def log_message(self, *_):
            """Tests say what they saw by themselves."""

    return Handler
