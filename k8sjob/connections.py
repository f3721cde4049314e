"""Connections to one server over http.client, kept open for the requests that follow.

Importing urllib3 instead takes longer than a short command may take.
"""

from __future__ import annotations

import base64
import select
import socket
import zlib
from collections import deque
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, IncompleteRead
from typing import TYPE_CHECKING, Final
from urllib.parse import SplitResult, unquote, urlsplit

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Iterator, Mapping

CONNECT_SECONDS: Final = 10.0
"""How long a connection may take until the server counts as unreachable."""
_PIECE: Final = 64 * 1024
"""The most bytes of an answer that are read at once."""
_GZIP: Final = 31
"""The window of zlib's that means a header of gzip."""
Headers = list[tuple[str, str]]
"""Names and values; a name may come several times."""


class Connections:
    """The connections to a server. Safe to use from several threads.

    Args:
        server: its URL, which may have a path.
        context: the TLS settings; None for a server without TLS.
        server_name: the name in its certificate, if that is not the host.
        proxy: the URL of a proxy; empty: none.
        connect: how long a connection may take, in seconds.
        check: called with the address that a new connection leads to, before anything is sent; its
            errors end the connection.

    Attributes:
        proxy: its host and port.

    Raises:
        ValueError: the server's URL has no valid port, or the proxy's is none of http; the message
            does not show its login.
    """

    def __init__(
        self,
        server: str,
        context: ssl.SSLContext | None,
        server_name: str | None = None,
        proxy: str = "",
        *,
        connect: float = CONNECT_SECONDS,
        check: Callable[[str], object] | None = None,
    ) -> None:
        self._idle: deque[HTTPConnection] = deque()
        url = urlsplit(server if "://" in server else f"//{server}")
        through = _url_of_proxy(proxy)
        host, self._path = url.hostname or "", url.path
        port, usual = url.port, 443 if context else 80
        self._peer = host, port or usual
        # An IPv6 address with brackets: http.client of Python 3.11 adds none to a CONNECT.
        name = f"[{host}]" if ":" in host else host
        # Some proxies do not know a Host with the usual port.
        self._host = name if port in {None, usual} else f"{name}:{port}"
        self._tunnel = (name, port or usual) if proxy and context else None
        self._for_proxy: dict[str, str] = {}
        self.proxy = through.netloc.rpartition("@")[2]
        if proxy:
            self._peer = through.hostname or "", through.port or 80
            if through.username is not None:
                pair = unquote(f"{through.username}:{through.password or ''}")
                self._for_proxy["Proxy-Authorization"] = basic(pair)
            if not context:  # without a tunnel the proxy reads the whole URL
                self._path = f"http://{url.netloc}{url.path}"
        self._context, self._server_name = context, server_name or host
        self._connect, self._check, self._is_closed = connect, check, False

    def close_idle(self) -> None:
        """Close the connections that are kept: what ended one may have ended all."""
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    __del__ = close_idle

    def close(self) -> None:
        """Close these, and each of the others when its answer has been read."""
        self._is_closed = True
        self.close_idle()

    def _keep(self, connection: HTTPConnection) -> None:
        self._idle.append(connection)
        if self._is_closed:
            self.close_idle()

    def open(self) -> None:
        """Have a connection ready for the next request; an OSError: nothing has been sent."""
        self._idle.append(self._connection(self._connect))

    def send(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: bytes | Iterable[bytes] | None,
        timeout: float,
    ) -> Answer:
        """The answer to a request, of which the status and the headers have been read.

        Args:
            method: of HTTP.
            target: path and query, encoded.
            headers: all but Host and Content-Length.
            body: None: without one; of blocks the headers have the Content-Length.
            timeout: the longest silence, in seconds.

        Raises:
            OSError: there is no connection, or no answer.
            HTTPException: the answer is not HTTP.
        """
        connection = self._connection(timeout)
        try:
            connection.sock.settimeout(timeout)
            connection.putrequest(
                method, self._path + target, skip_host=True, skip_accept_encoding=True
            )
            connection.putheader("Host", self._host.encode("idna"))
            # The header of a tunnel's proxy went with its CONNECT.
            for name, value in headers if self._context else [*headers, *self._for_proxy.items()]:
                connection.putheader(name, value)
            if isinstance(body, bytes):
                connection.putheader("Content-Length", str(len(body)))
            # A server that refuses a large body may answer and hang up before the body has ended.
            with suppress(BrokenPipeError):
                connection.endheaders(body)
            return Answer(connection, self._keep)
        except BaseException:
            connection.close()
            raise

    def _connection(self, timeout: float) -> HTTPConnection:
        """One that is open: a kept one that the server has not closed, else a new one."""
        with suppress(IndexError):
            while True:
                connection = self._idle.pop()
                # Nothing comes unasked but the end.
                poll = select.poll()
                poll.register(connection.sock, select.POLLIN)
                if not poll.poll(0):
                    return connection
                connection.close()
        seconds = min(timeout, self._connect)
        connection = HTTPConnection(*self._peer, timeout=seconds)
        connection.auto_open = 0  # which would be without TLS
        if self._tunnel:
            connection.set_tunnel(*self._tunnel, self._for_proxy)
        try:
            connection.connect()
            if self._check:
                self._check(connection.sock.getpeername()[0])
            if self._context:
                plain, name = connection.sock, self._server_name
                connection.sock = self._context.wrap_socket(plain, server_hostname=name)
        except BaseException as error:
            connection.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no connection within {seconds:.0f} s") from None
            raise
        return connection


class Answer:
    """An answer, which is read once and then closed.

    Attributes:
        status: of HTTP.
        headers: its headers.
    """

    def __init__(
        self, connection: HTTPConnection, keep: Callable[[HTTPConnection], object]
    ) -> None:
        self._connection, self._keep = connection, keep
        # Where an answer ends with its connection, http.client gives the socket to the response.
        self._socket = connection.sock
        self._kept = False
        self._response = connection.getresponse()
        self.status, self.headers = self._response.status, self._response.headers
        # http.client skips a 100 alone. What follows another would be the next request's answer.
        if self.status < 200:
            raise HTTPException(f"the server returned {self.status}, which announces an answer")

    def stream(self, *, unpacks: bool = True) -> Iterator[bytes]:
        """The content in pieces, as they come; the connection is kept at their end.

        Args:
            unpacks: whether content that was compressed by gzip is unpacked.

        Raises:
            OSError: the connection breaks, or is silent for too long.
            HTTPException: the content is not whole.
        """
        pieces = self._pieces()
        packed = self.headers.get("Content-Encoding") == "gzip"
        yield from _unpacked(pieces) if packed and unpacks else pieces
        self._kept = self._response.isclosed() and not self._response.will_close
        if self._kept:
            self._keep(self._connection)

    def _pieces(self) -> Iterator[bytes]:
        response, remaining = self._response, self._response.length
        # read() would wait until it has so many bytes; not every read1() counts them.
        while remaining != 0 and (piece := response.read1(min(_PIECE, remaining or _PIECE))):
            remaining = remaining and remaining - len(piece)
            yield piece
        if remaining:
            raise IncompleteRead(b"", remaining)
        response.close()

    def shutdown(self) -> None:
        """End the content while another thread waits for it."""
        self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the connection, unless it is kept: another request may be using it."""
        if not self._kept:
            self._response.close()
            self._connection.close()


def _unpacked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """What was compressed by gzip, a little at a time, however small it was."""
    unpacking = zlib.decompressobj(_GZIP)
    try:
        for piece in pieces:
            yield unpacking.decompress(piece, _PIECE)
            while unpacking.unconsumed_tail:
                yield unpacking.decompress(unpacking.unconsumed_tail, _PIECE)
        yield unpacking.flush()
    except zlib.error as error:
        raise IncompleteRead(b"") from error
    if not unpacking.eof:
        raise IncompleteRead(b"")


def proxy_for(server: str, variables: Mapping[str, str]) -> str:
    """The proxy for a server by HTTPS_PROXY or HTTP_PROXY, and NO_PROXY; empty: none.

    Source: golang.org/x/net, http/httpproxy, as in kubectl.
    """
    url = urlsplit(server)
    names = f"{url.scheme}_PROXY".upper(), "NO_PROXY"
    proxy, excepted = (variables.get(name) or variables.get(name.lower(), "") for name in names)
    port = url.port or (443 if url.scheme == "https" else 80)
    host, entries = url.hostname or "", f"127.0.0.0/8,::1,{excepted.lower()}".split(",")
    is_direct = any(_is_excepted(host, port, entry.strip()) for entry in entries)
    if not proxy or is_direct or host == "localhost":
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_excepted(host: str, port: int, entry: str) -> bool:
    """Whether an entry of NO_PROXY, as `10.0.0.0/8`, `.local:6443` or `*`, stands for the host."""
    from ipaddress import ip_address, ip_network  # noqa: PLC0415 - few have a proxy

    with suppress(ValueError):  # one of them is a name, or the entry has a port
        return ip_address(host) in ip_network(entry, strict=False)
    with suppress(ValueError):  # as with kubectl, what is no host counts for nothing
        pattern = urlsplit(f"//{entry}")
        name = (pattern.hostname or "").removeprefix("*")
        ending = host if name.startswith(".") else f".{host}"
        is_part = ending.endswith(f".{name.removeprefix('.')}") and name != ""
        return entry == "*" or (is_part and pattern.port in {None, port})
    return False


def _url_of_proxy(proxy: str) -> SplitResult:
    with suppress(ValueError):
        url = urlsplit(proxy)
        if not proxy or (url.scheme == "http" and url.hostname and url.port != 0):
            return url
    raise ValueError(
        f"the proxy {proxy.rpartition('@')[2]!r} is not http://[USER:PASSWORD@]HOST:PORT; only"
        " --client=kubectl takes others"
    )


def tls_context(*, trusts_machine: bool = True) -> ssl.SSLContext:
    """TLS settings that accept what kubectl and docker accept, with the machine's CAs or none."""
    import ssl  # noqa: PLC0415 - servers without TLS need none

    # From Python 3.13 on, ssl.create_default_context refuses a CA without a key identifier or a key
    # usage, as some clusters and companies have it.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["http/1.1"])
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the CA may be an intermediate one
    if trusts_machine:
        context.load_default_certs()
    return context


def basic(pair: str) -> str:
    """The value of a header for a user and a password, with a colon between them."""
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
