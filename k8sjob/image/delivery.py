"""The blobs of an image on their way to where it is to be, several at a time."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError
from k8sjob.image.content import RemoteContent, SmallContent
from k8sjob.image.manifest import digest_of
from k8sjob.image.parallel import at_once
from k8sjob.image.upload import Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8sjob.image.append import Base
    from k8sjob.image.content import Content
    from k8sjob.image.layout import Layout
    from k8sjob.image.reference import Reference
    from k8sjob.image.repository import Repository

__all__ = ["Blob", "Delivery"]

_AT_ONCE: Final = 6
"""Blobs on their way at the same time; each takes some hundred kilobytes of memory."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A part of the image.

    Attributes:
        digest: its name.
        size: bytes.
        sent: how it came to the repository.
    """

    digest: str
    size: int
    sent: Sent


class Delivery:
    """The blobs of an image on their way to a repository, or to a folder."""

    def __init__(
        self,
        target: Repository | Layout,
        below: Repository,
        progress: Callable[[int, int], object],
        *,
        dry_run: bool,
    ) -> None:
        self._target, self._below = target, below
        self._dry_run = dry_run
        self._progress = progress
        self._sent, self._total = 0, 0
        self._over = False
        self._lock = threading.Lock()

    def blobs(self, base: Base, layers: Sequence[Content], made: bytes) -> tuple[Blob, ...]:
        """Bring what is missing.

        Args:
            base: what is below.
            layers: what comes upon it.
            made: the config of both together.

        Returns:
            The parts in the manifest's order, the config last.
        """
        session, reference = self._below.session, self._below.reference
        below: list[Content] = [
            RemoteContent(session, reference, descriptor)
            for descriptor in dict.fromkeys(base.manifest.layers)
            if not descriptor.elsewhere
        ]
        config = SmallContent(digest_of(made), made)
        mount = reference if session is self._target.session else None
        parts = [(content, mount) for content in below]
        parts += [(content, None) for content in (*layers, config)]
        work = [lambda part=part: self._bring(*part) for part in parts]
        try:
            return tuple(at_once(work, _AT_ONCE))
        finally:
            self._over = True  # threads that are still at it end with their next block

    def _bring(self, content: Content, mount: Reference | None) -> Blob:
        upload = self._target.upload(content, self._note)
        if upload.is_there():
            return Blob(content.digest, content.size, Sent.THERE)
        if self._dry_run:
            return Blob(content.digest, content.size, Sent.MISSING)
        self._expect(content.size)
        sent = upload.run(mount)
        if sent is Sent.MOUNTED:
            self._expect(-content.size)
        return Blob(content.digest, content.size, sent)

    def _expect(self, size: int) -> None:
        with self._lock:
            self._total += size

    def _note(self, size: int) -> None:
        with self._lock:
            if self._over:
                raise ImageError("stopped, since another part has failed")
            self._sent += size
            self._progress(self._sent, self._total)
