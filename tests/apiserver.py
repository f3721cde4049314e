"""A small apiserver that keeps PyTorchJobs in memory: as a Transport, or behind HTTP.

It knows what submissions meet: names that are taken, dry runs, preconditions, selectors, defaults.
Nobody keeps its jobs: they stay as they are until a test changes their status.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
from urllib.parse import unquote

from serving import served

from k8sjob.kube.client.transport import ApiError, refusal

JOBS = "pytorchjobs"


class Apiserver:
    """The objects, and what was asked.

    Attributes:
        jobs: the PyTorchJobs by namespace and name.
        pods: the Pods, of all namespaces.
        missing: namespaces that are not there.
        namespaces: those that are listed.
        refusals: codes by "resource/name" of objects that a job names, as 404 or 403.
        lingers: how often a job that is being deleted, or the pods, are seen until they are gone;
            0: pods stay.
        asked: each request as "POST dry", "POST", "GET", "DELETE", "PATCH" of jobs.
        before: called with each of those words, before the request is looked at; whatever it
            returns is the answer, as (code, object).
    """

    def __init__(self):
        self.jobs = {}
        self.pods = []
        self.asked = []
        self.before = lambda _word: None
        self.missing = set()
        self.namespaces = ()
        self.refusals = {}
        self.nodes = []
        self.lingers = 0
        self._uids = itertools.count(1)
        self._lock = threading.RLock()

    def handle(self, method, path, query, body):
        """The answer to a request: code and object."""
        parts = [unquote(part) for part in path.strip("/").split("/")]
        at = parts.index("namespaces") if "namespaces" in parts[:-1] else None
        namespace = parts[at + 1] if at is not None else None
        rest = parts[at + 2 :] if at is not None else parts[3:]
        if not rest and namespace in self.missing:
            return status(404, "NotFound", f'namespaces "{namespace}" not found')
        if code := self.refusals.get("/".join(rest)):
            return status(code, "NotFound" if code == 404 else "Forbidden", f"{rest} refused")
        if rest[:1] != [JOBS] and len(rest) > 1 and method == "GET":
            return _missing(rest[1])
        if rest[:1] != [JOBS]:
            items = self._listed_pods() if rest[:1] == ["pods"] else []
            items = self.nodes if parts[-1] == "nodes" else items
            if parts[-1] == "namespaces":
                items = [{"metadata": {"name": name}} for name in self.namespaces]
            return 200, {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": items}
        word = f"{method} dry" if "dryRun" in query else method
        self.asked.append(word)
        answer = self.before(word)
        if answer is not None:
            return answer
        name = rest[1] if len(rest) > 1 else None
        with self._lock:
            return getattr(self, f"_{method.lower()}")(namespace, name, query, body)

    def end(self, namespace, name, condition="Succeeded"):
        """Let a job end."""
        reason = f"PyTorchJob{condition}"
        self.jobs[namespace, name]["status"] = {
            "conditions": [{"type": condition, "status": "True", "reason": reason}]
        }

    def _listed_pods(self):
        found = list(self.pods)
        if found and self.lingers:
            self.lingers -= 1
            if not self.lingers:
                self.pods.clear()
        return found

    def _post(self, namespace, _name, query, body):
        made = copy.deepcopy(body)
        meta = made["metadata"]
        if "generateName" in meta:
            meta["name"] = meta["generateName"] + "12345"
        if made.get("spec", {}).get("runPolicy", {}).get("wrong"):
            detail = 'strict decoding error: unknown field "spec.runPolicy.wrong"'
            return status(400, "BadRequest", detail)
        name = meta["name"]
        if (namespace, name) in self.jobs:
            detail = f'pytorchjobs.kubeflow.org "{name}" already exists'
            return status(409, "AlreadyExists", detail)
        meta |= {
            "namespace": namespace,
            "uid": f"uid-{next(self._uids)}",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "managedFields": [{}],
        }
        for replica in made["spec"]["pytorchReplicaSpecs"].values():
            for container in replica["template"]["spec"]["containers"]:
                for port in container.get("ports", ()):
                    port.setdefault("protocol", "TCP")
        if "dryRun" not in query:
            self.jobs[namespace, name] = made
        return 201, made

    def _get(self, namespace, name, query, _body):
        if name is not None:
            job = self.jobs.get((namespace, name))
            if job is None:
                return _missing(name)
            if "deletionTimestamp" in job["metadata"]:
                self.lingers -= 1
                if self.lingers < 0:
                    del self.jobs[namespace, name]
                    return _missing(name)
            return 200, job
        key, _, value = query.get("labelSelector", "").partition("=")
        found = [
            job
            for (ns, _), job in self.jobs.items()
            if namespace in (None, ns)
            and (not key or job["metadata"].get("labels", {}).get(key) == value)
        ]
        meta = {"resourceVersion": "1"}
        return 200, {"kind": "PyTorchJobList", "metadata": meta, "items": found}

    def _delete(self, namespace, name, _query, body):
        job = self.jobs.get((namespace, name))
        if job is None:
            return _missing(name)
        wanted = (body or {}).get("preconditions", {}).get("uid")
        if wanted and wanted != job["metadata"]["uid"]:
            return status(409, "Conflict", "the UID in the precondition does not match")
        if "deletionTimestamp" not in job["metadata"]:
            del self.jobs[namespace, name]
        return 200, {"kind": "Status", "status": "Success"}

    def _patch(self, namespace, name, _query, body):
        job = self.jobs.get((namespace, name))
        if job is None:
            return _missing(name)
        job["spec"]["runPolicy"] |= body["spec"]["runPolicy"]
        return 200, job

    def served(self):
        """Over HTTP on the loopback interface; its URL, as a context."""
        return served(self._answer)

    def _answer(self, method, path, query, body):
        """Also that of a watch, in which nothing happens, and which ends soon."""
        if "watch" in query:
            time.sleep(0.2)
            return 200, {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "1"}}}
        return self.handle(method, path, query, body)


class InMemory:
    """A Transport to an Apiserver of this process."""

    context = "fake"
    server = "https://fake"
    skew = 0.0

    def __init__(self, api, namespace="blue"):
        self.api, self.namespace = api, namespace

    def request(
        self,
        method,
        path,
        *,
        query=None,
        body=None,
        metadata_only=False,
        timeout=30.0,
    ):
        sent = json.loads(json.dumps(body))  # as the wire carries it
        code, answer = self.api.handle(method, path, dict(query or {}), sent)
        if code == 0:
            raise ApiError("https://fake cannot be reached")
        if code >= 300:
            raise refusal(code, answer)
        return copy.deepcopy(answer)

    def stream(self, path, *, query=None, idle=300.0, stop=None):
        raise AssertionError("nothing is watched here")


def status(code, reason, message):
    """A refusal."""
    return code, {"kind": "Status", "status": "Failure", "reason": reason, "message": message}


def kubeconfig(folder, url, *, context="fake", namespace="blue"):
    """Writes a kubeconfig for a server without TLS; the file."""
    file = folder / f"{context}.kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [{"name": context, "cluster": {"server": url}}],
        "users": [{"name": "tester", "user": {"token": "not-a-secret"}}],
        "contexts": [
            {
                "name": context,
                "context": {"cluster": context, "user": "tester", "namespace": namespace},
            }
        ],
    }
    file.write_text(json.dumps(config))
    return file


def _missing(name):
    return status(404, "NotFound", f'pytorchjobs.kubeflow.org "{name}" not found')
