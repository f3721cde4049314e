"""A small apiserver that keeps PyTorchJobs in memory.

It knows what submissions meet: names that are taken, dry runs, preconditions, selectors, defaults.
Nobody keeps its jobs: they stay as they are until a test changes their status.
"""

from __future__ import annotations

import copy
import itertools
import threading
from urllib.parse import unquote

from clusters import Cluster, status

JOBS = "pytorchjobs"


class Apiserver(Cluster):
    """The objects, and what was asked.

    Attributes:
        jobs: the PyTorchJobs by namespace and name.
        pods: the Pods, of all namespaces.
        missing: namespaces that are not there.
        namespaces: those that are listed.
        annotations: of each namespace.
        refusals: codes by "resource/name" of objects that a job names, as 404 or 403.
        lingers: how often a job that is being deleted, or the pods, are seen until they are gone;
            0: pods stay.
        nodes: the Nodes; None: they may not be read.
        words: each request as "POST dry", "POST", "GET", "DELETE", "PATCH" of jobs.
        before: called with each of those words, before the request is looked at; whatever it
            returns is the answer, as (code, object).
    """

    def __init__(self):
        super().__init__()
        self.jobs = {}
        self.pods = []
        self.words = []
        self.before = lambda _word: None
        self.missing = set()
        self.namespaces = ()
        self.annotations = {}
        self.refusals = {}
        self.nodes = []
        self.lingers = 0
        self._uids = itertools.count(1)
        self._lock = threading.RLock()

    def answer(self, method, path, query, body):
        parts = [unquote(part) for part in path.strip("/").split("/")]
        at = parts.index("namespaces") if "namespaces" in parts[:-1] else None
        namespace = parts[at + 1] if at is not None else None
        rest = parts[at + 2 :] if at is not None else parts[3:]
        if not rest and namespace in self.missing:
            return status(404, "NotFound", f'namespaces "{namespace}" not found')
        if code := self.refusals.get("/".join(rest)):
            return status(code, "NotFound" if code == 404 else "Forbidden", f"{rest} refused")
        if rest[:1] != [JOBS]:
            if len(rest) > 1 and method == "GET":
                return _missing(rest[1])
            listed = rest or namespace is None
            return self._listed(parts[-1]) if listed else self._namespace(namespace)
        word = f"{method} dry" if "dryRun" in query else method
        self.words.append(word)
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

    def _namespace(self, name):
        return {"metadata": {"name": name, "annotations": self.annotations}}

    def _listed(self, resource):
        items = []
        if resource == "pods":
            items = self._listed_pods()
        elif resource == "nodes":
            items = self.nodes
        elif resource == "namespaces":
            items = [{"metadata": {"name": name}} for name in self.namespaces]
        if items is None:
            return status(403, "Forbidden", "no")
        return {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": items}

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


def _missing(name):
    return status(404, "NotFound", f'pytorchjobs.kubeflow.org "{name}" not found')
