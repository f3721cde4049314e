"""The transport: the few requests to an apiserver that the cluster's back end is written over.

There are two: python_client.py and kubectl.py. Both take contexts, credentials and TLS from a
kubeconfig, or from the pod that they run in.
"""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final, Protocol

from k8sjob.errors import BackendError
from k8sjob.kube.json_text import OversizeError, parsed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from threading import Event

    from k8sjob.kube.objects import Json

_SAME_TIME: Final = 2.0
"""Seconds: a Date has no fraction, and an answer takes a moment."""
Cause = tuple[str, str]
"""A field's path and what is wrong with it, as in a Status' details.causes."""


class ApiError(BackendError):
    """An apiserver's refusal, or that none could be reached.

    Attributes:
        code: the HTTP status; 0: there was no answer, or the connection broke in the middle of one.
        reason: the Status' reason, as "AlreadyExists", "Forbidden", "Invalid", "Expired"; for
            code 0 "Unreachable", "Untrusted" (its certificate) or "Unusable" (the kubeconfig);
            empty for an error of the client's own.
        detail: the server's own message.
        causes: the fields that are wrong, where the server names them.
    """

    def __init__(
        self,
        message: str,
        next_step: str = "",
        *,
        code: int = 0,
        reason: str = "Unreachable",
        detail: str = "",
        causes: Sequence[Cause] = (),
    ) -> None:
        super().__init__(message, next_step)
        self.code, self.reason, self.causes = code, reason, causes
        self.detail = detail or str(self)


class Transport(Protocol):
    """A connection to one cluster, as one user. Safe to use from several threads."""

    context: str
    """The kubeconfig's context, or "in-cluster"."""
    namespace: str
    """The namespace where none is named."""
    server: str
    """The apiserver's URL, for messages."""

    @property
    def skew(self) -> float:
        """Seconds by which the server's clock is ahead of this machine's; 0 if not known."""

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        metadata_only: bool = False,
        timeout: float = 30.0,
    ) -> Json:
        """One request; the object in the answer.

        Args:
            method: "GET", "POST", "DELETE", or "PATCH", whose body is a merge patch of one object.
            path: the path at the apiserver, percent-encoded, as /api/v1/namespaces/default/pods.
            query: parameters, not encoded yet.
            body: an object.
            metadata_only: of one object to GET; its contents stay with the server.
            timeout: seconds without an answer until the request is given up.

        Raises:
            ApiError: the server refuses, or cannot be reached.
        """

    def stream(
        self,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        idle: float = 300.0,
        stop: Event | None = None,
    ) -> Iterator[bytes]:
        """The lines of an answer as they come, each with its newline; the last one may lack it.

        Closing the iterator closes the connection.

        Args:
            path: as for request.
            query: as for request.
            idle: seconds of silence after which the connection counts as broken.
            stop: set from another thread to end the iteration within a second.

        Raises:
            ApiError: the server refuses; with code 0 where the connection breaks. A clean end of
                the answer ends the iteration.
        """


def skew_by(date: str | None) -> float:
    """The skew by the Date of an answer that has just come; see Transport.skew."""
    try:
        ahead = parsedate_to_datetime(date or "").timestamp() - time.time()
    except ValueError:
        return 0.0
    # A skew that changes with each answer by a fraction would make ages jump.
    return ahead if abs(ahead) > _SAME_TIME else 0.0


def refusal(code: int, answer: Json | str) -> ApiError:
    """The error for an answer that is not a success: a Status, or another text (a proxy)."""
    if isinstance(answer, str):
        # A page of a proxy, or of a login, may have thousands of lines.
        text = " ".join(answer.split())[:300] or "without a reason"
        return ApiError(f"the server returned {code}: {text}", code=code, reason="", detail=text)
    reason = str(answer.get("reason") or "")
    causes = [
        (str(cause.get("field") or ""), str(cause.get("message") or ""))
        for cause in (answer.get("details") or {}).get("causes") or []
    ]
    text = str(answer.get("message") or reason or "without a reason")
    return ApiError(text, code=code, reason=reason, detail=text, causes=causes)


def malformed(answer: str) -> ApiError:
    """The error for an answer that Kubernetes does not give; it is not asked for again."""
    return ApiError(f"the server has sent {answer}", code=200, reason="Malformed", detail=answer)


def parsed_answer(data: bytes) -> Json:
    """The object in an answer.

    Raises:
        ApiError: it is too large or too deep.
        ValueError: it is no JSON.
    """
    try:
        # An answer without a body, such as a 204, counts as an object without fields.
        answer = parsed(data) if data.strip() else {}
    except OversizeError as error:
        raise malformed(f"JSON that is not read: {error}") from None
    return answer if isinstance(answer, dict) else {"items": answer}


MAX_ANSWER: Final = 1 << 28
"""Bytes of one answer: ten times those of a list of 10,000 Pods."""
ANSWER_SECONDS: Final = 600.0
"""How long one answer may take, however steadily it comes."""


def body_of(pieces: Iterable[bytes], seconds: float = ANSWER_SECONDS) -> bytes:
    """The whole of an answer that comes in pieces, within so many seconds.

    Raises:
        ApiError: it is too large.
        OSError: it does not end.
    """
    body, deadline = bytearray(), time.monotonic() + seconds
    for piece in pieces:
        body += piece
        if len(body) > MAX_ANSWER:
            raise malformed(f"an answer of more than {MAX_ANSWER >> 20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError(f"its answer has not ended after {seconds:.0f} s")
    return bytes(body)


MAX_LINE: Final = 16 * 2**20
"""Bytes of one line that are kept. No object of a cluster is that large, and no readable log line;
a progress bar that never ends its line is."""


class PartialLine:
    """A line that comes in pieces; only its first MAX_LINE bytes are kept."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._left_out = 0

    def add(self, piece: bytes) -> None:
        """Append a piece without a newline."""
        room = MAX_LINE - len(self._kept)
        self._kept += piece[:room]
        self._left_out += max(len(piece) - room, 0)

    def take(self) -> bytes:
        """The line so far, with a note if part of it was left out; starts the next line."""
        if self._left_out:
            self._kept += b" [k8sjob: %d more bytes of this line are left out]" % self._left_out
        taken = bytes(self._kept)
        self._kept.clear()
        self._left_out = 0
        return taken


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces of an answer as whole lines, each with its newline; a last one may lack it."""
    line = PartialLine()
    for chunk in chunks:
        *ends, begin = chunk.split(b"\n")
        if ends:
            line.add(ends[0])
            yield line.take() + b"\n"
            for whole in ends[1:]:
                yield whole + b"\n"
        line.add(begin)
    if last_line := line.take():
        yield last_line
