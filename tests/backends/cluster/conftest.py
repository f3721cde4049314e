"""A transport that answers as it was told to."""

import json
import threading
from collections import defaultdict, deque

import pytest
from clusters import Cluster

from k8sjob.kube.client.transport import ApiError


class Script(Cluster):
    """A cluster of prepared answers.

    The last answer for a request stands for all that follow. An answer is an object, an error that
    is raised, or a function of the request's body and query. A stream is a list of objects
    (events), bytes, errors, and of threading.Event, which are waited for.
    """

    context, namespace, server = "there", "team", "https://there:6443"

    def __init__(self):
        super().__init__()
        self.answers = defaultdict(deque)
        self.streams = defaultdict(deque)
        self.lock = threading.Lock()

    def on(self, method, path, *answers):
        self.answers[method, path] = deque(answers)
        return self

    def watched(self, path, *streams):
        self.streams[path] = deque(streams)
        return self

    def answer(self, method, path, query, body):
        with self.lock:
            answers = self.answers[method, path]
            answer = answers.popleft() if len(answers) > 1 else next(iter(answers), None)
        return answer(body, query) if callable(answer) else answer

    def stream(self, path, *, query=None, idle=300.0, stop=None):
        with self.lock:
            self.asked.append(("WATCH", path, dict(query or {}), None))
            scripts = self.streams[path]
            script = scripts.popleft() if scripts else None
        if script is None:  # nothing happens any more
            stop.wait(60)
            return
        for step in script:
            if isinstance(step, threading.Event):
                while not step.wait(0.01):
                    if stop.is_set():
                        return
            elif isinstance(step, Exception):
                raise step
            else:
                yield step if isinstance(step, bytes) else json.dumps(step).encode() + b"\n"

    def of(self, method):
        """The queries of all requests of that kind."""
        with self.lock:
            return [query for asked, _, query, _ in self.asked if asked == method]


@pytest.fixture
def script():
    return Script()


def broken(code=0, reason="Unreachable", detail="connection reset"):
    return ApiError(detail, code=code, reason=reason, detail=detail)


@pytest.fixture
def error():
    """An ApiError: code, reason, the server's words."""
    return broken


@pytest.fixture
def listed():
    """A collection as an apiserver lists it."""

    def make(version, *items, kind="PodList", more=""):
        meta = {"resourceVersion": str(version), **({"continue": more} if more else {})}
        return {"kind": kind, "apiVersion": "v1", "metadata": meta, "items": list(items)}

    return make
