"""Kinds of objects by the words that people and ownerReferences have for them, as served.

What runs Pods in every cluster is known; any other kind is asked for by its group.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from k8sjob.kube.api_resources import Resource
from k8sjob.kube.client.transport import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json


class Discovery:
    """The kinds that a cluster serves; each answer is kept.

    Of the `fixed` ones no request is made, which not everybody may make.
    """

    def __init__(self, transport: Transport, fixed: Sequence[Resource]) -> None:
        self._transport, self._fixed = transport, fixed
        self._answers: dict[str, Json] = {}

    def named(self, word: str) -> Resource | None:
        """The kind that a word names: "deploy", "rayjobs.ray.io"; None if none does.

        Raises:
            ApiError: the apiserver does not tell the kinds of the word's group.
        """
        word = word.lower()
        kinds = chain(self._fixed, self._of_group(word.partition(".")[2]))
        return next((kind for kind in kinds if kind.is_called(word)), None)

    def of(self, api_version: str, kind: str) -> Resource | None:
        """The kind of an object; None where it is not served, or not told."""
        kinds = chain(self._fixed, self._of_version(api_version))
        with suppress(ApiError):
            return next((k for k in kinds if (k.api_version, k.kind) == (api_version, kind)), None)
        return None

    def _of_group(self, group: str) -> Iterator[Resource]:
        """Those of all versions of a group, the preferred one first: it may lack some."""
        for version in self._answer(group).get("versions") or ():
            yield from self._of_version(str(version.get("groupVersion")))

    def _of_version(self, api_version: str) -> Iterator[Resource]:
        """Those of a version of a group that are in namespaces, without subresources."""
        # Anybody may write an ownerReference, and Kubernetes' core has no group.
        listed = self._answer(api_version).get("resources") if api_version.count("/") == 1 else ()
        for kind in listed or ():
            if kind.get("namespaced") and "/" not in str(kind.get("name")):
                words = (str(kind.get("singularName")), *(kind.get("shortNames") or ()))
                yield Resource(str(kind.get("kind")), str(kind.get("name")), api_version, words)

    def _answer(self, where: str) -> Json:
        """What the apiserver tells of a group, or of a version of one; empty: it has none."""
        if where and where not in self._answers:
            try:
                self._answers[where] = self._transport.request("GET", f"/apis/{where}")
            except ApiError as error:
                if error.code != 404:
                    raise
                return {}
        return self._answers.get(where, {})
