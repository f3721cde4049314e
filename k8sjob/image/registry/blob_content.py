"""Blobs, and where their bytes come from: a file, the memory, or a registry."""

from __future__ import annotations

import hashlib
import io
import time
from contextlib import closing
from enum import StrEnum
from http.client import HTTPException
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from k8sjob.errors import ImageError
from k8sjob.image.registry.manifest import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from tempfile import SpooledTemporaryFile
    from typing import BinaryIO

    from k8sjob.image.registry.client import RegistryClient
    from k8sjob.image.registry.manifest import Descriptor, ImageReference

BLOCK: Final = 256 << 10
"""Bytes that are in memory at once, of each blob that is being transferred."""
_MIN_RATE: Final = 10_000
"""Bytes a second that a registry must deliver on average; mobile networks are faster."""


class FileContent(NamedTuple):
    """A blob in an open file whose position nothing else changes."""

    digest: str
    size: int
    file: BinaryIO | SpooledTemporaryFile[bytes]

    def blocks(self) -> Iterator[bytes]:
        """All of it."""
        self.file.seek(0)
        while block := self.file.read(BLOCK):
            yield block


def in_memory(data: bytes) -> FileContent:
    """A small blob."""
    return FileContent(digest_of(data), len(data), io.BytesIO(data))


class RemoteContent:
    """A blob of a registry; never whole on this machine.

    A connection that breaks is resumed where it broke. The digest is checked before the last block
    is handed out.
    """

    def __init__(self, client: RegistryClient, reference: ImageReference, blob: Descriptor) -> None:
        self.digest = blob.digest
        self.size = blob.size
        self._client = client
        self._path = f"/v2/{reference.repository}/blobs/{blob.digest}"
        self._what = f"{reference.name}, blob {blob.digest[:19]}"

    def blocks(self) -> Iterator[bytes]:
        """All of it."""
        algorithm = self.digest.partition(":")[0]
        digest_so_far, held, at = hashlib.new(algorithm), b"", 0
        for block in self._received():
            # One block is held back: who receives the last block may rely on the digest.
            yield from [held] if held else []
            digest_so_far.update(block)
            held, at = block, at + len(block)
        digest = f"{algorithm}:{digest_so_far.hexdigest()}"
        if at != self.size or digest != self.digest:
            raise ImageError(
                f"{self._what}: received {at} bytes with the digest {digest}: the registry, or a"
                " proxy in between, is broken; try again"
            )
        yield from [held] if held else []

    def _received(self) -> Iterator[bytes]:
        at, failures, started = 0, 0, time.monotonic()
        retry = self._client.retry
        while at < self.size:
            # Failures count from the last progress: a blob of gigabytes may break several times.
            before = at
            try:
                for block in self._opened(at):
                    at += len(block)
                    self._check_pace(at, time.monotonic() - started)
                    yield block
            except (OSError, HTTPException):
                failures = 1 if at > before else failures + 1
                if failures >= retry.tries:
                    raise ImageError(
                        f"{self._what}: the connection broke after {at} of {self.size} bytes; try"
                        " again"
                    ) from None
                retry.wait(failures)
            else:
                return

    def _check_pace(self, end: int, seconds: float) -> None:
        """Refuse what would fill the memory, or never end."""
        if end > self.size:
            raise ImageError(
                f"{self._what}: received more than its {self.size} bytes: the registry, or a proxy"
                " in between, is broken; try again"
            )
        if seconds > self._client.retry.answer + self.size / _MIN_RATE:
            raise ImageError(
                f"{self._what}: {end} of {self.size} bytes received in {seconds:.0f} s, which is"
                " too slow; try again, or use a registry that is nearer"
            )

    def _opened(self, start: int) -> Iterator[bytes]:
        answer = self._client.request(
            "GET",
            self._path,
            ok={200, 206},
            doing=f"reading {self._what}",
            headers={"Range": f"bytes={start}-"} if start else {},
            stream=True,
        )
        assert answer.stream is not None  # noqa: S101 - what `stream=True` with these statuses means
        # Some registries, and their storage behind a redirect, ignore Range and send all of it.
        skipped = start if answer.status == 200 else 0
        with closing(answer.stream):
            # As it is: the digest is of the bytes as they lie in the registry, whatever
            # Content-Encoding says of them.
            for block in answer.stream.stream(unpacks=False):
                if skipped < len(block):
                    yield block[skipped:]
                skipped = max(0, skipped - len(block))


Content: TypeAlias = FileContent | RemoteContent
"""A blob that can be uploaded; its blocks may be asked for again after a failure."""


def counted(content: Content, note: Callable[[int], object]) -> Generator[bytes]:
    """The blocks of a blob; `note` is called with the size of each."""
    for block in content.blocks():
        note(len(block))
        yield block


class Sent(StrEnum):
    """The way in which a blob reached the registry."""

    THERE = "there"
    MOUNTED = "mounted"
    UPLOADED = "uploaded"
    MISSING = "missing"
    """It is not there: nothing was sent in a dry run."""
