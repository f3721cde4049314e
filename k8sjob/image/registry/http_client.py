"""HTTP for registries: where a URL leads, TLS and proxies, limits, and retries."""

from __future__ import annotations

import ipaddress
import itertools
import os
import random
import re
import shlex
import ssl
import threading
import time
from contextlib import closing, suppress
from email.utils import parsedate_to_datetime
from enum import IntEnum
from functools import partial
from http.client import HTTPException
from pathlib import Path
from socket import gaierror
from string import punctuation
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

from k8sjob.connections import Connections, proxy_for, tls_context
from k8sjob.contract import __version__
from k8sjob.environment import home, variables
from k8sjob.errors import ImageError, redacted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from http.client import HTTPMessage

    from k8sjob.connections import Answer

MAX_BODY: Final = 8 << 20
"""Bytes of a manifest, a config or a token at most: registries stop at 4 MiB themselves."""
_RETRIED: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_MAX_PAUSE: Final = 60.0
_HEADERS: Final = (("User-Agent", f"k8sjob/{__version__}"), ("Accept-Encoding", "identity"))
"""Of all requests; digests are of bytes that nobody has compressed on the way."""
_NETLOC: Final = re.compile(
    r"(?:[^@\\\s]*@)?((?:[\w.-]+|\[[0-9a-f:.]+\])(?::\d*)?)", re.ASCII | re.IGNORECASE
)
_CERTIFICATES: Final = ("/etc/docker/certs.d", "/etc/containers/certs.d")
_HOME_CERTIFICATES: Final = (".docker/certs.d", ".config/containers/certs.d")


class TransportError(Exception):
    """The connection broke or could not be made; a retry may succeed."""


class Zone(IntEnum):
    """Where an address is. A registry may lead to its own zone and those before it."""

    PUBLIC = 0
    PRIVATE = 1  # any network that is not the Internet
    LOOPBACK = 2
    LINK_LOCAL = 3  # a cloud's metadata server, for one

    @classmethod
    def of(cls, address: str) -> Zone:
        """That of an IPv4 or IPv6 address; a ValueError where it is none."""
        ip = ipaddress.ip_address(address.partition("%")[0])
        # ::ffff:127.0.0.1 is a loopback address for the kernel, not for Python 3.11's ipaddress.
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if ip.is_loopback or ip.is_unspecified:
            return cls.LOOPBACK
        if ip.is_link_local:
            return cls.LINK_LOCAL
        return cls.PUBLIC if ip.is_global else cls.PRIVATE


class RetryPolicy(NamedTuple):
    """How often and for how long a request is tried.

    Attributes:
        tries: attempts of each request, the first one included.
        pause: seconds before the second attempt; doubles with each further one, with jitter.
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

    def wait(self, failures: int, retry_after: str | None = None) -> None:
        """Pause before the next attempt, after so many failures (from 1) and what a header asks."""
        pause = self.pause * 2 ** (failures - 1) * random.uniform(0.75, 1.25)  # noqa: S311 - jitter, no secret
        time.sleep(min(_MAX_PAUSE, max(pause, _retry_after(retry_after))))


def _retry_after(header: str | None) -> float:
    """Seconds from a number or a date; 0 where it is neither."""
    text = (header or "").strip()
    if text.isdecimal():
        return float(text)
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0


class Response(NamedTuple):
    """An answer to the request of a URL: complete, or a stream that is still to be read."""

    url: str
    status: int
    headers: Mapping[str, str] | HTTPMessage
    body: bytes = b""
    stream: Answer | None = None

    def describes(self, digest: str, size: int) -> bool:
        """Whether it is about this content; the page of a captive portal has status 200, too."""
        named = self.headers.get("Docker-Content-Digest")
        return self.status == 200 and (
            named == digest if named else self.headers.get("Content-Length") == str(size)
        )


class HttpClient:
    """Requests to any host over connections that are kept open; threads may share it."""

    def __init__(self, plain_http: Collection[str] = (), retry: RetryPolicy | None = None) -> None:
        """Prepare; `plain_http` names registries (host[:port]) besides loopback without TLS."""
        self.retry = retry or RetryPolicy()
        self._plain_http = plain_http
        self._connections: dict[tuple[str, str, str, Zone | None], Connections] = {}
        self._zones: dict[str, Zone] = {}
        self._lock = threading.Lock()

    def base_url(self, host: str) -> str:
        """The URL that a registry's paths are relative to.

        On loopback both schemes are usual. A server with TLS says so when it gets plain HTTP, and
        nothing but that question is sent before the scheme is known.
        """
        if host in self._plain_http:
            return f"http://{host}"
        if not is_loopback(host):
            return f"https://{host}"
        # Go's servers answer plain HTTP on a TLS port with 400 and a sentence that names HTTPS.
        answer = self.request("GET", f"http://{host}/v2/")
        uses_tls = answer.status == 400 and b"https" in answer.body.lower()
        return f"{'https' if uses_tls else 'http'}://{host}"

    def zone(self, url: str) -> Zone:
        """Where the host of a URL was when it was last connected to; PUBLIC behind a proxy."""
        return self._zones.get(host_of(url), Zone.PUBLIC)

    def close(self) -> None:
        """Close idle connections, and the others when their answers have been read."""
        with self._lock:
            for connections in self._connections.values():
                connections.close()
            self._connections.clear()

    def request(self, method: str, url: str, **options: Any) -> Response:
        """Make a request that is safe to repeat, with retries; see `send`, but for blocks.

        Returns:
            The last answer, of any status.
        """
        # For all attempts together: five slow answers would take five times as long.
        end = time.monotonic() + self.retry.answer
        for failures in itertools.count(1):
            retry_after, is_last = None, failures >= self.retry.tries
            try:
                answer = self.send(method, url, **options)
                if answer.status not in _RETRIED or is_last or time.monotonic() > end:
                    break
                retry_after = answer.headers.get("Retry-After")
            except TransportError:
                if is_last or time.monotonic() > end:
                    raise
            self.retry.wait(failures, retry_after)
        return answer

    def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | Iterable[bytes] | None = None,
        stream: bool = False,
        limit: Zone | None = None,
    ) -> Response:
        """Make a request once; redirects are not followed.

        Args:
            method: of HTTP.
            url: complete.
            headers: besides those of all requests.
            body: whole, or a stream of blocks.
            stream: leave the body of a good answer to be read.
            limit: the farthest zone, for a URL that a registry gave.

        Raises:
            TransportError: there was no answer.
            ImageError: the other side is not to be trusted, or cannot be a registry.
        """
        host = host_of(url)
        proxy = proxy_for(url, variables()) if host else ""
        connections = self._to(url, host, proxy, limit)
        everything = [*_HEADERS, *(headers or {}).items()]
        try:
            answer = connections.send(method, target_of(url), everything, body, self.retry.read)
            # A registry may give each challenge in a header of its own.
            if challenges := answer.headers.get_all("WWW-Authenticate"):
                answer.headers.replace_header("WWW-Authenticate", ", ".join(challenges))
            if stream and answer.status in {200, 206}:
                return Response(url, answer.status, answer.headers, stream=answer)
            # Also of an error: its text is in messages, and a connection that was not read to its
            # end cannot be used again.
            with closing(answer):
                content = b"".join(_limited(answer, url, self.retry.answer))
        except (OSError, HTTPException, UnicodeError) as error:
            raise _explained(error, url, proxy) from None
        return Response(url, answer.status, answer.headers, content)

    def _to(self, url: str, host: str, proxy: str, limit: Zone | None) -> Connections:
        """The connections for a URL; refuses what is none, or lacks TLS."""
        scheme = url.partition(":")[0].lower()
        if scheme not in {"http", "https"} or not host:
            raise ImageError(f"{redacted(url)!r} is not the URL of a registry")
        if scheme == "http" and not (is_loopback(host) or host in self._plain_http):
            raise ImageError(
                f"{host} would be accessed without TLS, so that anyone could read and change what"
                f" is sent; if you trust the network in between: --plain-http {shlex.quote(host)}"
            )
        if proxy:
            with suppress(ValueError):  # a name, whose address is the proxy's affair
                self._check(host, limit, urlsplit(url).hostname or "")
        # By the limit, too: a connection that was made without it must not serve a request that has
        # one.
        key = (proxy, scheme, host, limit)
        with self._lock:
            return self._connections.get(key) or self._connections.setdefault(key, self._new(*key))

    def _new(self, proxy: str, scheme: str, host: str, limit: Zone | None) -> Connections:
        try:
            return Connections(
                f"{scheme}://{host}",
                _tls_of_registry(host) if scheme == "https" else None,
                proxy=proxy,
                connect=self.retry.connect,
                # On the connection itself: between a look-up of its own and the connection the name
                # could be given another address. Behind a proxy it is the proxy's.
                check=None if proxy else partial(self._check, host, limit),
            )
        except ValueError as error:
            step = "correct http_proxy and https_proxy, or name the registry in no_proxy"
            raise ImageError(f"{error}; {step}") from None

    def _check(self, host: str, limit: Zone | None, address: str) -> None:
        """Note where a host is; refuse what is farther than a registry may lead."""
        zone = Zone.of(address)
        if limit is None:
            self._zones[host] = zone
        # AWS's interface endpoints put the storage of a public registry at a private address: who
        # has named such a host trusts it.
        elif zone > limit and not (host in self._plain_http or _cert_folders(host)):
            raise ImageError(
                f"the registry leads to {host}, a {zone.name.lower().replace('_', '-')} address"
                f" ({address}), where it is not itself; if you trust it: mkdir -p"
                f" ~/.docker/certs.d/{shlex.quote(host)}"
            )


def is_loopback(host: str) -> bool:
    """Whether a host[:port] is this machine; decided by its name, no address is looked up."""
    # As for docker, registries at localhost and in 127.0.0.0/8 need no TLS.
    name = host.rpartition(":")[0] if ":" in host else host
    try:
        return name == "localhost" or ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False


def host_of(url: str) -> str:
    """The host[:port] of a URL; empty if it has none, or one that can be read in two ways."""
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.port != 0 and (netloc := _NETLOC.fullmatch(parts.netloc)):
            return netloc[1].lower().rstrip(":")
    return ""


def target_of(url: str) -> str:
    """The path and the query of a URL, whose signature stays valid: only what HTTP needs is quoted.

    http.client makes a character of each byte in a Location.
    """
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return quote(target.encode("latin-1", "replace"), safe=punctuation)


def _cert_folders(host: str) -> list[Path]:
    """The folders for the certificates of a registry that exist and can be read."""
    folders = [*map(Path, _CERTIFICATES), *(home() / folder for folder in _HOME_CERTIFICATES)]
    # Path.is_dir() raises errors: of /etc/docker, which may be for root alone, and of long names.
    return [path for folder in folders if os.path.isdir(path := folder / host)]  # noqa: PTH112 - see above


def _tls_of_registry(host: str) -> ssl.SSLContext:
    """The machine's certificates, or SSL_CERT_FILE's, and those kept for a registry."""
    context = tls_context()
    for file in (path for folder in _cert_folders(host) for path in sorted(folder.glob("*"))):
        try:
            if file.suffix == ".crt":
                context.load_verify_locations(file)
            # Docker's layout: NAME.crt is a CA, NAME.cert with NAME.key the client's own
            # certificate.
            elif file.suffix == ".cert":
                context.load_cert_chain(file, file.with_suffix(".key"))
        except (OSError, ssl.SSLError) as error:
            raise ImageError(
                f"{file}: not a usable certificate: {error.strerror or error}; it is read for"
                f" {host}: replace it, or remove it"
            ) from None
    return context


def _limited(answer: Answer, url: str, limit: float) -> Iterator[bytes]:
    """A body as it arrives, up to a size and a time."""
    end, size = time.monotonic() + limit, 0
    for piece in answer.stream(unpacks=False):
        yield piece
        size += len(piece)
        if size > MAX_BODY or time.monotonic() > end:
            how = f"with more than {MAX_BODY} bytes" if size > MAX_BODY else "too slowly"
            raise ImageError(f"{_shown(url)}: responds {how}; is it the address of a registry?")


def _shown(url: str) -> str:
    """A URL without its login and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{host_of(url)}{parts.path}"


def _explained(error: Exception, url: str, proxy: str) -> Exception:
    """The error for a failed connection: TransportError if a retry may help, else ImageError."""
    host = host_of(url)
    match error:
        case ssl.SSLCertVerificationError():
            return ImageError(
                f"{host}: its certificate is not trusted: {error.verify_message}; put the"
                f" certificate of its CA into ~/.docker/certs.d/{host}/ca.crt, or set SSL_CERT_FILE"
                " to a bundle"
            )
        case ssl.SSLError(reason="WRONG_VERSION_NUMBER" | "RECORD_LAYER_FAILURE"):
            return ImageError(
                f"{host} does not use TLS; if you trust the network in between: --plain-http"
                f" {shlex.quote(host)}"
            )
        case UnicodeError():  # of a name with an empty part
            return ImageError(f"{_shown(url)!r} is not the URL of a registry")
        case TimeoutError():
            reason = (
                "no connection in time" if "connection" in str(error) else "no response in time"
            )
        case ConnectionResetError() | BrokenPipeError() | ssl.SSLError() | HTTPException():
            reason = f"the connection broke ({type(error).__name__})"
        case _ if proxy:
            reason = "the proxy set in the environment does not reach it"
        case gaierror():
            reason = "no host has that name"
        case _:
            reason = getattr(error, "strerror", None) or "no connection"
    return TransportError(f"{host}: {reason}")
