"""A cluster in which all is well, for the doctor: as a Transport, or behind HTTP."""

from __future__ import annotations

import copy
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from k8sjob.backends.transport import ApiError

WEBHOOK = "validator.pytorchjob.training-operator.kubeflow.org"
BAD_JOB = ApiError(
    f'admission webhook "{WEBHOOK}" denied the request: metadata.name: Invalid value: "0-x"',
    code=403,
    reason="Forbidden",
)
NAMESPACE = "/api/v1/namespaces/team"


def node(name="n1", *, gpus=0, labels=None, taints=(), ready=True, cordoned=False, **offers):
    offers = {"cpu": "8", "memory": "32Gi", "pods": "110", **offers}
    if gpus:
        offers["nvidia.com/gpu"] = str(gpus)
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"taints": list(taints), **({"unschedulable": True} if cordoned else {})},
        "status": {
            "allocatable": offers,
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }


def pod(node="n1", *, phase="Running", **requests):
    resources = {"requests": requests}
    return {
        "metadata": {"name": "p"},
        "spec": {"nodeName": node, "containers": [{"name": "c", "resources": resources}]},
        "status": {"phase": phase},
    }


def healthy():
    """The answers of a cluster where all is well, by path; POSTs by their last part."""
    return {
        "/version": {"gitVersion": "v1.34.4"},
        "/apis/kubeflow.org/v1": {"resources": [{"name": "pytorchjobs"}]},
        "/apis/apps/v1/deployments": {"items": [deployment()]},
        "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations": {"items": []},
        "/api/v1/nodes": {"items": [node()]},
        "/api/v1/pods": {"items": [pod(cpu="1")]},
        "/apis/storage.k8s.io/v1/storageclasses": {
            "items": [
                {
                    "metadata": {
                        "name": "fast",
                        "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
                    }
                }
            ]
        },
        NAMESPACE: {"metadata": {"name": "team", "labels": {}}},
        f"{NAMESPACE}/serviceaccounts/default": {"metadata": {"name": "default"}},
        f"{NAMESPACE}/resourcequotas": {"items": []},
        f"{NAMESPACE}/limitranges": {"items": []},
        f"{NAMESPACE}/pods": {"items": []},
        "selfsubjectaccessreviews": {"status": {"allowed": True}},
        "selfsubjectreviews": {"status": {"userInfo": {"username": "eve"}}},
        "pytorchjobs": lambda body: BAD_JOB if body["metadata"]["name"][0] == "0" else body,
    }


def deployment(*args, ready=1, image="registry.example/training-operator:v1.9.4"):
    return {
        "metadata": {"name": "training-operator", "namespace": "kubeflow"},
        "spec": {
            "replicas": 1,
            "template": {"spec": {"containers": [{"image": image, "args": list(args)}]}},
        },
        "status": {"readyReplicas": ready},
    }


class HealthyCluster:
    """A Transport that answers from a table, in which a test changes what it wants to be ill.

    Attributes:
        answers: by path, for POST by its last part: an object, an ApiError, a function of the
            query or the body; what is not there is 404.
        asked: method, path, query, body and metadata_only of each request.
    """

    context, namespace, server = "lab", "team", "https://lab.example:6443"

    def __init__(self):
        self.answers = healthy()
        self.asked = []

    def request(
        self,
        method,
        path,
        *,
        query=None,
        body=None,
        content_type="application/json",
        metadata_only=False,
        timeout=30.0,
    ):
        self.asked.append((method, path, dict(query or {}), body, metadata_only))
        answer = self.answers.get(path if method == "GET" else path.rpartition("/")[2])
        if callable(answer):
            answer = answer(query if method == "GET" else body)
        if answer is None:
            answer = ApiError(f"{path} not found", code=404, reason="NotFound")
        if isinstance(answer, ApiError):
            raise answer
        return copy.deepcopy(answer)

    def stream(self, path, *, query=None, idle=300.0, stop=None):
        raise AssertionError("the doctor follows nothing")

    @contextmanager
    def served(self):
        """Over HTTP on the loopback interface; its URL."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _handler(cluster):
    class Handler(BaseHTTPRequestHandler):
        def _answer(self):
            url = urlsplit(self.path)
            sent = self._body()
            body = json.loads(sent) if sent else None
            query = dict(parse_qsl(url.query))
            try:
                code, answer = 200, cluster.request(self.command, url.path, query=query, body=body)
            except ApiError as error:
                code = error.code or 500
                answer = {"kind": "Status", "message": error.said, "reason": error.reason}
            sent = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def _body(self):
            if self.headers.get("Transfer-Encoding") != "chunked":  # as kubectl sends it
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_POST = _answer  # noqa: N815 - http.server calls them so

        def log_message(self, *_):
            """Nothing on stderr."""

    return Handler
