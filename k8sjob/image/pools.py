"""The connections of the wire: to whom in plain, by TLS or through a proxy, and who is trusted."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError, ProxySchemeUnknown

from k8sjob.errors import ImageError, redacted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["Pools", "host_of", "is_loopback"]

_CERTIFICATES: Final = ("/etc/docker/certs.d", "/etc/containers/certs.d")
_HOME_CERTIFICATES: Final = (".docker/certs.d", ".config/containers/certs.d")
HEADERS_LIMIT: Final = 300.0
"""Seconds until the headers of an answer are there; the read timeout is for each of its bytes."""
_SIZE: Final = 16
"""Idle connections to one host that are kept."""


@dataclass(slots=True)
class Pools:
    """Connections to any host, kept open; may be shared by threads.

    Attributes:
        plain_http: registries (host[:port]) beside loopback that may be spoken to without TLS.
        timeout: of each connection.
    """

    plain_http: Collection[str]
    timeout: urllib3.Timeout
    _pools: dict[tuple[str, str], urllib3.PoolManager] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Close the connections that nobody uses; others are closed when they are given back."""
        with self._lock:
            for manager in self._pools.values():
                # Its clear() only forgets them, and an error may still keep hold of one.
                for key in manager.pools.keys():  # noqa: SIM118 - it cannot be iterated over
                    manager.pools[key].close()
            self._pools.clear()

    def find(self, url: str) -> urllib3.PoolManager:
        """The connections for a URL.

        Raises:
            ImageError: it is none, or is to be asked without TLS.
        """
        host = host_of(url)
        scheme = url.partition(":")[0].lower()
        if scheme not in {"http", "https"} or not host:
            raise ImageError(f"{redacted(url)!r} is no URL of a registry")
        if scheme == "http" and not (is_loopback(host) or host in self.plain_http):
            raise ImageError(
                f"{host} is to be asked without TLS, by which anybody could read and change what is"
                f" sent; if you trust the way to it: --plain-http {host}"
            )
        key = (_proxy(scheme, host), host if scheme == "https" else "")
        with self._lock:
            if key not in self._pools:
                self._pools[key] = self._new_pool(*key)
            return self._pools[key]

    def _new_pool(self, proxy: str, host: str) -> urllib3.PoolManager:
        context = _context(host) if host else None
        try:
            manager = self._manager(proxy, context)
        except (ValueError, HTTPError, ProxySchemeUnknown):
            raise ImageError(
                f"the proxy that the environment names is no http://[USER:PASSWORD@]HOST:PORT:"
                f" {proxy.rpartition('@')[2]!r}; correct http_proxy and https_proxy, or name the"
                " registry in no_proxy"
            ) from None
        manager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
        return manager

    def _manager(self, proxy: str, context: ssl.SSLContext | None) -> urllib3.PoolManager:
        if not proxy:
            return urllib3.PoolManager(timeout=self.timeout, maxsize=_SIZE, ssl_context=context)
        user = urlsplit(proxy)
        login = f"{user.username}:{user.password or ''}" if user.username else None
        return urllib3.ProxyManager(
            proxy,
            proxy_headers=urllib3.make_headers(proxy_basic_auth=login),
            timeout=self.timeout,
            maxsize=_SIZE,
            ssl_context=context,
        )


class _Deadline:
    """A connection whose answer must begin in time, however slowly its headers come."""

    sock: socket.socket | None

    def getresponse(self) -> urllib3.HTTPResponse:
        """The answer's status and headers."""
        late = threading.Event()
        timer = threading.Timer(HEADERS_LIMIT, self._end, [late])
        timer.daemon = True
        timer.start()
        answer: urllib3.HTTPResponse | None = None
        try:
            answer = super().getresponse()  # type: ignore[misc]  # of the connection
        except (OSError, http.client.HTTPException):
            if not late.is_set():
                raise
        finally:
            timer.cancel()
        if answer is None or late.is_set():  # http.client takes cut headers for whole ones
            if answer is not None:
                answer.close()
            raise TimeoutError
        return answer

    def _end(self, late: threading.Event) -> None:
        late.set()
        with suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]  # see suppress


class _HTTP(_Deadline, urllib3.connection.HTTPConnection):  # type: ignore[misc]  # the same form
    pass


class _HTTPS(_Deadline, urllib3.connection.HTTPSConnection):  # type: ignore[misc]  # see above
    pass


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HTTP


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HTTPS


def is_loopback(host: str) -> bool:
    """Whether a host[:port] is this machine, without asking anybody for its address."""
    name = host.rpartition(":")[0] if ":" in host else host
    try:
        return name == "localhost" or ipaddress.IPv4Address(name).is_loopback
    except ValueError:
        return False


def host_of(url: str) -> str:
    r"""The host[:port] that a request to the URL goes to, as the HTTP library reads it.

    Other parsers read `http://one\@two/` in another way. Empty where the URL has none.
    """
    try:
        return urllib3.util.parse_url(url).netloc or ""
    except (HTTPError, ValueError):
        return ""


def _proxy(scheme: str, host: str) -> str:
    """The proxy for a host as the environment names it; none for loopback, as other tools do."""
    if is_loopback(host) or urllib.request.proxy_bypass(host.partition(":")[0]):
        return ""
    proxy = urllib.request.getproxies().get(scheme, "").strip()
    return proxy if "://" in proxy or not proxy else f"http://{proxy}"


def _context(host: str) -> ssl.SSLContext:
    """The machine's certificates (or SSL_CERT_FILE's), and those kept for this registry."""
    context = ssl.create_default_context()
    for folder in _certificate_folders(host):
        for file in sorted(folder.glob("*")):
            try:
                if file.suffix == ".crt":
                    context.load_verify_locations(file)
                elif file.suffix == ".cert":
                    context.load_cert_chain(file, file.with_suffix(".key"))
            except (OSError, ssl.SSLError) as error:
                raise ImageError(
                    f"{file}: not a certificate that can be used: {error.strerror or error}; it is"
                    f" read for {host}: replace it, or take it away"
                ) from None
    return context


def _certificate_folders(host: str) -> Iterator[Path]:
    for folder in _CERTIFICATES:
        yield Path(folder) / host
    for folder in _HOME_CERTIFICATES:
        with suppress(RuntimeError):  # users of containers may have none
            yield Path.home() / folder / host
