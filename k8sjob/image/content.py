"""What can be uploaded: bytes, a file, or a blob of another registry, from any offset on."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from urllib3.exceptions import HTTPError

from k8sjob.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from tempfile import SpooledTemporaryFile
    from typing import BinaryIO

    from k8sjob.image.manifest import Descriptor
    from k8sjob.image.reference import Reference
    from k8sjob.image.session import Session

__all__ = ["BLOCK", "Content", "FileContent", "RemoteContent", "SmallContent"]

BLOCK: Final = 256 << 10
"""Bytes that are in memory at once, of each blob that is on its way."""


_SLOWEST: Final = 10_000
"""Bytes a second that a registry must give on average; mobile networks give more."""


class Content(Protocol):
    """A blob that is to be uploaded."""

    @property
    def digest(self) -> str:
        """Of all of it."""

    @property
    def size(self) -> int:
        """In bytes."""

    def blocks(self, start: int) -> Iterator[bytes]:
        """What comes after `start` bytes; may be called again after a failure.

        Raises:
            ImageError: it cannot be read, or is not what its digest says.
        """


@dataclass(frozen=True, slots=True)
class SmallContent:
    """A blob in memory."""

    digest: str
    data: bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.data)

    def blocks(self, start: int) -> Iterator[bytes]:
        """The rest of it."""
        yield self.data[start:]


@dataclass(frozen=True, slots=True)
class FileContent:
    """A blob in an open file, which nothing else moves in."""

    digest: str
    size: int
    file: BinaryIO | SpooledTemporaryFile[bytes]

    def blocks(self, start: int) -> Iterator[bytes]:
        """The rest of it."""
        self.file.seek(start)
        while block := self.file.read(BLOCK):
            yield block


class RemoteContent:
    """A blob of a registry; never whole on this machine.

    A connection that breaks is made again where it broke. What has come is compared with the
    digest before its last block is given away.
    """

    def __init__(self, session: Session, reference: Reference, descriptor: Descriptor) -> None:
        self.digest = descriptor.digest
        self.size = descriptor.size
        self._session = session
        self._reference = reference
        self._hash = hashlib.new(descriptor.digest.partition(":")[0])
        self._hashed = 0

    def blocks(self, start: int) -> Iterator[bytes]:
        """The rest of it."""
        held, at = b"", start
        for block in self._received(start):
            yield from [held] if held else []
            held, at = block, at + len(block)
            self._note(block, at)
        self._check(at)
        yield from [held] if held else []

    def _note(self, block: bytes, end: int) -> None:
        """Hash what has not been seen before."""
        new = end - self._hashed
        if 0 < new <= len(block):
            self._hash.update(block[len(block) - new :])
            self._hashed = end

    def _check(self, end: int) -> None:
        digest = f"{self.digest.partition(':')[0]}:{self._hash.hexdigest()}"
        if end != self.size or (self._hashed == self.size and digest != self.digest):
            raise ImageError(
                f"{self._what}: what came has {end} bytes and the digest {digest}: the registry, or"
                " a proxy on the way, is broken; try again"
            )

    def _received(self, start: int) -> Iterator[bytes]:
        at, failures, started = start, 0, time.monotonic()
        patience = self._session.patience
        while at < self.size:
            before = at
            try:
                for block in self._opened(at):
                    at += len(block)
                    self._check_pace(at, time.monotonic() - started)
                    yield block
            except HTTPError:
                failures = 1 if at > before else failures + 1
                if failures >= patience.tries:
                    raise ImageError(
                        f"{self._what}: the connection breaks after {at} of {self.size} bytes; try"
                        " again"
                    ) from None
                patience.wait(failures)
            else:
                return

    def _check_pace(self, end: int, seconds: float) -> None:
        """Refuse what would fill the memory, or never end."""
        if end > self.size:
            raise ImageError(
                f"{self._what}: more came than its {self.size} bytes: the registry, or a proxy on"
                " the way, is broken; try again"
            )
        if seconds > self._session.patience.answer + self.size / _SLOWEST:
            raise ImageError(
                f"{self._what}: {end} of {self.size} bytes came in {seconds:.0f} s, which is too"
                " slow; try again, or use a registry that is nearer"
            )

    def _opened(self, start: int) -> Iterator[bytes]:
        answer = self._session.request(
            "GET",
            f"/v2/{self._reference.repository}/blobs/{self.digest}",
            ok={200, 206},
            doing=f"reading {self._what}",
            headers={"Range": f"bytes={start}-"} if start else {},
            stream=True,
        )
        assert answer.stream is not None  # noqa: S101 - what `stream=True` with these statuses means
        skipped = start if answer.status == 200 else 0
        with answer.stream as response:
            while block := response.read1(BLOCK, decode_content=False):
                if skipped < len(block):
                    yield block[skipped:]
                skipped = max(0, skipped - len(block))

    @property
    def _what(self) -> str:
        return f"{self._reference.name}, blob {self.digest[:19]}"
