"""An index of Python packages on loopback, which wants a password."""

import base64
import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOGIN = "somebody:very-secret"


@contextlib.contextmanager
def serving(wheels):
    """Serves the wheels of a folder; gives the index's address, with the password in it."""
    pages = {}
    for file in wheels.glob("*.whl"):
        pages[f"/{file.name}"] = file.read_bytes()
        page = f"/simple/{file.name.partition('-')[0]}/"
        pages[page] = pages.get(page, b"") + f'<a href="/{file.name}">{file.name}</a>'.encode()

    class Handler(_Handler):
        contents = pages

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{LOGIN}@127.0.0.1:{server.server_port}/simple/"
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    wanted = "Basic " + base64.b64encode(LOGIN.encode()).decode()

    def do_GET(self):
        if self.headers.get("Authorization") != self.wanted:
            return self.answer(401, b"", "WWW-Authenticate", 'Basic realm="index"')
        if self.path not in self.contents:
            return self.answer(404, b"")
        return self.answer(200, self.contents[self.path])

    def answer(self, status, content, *header):
        self.send_response(status)
        if header:
            self.send_header(*header)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass
