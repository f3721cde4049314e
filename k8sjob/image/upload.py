"""Getting a blob into a registry: mounted from a neighbour, or uploaded and resumed.

A registry may lose a session, cut the connection, forget the token or say nonsense about how much
it has. What it ends up with is always checked against the digest, by itself.
"""

from __future__ import annotations

import re
from contextlib import closing, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from k8sjob.errors import ImageError
from k8sjob.image.wire import Broken

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from k8sjob.image.content import Content
    from k8sjob.image.reference import Reference
    from k8sjob.image.session import Session
    from k8sjob.image.wire import Answer

__all__ = ["Sent", "Upload"]

_WHOLE: Final = 1 << 20
"""Up to so many bytes are sent with the last request of an upload, which saves one."""
_BYTES: Final = {"Content-Type": "application/octet-stream"}
_RANGE: Final = re.compile(r"(?:bytes=)?0-(\d+)")


class Sent(StrEnum):
    """How a blob came to be in the registry."""

    THERE = "there"
    MOUNTED = "mounted"
    UPLOADED = "uploaded"
    MISSING = "missing"
    """It is not; that was only looked at."""


class _Lost(Exception):  # noqa: N818 - the session is of no more use; a new one may be
    """The registry and this side do not agree any more on what has been sent."""


class Upload:
    """One blob on its way into one repository."""

    def __init__(
        self,
        session: Session,
        target: Reference,
        content: Content,
        sent: Callable[[int], object],
    ) -> None:
        """Prepare it.

        Args:
            session: with the registry.
            target: names the repository.
            content: the blob.
            sent: is called with each number of bytes that go out.
        """
        self._session = session
        self._root = f"/v2/{target.repository}/blobs"
        self._content = content
        self._sent = sent
        self._doing = f"uploading {content.digest[:19]} to {target.name}"

    def is_there(self) -> bool:
        """Whether the repository has the blob."""
        path = f"{self._root}/{self._content.digest}"
        # A repository that is not there yet is refused by some, to those who may make it.
        answer = self._session.request(
            "HEAD", path, ok={200, 401, 403, 404}, doing=f"{self._doing}: looking for it"
        )
        return answer.has(self._content.digest, self._content.size)

    def run(self, mount: Reference | None = None) -> Sent:
        """Bring the blob into the repository.

        Args:
            mount: a repository of the same registry that has it.

        Raises:
            ImageError: the registry does not take it.
        """
        patience = self._session.patience
        reason = ""
        for failures in range(1, patience.tries + 1):
            location = self._started(mount)
            if location is None:
                return Sent.MOUNTED
            mount = None  # it was not granted
            try:
                self._filled(location)
            except _Lost as lost:
                reason = str(lost)
            else:
                return Sent.UPLOADED
            patience.wait(failures)
            if self.is_there():
                return Sent.UPLOADED  # the answer was lost, not the blob
        raise ImageError(f"{self._doing}: {reason}; tried {patience.tries} times")

    def _started(self, mount: Reference | None) -> str | None:
        """The location of a new upload; None where the blob was mounted instead."""
        if mount is not None:
            query = urlencode({"mount": self._content.digest, "from": mount.repository})
            with suppress(ImageError):  # a favour: what really is in the way stops the upload, too
                answer = self._post(f"?{query}", ok={201, 202})
                return None if answer.status == 201 else self._location(answer)
        return self._location(self._post("", ok={202}))

    def _post(self, query: str, *, ok: set[int]) -> Answer:
        path = f"{self._root}/uploads/{query}"
        return self._session.request("POST", path, ok=ok, doing=self._doing, body=b"")

    def _location(self, answer: Answer, before: str | None = None) -> str:
        location = answer.headers.get("Location")
        if location:
            return self._session.url(location, answer)
        if before is None:
            raise ImageError(
                f"{self._doing}: the registry accepts it and does not say where to send it"
            )
        return before

    def _filled(self, location: str) -> None:
        """Send the content and close the upload."""
        size = self._content.size
        start = 0
        if size > _WHOLE:
            location = self._streamed(location)
            start = size
        separator = "&" if "?" in location else "?"
        url = location + separator + urlencode({"digest": self._content.digest})
        headers = {**_BYTES, "Content-Length": str(size - start)}
        try:
            answer = self._send("PUT", url, headers, start)
        except Broken as broken:
            raise _Lost(str(broken)) from None
        if answer.status != 201:
            raise self._lost(answer)
        given = answer.headers.get("Docker-Content-Digest", self._content.digest)
        if given != self._content.digest:
            raise _Lost(f"the registry took it for {given}")

    def _streamed(self, location: str) -> str:
        """Send all of it, from wherever the registry says it is; the location to close it at."""
        patience = self._session.patience
        offset, failures = 0, 0
        while offset < self._content.size:
            before = offset
            location, offset = self._sent_from(offset, location)
            if offset < self._content.size:
                failures = 1 if offset > before else failures + 1
                if failures >= patience.tries:
                    raise _Lost(f"it stays at {offset} of {self._content.size} bytes")
                patience.wait(failures)
                location, offset = self._asked(location)
        return location

    def _sent_from(self, offset: int, location: str) -> tuple[str, int]:
        """Send the rest in one request; where the next goes, and how much the registry has."""
        size = self._content.size
        headers = {**_BYTES, "Content-Length": str(size - offset)}
        if offset:
            headers["Content-Range"] = f"{offset}-{size - 1}"
        try:
            answer = self._send("PATCH", location, headers, offset)
        except Broken:
            return location, offset
        if answer.status in {401, 408, 416, 425, 429} or answer.status >= 500:
            return location, offset  # the token is new by now, or it passes: ask and go on
        if answer.status not in {201, 202, 204}:
            raise self._lost(answer)
        return self._location(answer, location), self._offset(answer, size)

    def _send(self, method: str, url: str, headers: dict[str, str], start: int) -> Answer:
        # A connection that breaks leaves the rest unread, and urllib3's error keeps hold of it:
        # what it is read from is let go of here.
        with closing(self._blocks(start)) as body:
            return self._session.send(method, url, headers=headers, body=body)

    def _asked(self, location: str) -> tuple[str, int]:
        """How much the registry has of an upload."""
        answer = self._session.request(
            "GET", location, ok={200, 202, 204, 400, 404, 405}, doing=self._doing
        )
        if answer.status >= 400:
            raise _Lost("the registry has forgotten the upload")
        return self._location(answer, location), self._offset(answer, 0)

    def _offset(self, answer: Answer, default: int) -> int:
        """Bytes that the registry has; `0-0` is what it says of none, and of one."""
        text = answer.headers.get("Range")
        if text is None:
            return default
        match = _RANGE.fullmatch(text)
        end = int(match[1]) if match else -1
        offset = end + 1 if end else 0
        if match is None or offset > self._content.size:
            raise _Lost(f"the registry says that it has {text!r} of {self._content.size} bytes")
        return offset

    def _blocks(self, start: int) -> Generator[bytes]:
        for block in self._content.blocks(start):
            self._sent(len(block))
            yield block

    def _lost(self, answer: Answer) -> Exception:
        """Whether a refusal may be another one in a new session, or stays."""
        refusal = self._session.refusal(answer, self._doing)
        return refusal if answer.status in {403, 405, 413} else _Lost(str(refusal))
