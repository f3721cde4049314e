"""The server of the page: who may ask, what is answered, and the streams of events.

It listens only on the loopback interface, where other users of the machine and any page in the
browser can reach it, too. So every request needs the token, which a page of another origin cannot
have; a request that names another host (DNS rebinding) or comes from another origin is refused.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import uvicorn
from anyio import CancelScope, CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.h11_impl import H11Protocol

from k8sjob.errors import BackendError, JobNotFound, K8sJobError
from k8sjob.observe.watch import watch
from k8sjob.sanitize import safe_text
from k8sjob.ui.details import (
    ACTIONS,
    PARTS,
    JobNews,
    act,
    compared,
    output,
    output_text,
    part,
    plain,
)
from k8sjob.ui.rows import Rows
from k8sjob.view.follow import batches

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator
    from types import FrameType

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from k8sjob.ui.details import Connect
    from k8sjob.ui.jobs import JobEntry, Jobs

    _Stream = Generator[str, None, None]

HOST: Final = "127.0.0.1"
_HOSTS: Final = frozenset({HOST, "localhost", "::1"})
_STATIC: Final = Path(__file__).with_name("static")
_STREAMS: Final = 64
"""Streams that are open at a time; a browser opens six at most."""
_CONNECTIONS: Final = 128
"""Connections that are open at a time; more than the streams, so that a page always has some."""
_ACCEPTED: Final = 32
"""Connections that are accepted before the others are looked at; with those above, they need fewer
file descriptors than the smallest usual limit of a process, 256."""
_BACKLOG: Final = 2048
"""Connections that wait in the kernel."""
_MOST_COMPARED: Final = 10
_MOST_ROWS: Final = 64
_BEAT_SECONDS: Final = 10.0
"""A stream without events sends a comment so often, which notices a reader that is gone."""
_LIST_SECONDS: Final = 1.0
"""Seconds between checks for changes in the list."""
_UNREAD_SECONDS: Final = 0.05
"""The same, before its first jobs are there."""
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class RequestGuard:
    """Lets through what the page itself asks, and sets the headers of every answer.

    Args:
        app: what answers.
        token: what a request below /api/ must carry.
        read_only: refuse requests that change something.
    """

    def __init__(self, app: ASGIApp, token: str, *, read_only: bool) -> None:
        self._app, self._token, self._read_only = app, token, read_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        code, why = self._refusal(scope)
        app = _error(code, why) if code else self._app
        await app(scope, receive, answer)

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        headers, method = Headers(scope=scope), scope["method"]
        host = headers.get("host", "")
        if _hostname(host) not in _HOSTS:
            return 403, f"this page is for 127.0.0.1 and localhost, not for {host!r}"
        same_origin = headers.get("origin", f"http://{host}") == f"http://{host}"
        followed = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
        site = headers.get("sec-fetch-site", "none")
        if not same_origin or not (followed or site in {"same-origin", "none"}):
            return 403, "requests from other pages are refused"
        if method not in {"GET", "HEAD", "POST"}:
            return 405, f"{method} is unknown"
        if scope["path"].startswith("/api/"):
            token = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return 401, "the token is missing; open the address that `k8sjob ui` printed"
            scope["auth"] = "token"  # see _Connection.is_in_use
        if method == "POST" and self._read_only:
            return 403, "`k8sjob ui --read-only` changes nothing"
        return 0, ""


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Page:
    """What the page asks for.

    Args:
        jobs: all jobs.
        connect: the cluster in a namespace, where jobs are submitted again.
        read_only: whether nothing may be changed.
    """

    def __init__(self, jobs: Jobs, connect: Connect, *, read_only: bool) -> None:
        self._jobs, self._connect, self._read_only = jobs, connect, read_only
        self._rows = Rows(jobs)
        self._streams = CapacityLimiter(_STREAMS)

    def app(self, token: str) -> ASGIApp:
        """The application."""

        @asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            self._jobs.start()
            yield
            self.close()

        routes = [
            Route("/", _index),
            Route("/api/events", self.list_events),
            Route("/api/rows", self.rows),
            Route("/api/compare", self.compare),
            Route("/api/jobs/{key}/events", self.job_events),
            Route("/api/jobs/{key}/output", self.output),
            Route("/api/jobs/{key}/output.txt", self.output_text),
            Route("/api/jobs/{key}/{part}", self.part),
            Route("/api/jobs/{key}/{action}", self.act, methods=["POST"]),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ]
        app = Starlette(routes=routes, lifespan=lifespan)
        return RequestGuard(app, token, read_only=self._read_only)

    def close(self) -> None:
        """End the streams, and stop to read the jobs."""
        self._jobs.close()

    async def list_events(self, _request: Request) -> Response:
        """The list, and what changes about it, as server-sent events."""
        return self._stream(self._list())

    async def rows(self, request: Request) -> Response:
        """What rows of the list say beyond the jobs' objects."""
        keys = request.query_params.getlist("job")[:_MOST_ROWS]
        return await _answer(lambda: plain(self._rows.of(keys)))

    async def job_events(self, request: Request) -> Response:
        """Everything that happens to a job, as server-sent events."""
        entry = self._jobs.find(request.path_params["key"])
        return self._stream(_events(entry, self._jobs.closed)) if entry else _gone()

    async def part(self, request: Request) -> Response:
        """A part of a job."""
        name = request.path_params["part"]
        if name not in PARTS:
            return _error(404, f"{name!r} is not a part of a job")
        return await self._of_job(request, lambda entry: self._part(entry, name))

    def _part(self, entry: JobEntry, name: str) -> Any:
        content = part(entry, name)
        if name == "status" and self._read_only:
            content["can"] = []
        return content

    async def output(self, request: Request) -> Response:
        """The last lines of the output in which words occur."""
        return await self._of_job(request, lambda entry: output(entry, request.query_params))

    async def output_text(self, request: Request) -> Response:
        """All of them, as text."""
        entry = self._jobs.find(request.path_params["key"])
        if not entry:
            return _gone()
        return self._stream(output_text(entry, request.query_params), "text/plain")

    async def act(self, request: Request) -> Response:
        """Change a job."""
        action = request.path_params["action"]
        if action not in ACTIONS:
            return _error(404, f"{action!r} is not an action")

        def answer(entry: JobEntry) -> dict[str, str]:
            done, key = act(entry, action, self._connect)
            if key:  # the page shows it next
                self._jobs.await_job(key)
            return {"done": done, "key": key}

        return await self._of_job(request, answer)

    async def compare(self, request: Request) -> Response:
        """What differs between jobs."""
        keys = request.query_params.getlist("job")[:_MOST_COMPARED]
        entries = [entry for key in keys if (entry := self._jobs.find(key))]
        if len(entries) < 2:
            return _error(404, "fewer than two of these jobs exist")
        return await _answer(lambda: compared(entries))

    async def _of_job(self, request: Request, answer_of: Callable[[JobEntry], Any]) -> Response:
        entry = self._jobs.find(request.path_params["key"])
        return await _answer(lambda: answer_of(entry)) if entry else _gone()

    def _list(self) -> _Stream:
        versions: dict[str, int] = {}
        places: object = None
        while not self._jobs.closed.is_set():
            news = self._jobs.news(versions)
            now = news["problems"], news["unread"]
            if news["jobs"] or news["gone"] or now != places:
                places = now
                yield _encoded("jobs", plain(news))
            else:
                yield ":\n\n"
            self._jobs.closed.wait(_UNREAD_SECONDS if news["unread"] else _LIST_SECONDS)

    def _stream(self, lines: _Stream, media_type: str = "text/event-stream") -> Response:
        # Each open stream occupies a thread while it waits for events; one thread stays free to
        # close the others.
        if self._streams.borrowed_tokens >= _STREAMS - 1:
            return _error(503, "too many pages are open; close some")
        return StreamingResponse(_in_thread(lines, self._streams), media_type=media_type)


def _events(entry: JobEntry, closed: threading.Event) -> _Stream:
    """What is new about a job, see JobNews, until it has ended or the server closes."""
    stop, sent_at, news = threading.Event(), time.monotonic(), JobNews()
    try:
        for batch in batches(watch(entry.backend, entry.ref, stop=stop)):
            if closed.is_set():
                return
            if batch:
                yield _encoded("news", plain(news.after(batch)))
            elif time.monotonic() - sent_at > _BEAT_SECONDS:
                yield ":\n\n"
            else:  # an empty batch comes ten times a second
                continue
            sent_at = time.monotonic()
    except K8sJobError as error:
        yield _encoded("problem", {"message": safe_text(str(error))})
    finally:
        stop.set()
    yield _encoded("end", {})


async def _in_thread(lines: _Stream, limiter: CapacityLimiter) -> AsyncIterator[str]:
    """The items of a blocking generator, which is closed when the reader goes."""
    try:
        while (line := await to_thread.run_sync(next, lines, None, limiter=limiter)) is not None:
            yield line
    finally:
        with CancelScope(shield=True):
            await to_thread.run_sync(lines.close, limiter=limiter)


def _encoded(name: str, data: object) -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


async def _index(_request: Request) -> Response:
    return FileResponse(_STATIC / "index.html")


async def _answer(answer_of: Callable[[], Any]) -> Response:
    try:
        return JSONResponse(await run_in_threadpool(answer_of))
    except K8sJobError as error:
        return _error(404 if isinstance(error, JobNotFound) else 502, safe_text(str(error)))


def _gone() -> Response:
    return _error(404, "this job no longer exists")


def _error(code: int, why: str) -> Response:
    return JSONResponse({"error": why}, code)


def listen(port: int) -> socket.socket:
    """A socket on the loopback interface.

    Raises:
        BackendError: the port is taken.
    """
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise BackendError(
            f"port {port} of {HOST} cannot be used: {error.strerror}; choose another with --port,"
            " or leave it out for a free one"
        ) from error


class _Connection(H11Protocol):
    """A connection to the page, which is closed where it asks nothing and there are too many.

    uvicorn alone waits for ever for a first request, and for one that comes byte by byte.
    """

    idle_since: float
    """The time of its loop at which it was opened, or its last answer ended."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = self.loop.time()
        peers = [peer for peer in self.connections if not peer.transport.is_closing()]
        unused = [peer for peer in peers if isinstance(peer, _Connection) and not peer.is_in_use]
        if len(peers) > _CONNECTIONS:
            min(unused, key=lambda peer: peer.idle_since).transport.abort()

    @property
    def is_in_use(self) -> bool:
        """Whether an answer is being made or read for somebody with the token.

        Anybody may ask for the page's own files, or without the token, and not read the answers.
        """
        is_answered = getattr(self.cycle, "response_complete", True)  # None before the first
        is_read = is_answered and not self.transport.get_write_buffer_size()
        return not is_read and "auth" in self.scope

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since = self.loop.time()


class Server(uvicorn.Server):
    """Answers requests until an interrupt comes: `Server(page, token).run(sockets=[listen(0)])`.

    Its streams end with it; without that uvicorn would wait for them, and then report each as an
    error.
    """

    def __init__(self, page: Page, token: str) -> None:
        super().__init__(
            uvicorn.Config(
                page.app(token),
                http=_Connection,
                ws="none",
                backlog=_ACCEPTED,  # asyncio accepts so many at once
                log_level="error",  # its warnings are about requests, which anybody can make
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=3,
            )
        )
        self._page = page

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        asyncio.get_running_loop().set_exception_handler(_report)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by a signal."""
        self._page.close()
        # Requests that are cut off now would each be reported with a traceback.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        super().handle_exit(sig, frame)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error of the event loop, unless it is about a connection.

    Such are clients that go away. Where no file descriptor is free, asyncio writes a traceback for
    each of the connections that wait, again and again.
    """
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)
