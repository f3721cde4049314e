"""An apiserver that sends recorded objects with one value of another kind."""

import copy
import json

from clusters import Cluster

from k8sjob.kube.api_resources import ResourcePath
from k8sjob.kube.objects import at_path
from k8sjob.targets.object_types import KINDS

NESTED = json.loads("[" * 90 + "]" * 90)
VALUES = (
    None, [], {}, [None], [[]], {"": None}, 0, -1, 10**30, 1.5, 1e308, True, "", "x" * 70_000,
    "\ud800", "\x1b[2J\n::error::", "0000-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59", "2026-06-30T23:59:60Z", "2026-01-01T00:00:00", NESTED,
)  # fmt: skip
"""What may stand in the place of any value."""
_RESOURCES = {kind: resource for resource, kind in KINDS.items()} | {
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Namespace": "namespaces",
    "StatefulSet": "statefulsets",
}


class Recorded(Cluster):
    """The objects of one recorded job.

    Attributes:
        objects: the objects by their resource.
        watched: what a watch of a resource reports, in place of its objects.
        more: fields of each list.
    """

    context, server = "hostile", "https://hostile"

    def __init__(self, seen):
        super().__init__()
        self.namespace, self.name, self.kind = (
            next(value for value in (at_path(seen["job"], *path), default) if is_text(value))
            for path, default in (
                (("metadata", "namespace"), "team"),
                (("metadata", "name"), "x"),
                (("kind",), "PyTorchJob"),
            )
        )
        self.logs, self.watched, self.more = seen.get("logs", {}), {}, {}
        self.job = _RESOURCES.get(self.kind, "pytorchjobs")
        self.objects = {self.job: [seen["job"]]}
        for part in ("pods", "events"):
            self.objects[part] = self.objects.get(part, []) + seen.get(part, [])
        related = seen.get("related", [])
        for item in related if isinstance(related, list) else ():
            resource = _RESOURCES.get(str(at_path(item, "kind")), "nodes")
            known = self.objects.get(resource, [])
            self.objects[resource] = [*known, item] if isinstance(known, list) else known

    def answer(self, method, path, _query, _body):
        about = ResourcePath.of(path)
        items = self.objects.get(about.resource)
        if method != "GET" or (items is None and about.name):
            return None
        if not about.name:
            listed = {"kind": "List", "metadata": {"resourceVersion": "1"}}
            return {**listed, "items": [] if items is None else items, **self.more}
        every = items if isinstance(items, list) else [items]
        named = [item for item in every if at_path(item, "metadata", "name") == about.name]
        # The job is what is asked for, whatever it is called.
        return next(iter(named or (every if about.resource == self.job else [])), None)

    def _over_http(self, request):
        if ResourcePath.of(request.path).subresource == "log":
            return 200, b"".join(self.stream(request.path))
        return super()._over_http(request)

    def stream(self, path, *, query=None, idle=300.0, stop=None):
        about = ResourcePath.of(path)
        if about.subresource == "log":
            for replica, lines in self.logs.items():
                if about.name.endswith(replica):
                    for line in lines:
                        yield f"2026-01-01T00:00:00.000000001Z {line}\n".encode()
            return
        for item in self.watched.get(about.resource, ()):
            yield json.dumps({"type": "MODIFIED", "object": item}).encode() + b"\n"


def is_text(value):
    return isinstance(value, str) and bool(value) and value.isascii() and value.isprintable()


def places(value, path=()):
    """The paths of all values in JSON."""
    if not isinstance(value, dict | list):
        return
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(seen, path, value):
    """A copy with another value at a path."""
    copied = copy.deepcopy(seen)
    *parents, last = path
    inner = copied
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return copied
