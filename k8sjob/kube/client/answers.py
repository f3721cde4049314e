"""Answers of an apiserver, checked before anything is read of them.

The server may be another than its user believes, or one with a fault. An object whose fields do not
have the types of its kind is an error; in a list or a watch it is left out, with a warning.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from k8sjob.kube.api_resources import ResourcePath
from k8sjob.kube.client.transport import malformed
from k8sjob.kube.json_text import parsed
from k8sjob.kube.objects import Object, at_path, is_name, odd_name
from k8sjob.sanitize import safe_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json

    Typed = Callable[[str, Any], tuple[Json, str]]
    """Gives an object, of such a resource, without nulls, and what is wrong with it or ""."""

_MAX_NAME: Final = 80
_CHANGES: Final = frozenset({"ADDED", "MODIFIED", "DELETED"})


class CheckedAnswers:
    """A transport whose objects have fields of the right types only; see Transport."""

    def __init__(self, transport: Transport, typed: Typed) -> None:
        self._transport, self._typed = transport, typed
        self.context, self.namespace = transport.context, transport.namespace
        self.server = transport.server
        self._warned: set[ResourcePath] = set()

    @property
    def skew(self) -> float:
        """See Transport.skew."""
        return self._transport.skew

    def request(self, method: str, path: str, **options: Any) -> Json:
        """One request; see Transport.request."""
        answer = self._transport.request(method, path, **options)
        about = ResourcePath.of(path)
        # A GET without a name is a list, and so is the subresource pendingworkloads of a
        # LocalQueue.
        if method == "GET" and about.resource and (not about.name or about.subresource):
            return self._list(answer, about)
        # A DELETE is answered with a Status, or with the object where that is not gone at once.
        refused = answer.get("kind") == "Status" and method != "GET"
        item, problem = self._checked("Status" if refused else about.resource, answer)
        if problem:
            raise malformed(f"an object of which {problem}")
        name, namespace = Object(item).name, Object(item).namespace
        # The object's name becomes a part of later requests and of commands to paste, so it must be
        # the one that was asked for.
        elsewhere = about.namespace and namespace not in {"", about.namespace}
        if method == "GET" and about.name and (name not in {"", about.name} or elsewhere):
            raise malformed(f"{namespace}/{name} in its place")
        return item

    def stream(self, path: str, **options: Any) -> Iterator[bytes]:
        """The lines of an answer as they come; see Transport.stream."""
        lines = self._transport.stream(path, **options)
        watches = "watch" in (options.get("query") or {})
        yield from self._events(lines, ResourcePath.of(path)) if watches else lines

    def _list(self, answer: Json, about: ResourcePath) -> Json:
        """A list, or a page of it, without the objects that are not as they should be."""
        head, problem = self._typed("List", answer)
        if problem:
            raise malformed(f"a list of which {problem}")
        resource = about.subresource or about.resource
        # One bad object stops no command: whoever may create objects in a namespace could do that
        # to all others who list them.
        every = [self._named(resource, item) for item in answer.get("items") or ()]
        if bad := [(item, problem) for item, problem in every if problem]:
            self._warn(about, f"{len(bad)} of {len(every)} objects are", *bad[0])
        return {**head, "items": [item for item, problem in every if not problem]}

    def _events(self, lines: Iterator[bytes], about: ResourcePath) -> Iterator[bytes]:
        """The events of a watch without those about objects that are not as they should be."""
        for line in lines:
            try:
                event = parsed(line)
            except ValueError:  # the connection broke, as the reader will say
                yield line
                continue
            kind, item = at_path(event, "type"), at_path(event, "object")
            # A BOOKMARK has only a resourceVersion, and an ERROR a Status: neither has a name.
            check = self._named if kind in _CHANGES else self._checked
            item, problem = check("Status" if kind == "ERROR" else about.resource, item)
            if problem or not isinstance(kind, str):
                self._warn(about, "an object is", item, problem or "its event has no type")
            else:
                yield json.dumps({"type": kind, "object": item}).encode() + b"\n"

    def _named(self, of: str, item: Any) -> tuple[Json, str]:
        """The same of an object that must have a name, as all have that are listed."""
        named = isinstance(at_path(item, "metadata", "name"), str)
        item, problem = self._checked(of, item)
        return item, problem or ("" if named else "the name is missing")

    def _checked(self, of: str, item: Any) -> tuple[Json, str]:
        """An object without nulls, and what is wrong with its types or its name; or empty.

        Who creates an Event may call it anything, and who creates a Pod its node: then it has none.
        """
        item, problem = self._typed(of, item)
        if problem:
            return item, problem
        typed = Object(item)
        # Controllers themselves make Events whose names Kubernetes does not allow elsewhere. Such
        # an Event is read without its name, which nothing needs.
        free = {"nodeName": typed.spec, "name": typed.part("involvedObject") and typed.metadata}
        for key, part in free.items():
            if not is_name(part.get(key)):
                del part[key]
        name = odd_name(item)
        return item, name and f"a name is {name}, which Kubernetes does not allow"

    def _warn(self, about: ResourcePath, noun: str, item: Json, problem: str) -> None:
        """Warn of objects that are left out, once for each collection."""
        # A watch reports a bad object at each of its changes.
        if about in self._warned:
            return
        self._warned.add(about)
        where = f"{about} of {self.server} (context {self.context})"
        name = ascii(Object(item).name)[:_MAX_NAME]
        import logging  # noqa: PLC0415 - most servers have no bad objects

        # Without a handler its warnings are lines on stderr.
        text = safe_line(f"{where}: {noun} left out; of {name} {problem}")
        logging.getLogger("k8sjob").warning("warning: %s", text)
