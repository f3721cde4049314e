"""The transport by kubectl: `get --raw` and its like, one process per request.

Every way to log in and every proxy that kubectl knows works. kubectl prints an answer or, for
people, an error, which is parsed here into what the server had answered.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import signal
import subprocess
import tempfile
import time
import weakref
from contextlib import contextmanager, suppress
from functools import cached_property
from http import HTTPStatus
from typing import IO, TYPE_CHECKING, Final

from k8sjob.environment import variables
from k8sjob.errors import BackendError, redacted
from k8sjob.kube.api_resources import ResourcePath, with_query
from k8sjob.kube.client.credential_plugin import LOGIN_SECONDS
from k8sjob.kube.client.transport import MAX_LINE, ApiError, body_of, lines, parsed_answer, skew_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from threading import Event

    from k8sjob.kube.client.kubeconfig import Access
    from k8sjob.kube.objects import Json

_RAW: Final = {"GET": "get", "POST": "create", "DELETE": "delete"}
_CODES: Final = {status.phrase.replace(" ", ""): status.value for status in HTTPStatus} | {
    "AlreadyExists": 409,
    "Expired": 410,
    "InternalError": 500,
    "Invalid": 422,
    "RequestEntityTooLarge": 413,
    "ServerTimeout": 500,
    "Timeout": 504,
}
"""HTTP statuses by the reason of a Status: kubectl prints only the reason."""
_OF_SERVER: Final = re.compile(
    r"Error from server(?: \((?P<reason>\w+)\))?: (?P<message>.*)", re.DOTALL
)
_INVALID: Final = re.compile(r"The (?P<what>.+?) is invalid(?:: ?(?P<causes>.*))?$", re.DOTALL)
_DATE: Final = re.compile(r"\bDate: (\w{3}, [^\n]*? GMT)")
_LOGGED: Final = re.compile(r"^(?:[EWIF]\d{4} |Warning: )")
_LOGGED_OUT: Final = re.compile(r"must be logged in to the server|Unauthorized")
_PLUGIN: Final = re.compile(r"^[^\n]*getting credentials: (?P<why>[^\n]*)", re.MULTILINE)
_TLS: Final = re.compile(r"x509: (?P<why>.*)")
_UNUSABLE: Final = re.compile(r"unable to (?:read|load) .*|invalid configuration: .*")
_PASSWORD_PROMPT: Final = b"Please enter Username"
"""The prompt that kubectl prints for a person if there are no credentials."""
_ERROR_FRAME: Final = re.compile(
    r'^(?:error: |Unable to connect to the server: |Get "[^"]*": )+| - error from a previous.*'
)
_REFUSED: Final = re.compile(r"The connection to the server \S+ was refused")
_NETWORK: Final = re.compile(
    r"Unable to connect|^Get \"|connect|dial |lookup |\bEOF\b|refused|reset|time(?:d )?out|deadline"
    r"|unreachable|no route|handshake|broken pipe|http2?: |stream error|GOAWAY",
    re.IGNORECASE,
)
"""Failures of the connection; others are kubectl's own."""
_POLL_SECONDS: Final = 0.2
_MOST_OF_ERROR: Final = 1 << 16
"""Characters of an error that are read."""


class KubectlTransport:
    """A cluster by way of the program kubectl; see Transport."""

    def __init__(self, access: Access, program: str = "kubectl") -> None:
        self.context, self.namespace, self.server = access.context, access.namespace, access.server
        self._access = access
        self._argv = [program]
        self._env = variables()
        # Inside a Pod kubectl finds the service account by itself, but only where no context is
        # named.
        if access.files:
            self._argv += ["--context", access.context]
            self._env["KUBECONFIG"] = access.kubeconfig
        self._processes: set[subprocess.Popen[bytes]] = set()
        # Threads that read a stream may be cut off by the end of this program.
        weakref.finalize(self, _end, self._processes)

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
        """One request; see Transport.request. A PATCH is for one object of a namespace."""
        if metadata_only:
            # `get --raw` cannot set the header Accept, by which metadata alone is asked for. For a
            # table the object's contents are not sent either.
            self._run(["get", "--no-headers", *_object_arguments(path)], timeout)
            name = ResourcePath.of(path).name
            return {"kind": "PartialObjectMetadata", "metadata": {"name": name}}
        # `patch` has no --raw.
        if method == "PATCH":
            argv = ["patch", "--type=merge", f"--patch={json.dumps(body)}", "--output=json"]
            argv += _object_arguments(path)
            body = None
        else:
            argv = [_RAW[method], "--raw", with_query(path, query)]
            argv += [] if body is None else ["-f", "-"]
        text = self._run(argv, timeout, body)
        try:
            return parsed_answer(text)
        except ValueError:
            shown = text[:200].decode(errors="replace")
            raise self._unexpected(f"prints no JSON: {shown!r}") from None

    def stream(
        self,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        idle: float = 300.0,
        stop: Event | None = None,
    ) -> Iterator[bytes]:
        """The lines of an answer as they come; see Transport.stream."""
        argv = ["get", "--raw", with_query(path, query)]
        # A file and not a pipe: nobody reads stderr while the stream runs, and a full pipe would
        # stop kubectl.
        with tempfile.TemporaryFile() as stderr, self._process(argv, stderr) as process:
            yield from lines(self._pieces(process, idle, stop))
            if stop and stop.is_set():
                return
            # 0 is no proof of a whole answer: kubectl exits with it where the apiserver has died
            # during a watch. The reader of a watch lists again after any end.
            if process.wait() != 0:
                stderr.seek(0)
                raise self._error(stderr.read(MAX_LINE).decode(errors="replace"))

    @cached_property
    def skew(self) -> float:
        """By the headers of one small answer, which kubectl prints at this verbosity."""
        with suppress(BackendError):
            # /version may be read by every user.
            argv = ["get", "--raw", "/version", "--v=8"]
            printed = self._run(argv, 10.0, log=True).decode(errors="replace")
            if date := _DATE.search(printed):
                return skew_by(date[1])
        return 0.0

    # --- processes --------------------------------------------------------------------------------

    def _run(
        self, argv: Sequence[str], timeout: float, body: Json | None = None, *, log: bool = False
    ) -> bytes:
        """What kubectl prints, or what it writes to its log."""
        # With --request-timeout kubectl does not find a pod's own account any more.
        # A plugin may open a browser and wait for a person.
        timeout += LOGIN_SECONDS if self._access.plugin else 0.0
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
            # A file again: the body cannot block this process while kubectl is still at its login.
            stdin.write(b"" if body is None else json.dumps(body).encode())
            stdin.seek(0)
            with self._process(argv, stderr, stdin) as process:
                try:
                    # The first limit is for silence, the second for the whole answer.
                    printed = body_of(self._pieces(process, timeout, None), timeout)
                    process.wait(timeout)
                except (subprocess.TimeoutExpired, TimeoutError):
                    raise self._access.unreachable("it does not respond in time") from None
            stderr.seek(0)
            logged = stderr.read(MAX_LINE)
        if process.returncode != 0:
            # Without credentials kubectl asks for a name on stdout, reads the end of stdin, and
            # fails.
            if _PASSWORD_PROMPT in printed:
                raise self._access.rejected()
            raise self._error(logged.decode(errors="replace"))
        return logged if log else printed

    @contextmanager
    def _process(
        self, argv: Sequence[str], stderr: IO[bytes], stdin: int | IO[bytes] = subprocess.DEVNULL
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A kubectl that is ended, with all that it has started, when the block is left."""
        try:
            process = subprocess.Popen(
                [*self._argv, *argv],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=self._env,
                start_new_session=True,  # Ctrl-C is for k8sjob, which ends it then
            )
        except OSError as error:
            raise BackendError(
                f"{self._argv[0]} cannot be started ({error.strerror})",
                "install kubectl, or leave out --client=kubectl",
            ) from None
        with process:
            self._processes.add(process)
            try:
                yield process
            finally:
                self._processes.discard(process)
                _kill(process)

    def _pieces(
        self, process: subprocess.Popen[bytes], idle: float, stop: Event | None
    ) -> Iterator[bytes]:
        """The output of the process, until its end or until `stop` is set."""
        if process.stdout is None:  # it is a pipe
            return
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            silent_since = time.monotonic()
            while not (stop and stop.is_set()):
                # Asked for before the output is read: what the process wrote before its end is then
                # in the pipe.
                has_ended = process.poll() is not None
                if selector.select(_POLL_SECONDS):
                    piece = os.read(process.stdout.fileno(), 64 * 1024)
                    if not piece:
                        return
                    silent_since = time.monotonic()
                    yield piece
                # What a plugin leaves in the background, as an agent, may hold the pipe for ever.
                elif has_ended:
                    return
                elif time.monotonic() - silent_since > idle:
                    raise self._access.unreachable("it does not respond in time")

    # --- errors -----------------------------------------------------------------------------------

    def _error(self, stderr: str) -> ApiError:
        """The error that kubectl printed."""
        stderr = stderr[:_MOST_OF_ERROR]
        # kubectl mixes lines of its log (klog) and warnings of the server into its errors.
        text = "\n".join(x for x in stderr.splitlines() if x and not _LOGGED.match(x)).strip()
        text = redacted(text or stderr.strip())
        # kubectl prints a 422 for people, and not as the Status that it got: the causes are read
        # back from its lines.
        if invalid := _INVALID.match(text):
            causes = _causes(invalid["causes"] or "")
            return ApiError(text, code=422, reason="Invalid", detail=text, causes=causes)
        refused = _OF_SERVER.match(text)
        # Where kubectl has an error of the server, it names the reason alone, so the code follows
        # from that.
        if refused and refused["reason"] != "Unauthorized":
            reason, message = refused["reason"] or "", refused["message"].strip()
            return ApiError(message, code=_CODES.get(reason, 500), reason=reason, detail=message)
        if plugin := _PLUGIN.search(text):
            # What the plugin has written on stderr stands before kubectl's own sentence.
            message = " ".join(text[: plugin.start()].split())
            raised = self._access.without_credentials
            return raised(f"{plugin['why']}: {message}" if message else plugin["why"])
        if _LOGGED_OUT.search(text):
            return self._access.rejected()
        return self._before_the_server(text)

    def _before_the_server(self, text: str) -> ApiError:
        """The error of a request that did not reach the server."""
        if tls := _TLS.search(text):
            return self._access.untrusted(tls["why"])
        if unusable := _UNUSABLE.search(text):
            return self._access.unusable(unusable[0])
        if _REFUSED.match(text):
            return self._access.unreachable("Connection refused")
        if text and not _NETWORK.search(text):
            return self._unexpected(f"fails: {text[:400]}")
        return self._access.unreachable(_ERROR_FRAME.sub("", text) or "kubectl gives no reason")

    def _unexpected(self, failure: str) -> ApiError:
        """The error for what kubectl should not do."""
        look = shlex.join([*self._argv, "version"])
        message = redacted(failure)
        return ApiError(
            f"{self._argv[0]} {message}; check it with: {look}", reason="", detail=message
        )


def _end(processes: set[subprocess.Popen[bytes]]) -> None:
    for process in list(processes):
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group: a plugin would outlive it."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _object_arguments(path: str) -> list[str]:
    """The object that a path names, as kubectl's last arguments name it.

    A job may name a Secret "--server=...", and the API accepts some such names: no options follow.
    """
    target = ResourcePath.of(path)
    resource, namespace = target.resource, target.namespace
    if target.group:
        resource += f".{target.version}.{target.group}"
    return [*(["--namespace", namespace] if namespace else []), "--", resource, target.name]


def _causes(text: str) -> list[tuple[str, str]]:
    """`field: what is wrong`, one, or one per line after a star."""
    parts = (line.strip().removeprefix("* ").partition(": ") for line in text.splitlines())
    return [(field, cause) for field, colon, cause in parts if colon]
