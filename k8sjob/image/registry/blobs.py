"""Blobs: where their bytes come from, and how they get into a registry.

A registry may lose an upload, cut the connection or forget the token: then the upload starts again.
What the registry ends up with is always checked against the digest, by the registry itself.
"""

from __future__ import annotations

import hashlib
import io
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlencode

from urllib3.exceptions import HTTPError

from k8sjob.errors import ImageError
from k8sjob.image.registry.http_client import TransportError
from k8sjob.image.registry.manifest import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from tempfile import SpooledTemporaryFile
    from typing import BinaryIO

    from k8sjob.image.registry.client import RegistryClient
    from k8sjob.image.registry.http_client import Response
    from k8sjob.image.registry.manifest import Descriptor
    from k8sjob.image.registry.reference import Reference

BLOCK: Final = 256 << 10
"""Bytes that are in memory at once, of each blob that is being transferred."""
_MIN_RATE: Final = 10_000
"""Bytes a second that a registry must deliver on average; mobile networks are faster."""


class Content(Protocol):
    """A blob that can be uploaded."""

    @property
    def digest(self) -> str:
        """Of all of it."""

    @property
    def size(self) -> int:
        """In bytes."""

    def blocks(self) -> Iterator[bytes]:
        """All of it; may be called again after a failure.

        Raises:
            ImageError: it cannot be read, or does not match its digest.
        """


@dataclass(frozen=True, slots=True)
class FileContent:
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

    def __init__(self, client: RegistryClient, reference: Reference, blob: Descriptor) -> None:
        self.digest = blob.digest
        self.size = blob.size
        self._client = client
        self._path = f"/v2/{reference.repository}/blobs/{blob.digest}"
        self._what = f"{reference.name}, blob {blob.digest[:19]}"

    def blocks(self) -> Iterator[bytes]:
        """All of it."""
        algorithm = self.digest.partition(":")[0]
        found, held, at = hashlib.new(algorithm), b"", 0
        for block in self._received():
            yield from [held] if held else []
            found.update(block)
            held, at = block, at + len(block)
        digest = f"{algorithm}:{found.hexdigest()}"
        if at != self.size or digest != self.digest:
            raise ImageError(
                f"{self._what}: received {at} bytes with the digest {digest}: the registry, or a"
                " proxy on the way, is broken; try again"
            )
        yield from [held] if held else []

    def _received(self) -> Iterator[bytes]:
        at, failures, started = 0, 0, time.monotonic()
        retry = self._client.retry
        while at < self.size:
            before = at
            try:
                for block in self._opened(at):
                    at += len(block)
                    self._check_pace(at, time.monotonic() - started)
                    yield block
            except HTTPError:
                failures = 1 if at > before else failures + 1
                if failures >= retry.tries:
                    raise ImageError(
                        f"{self._what}: the connection breaks after {at} of {self.size} bytes; try"
                        " again"
                    ) from None
                retry.wait(failures)
            else:
                return

    def _check_pace(self, end: int, seconds: float) -> None:
        """Refuse what would fill the memory, or never end."""
        if end > self.size:
            raise ImageError(
                f"{self._what}: more came than its {self.size} bytes: the registry, or a proxy on"
                " the way, is broken; try again"
            )
        if seconds > self._client.retry.answer + self.size / _MIN_RATE:
            raise ImageError(
                f"{self._what}: {end} of {self.size} bytes came in {seconds:.0f} s, which is too"
                " slow; try again, or use a registry that is nearer"
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
        skipped = start if answer.status == 200 else 0
        with answer.stream as response:
            while block := response.read1(BLOCK, decode_content=False):
                if skipped < len(block):
                    yield block[skipped:]
                skipped = max(0, skipped - len(block))


class Sent(StrEnum):
    """How a blob came to be where it is."""

    THERE = "there"
    MOUNTED = "mounted"
    UPLOADED = "uploaded"
    MISSING = "missing"
    """It is not there: nothing was sent in a dry run."""


class Upload:
    """The upload of one blob into one repository: mounted from another one, or sent."""

    def __init__(
        self,
        client: RegistryClient,
        target: Reference,
        content: Content,
        sent: Callable[[int], object] = lambda _size: None,
    ) -> None:
        """Prepare it; `sent` is called with the bytes that go out, or less than 0: were lost."""
        self._client = client
        self._root = f"/v2/{target.repository}/blobs"
        self._content = content
        self._sent = sent
        self._doing = f"uploading {content.digest[:19]} to {target.name}"

    def is_there(self) -> bool:
        """Whether the repository has the blob."""
        path = f"{self._root}/{self._content.digest}"
        # A repository that does not exist yet is refused by some, even to those who may create it.
        answer = self._client.request(
            "HEAD", path, ok={200, 401, 403, 404}, doing=f"{self._doing}: looking for it"
        )
        return answer.confirms(self._content.digest, self._content.size)

    def run(self, mount: Reference | None = None) -> Sent:
        """Bring the blob into the repository; `mount` is one of the same registry that has it.

        Raises:
            ImageError: the registry does not take it.
        """
        retry, lost = self._client.retry, None
        for failures in range(1, retry.tries + 1):
            location = self._begin(mount)
            if location is None:
                return Sent.MOUNTED
            mount = None  # it was not granted
            lost = self._send(location)
            if lost is None:
                return Sent.UPLOADED
            retry.wait(failures)
            if self.is_there():
                return Sent.UPLOADED  # the answer was lost, not the blob
        raise ImageError(f"{self._doing}: {lost}; tried {retry.tries} times")

    def _begin(self, mount: Reference | None) -> str | None:
        """The location of a new upload; None where the blob was mounted instead."""
        if mount is not None:
            query = urlencode({"mount": self._content.digest, "from": mount.repository})
            with suppress(ImageError):  # a real obstacle stops the upload, too
                answer = self._post(f"?{query}", ok={201, 202})
                return None if answer.status == 201 else self._location(answer)
        return self._location(self._post("", ok={202}))

    def _post(self, query: str, *, ok: set[int]) -> Response:
        path = f"{self._root}/uploads/{query}"
        return self._client.request("POST", path, ok=ok, doing=self._doing, body=b"")

    def _location(self, answer: Response) -> str:
        if location := answer.headers.get("Location"):
            return self._client.url(location, answer)
        raise ImageError(
            f"{self._doing}: the registry accepts it and does not say where to send it"
        )

    def _send(self, location: str) -> str | None:
        """Send the content; why it was lost where a new upload may succeed, else None."""
        digest, size = self._content.digest, self._content.size
        url = f"{location}{'&' if '?' in location else '?'}{urlencode({'digest': digest})}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        out = 0

        def blocks() -> Generator[bytes]:
            nonlocal out
            for block in self._content.blocks():
                self._sent(len(block))
                out += len(block)
                yield block

        # urllib3's error keeps hold of a body that was not read to its end: closed here, so that
        # the connection it is read from is released.
        try:
            with closing(blocks()) as body:
                answer = self._client.send("PUT", url, headers=headers, body=body)
        except TransportError as error:
            lost = str(error)
        else:
            stored = answer.headers.get("Docker-Content-Digest", digest)
            if answer.status == 201 and stored == digest:
                return None
            refusal = self._client.refusal(answer, self._doing)
            if answer.status in {403, 405, 413}:
                raise refusal
            lost = f"the registry took it for {stored}" if answer.status == 201 else str(refusal)
        self._sent(-out)
        return lost
