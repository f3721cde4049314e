"""An index of Python packages on loopback, which wants a password."""

import base64
import contextlib
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOGIN = "somebody:very-secret"


@contextlib.contextmanager
def serving(wheels, certificate=None):
    """Serves the wheels of a folder; gives the index's address, with the password in it.

    A certificate and its key make it speak TLS.
    """
    pages = {}
    for file in wheels.glob("*.whl"):
        pages[f"/{file.name}"] = file.read_bytes()
        page = f"/simple/{file.name.partition('-')[0]}/"
        pages[page] = pages.get(page, b"") + f'<a href="/{file.name}">{file.name}</a>'.encode()

    class Handler(_Handler):
        contents = pages

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(*certificate)
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http{'s' if certificate else ''}://{LOGIN}@127.0.0.1:{server.server_port}/simple/"
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
