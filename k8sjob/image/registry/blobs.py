"""Blobs: where their bytes come from, and how they get into a registry.

A registry may lose an upload, cut the connection, forget the token or misreport how much it has.
What it ends up with is always checked against the digest, by the registry itself.
"""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlencode

from urllib3.exceptions import HTTPError

from k8sjob.errors import ImageError
from k8sjob.image.registry.http_client import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from tempfile import SpooledTemporaryFile
    from typing import BinaryIO

    from k8sjob.image.registry.client import RegistryClient
    from k8sjob.image.registry.http_client import Response
    from k8sjob.image.registry.manifest import Descriptor
    from k8sjob.image.registry.reference import Reference

__all__ = ["BLOCK", "Content", "FileContent", "RemoteContent", "Sent", "SmallContent", "Upload"]

BLOCK: Final = 256 << 10
"""Bytes that are in memory at once, of each blob that is being transferred."""
_MIN_RATE: Final = 10_000
"""Bytes a second that a registry must deliver on average; mobile networks are faster."""
_SINGLE_REQUEST: Final = 1 << 20
"""Up to so many bytes are sent with the last request of an upload, which saves one."""
_BINARY: Final = {"Content-Type": "application/octet-stream"}
_RANGE: Final = re.compile(r"(?:bytes=)?0-(\d+)")


class Content(Protocol):
    """A blob that can be uploaded."""

    @property
    def digest(self) -> str:
        """Of all of it."""

    @property
    def size(self) -> int:
        """In bytes."""

    def blocks(self, start: int) -> Iterator[bytes]:
        """What follows `start` bytes; may be called again after a failure.

        Raises:
            ImageError: it cannot be read, or does not match its digest.
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
    """A blob in an open file whose position nothing else changes."""

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

    A connection that breaks is resumed where it broke. The digest is checked before the last block
    is handed out.
    """

    def __init__(self, client: RegistryClient, reference: Reference, blob: Descriptor) -> None:
        self.digest = blob.digest
        self.size = blob.size
        self._client = client
        self._path = f"/v2/{reference.repository}/blobs/{blob.digest}"
        self._what = f"{reference.name}, blob {blob.digest[:19]}"
        self._hash = hashlib.new(blob.digest.partition(":")[0])
        self._hashed = 0

    def blocks(self, start: int) -> Iterator[bytes]:
        """The rest of it."""
        held, at = b"", start
        for block in self._received(start):
            yield from [held] if held else []
            held, at = block, at + len(block)
            new = at - self._hashed
            if 0 < new <= len(block):  # what was not hashed before a retry
                self._hash.update(block[len(block) - new :])
                self._hashed = at
        digest = f"{self.digest.partition(':')[0]}:{self._hash.hexdigest()}"
        if at != self.size or (self._hashed == self.size and digest != self.digest):
            raise ImageError(
                f"{self._what}: received {at} bytes with the digest {digest}: the registry, or a"
                " proxy on the way, is broken; try again"
            )
        yield from [held] if held else []

    def _received(self, start: int) -> Iterator[bytes]:
        at, failures, started = start, 0, time.monotonic()
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


class _UploadLostError(Exception):
    """The registry and this side disagree on what has been sent; a new upload may succeed."""


class Upload:
    """The upload of one blob into one repository: mounted from another one, or sent and resumed."""

    def __init__(
        self,
        client: RegistryClient,
        target: Reference,
        content: Content,
        sent: Callable[[int], object],
    ) -> None:
        """Prepare it.

        Args:
            client: of the registry.
            target: names the repository.
            content: the blob.
            sent: is called with each number of bytes that go out.
        """
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
        """Bring the blob into the repository.

        Args:
            mount: a repository of the same registry that has it.

        Raises:
            ImageError: the registry does not take it.
        """
        retry = self._client.retry
        reason = ""
        for failures in range(1, retry.tries + 1):
            location = self._start(mount)
            if location is None:
                return Sent.MOUNTED
            mount = None  # it was not granted
            try:
                self._fill(location)
            except _UploadLostError as lost:
                reason = str(lost)
            else:
                return Sent.UPLOADED
            retry.wait(failures)
            if self.is_there():
                return Sent.UPLOADED  # the answer was lost, not the blob
        raise ImageError(f"{self._doing}: {reason}; tried {retry.tries} times")

    def _start(self, mount: Reference | None) -> str | None:
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

    def _location(self, answer: Response, before: str | None = None) -> str:
        location = answer.headers.get("Location")
        if location:
            return self._client.url(location, answer)
        if before is None:
            raise ImageError(
                f"{self._doing}: the registry accepts it and does not say where to send it"
            )
        return before

    def _fill(self, location: str) -> None:
        """Send the content and close the upload."""
        size = self._content.size
        start = 0
        if size > _SINGLE_REQUEST:
            location = self._stream(location)
            start = size
        separator = "&" if "?" in location else "?"
        url = location + separator + urlencode({"digest": self._content.digest})
        headers = {**_BINARY, "Content-Length": str(size - start)}
        try:
            answer = self._send("PUT", url, headers, start)
        except TransportError as error:
            raise _UploadLostError(str(error)) from None
        if answer.status != 201:
            raise self._failure(answer)
        digest = answer.headers.get("Docker-Content-Digest", self._content.digest)
        if digest != self._content.digest:
            raise _UploadLostError(f"the registry took it for {digest}")

    def _stream(self, location: str) -> str:
        """Send all of it, resumed at where the registry says; the location to close it at."""
        retry = self._client.retry
        offset, failures = 0, 0
        while offset < self._content.size:
            before = offset
            location, offset = self._send_from(offset, location)
            if offset < self._content.size:
                failures = 1 if offset > before else failures + 1
                if failures >= retry.tries:
                    raise _UploadLostError(f"it stays at {offset} of {self._content.size} bytes")
                retry.wait(failures)
                location, offset = self._progress(location)
        return location

    def _send_from(self, offset: int, location: str) -> tuple[str, int]:
        """Send the rest in one request; the next location, and how much the registry has."""
        size = self._content.size
        headers = {**_BINARY, "Content-Length": str(size - offset)}
        if offset:
            headers["Content-Range"] = f"{offset}-{size - 1}"
        try:
            answer = self._send("PATCH", location, headers, offset)
        except TransportError:
            return location, offset
        if answer.status in {401, 408, 416, 425, 429} or answer.status >= 500:
            return location, offset  # the token is renewed by now, or a retry may help
        if answer.status not in {201, 202, 204}:
            raise self._failure(answer)
        return self._location(answer, location), self._offset(answer, size)

    def _send(self, method: str, url: str, headers: dict[str, str], start: int) -> Response:
        # urllib3's error keeps hold of a body that was not read to its end: closed here, so that
        # the connection it is read from is released.
        with closing(self._blocks(start)) as body:
            return self._client.send(method, url, headers=headers, body=body)

    def _progress(self, location: str) -> tuple[str, int]:
        """How much the registry has of an upload."""
        answer = self._client.request(
            "GET", location, ok={200, 202, 204, 400, 404, 405}, doing=self._doing
        )
        if answer.status >= 400:
            raise _UploadLostError("the registry has forgotten the upload")
        return self._location(answer, location), self._offset(answer, 0)

    def _offset(self, answer: Response, default: int) -> int:
        """Bytes that the registry has; `0-0` stands for none as well as for one."""
        text = answer.headers.get("Range")
        if text is None:
            return default
        match = _RANGE.fullmatch(text)
        end = int(match[1]) if match else -1
        offset = end + 1 if end else 0
        if match is None or offset > self._content.size:
            raise _UploadLostError(
                f"the registry says that it has {text!r} of {self._content.size} bytes"
            )
        return offset

    def _blocks(self, start: int) -> Generator[bytes]:
        for block in self._content.blocks(start):
            self._sent(len(block))
            yield block

    def _failure(self, answer: Response) -> Exception:
        """A refusal that stays, or a lost upload, where a new one may succeed."""
        refusal = self._client.refusal(answer, self._doing)
        is_final = answer.status in {403, 405, 413}
        return refusal if is_final else _UploadLostError(str(refusal))
