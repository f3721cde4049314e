"""Clusters that tests play: as a Transport, or behind HTTP."""

import json
import time

from serving import Server

from k8sjob.kube.client.transport import ApiError, refusal


class Cluster:
    """A Transport whose answers are those of a function, or of a subclass.

    An answer is an object, an ApiError, code and object as an apiserver sends them, or None where
    there is no such object.

    Args:
        answer: the answer to (method, path, query, body).

    Attributes:
        asked: method, path, query and body of each request.
        bare: paths of which only metadata were requested.
    """

    context, namespace, server, skew = "fake", "blue", "https://fake", 0.0

    def __init__(self, answer=None):
        self.asked, self.bare = [], set()
        if answer:
            self.answer = answer

    def request(self, method, path, *, query=None, body=None, metadata_only=False, timeout=30.0):
        if metadata_only:
            self.bare.add(path)
        code, answer = self._answered(method, path, dict(query or {}), body)
        if code == 0:
            raise ApiError(f"{self.server} cannot be reached")
        if code >= 300:
            raise refusal(code, answer)
        return json.loads(json.dumps(answer))

    def stream(self, path, *, query=None, idle=300.0, stop=None):
        raise AssertionError("nothing is followed here")

    def _answered(self, method, path, query, body):
        body = json.loads(json.dumps(body))  # as the wire carries it
        self.asked.append((method, path, query, body))
        answer = self.answer(method, path, query, body)
        if answer is None:
            raise ApiError(f"{path} not found", code=404, reason="NotFound")
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, tuple) else (200, answer)

    def served(self):
        """A server for it, without TLS."""
        return Server(self._over_http)

    def _over_http(self, request):
        """Also a watch, in which nothing happens, and which ends soon."""
        if "watch" in request.query:
            time.sleep(0.2)
            return 200, {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1"}}}
        try:
            return self._answered(request.method, request.path, request.query, request.json)
        except ApiError as error:
            return error.code or 500, status(error.code, error.reason, error.detail)[1]


def status(code, reason, message):
    """A refusal."""
    return code, {"kind": "Status", "status": "Failure", "reason": reason, "message": message}


def kubeconfig(folder, url, *, context="fake", namespace="blue", token="t"):
    """Writes a kubeconfig for a server without TLS; the file."""
    file = folder / f"{context}.kubeconfig"
    user = {"name": "tester", "user": {"token": token}}
    access = {"cluster": context, "user": "tester", "namespace": namespace}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [{"name": context, "cluster": {"server": url}}],
        "users": [user],
        "contexts": [{"name": context, "context": access}],
    }
    file.write_text(json.dumps(config))
    return file
