"""Whole collections, page by page, without what nobody reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.backends.transport import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8sjob.backends.api import Json
    from k8sjob.backends.transport import Transport

__all__ = ["Listing", "listing", "slim"]

PAGE: Final = 500
"""So many objects an answer: a page of jobs is some 3 MB, and is parsed before the next comes."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A collection at one moment.

    Attributes:
        items: the objects.
        version: the resourceVersion from which a watch goes on.
    """

    items: list[Json]
    version: str


def listing(
    transport: Transport,
    path: str,
    query: Mapping[str, str] | None = None,
    *,
    keep: Callable[[Json], bool] = lambda _: True,
) -> Listing:
    """All objects of a collection.

    Args:
        transport: carries the requests.
        path: of the collection.
        query: selectors.
        keep: which objects are wanted; what is not is dropped page by page.

    Raises:
        ApiError: the server refuses, or cannot be reached.
    """
    items: list[Json] = []
    asked = {**(query or {}), "limit": str(PAGE)}
    while True:
        try:
            page = transport.request("GET", path, query=asked)
        except ApiError as error:
            if error.code != 410 or "continue" not in asked:
                raise
            # The pages are too old for the next one: all at once, as kubectl does it.
            items, asked = [], dict(query or {})
            continue
        found = {
            "apiVersion": page.get("apiVersion", ""),
            "kind": str(page.get("kind", "")).removesuffix("List"),
        }
        items += (slim({**found, **item}) for item in page.get("items") or [] if keep(item))
        meta = page.get("metadata") or {}
        if not meta.get("continue"):
            return Listing(items, str(meta.get("resourceVersion", "")))
        asked["continue"] = meta["continue"]


def slim(item: Json) -> Json:
    """The object without its managedFields, which are often half of it."""
    meta = item.get("metadata") or {}
    meta.pop("managedFields", None)
    (meta.get("annotations") or {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return item
