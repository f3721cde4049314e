"""An index of Python packages on loopback, which wants a password."""

import base64
import contextlib

from serving import Server

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
    secret = "Basic " + base64.b64encode(LOGIN.encode()).decode()

    def answer(request):
        if request.headers.get("Authorization") != secret:
            return 401, b"", {"WWW-Authenticate": 'Basic realm="index"'}
        if request.path not in pages:
            return (404,)
        return 200, pages[request.path], {"Content-Type": "text/html"}

    with Server(answer, tls=certificate) as server:
        yield server.url.replace("://", f"://{LOGIN}@") + "/simple/"
