"""The page's server over back ends in memory, and a client for it."""

import json
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
import urllib3

from k8sjob.ui.jobs import Jobs
from k8sjob.ui.server import Page, Server, listen

TOKEN = "the-token"


def job(name, state="Running", message="", *, minutes=25, **more):
    """A PyTorchJob that was created, and started, so many minutes ago."""
    began = (datetime.now(UTC) - timedelta(minutes=minutes)).isoformat(timespec="seconds")
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", "creationTimestamp": began}
    condition = {"type": state, "status": "True", "reason": "R", "message": message}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {**meta, **more},
        "spec": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": 1}}},
        "status": {"conditions": [condition], "startTime": began},
    }


class Client:
    """Asks the server as the page does, unless a test says otherwise."""

    def __init__(self, port, token=TOKEN):
        self.port, self._token = port, token
        self._http = urllib3.PoolManager(retries=False)

    def ask(self, path, method="GET", **headers):
        """The answer: status, headers, and the body as JSON where it is."""
        given = {"Host": f"127.0.0.1:{self.port}", "Authorization": f"Bearer {self._token}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"http://127.0.0.1:{self.port}{path}"
        sent = {name: value for name, value in given.items() if value}
        answer = self._http.request(method, url, headers=sent, timeout=60)
        body = answer.data
        kind = answer.headers.get("content-type", "")
        return answer.status, answer.headers, json.loads(body) if "json" in kind else body

    @contextmanager
    def stream(self, path):
        """The events of a stream, as (name, data)."""
        headers = {"Authorization": f"Bearer {self._token}"}
        url = f"http://127.0.0.1:{self.port}{path}"
        answer = self._http.request("GET", url, headers=headers, preload_content=False, timeout=20)

        def events():
            rest = ""
            while chunk := answer.read1():
                *blocks, rest = (rest + chunk.decode()).split("\n\n")
                for block in blocks:
                    if block.startswith("event"):
                        name, data = block.split("\n", 1)
                        yield name[7:], json.loads(data[6:])

        try:
            yield events()
        finally:
            answer.close()

    def close(self):
        self._http.clear()


@pytest.fixture
def serve():
    """`serve(local, ...)` gives a client of a server that shows these back ends."""
    ended = []

    def start(local=None, cluster=None, records=(), *, read_only=False, connect=None):
        jobs = Jobs(local, cluster, records)
        server = Server(Page(jobs, connect or (lambda _ns: cluster), read_only=read_only), TOKEN)
        listener = listen(0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        client = Client(listener.getsockname()[1])

        def end():
            client.close()
            if thread.is_alive():
                server.handle_exit(2, None)
            thread.join(15)
            listener.close()
            assert not thread.is_alive()

        ended.append(end)
        client.end = end
        return client

    yield start
    for end in ended:
        end()
