"""The transport in Python: the only module that imports the Python client, and late.

To import the client takes longer than most commands, so only an `auth-provider` of the kubeconfig
is left to it. What is used of it is alike in its releases 35 to 37.
"""

from __future__ import annotations

import base64
import json
import math
import ssl
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob import environment
from k8sjob.connections import Connections, basic, proxy_for, tls_context
from k8sjob.errors import BackendError, install_step
from k8sjob.kube.api_resources import with_query
from k8sjob.kube.client import kubeconfig
from k8sjob.kube.client.transport import ApiError, body_of, lines, parsed_answer, refusal, skew_by
from k8sjob.kube.json_text import parsed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from k8sjob.connections import Answer, Headers
    from k8sjob.kube.client.kubeconfig import Access
    from k8sjob.kube.objects import Json

BUSY_TRIES: Final = 4
"""Attempts at a server that answers with Retry-After."""
MERGE_PATCH: Final = "application/merge-patch+json"
METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
STOP_SECONDS: Final = 0.3
"""How often a stream's `stop` is looked at."""
RENEWAL_SECONDS: Final = 10.0
"""How long before their end credentials are renewed."""


class _Session(NamedTuple):
    """The user's fields, with those of a plugin, and connections, until the credentials expire."""

    user: Mapping[str, Any]
    connections: Connections
    end: float


class PythonTransport:
    """A cluster over http.client; see Transport.

    Raises:
        BackendError: the kubeconfig cannot be used, a plugin returns no credentials, or the
            `kubernetes` package is missing where it is necessary.
    """

    def __init__(self, access: Access) -> None:
        self.context, self.namespace, self.server = access.context, access.namespace, access.server
        self.skew = 0.0
        self._access = access
        self._lock = threading.Lock()
        self._session = self._load()

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
        """One request; see Transport.request."""
        headers = {
            "Accept": METADATA if metadata_only else "application/json",
            "Accept-Encoding": "gzip",  # as kubectl asks; apiservers compress from 128 KiB on
            "Content-Type": MERGE_PATCH if method == "PATCH" else "application/json",
        }
        content = None if body is None else json.dumps(body).encode()
        # A redirect (3xx) is not followed, and counts as a refusal: the credentials are for this
        # server alone.
        answer = self._answer(method, with_query(path, query), headers, content, timeout)
        data = self._body(answer)
        if answer.status >= 300:
            raise self._refused(answer.status, data)
        try:
            return parsed_answer(data)
        except ValueError:
            raise refusal(answer.status, data.decode(errors="replace")) from None

    def stream(
        self,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        idle: float = 300.0,
        stop: threading.Event | None = None,
    ) -> Iterator[bytes]:
        """The lines of an answer as they come; see Transport.stream."""
        answer = self._answer("GET", with_query(path, query), {"Accept": "*/*"}, None, idle)
        with closing(answer), self._network_errors(stop), _ended_by(stop, answer):
            if answer.status >= 300:
                raise self._refused(answer.status, self._body(answer))
            for line in lines(answer.stream()):
                if stop and stop.is_set():
                    return
                yield line

    # --- one answer -------------------------------------------------------------------------------

    def _answer(self, *request: Any) -> Answer:
        """The answer to a request (see _send), repeated after a 401 and as Retry-After says."""
        # A 401 may mean that the credentials have been renewed on disk since they were read.
        renewed, session = False, self._current_session()
        for tries_left in reversed(range(BUSY_TRIES)):
            answer = self._send(session, request)
            if answer.status == 401 and not renewed:
                renewed = True
                answer.close()
                session = self._current_session(refused=session)
                answer = self._send(session, request)
            # 429: the queues of the apiserver (API Priority and Fairness) are full; 500 and 503: it
            # cannot complete the request now (ServerTimeout).
            wait = answer.headers.get("Retry-After", "")
            if not (tries_left and wait.isdecimal() and answer.status in (429, 500, 503)):
                break
            answer.close()
            time.sleep(min(int(wait), 10))
        return answer

    def _current_session(self, refused: _Session | None = None) -> _Session:
        """The session, renewed if it ends, or if it is the one that the server has refused."""
        with self._lock:
            session = self._session
            if session is refused:
                files = self._access.kubeconfig
                with suppress(BackendError):  # it is just being written
                    self._access = kubeconfig.access(self.context, files, self.namespace)
            if session is refused or time.time() > session.end - RENEWAL_SECONDS:
                self._session = self._load()
            return self._session

    def _send(self, session: _Session, request: tuple[Any, ...]) -> Answer:
        """The answer to a request, as Connections.send takes one but for the user's headers."""
        method, target, headers, body, timeout = request
        connections = session.connections
        try:
            credentials = _authorization(session.user)
        except (OSError, ValueError) as error:
            raise self._access.unusable(str(error)) from None
        # Pairs: the header Impersonate-Group is repeated for each group.
        everything = [*headers.items(), *credentials.items(), *self._access.headers]
        self._check(everything)
        send = partial(connections.send, method, target, everything, body, timeout)
        with self._network_errors():
            try:
                answer = send()
            except (ConnectionError, HTTPException):
                # A kept connection that the server closed in this moment. A request that changes
                # something may have been carried out.
                connections.close_idle()
                if method != "GET":
                    raise
                answer = send()
        self.skew = skew_by(answer.headers.get("Date"))
        return answer

    def _check(self, headers: Headers) -> None:
        """Refuse what http.client refuses by an error that repeats the value, even a token."""
        for name, value in headers:
            if not (value.isascii() and value.isprintable()):
                header = "token or password" if name.lower() == "authorization" else name
                whose = f" of {self._access.plugin!r}" if self._access.plugin else ""
                raise self._access.unusable(
                    f"the {header}{whose} has a character that is not allowed in an HTTP header,"
                    " such as a line break"
                )

    def _body(self, answer: Answer) -> bytes:
        # What is left of it would be the next answer of its connection.
        with closing(answer), self._network_errors():
            return body_of(answer.stream())
        raise AssertionError  # not reached: errors are raised

    def _refused(self, status: int, data: bytes) -> ApiError:
        # After the credentials were read again: they are no longer valid.
        if status == 401:
            return self._access.rejected()
        try:
            answer = parsed(data)
        except ValueError:
            answer = None
        return refusal(
            status, answer if isinstance(answer, dict) else data.decode(errors="replace")
        )

    @contextmanager
    def _network_errors(self, stop: threading.Event | None = None) -> Iterator[None]:
        """Errors of the network as ApiErrors; none once `stop` is set."""
        try:
            yield
        except (OSError, HTTPException, ValueError) as error:  # ValueError: of a host's name
            if stop and stop.is_set():
                return
            if isinstance(error, ssl.SSLCertVerificationError):
                raise self._access.untrusted(error.verify_message) from None
            proxy = self._session.connections.proxy
            by_proxy = f", through the proxy {proxy}" if proxy else ""
            raise self._access.unreachable(f"{_why(error)}{by_proxy}") from None

    # --- credentials ------------------------------------------------------------------------------

    def _load(self) -> _Session:
        """A session by the kubeconfig as it was read last; runs its plugin."""
        access, cluster, end = self._access, self._access.cluster, math.inf
        fields: dict[str, str] = {}
        try:
            if access.user.get("exec"):
                from k8sjob.kube.client.credential_plugin import plugin_credentials  # noqa: PLC0415 - tokens need none

                fields, end = plugin_credentials(access)
            elif access.user.get("auth-provider"):
                fields = {"token": _provided_token(access)}
            # As with kubectl, what the kubeconfig itself has goes before what a program returns.
            user = fields | {name: value for name, value in access.user.items() if value}
            context = _tls_context(cluster, user) if access.server.startswith("https:") else None
            proxy = cluster.get("proxy-url") or proxy_for(access.server, environment.variables())
            name = cluster.get("tls-server-name")
            connections = Connections(access.server, context, name, proxy)
            # Never over a connection that anybody can read; kubectl does the same.
            return _Session(user if context else {}, connections, end)
        except (OSError, ValueError) as error:
            raise access.unusable(str(error)) from None


def _provided_token(access: Access) -> str:
    """The token of an `auth-provider`, which the `kubernetes` package renews after its end."""
    try:
        from kubernetes import client, config  # noqa: PLC0415 - 0.3 to 0.6 s
    except ImportError as error:
        raise BackendError(
            f"the Python client of Kubernetes is missing ({error})",
            f"{install_step('cluster')}, or use --client=kubectl",
        ) from None
    settings = client.Configuration()
    try:
        config.load_kube_config(access.kubeconfig, access.context, client_configuration=settings)
        return str(settings.api_key["BearerToken"]).removeprefix("Bearer ")
    except Exception as error:  # noqa: BLE001 - of urllib3, google-auth or oauthlib, too
        raise ValueError(f"its auth-provider gives no token: {error}") from None


def _authorization(user: Mapping[str, Any]) -> dict[str, str]:
    """The header of a token or of a password; none where a certificate names the user."""
    # As with kubectl, a file goes before a token beside it. It is read each time: tokens of service
    # accounts are renewed every hour.
    file = user.get("tokenFile")
    if token := Path(file).read_text(encoding="utf-8").strip() if file else user.get("token"):
        return {"authorization": f"Bearer {token}"}
    if user.get("username") and user.get("password"):
        return {"authorization": basic(f"{user['username']}:{user['password']}")}
    return {}


def _tls_context(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    """The TLS settings of a cluster and a user."""
    context = tls_context(trusts_machine=False)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with ExitStack() as stack:
        if data := cluster.get("certificate-authority-data"):
            # Python's ssl takes no text but ASCII, and comments may have other characters.
            authorities = base64.b64decode(data).decode("ascii", "ignore")
            context.load_verify_locations(cadata=authorities)
        elif file := _file(stack, cluster, "certificate-authority"):
            context.load_verify_locations(file)
        else:
            context.load_default_certs()
        key = _file(stack, user, "client-key")
        if certificate := _file(stack, user, "client-certificate"):
            # With a password, a key that is encrypted is an error; without one, OpenSSL asks for
            # it.
            context.load_cert_chain(certificate, key, password="")
    return context


def _file(stack: ExitStack, fields: Mapping[str, Any], name: str) -> Path | None:
    """The file of a certificate or a key; where the fields have its data, until the stack ends."""
    if data := fields.get(f"{name}-data"):
        from k8sjob.temporary import temporary_folder  # noqa: PLC0415 - tokens need none

        # Python's ssl reads the certificates and keys of users from files alone.
        path = stack.enter_context(temporary_folder("tls")) / name
        path.write_bytes(base64.b64decode(data))
        return path
    file = Path(fields[name]) if fields.get(name) else None
    if file and not file.is_file():
        raise ValueError(f"there is no file {file}")
    return file


@contextmanager
def _ended_by(stop: threading.Event | None, answer: Answer) -> Iterator[None]:
    """While a stream is read: its connection ends when `stop` is set, though it is silent."""
    done = threading.Event()

    def look() -> None:
        while stop and not done.wait(STOP_SECONDS):
            if stop.is_set():
                # The thread of the reader hangs in recv(), which only the end of the connection
                # interrupts.
                with suppress(ValueError, RuntimeError, OSError):  # it ended by itself
                    answer.shutdown()

    if stop:
        threading.Thread(target=look, name="k8sjob-stop", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError) and "timed out" in str(error):
        return "it does not respond in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
