"""HTTP to registries: TLS that is always verified, proxies, and patience with what passes.

Plain http is spoken to this machine's loopback, and to hosts that the user has named for it.
"""

from __future__ import annotations

import email.utils
import random
import ssl
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import urllib3
from urllib3 import exceptions

from k8sjob.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from urllib3 import BaseHTTPResponse

__all__ = ["Answer", "Broken", "Patience", "Wire", "is_loopback"]

MAX_ANSWER: Final = 8 << 20
"""Bytes of a manifest, a config or a token at most: registries stop at 4 MiB themselves."""
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers that may be another one a moment later."""
_LONGEST_PAUSE: Final = 60.0
_CERTIFICATES: Final = ("/etc/docker/certs.d", "/etc/containers/certs.d")
_HOME_CERTIFICATES: Final = (".docker/certs.d", ".config/containers/certs.d")


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
    """

    tries: int = 5
    pause: float = 0.2
    connect: float = 10.0
    read: float = 120.0

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
    except ValueError:
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
        requests: how many were made.
    """

    plain_http: Collection[str] = ()
    patience: Patience = field(default_factory=Patience)
    requests: int = 0
    _pools: dict[tuple[str, str], urllib3.PoolManager] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

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
        with self._lock:
            for pool in self._pools.values():
                pool.clear()
            self._pools.clear()

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
        for failures in range(1, self.patience.tries):
            asked = None
            try:
                answer = self.send(method, url, headers=headers, body=body, stream=stream)
                if answer.status not in _PASSING:
                    return answer
                asked = answer.headers.get("Retry-After")
            except Broken:
                pass
            self.patience.wait(failures, asked)
        return self.send(method, url, headers=headers, body=body, stream=stream)

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
        pool = self._pool(url)
        self.requests += 1
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
            content = response.read(MAX_ANSWER + 1)
        except exceptions.HTTPError as error:
            raise _in_words(error, url) from None
        if len(content) > MAX_ANSWER:
            response.close()
            raise ImageError(f"{_place(url)}: answers with more than {MAX_ANSWER} bytes")
        response.release_conn()
        return Answer(url, response.status, response.headers, content)

    def _pool(self, url: str) -> urllib3.PoolManager:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        if parts.scheme not in {"http", "https"} or not host:
            raise ImageError(f"{url!r} is no URL of a registry")
        if parts.scheme == "http" and not (is_loopback(host) or host in self.plain_http):
            raise ImageError(
                f"{host} is to be asked without TLS, by which anybody could read and change what is"
                f" sent; if you trust the way to it: --plain-http {host}"
            )
        key = (_proxy(parts.scheme, host), host if parts.scheme == "https" else "")
        with self._lock:
            if key not in self._pools:
                self._pools[key] = self._new_pool(*key)
            return self._pools[key]

    def _new_pool(self, proxy: str, host: str) -> urllib3.PoolManager:
        context = _context(host) if host else None
        timeout = urllib3.Timeout(connect=self.patience.connect, read=self.patience.read)
        if not proxy:
            return urllib3.PoolManager(timeout=timeout, maxsize=16, ssl_context=context)
        user = urlsplit(proxy)
        login = f"{user.username}:{user.password or ''}" if user.username else None
        return urllib3.ProxyManager(
            proxy,
            proxy_headers=urllib3.make_headers(proxy_basic_auth=login),
            timeout=timeout,
            maxsize=16,
            ssl_context=context,
        )


def is_loopback(host: str) -> bool:
    """Whether a host[:port] is this machine, without asking anybody for its address."""
    name = host.rpartition(":")[0] if ":" in host else host
    parts = name.split(".")
    numbers = len(parts) == 4 and all(part.isdecimal() for part in parts)
    return name == "localhost" or (numbers and parts[0] == "127")


def _proxy(scheme: str, host: str) -> str:
    """The proxy for a host as the environment names it; none for loopback, as other tools do."""
    if is_loopback(host) or urllib.request.proxy_bypass(host.partition(":")[0]):
        return ""
    proxy = urllib.request.getproxies().get(scheme, "")
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
        yield Path.home() / folder / host


def _place(url: str) -> str:
    """A URL without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _in_words(error: exceptions.HTTPError, url: str) -> Exception:
    """What a failure of the connection means: Broken, where another try may help."""
    host = urlsplit(url).netloc.rpartition("@")[2]
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
    words = next((said for kind, said in _KINDS.items() if isinstance(error, kind)), None)
    if words is None and isinstance(error, exceptions.NewConnectionError):
        words = text.rpartition(": ")[2]
    return Broken(f"{host}: {words or f'the connection broke ({type(error).__name__})'}")


_KINDS: Final[dict[type[Exception], str]] = {
    exceptions.ProxyError: "the proxy that the environment names does not lead there",
    exceptions.NameResolutionError: "there is no host of that name",
    exceptions.ConnectTimeoutError: "no connection in time",
    exceptions.ReadTimeoutError: "no answer in time",
}
