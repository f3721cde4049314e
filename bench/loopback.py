"""An apiserver on loopback: that of the tests, with what kubectl asks of one before each request.

It adds discovery, Tables, pages, and streams of logs and of Pods. A command that is measured
against it takes no time of a real apiserver, which would hide a part of its own, or a fixed one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from apiserver import Apiserver  # noqa: E402 - of the tests
from clusters import kubeconfig  # noqa: E402 - as the line before
from observed import about, condition, ended, make_pod, unplaced  # noqa: E402 - as the line before

TIME = "2026-01-01T00:00:00Z"
_BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def _resource(name: str, kind: str, **more: object) -> dict[str, object]:
    return {"name": name, "singularName": kind.lower(), "kind": kind, "namespaced": True} | more


VERSION = {"groupVersion": "kubeflow.org/v1", "version": "v1"}
DISCOVERY = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [{"name": "kubeflow.org", "versions": [VERSION], "preferredVersion": VERSION}],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            _resource("pods", "Pod", verbs=VERBS),
            _resource("pods/log", "Pod", verbs=["get"]),
        ],
    },
    "/apis/kubeflow.org/v1": {
        "kind": "APIResourceList",
        "groupVersion": "kubeflow.org/v1",
        "resources": [_resource("pytorchjobs", "PyTorchJob", verbs=VERBS)],
    },
}
COLUMNS = [
    {"name": name, "type": "string", "format": "", "priority": 0}
    for name in ("Name", "State", "Age")
]


class Loopback(Apiserver):
    """Jobs from manifests/digits-ddp, some 6 kB of JSON each.

    Attributes:
        delay: seconds that each answer takes.
        texts: of each job that is listed the JSON of itself, and that of its row in a Table.
        lines: the number of lines that the log of a Pod has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.delay = 0.0
        self.texts: list[tuple[bytes, bytes]] = []
        self.lines = 0
        self._events: list[dict[str, Any]] = []
        self._changes: list[dict[str, Any]] = []
        self._ended: list[dict[str, Any]] = []
        self._job: dict[str, Any] = {}
        self._end = threading.Event()

    def list_jobs(self, count: int) -> None:
        """Serve a list of suspended jobs: of those no logs are read."""
        self.jobs, self.texts = {}, []
        job = _job({"policy": {"suspend": True}}, "Created", "Suspended")
        for number in range(count):
            meta = job["metadata"] | {"name": f"job-{number}", "uid": f"uid-{number}"}
            row = {
                "cells": [meta["name"], "Suspended", "1d"],
                "object": {
                    "kind": "PartialObjectMetadata",
                    "apiVersion": "meta.k8s.io/v1",
                    "metadata": meta,
                },
            }
            texts = json.dumps(job | {"metadata": meta}), json.dumps(row)
            self.texts.append((texts[0].encode(), texts[1].encode()))

    def run_job(self, replicas: int, lines: int = 0) -> None:
        """Serve one job, `blue/job`, whose Pods begin to run once they are watched.

        The job ends when its Pods have been told, or their log has been read where it has lines.
        """
        self.lines, self._end = lines, threading.Event()
        names = self._make_job(replicas, "Created", "Running")
        running = [_pod(name, running={"startedAt": TIME}) for name in names]
        waiting = {"reason": "ContainerCreating"}
        self.pods = running if lines else [_pod(name, "Pending", waiting=waiting) for name in names]
        self._changes = [] if lines else running
        end = {"exitCode": 0, "startedAt": TIME, "finishedAt": TIME}
        self._ended = [_pod(name, "Succeeded", terminated=end) for name in names]

    def hold_job(self, replicas: int, state: str) -> None:
        """Serve `blue/job` whose Pods are all "pending", "failed" or "crashing", and stay so.

        Each Pod that waits or crashes has an Event.
        """
        self.lines, error = 0, ended(1, "ValueError: the loss is no number")
        reached = {"pending": "Created", "crashing": "Running", "failed": "Failed"}[state]
        names = self._make_job(replicas, "Created", reached)
        if state == "pending":
            event = "FailedScheduling", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            pods = [unplaced(name, "Unschedulable", event[1]) for name in names]
        elif state == "crashing":
            event = "BackOff", "Back-off restarting failed container pytorch in pod"
            waiting = {"reason": "CrashLoopBackOff", "message": "back-off 1m20s restarting failed"}
            pods = [make_pod(name, restarts=4, last=error, waiting=waiting) for name in names]
        else:
            pods = [make_pod(name, "Failed", terminated=error) for name in names]
        self.pods = [_as_served(name, pod) for name, pod in zip(names, pods, strict=True)]
        if state != "failed":
            self._events = [_event_of(name, *event) for name in names]

    def _make_job(self, replicas: int, *conditions: str) -> list[str]:
        """The names of the replicas of a new `blue/job`, which is the only job."""
        self.texts, self._events = [], []
        self._job = _job({"replicas": {"workers": replicas - 1}}, *conditions)
        self.jobs = {("blue", "job"): self._job}
        return ["master-0", *(f"worker-{number}" for number in range(replicas - 1))]

    def _listed(self, resource: str) -> Any:
        if resource == "events":
            return {"kind": "EventList", "apiVersion": "v1", "items": self._events}
        return super()._listed(resource)

    def _over_http(self, request: Any) -> Any:
        time.sleep(self.delay)
        path, query = request.path, request.query
        resource = path.rpartition("/")[2]
        if path in DISCOVERY:
            return 200, DISCOVERY[path]
        if resource == "log":
            return 200, lambda write: self._write_log(write, query)
        if path.endswith("/pods/job-master-0"):
            return 200, {"kind": "Pod", "apiVersion": "v1", **self.pods[0]}
        if "watch" in query and resource in {"pods", "pytorchjobs"}:
            known = query.get("resourceVersion", "")
            return 200, lambda write: self._write_changes(write, resource, known)
        if request.method == "GET" and resource == "pytorchjobs" and self.texts:
            return self._page(query, as_table="as=Table" in request.headers["Accept"])
        return super()._over_http(request)

    def _page(self, query: dict[str, str], *, as_table: bool) -> tuple[int, bytes, dict[str, str]]:
        start = int(query.get("continue", 0))
        end = start + int(query.get("limit", 0) or len(self.texts))
        meta = {"resourceVersion": "1"} | ({"continue": str(end)} if end < len(self.texts) else {})
        head: dict[str, object] = {"kind": "PyTorchJobList", "apiVersion": "kubeflow.org/v1"}
        if as_table:
            head = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "columnDefinitions": COLUMNS}
        text = json.dumps(head | {"metadata": meta})[:-1].encode()
        items = b",".join(texts[as_table] for texts in self.texts[start:end])
        text += b', "%s": [%s]}' % (b"rows" if as_table else b"items", items)
        return 200, text, {"Content-Type": "application/json"}

    def _write_log(self, write: Any, query: dict[str, str]) -> bool:
        """Answer a log of 1,000 lines in each second."""
        first = max(self.lines - int(query.get("tailLines", self.lines)), 0)
        for start in range(first // 1000 * 1000, self.lines, 1000):
            second = (_BEGIN + timedelta(seconds=start // 1000)).strftime("%Y-%m-%dT%H:%M:%S")
            if f"{second}Z" < query.get("sinceTime", ""):
                continue
            numbers = range(max(start, first), min(start + 1000, self.lines))
            heads = (f"{second}.{n % 1000:03}Z " if "timestamps" in query else "" for n in numbers)
            lines = zip(heads, numbers, strict=True)
            write("".join(f"{head}epoch 1 step {n} loss 0.123\n" for head, n in lines).encode())
        if "follow" in query:
            self._finish()
        return True

    def _finish(self) -> None:
        self.pods = self._ended
        self.jobs["blue", "job"] = _with_conditions(self._job, "Created", "Succeeded")
        self._end.set()

    def _write_changes(self, write: Any, resource: str, known: str) -> bool:
        """Answer a watch: that of the job says nothing until the end, and nothing after it."""
        if known == "3":
            time.sleep(1)
            return True
        if resource == "pods":
            for pod in self._changes:
                write(_event(pod, "2"))
            if not self.lines:
                self._finish()
        self._end.wait(120)
        for item in self.pods if resource == "pods" else self.jobs.values():
            write(_event(item, "3"))
        return True


def _event_of(replica: str, reason: str, message: str) -> dict[str, Any]:
    pod = f"job-{replica}"
    meta = {"name": f"{pod}.1", "namespace": "blue", "uid": f"event-{pod}"}
    uid = f"uid-{replica}"
    return about("Pod", pod, reason, message, type="Warning", uid=uid, metadata=meta)


def _event(item: dict[str, Any], version: str) -> bytes:
    changed = item | {"metadata": item["metadata"] | {"resourceVersion": version}}
    return json.dumps({"type": "MODIFIED", "object": changed}).encode() + b"\n"


def _pod(replica: str, *args: Any, **state: Any) -> dict[str, Any]:
    return _as_served(replica, make_pod(replica, *args, **state))


def _as_served(replica: str, pod: dict[str, Any]) -> dict[str, Any]:
    pod["metadata"] |= {"namespace": "blue", "uid": f"uid-{replica}", "resourceVersion": "1"}
    pod["metadata"]["creationTimestamp"] = TIME
    pod["spec"]["containers"] = [{"name": "pytorch", "image": "x:1"}]
    return pod


def _with_conditions(job: dict[str, Any], *conditions: str) -> dict[str, Any]:
    return {**job, "status": {"conditions": [*map(condition, conditions)]}}


def _job(fields: dict[str, object], *conditions: str) -> dict[str, Any]:
    """A job as the apiserver has it."""
    from k8sjob.rendering.manifest import manifest
    from k8sjob.spec import load

    spec = load(ROOT / "manifests/digits-ddp").with_(name="job", namespace="blue", **fields)
    raw = manifest(spec, f"registry.example/x@sha256:{'a' * 64}").raw
    meta = {**raw["metadata"], "uid": "u", "resourceVersion": "1", "creationTimestamp": TIME}
    return _with_conditions({**raw, "metadata": meta}, *conditions)


@contextmanager
def cluster() -> Iterator[Loopback]:
    """A server that KUBECONFIG names; HOME is a folder of its own, so caches begin empty."""
    before = dict(os.environ)
    server = Loopback()
    with tempfile.TemporaryDirectory() as home, server.served() as served:
        config = kubeconfig(Path(home), served.url)
        os.environ.update({"KUBECONFIG": str(config), "HOME": home, "K8SJOB_STATE": f"{home}/jobs"})
        try:
            yield server
        finally:
            os.environ.clear()
            os.environ.update(before)
