"""An HTTPS server that answers as a test tells it, in the place of an apiserver."""

import shutil
from collections import deque

import pytest
import yaml
from serving import Server

from k8sjob.kube.client.kubeconfig import access


class Apiserver(Server):
    """Answers each request by the next of its answers; the last stands for all that follow.

    Attributes:
        asked: method, path with query, headers and body of each request.
    """

    def __init__(self, certificate):
        self.answers, self.asked = deque(), []
        super().__init__(self._next, tls=[certificate])

    def on(self, *answers):
        self.answers = deque(answers)
        self.asked.clear()

    def _next(self, request):
        if request.path == "/version":  # some builds of kubectl ask for it by themselves
            return 200, {"major": "1", "minor": "34", "gitVersion": "v1.34.4"}
        self.asked.append((request.method, request.target, request.headers, request.body))
        return self.answers.popleft() if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def apiserver(certificate):
    with Apiserver(certificate) as server:
        yield server


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
    """Makes a transport in Python."""
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
