"""HTTP for registries: pooled connections, TLS and proxies, limits, and retries.

`urllib3.Retry` is not used for the retries: it would read the body of a failed answer without a
limit, would not retry an answer that breaks off, and has no deadline over all attempts.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import random
import shlex
import ssl
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import urllib3
from urllib3 import exceptions

from k8sjob.environment import home
from k8sjob.errors import ImageError, redacted

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from urllib3 import BaseHTTPResponse

MAX_BODY: Final = 8 << 20
"""Bytes of a manifest, a config or a token at most: registries stop at 4 MiB themselves."""
_RETRIED: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_CHUNK: Final = 64 << 10
_MAX_PAUSE: Final = 60.0
_POOL_SIZE: Final = 16
"""Idle connections that are kept to one host."""
_CERTIFICATES: Final = ("/etc/docker/certs.d", "/etc/containers/certs.d")
_HOME_CERTIFICATES: Final = (".docker/certs.d", ".config/containers/certs.d")
_REASONS: Final[dict[type, str]] = {
    exceptions.ProxyError: "the proxy set in the environment does not reach it",
    exceptions.NameResolutionError: "no host has that name",
    exceptions.NewConnectionError: "no connection",
    exceptions.ConnectTimeoutError: "no connection in time",
    exceptions.ReadTimeoutError: "no response in time",
}


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


@dataclass(frozen=True, slots=True)
class RetryPolicy:
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
    with suppress(exceptions.InvalidHeader, ValueError, OverflowError):
        return urllib3.Retry().parse_retry_after(header or "")
    return 0.0


@dataclass(frozen=True, slots=True)
class Response:
    """An answer to the request of a URL: complete, or a stream that is still to be read."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    stream: BaseHTTPResponse | None = None

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
        self._pools: dict[tuple[str, str, str, Zone | None], urllib3.PoolManager] = {}
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
        """Close idle connections; the others are closed when they are given back."""
        with self._lock:
            for manager in self._pools.values():
                # Its clear() only forgets them, and an error may still keep hold of one.
                for key in manager.pools.keys():  # noqa: SIM118 - it cannot be iterated over
                    manager.pools[key].close()
            self._pools.clear()

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        stream: bool = False,
        limit: Zone | None = None,
    ) -> Response:
        """Make a request that is safe to repeat, with retries; the last answer, of any status.

        Redirects are not followed; stream: leave the body of a good answer to be read; limit: the
        farthest zone, for a URL that a registry gave.

        Raises:
            TransportError: there was no answer.
            ImageError: the other side is not to be trusted, or cannot be a registry.
        """
        # For all attempts together: five slow answers would take five times as long.
        end = time.monotonic() + self.retry.answer
        for failures in itertools.count(1):
            retry_after, is_last = None, failures >= self.retry.tries
            try:
                answer = self.send(
                    method, url, headers=headers, body=body, stream=stream, limit=limit
                )
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
        """Make a request once; see `request`. The body may be a stream of blocks."""
        pool = self._pool(url, limit)
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
                return Response(url, response.status, response.headers, stream=response)
            # Also of an error: its text is in messages, and a connection that was not read to its
            # end cannot be used again.
            content = b"".join(_chunks(response, url, self.retry.answer))
        except exceptions.HTTPError as error:
            raise _explained(error, url) from None
        response.release_conn()
        return Response(url, response.status, response.headers, content)

    def _pool(self, url: str, limit: Zone | None) -> urllib3.PoolManager:
        """The connections for a URL; refuses what is none, or lacks TLS."""
        host = host_of(url)
        scheme = url.partition(":")[0].lower()
        if scheme not in {"http", "https"} or not host:
            raise ImageError(f"{redacted(url)!r} is not the URL of a registry")
        if scheme == "http" and not (is_loopback(host) or host in self._plain_http):
            raise ImageError(
                f"{host} would be accessed without TLS, so that anyone could read and change what"
                f" is sent; if you trust the network in between: --plain-http {shlex.quote(host)}"
            )
        proxy = proxy_for(scheme, host)
        if proxy:
            with suppress(ValueError):  # a name, whose address is the proxy's affair
                self._check(host, limit, (urllib3.util.parse_url(url).host or "").strip("[]"))
        # By the limit, too: a connection that was made without it must not serve a request that has
        # one.
        key = (proxy, scheme, host, limit)
        with self._lock:
            return self._pools.get(key) or self._pools.setdefault(key, self._new_pool(*key))

    def _new_pool(
        self, proxy: str, scheme: str, host: str, limit: Zone | None
    ) -> urllib3.PoolManager:
        options: dict[str, Any] = {
            "timeout": urllib3.Timeout(connect=self.retry.connect, read=self.retry.read),
            "maxsize": _POOL_SIZE,
            "ssl_context": _tls_context(host) if scheme == "https" else None,
        }
        try:
            manager = pool_manager(proxy, **options)
        except ValueError as error:
            step = "correct http_proxy and https_proxy, or name the registry in no_proxy"
            raise ImageError(f"{error}; {step}") from None
        # Behind a proxy the peer's address is that of the proxy.
        check = None if proxy else partial(self._check, host, limit)
        # The address is checked on the connection itself: between a look-up of its own and the
        # connection the name could be given another address.
        manager.pool_classes_by_scheme = {
            "http": partial(_HTTPPool, check=check),  # type: ignore[dict-item]  # called alone
            "https": partial(_HTTPSPool, check=check),  # type: ignore[dict-item]
        }
        return manager

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


class _Checked:
    """A connection to an address that is checked before anything is sent."""

    def __init__(
        self, *args: Any, check: Callable[[str], None] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._check = check

    def _new_conn(self) -> socket.socket:
        # Connected, and nothing sent yet, not even TLS's first message.
        connection: socket.socket = super()._new_conn()  # type: ignore[misc]  # of the connection
        try:
            if self._check:
                self._check(connection.getpeername()[0])
        except ImageError:
            connection.close()
            raise
        return connection


class _HTTP(_Checked, urllib3.connection.HTTPConnection):
    pass


class _HTTPS(_Checked, urllib3.connection.HTTPSConnection):
    pass


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HTTP


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HTTPS


def pool_manager(proxy: str, **options: Any) -> urllib3.PoolManager:
    """Connections through a proxy, which may have a login; "": without.

    Raises:
        ValueError: it is no proxy's URL; the message does not show its login.
    """
    if not proxy:
        return urllib3.PoolManager(**options)
    try:
        user = urlsplit(proxy)
        login = f"{user.username}:{user.password or ''}" if user.username else None
        headers = urllib3.make_headers(proxy_basic_auth=login)
        return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
    except (ValueError, exceptions.HTTPError, exceptions.ProxySchemeUnknown):
        raise ValueError(
            "the proxy set in the environment is not http://[USER:PASSWORD@]HOST:PORT:"
            f" {proxy.rpartition('@')[2]!r}"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether a host[:port] is this machine; decided by its name, no address is looked up."""
    # As for docker, registries at localhost and in 127.0.0.0/8 need no TLS.
    name = host.rpartition(":")[0] if ":" in host else host
    try:
        return name == "localhost" or ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False


def host_of(url: str) -> str:
    r"""The host[:port] that urllib3 would connect to; empty if the URL has none.

    Other parsers read `http://one\@two/` differently.
    """
    try:
        return urllib3.util.parse_url(url).netloc or ""
    except (exceptions.HTTPError, ValueError):
        return ""


def proxy_for(scheme: str, host: str) -> str:
    """The proxy for a host from the environment; none for loopback, as other tools do."""
    if is_loopback(host) or urllib.request.proxy_bypass(host.partition(":")[0]):
        return ""
    # Many write the variable without a scheme, as curl accepts it.
    proxy = urllib.request.getproxies().get(scheme, "").strip()
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def _cert_folders(host: str) -> list[Path]:
    """The folders for the certificates of a registry that exist and can be read."""
    folders = [*map(Path, _CERTIFICATES), *(home() / folder for folder in _HOME_CERTIFICATES)]
    # Path.is_dir() raises errors: of /etc/docker, which may be for root alone, and of long names.
    return [path for folder in folders if os.path.isdir(path := folder / host)]  # noqa: PTH112 - see above


def _tls_context(host: str) -> ssl.SSLContext:
    """The machine's certificates (or SSL_CERT_FILE's), and those kept for this registry."""
    context = ssl.create_default_context()
    # Set from Python 3.13 on: it refuses CAs of companies that docker and containerd accept.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
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


def _chunks(response: BaseHTTPResponse, url: str, limit: float) -> Iterator[bytes]:
    """A body as it arrives, up to a size and a time."""
    end, size = time.monotonic() + limit, 0
    while chunk := response.read1(_CHUNK):
        yield chunk
        size += len(chunk)
        if size > MAX_BODY or time.monotonic() > end:
            response.close()
            how = f"with more than {MAX_BODY} bytes" if size > MAX_BODY else "too slowly"
            raise ImageError(f"{_shown(url)}: responds {how}; is it the address of a registry?")


def _shown(url: str) -> str:
    """A URL without its login and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{host_of(url)}{parts.path}"


def _explained(error: exceptions.HTTPError, url: str) -> Exception:
    """The error for a failed connection: TransportError if a retry may help, else ImageError."""
    host = host_of(url)
    text = str(error)
    # The reason is in the text alone, since urllib3 wraps the error of ssl.
    if "CERTIFICATE_VERIFY_FAILED" in text:
        why = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0]
        return ImageError(
            f"{host}: its certificate is not trusted: {why or text}; put the certificate of its CA"
            f" into ~/.docker/certs.d/{host}/ca.crt, or set SSL_CERT_FILE to a bundle"
        )
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER_FAILURE" in text:
        return ImageError(
            f"{host} does not use TLS; if you trust the network in between: --plain-http"
            f" {shlex.quote(host)}"
        )
    if isinstance(error, exceptions.LocationValueError):
        return ImageError(f"{_shown(url)!r} is not the URL of a registry")
    # The most specific class counts: in urllib3 a refused connection is a kind of timeout.
    kind = next((kind for kind in type(error).__mro__ if kind in _REASONS), None)
    reason = _REASONS[kind] if kind else f"the connection broke ({type(error).__name__})"
    if kind is exceptions.NewConnectionError:
        reason = text.rpartition(": ")[2].rpartition("] ")[2] or reason  # the system's own message
    return TransportError(f"{host}: {reason}")
