"""One repository of a registry: manifests and small blobs, checked against their digests."""

from __future__ import annotations

import hashlib
from itertools import count
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError
from k8sjob.image import manifest
from k8sjob.image.content import RemoteContent
from k8sjob.image.manifest import Index, digest_of
from k8sjob.image.upload import Upload
from k8sjob.image.wire import MAX_ANSWER

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.image.content import Content
    from k8sjob.image.manifest import Descriptor, Manifest
    from k8sjob.image.reference import Reference
    from k8sjob.image.session import Session
    from k8sjob.image.wire import Answer

__all__ = ["Repository"]

_DEEPEST: Final = 3
"""Indexes in indexes that are looked into."""


class Repository:
    """Where images of one name are."""

    def __init__(self, session: Session, reference: Reference) -> None:
        self.session = session
        self.reference = reference
        self._manifests = f"/v2/{reference.repository}/manifests"

    def image(self, platform: str | None) -> Manifest:
        """The manifest of the reference, for one platform.

        Args:
            platform: os/architecture[/variant]; None: see Index.choose.

        Raises:
            ImageError: there is no such image, or none for the platform.
        """
        version = self.reference.version
        for _ in range(_DEEPEST):
            found = self._read(version)
            if not isinstance(found, Index):
                return found
            version = found.choose(platform, str(self.reference))
        raise ImageError(f"{self.reference}: an index in an index in an index; take another base")

    def is_there(self) -> bool:
        """Whether the registry shows an image of this reference."""
        answer = self.session.request(
            "HEAD",
            f"{self._manifests}/{self.reference.version}",
            ok={200, 401, 403, 404},  # of what is not there some registries say no more than "no"
            doing=f"looking for {self.reference}",
            headers={"Accept": manifest.ACCEPTED},
        )
        return answer.status == 200

    def _read(self, version: str) -> Manifest | Index:
        answer = self.session.request(
            "GET",
            f"{self._manifests}/{version}",
            ok={200},
            doing=f"reading {self.reference}",
            headers={"Accept": manifest.ACCEPTED},
        )
        algorithm, digested, _ = version.partition(":")
        if digested and version != f"{algorithm}:{hashlib.new(algorithm, answer.body).hexdigest()}":
            raise ImageError(
                f"{self.reference}: what came as {version} has the digest {digest_of(answer.body)}:"
                " the registry, or a proxy on the way, is broken; try again"
            )
        return manifest.read(
            answer.body, answer.headers.get("Content-Type", ""), str(self.reference)
        )

    def blob(self, descriptor: Descriptor) -> bytes:
        """A small blob, whole.

        Raises:
            ImageError: it is too large, cannot be read, or is not what its digest says.
        """
        if descriptor.size > MAX_ANSWER:
            raise ImageError(
                f"{self.reference}: its config has {descriptor.size} bytes; the image is broken"
            )
        return b"".join(RemoteContent(self.session, self.reference, descriptor).blocks(0))

    def has(self, raw: bytes, media_type: str) -> bool:
        """Whether a manifest is there."""
        digest = digest_of(raw)
        answer = self.session.request(
            "HEAD",
            f"{self._manifests}/{digest}",
            ok={200, 401, 403, 404},
            doing=f"looking for {self.reference.at(digest)}",
            headers={"Accept": media_type},
        )
        return answer.has(digest, len(raw))

    def upload(self, content: Content, sent: Callable[[int], object]) -> Upload:
        """A blob on its way into the repository.

        Args:
            content: the blob.
            sent: is called with each number of bytes that go out.
        """
        return Upload(self.session, self.reference, content, sent)

    def put(self, raw: bytes, media_type: str, tag: str) -> None:
        """Write a manifest under a tag; all that it names must be there.

        Raises:
            ImageError: the registry does not take it, or took it for something else.
        """
        digest = digest_of(raw)
        answer = self._written(raw, media_type, tag)
        given = answer.headers.get("Docker-Content-Digest", digest)
        if given != digest or not self.has(raw, media_type):
            raise ImageError(
                f"{self.reference.name}:{tag}: the registry has it as {given} and not as {digest};"
                " it is broken, or changes what it is given"
            )

    def _written(self, raw: bytes, media_type: str, tag: str) -> Answer:
        patience, doing = self.session.patience, f"writing {self.reference.name}:{tag}"
        for failures in count(1):
            answer = self.session.request(
                "PUT",
                f"{self._manifests}/{tag}",
                ok={201, 400, 404},
                doing=doing,
                headers={"Content-Type": media_type},
                body=raw,
            )
            if answer.status == 201:
                break
            # While another one pushes a blob of it, too, a registry may not know it for a moment.
            if failures == patience.tries or b"BLOB_UNKNOWN" not in answer.body:
                raise self.session.refusal(answer, doing)
            patience.wait(failures)
        return answer
