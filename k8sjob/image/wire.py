"""HTTP to registries: one request and its answer, with patience for what passes."""

from __future__ import annotations

import email.utils
import itertools
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import urllib3
from urllib3 import exceptions

from k8sjob.errors import ImageError
from k8sjob.image.pools import Pools, host_of, is_loopback

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from urllib3 import BaseHTTPResponse

__all__ = ["Answer", "Broken", "Patience", "Wire"]

MAX_ANSWER: Final = 8 << 20
"""Bytes of a manifest, a config or a token at most: registries stop at 4 MiB themselves."""
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers that may be another one a moment later."""
_PIECE: Final = 64 << 10
_LONGEST_PAUSE: Final = 60.0


class Broken(Exception):  # noqa: N818 - a state of the connection, never shown as an error's name
    """The connection broke, or could not be made; another try may do."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long something is tried.

    Attributes:
        tries: of each request, the first one included.
        pause: seconds before the second try; each further pause is twice as long, and as random.
        connect: seconds for a connection.
        read: seconds without a byte from the other side.
        answer: seconds for a whole answer, however slowly it comes; a blob has more by its size.
            After them nothing is tried again.
    """

    tries: int = 5
    pause: float = 0.2
    connect: float = 10.0
    read: float = 120.0
    answer: float = 300.0

    def wait(self, failures: int, asked: str | None = None) -> None:
        """Pause before the next try.

        Args:
            failures: how many tries have failed, from 1.
            asked: the other side's Retry-After.
        """
        pause = self.pause * 2 ** (failures - 1) * random.uniform(0.75, 1.25)  # noqa: S311 - jitter, no secret
        time.sleep(min(_LONGEST_PAUSE, max(pause, _seconds(asked))))


def _seconds(retry_after: str | None) -> float:
    if not retry_after:
        return 0.0
    try:
        return float(retry_after)
    except ValueError:
        pass
    try:
        return email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        url: what was asked.
        status: of HTTP.
        headers: with any case.
        body: complete; empty where it is a stream.
        stream: the response that is still to be read.
    """

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    stream: BaseHTTPResponse | None = None

    def has(self, digest: str, size: int) -> bool:
        """Whether it speaks of this content; the page of a captive portal says 200, too."""
        named = self.headers.get("Docker-Content-Digest")
        return self.status == 200 and (
            named == digest if named else self.headers.get("Content-Length") == str(size)
        )


@dataclass(slots=True)
class Wire:
    """Connections to any host, kept open; may be shared by threads.

    Attributes:
        plain_http: registries (host[:port]) beside loopback that may be spoken to without TLS.
        patience: with each request.
    """

    plain_http: Collection[str] = ()
    patience: Patience = field(default_factory=Patience)
    _pools: Pools = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the connections; none is made."""
        timeout = urllib3.Timeout(connect=self.patience.connect, read=self.patience.read)
        self._pools = Pools(self.plain_http, timeout)

    def base(self, host: str) -> str:
        """The URL that a registry's paths are relative to.

        On loopback both schemes are usual, and a server of TLS says so when it is spoken to in
        plain; nothing but a question goes over the wire before that is known.
        """
        if host in self.plain_http:
            return f"http://{host}"
        if not is_loopback(host):
            return f"https://{host}"
        answer = self.ask("GET", f"http://{host}/v2/")
        speaks_tls = answer.status == 400 and b"https" in answer.body.lower()
        return f"{'https' if speaks_tls else 'http'}://{host}"

    def close(self) -> None:
        """Close the connections that nobody uses; others are closed when they are given back."""
        self._pools.close()

    def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        stream: bool = False,
    ) -> Answer:
        """Make a request until it is answered for good, or patience ends.

        Args:
            method: of HTTP.
            url: complete.
            headers: of the request.
            body: whole, so that it can be sent again.
            stream: leave the body of a good answer to be read.

        Returns:
            The last answer, whatever its status. Redirects are answers.

        Raises:
            Broken: there was none.
            ImageError: the other side is not to be trusted, or cannot be one.
        """
        end = time.monotonic() + self.patience.answer
        for failures in itertools.count(1):
            asked, last = None, failures >= self.patience.tries
            try:
                answer = self.send(method, url, headers=headers, body=body, stream=stream)
                if answer.status not in _PASSING or last or time.monotonic() > end:
                    break
                asked = answer.headers.get("Retry-After")
            except Broken:
                if last or time.monotonic() > end:
                    raise
            self.patience.wait(failures, asked)
        return answer

    def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | Iterable[bytes] | None = None,
        stream: bool = False,
    ) -> Answer:
        """Make a request once; as `ask`, and the body may be a stream of blocks."""
        pool = self._pools.find(url)
        try:
            response = pool.request(
                method,
                url,
                headers=dict(headers or {}),
                body=body,
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
            )
            if stream and response.status in {200, 206}:
                return Answer(url, response.status, response.headers, stream=response)
            content = b"".join(_pieces(response, url, self.patience.answer))
        except exceptions.HTTPError as error:
            raise _in_words(error, url) from None
        response.release_conn()
        return Answer(url, response.status, response.headers, content)


def _pieces(response: BaseHTTPResponse, url: str, limit: float) -> Iterator[bytes]:
    """A small answer as it comes, up to a size and a time."""
    end, size = time.monotonic() + limit, 0
    while piece := response.read1(_PIECE):
        yield piece
        size += len(piece)
        if size > MAX_ANSWER or time.monotonic() > end:
            response.close()
            much = f"with more than {MAX_ANSWER} bytes" if size > MAX_ANSWER else "too slowly"
            raise ImageError(f"{_place(url)}: answers {much}; is it the address of a registry?")


def _place(url: str) -> str:
    """A URL without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{host_of(url)}{parts.path}"


def _in_words(error: exceptions.HTTPError, url: str) -> Exception:
    """What a failure of the connection means: Broken, where another try may help."""
    host = host_of(url)
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        return ImageError(
            f"{host}: its certificate is not trusted: {why or text}; put the certificate of its CA"
            f" into ~/.docker/certs.d/{host}/ca.crt, or name a bundle by SSL_CERT_FILE"
        )
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return ImageError(
            f"{host} does not speak TLS; if you trust the way to it: --plain-http {host}"
        )
    if isinstance(error, exceptions.LocationValueError):
        return ImageError(f"{_place(url)!r} is no URL of a registry")
    kind = next((kind for kind in type(error).__mro__ if kind in _KINDS), None)
    words = _KINDS[kind] if kind else None
    if kind is exceptions.NewConnectionError:
        words = text.rpartition(": ")[2].rpartition("] ")[2]  # as the system says it
    return Broken(f"{host}: {words or f'the connection broke ({type(error).__name__})'}")


_KINDS: Final[dict[type, str]] = {
    exceptions.ProxyError: "the proxy that the environment names does not lead there",
    exceptions.NameResolutionError: "there is no host of that name",
    exceptions.NewConnectionError: "no connection",
    exceptions.ConnectTimeoutError: "no connection in time",
    exceptions.ReadTimeoutError: "no answer in time",
}
