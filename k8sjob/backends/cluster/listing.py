"""Whole collections, page by page, without what nobody reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.backends.transport import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from k8sjob.backends.api import Json
    from k8sjob.backends.transport import Transport

__all__ = ["Listing", "listing", "pages", "slim"]

PAGE: Final = 250
"""So many objects an answer: some 2 MB of jobs, which are parsed before the next ones come."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A collection at one moment, or a page of it.

    Attributes:
        items: the objects.
        version: the resourceVersion from which a watch goes on.
    """

    items: list[Json]
    version: str


def listing(transport: Transport, path: str, query: Mapping[str, str] | None = None) -> Listing:
    """All objects of a collection.

    Args:
        transport: carries the requests.
        path: of the collection.
        query: selectors.

    Raises:
        ApiError: the server refuses, or cannot be reached.
    """
    try:
        found = list(pages(transport, path, query))
    except ApiError as error:
        if error.code != 410:
            raise
        # The first pages were too old for the next one: all at once, as kubectl does it.
        found = list(pages(transport, path, query, size=0))
    return Listing([item for page in found for item in page.items], found[-1].version)


def pages(
    transport: Transport, path: str, query: Mapping[str, str] | None = None, *, size: int = PAGE
) -> Iterator[Listing]:
    """The same, page by page, all as of one moment; at least one.

    Args:
        transport: carries the requests.
        path: of the collection.
        query: selectors.
        size: so many objects a page; 0: all in one.

    Raises:
        ApiError: as for listing; 410 where reading took so long that the rest is not there any
            more.
    """
    asked = {**(query or {}), **({"limit": str(size)} if size else {})}
    while True:
        page = transport.request("GET", path, query=asked)
        # What stands in a list carries no kind of its own.
        kind = str(page.get("kind", "")).removesuffix("List")
        named = {"apiVersion": page.get("apiVersion", ""), "kind": kind}
        meta = page.get("metadata") or {}
        yield Listing(
            [slim({**named, **item}) for item in page.get("items") or []],
            str(meta.get("resourceVersion", "")),
        )
        if not meta.get("continue"):
            return
        asked["continue"] = meta["continue"]


def slim(item: Json) -> Json:
    """The object without its managedFields, which are often half of it."""
    meta = item.get("metadata") or {}
    meta.pop("managedFields", None)
    (meta.get("annotations") or {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return item
