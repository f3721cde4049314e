"""An index of Python packages on loopback, which wants a password."""

import base64
import contextlib
import ssl

from serving import Handler, Server

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
    tls = None
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*certificate)
    server = Server(_Handler, tls=tls, pages=pages)
    try:
        yield f"http{'s' if certificate else ''}://{LOGIN}@{server.host}/simple/"
    finally:
        server.stop()


class _Handler(Handler):
    wanted = "Basic " + base64.b64encode(LOGIN.encode()).decode()
    pages = None

    def do_GET(self):  # noqa: N802 - http.server's name
        if self.headers.get("Authorization") != self.wanted:
            return self.reply(401, headers={"WWW-Authenticate": 'Basic realm="index"'})
        if self.path not in self.pages:
            return self.reply(404)
        return self.reply(200, self.pages[self.path], {"Content-Type": "text/html"})
