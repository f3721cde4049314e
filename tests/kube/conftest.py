"""An HTTPS server that answers as a test tells it, in the place of an apiserver."""

import http.server
import json
import shutil
import ssl
import subprocess
import threading
import time
from collections import deque

import pytest
import yaml

from k8sjob.kube.client.kubeconfig import access


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request by the server's next answer."""

    protocol_version = "HTTP/1.1"

    def date_time_string(self, timestamp=None):
        return super().date_time_string(time.time() + self.server.ahead)

    def log_message(self, *args):
        pass

    def answer(self):
        status, content, headers = self.server.next(
            self.command, self.path, self.headers, self.body()
        )
        if status == 0:  # the connection breaks instead
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if callable(content):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            whole = content(self.piece)
            if whole:
                self.piece(b"")
            self.close_connection = not whole
            return
        if not isinstance(content, str):
            self.send_header("Content-Type", "application/json")
            content = json.dumps(content)
        self.send_header("Content-Length", str(len(content.encode())))
        self.end_headers()
        self.wfile.write(content.encode())

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        whole = b""
        while length := int(self.rfile.readline(), 16):
            whole += self.rfile.read(length)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def piece(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815 - the library's names


class Apiserver(http.server.ThreadingHTTPServer):
    """Answers each request by the next of its answers: (status, body, headers), the last forever.

    A body is an object, text, or a function that is given what writes a piece of a chunked body and
    says whether that came to its end. With the status 0 the connection breaks instead.
    """

    daemon_threads = True

    def __init__(self, certificate):
        super().__init__(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = context.wrap_socket(
            self.socket, server_side=True, do_handshake_on_connect=False
        )
        self.answers = deque()
        self.asked = []
        self.ahead = 0.0  # its clock, in seconds
        self.url = f"https://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def on(self, *answers):
        self.answers = deque((*answer, {})[:3] for answer in answers)
        self.asked.clear()

    def next(self, method, path, headers, body):
        if path.startswith("/version"):  # some builds of kubectl ask for it by themselves
            return 200, {"major": "1", "minor": "34", "gitVersion": "v1.34.4"}, {}
        self.asked.append((method, path, headers, body))
        return self.answers.popleft() if len(self.answers) > 1 else self.answers[0]

    def handle_error(self, *args):
        """A client that goes away is not worth a word."""


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """A certificate for this machine, signed by itself, and its key, in one file."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    argv = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 2"
    argv += f" -subj /CN=test -addext subjectAltName=IP:127.0.0.1 -keyout {path} -out {path}.crt"
    subprocess.run(argv.split(), check=True, capture_output=True)
    with path.open("a") as both:
        both.write(path.with_suffix(".pem.crt").read_text())
    return path


@pytest.fixture
def apiserver(certificate):
    server = Apiserver(certificate)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def kubeconfig(tmp_path, apiserver, certificate):
    """Writes a kubeconfig for the server; its user and cluster by their fields."""

    def write(user=None, **cluster):
        trusted = {"certificate-authority": f"{certificate}.crt"}
        content = {
            "clusters": [{"name": "c", "cluster": {"server": apiserver.url, **trusted, **cluster}}],
            "users": [{"name": "u", "user": {"token": "first-token"} if user is None else user}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "here",
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture
def python(kubeconfig):
    """Makes a transport over the Python client."""
    pytest.importorskip("kubernetes")
    from k8sjob.kube.client.python_client import PythonTransport

    return lambda *args, **fields: PythonTransport(access(kubeconfig=kubeconfig(*args, **fields)))


@pytest.fixture
def kubectl(kubeconfig):
    """Makes a transport over kubectl."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    from k8sjob.kube.client.kubectl import KubectlTransport

    return lambda *args, **fields: KubectlTransport(access(kubeconfig=kubeconfig(*args, **fields)))


@pytest.fixture(params=["python", "kubectl"])
def transport(request):
    """Makes a transport, of each kind."""
    return request.getfixturevalue(request.param)
