"""The transport in Python: the only module that imports the Python client, and late.

The client gets and renews the credentials of plugins, and finds proxies; only what is alike in its
releases 35 to 37 is used. To import it takes longer than most commands, so
certificates, tokens and passwords that are in the kubeconfig are read without it.
"""

from __future__ import annotations

import base64
import json
import logging
import ssl
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob import environment
from k8sjob.connections import Connections, basic
from k8sjob.errors import BackendError, install_step
from k8sjob.kube.api_resources import with_query
from k8sjob.kube.client import kubeconfig
from k8sjob.kube.client.transport import ApiError, body_of, lines, parsed_answer, refusal, skew_by
from k8sjob.kube.json_text import parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from k8sjob.connections import Answer, Headers
    from k8sjob.kube.client.kubeconfig import Access
    from k8sjob.kube.objects import Json

BUSY_TRIES: Final = 4
"""Attempts at a server that answers with Retry-After."""
MERGE_PATCH: Final = "application/merge-patch+json"
METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
STOP_SECONDS: Final = 0.3
"""How often a stream's `stop` is looked at."""


class PythonTransport:
    """A cluster by way of the `kubernetes` package; see Transport.

    Raises:
        BackendError: the package is missing, or the kubeconfig cannot be used.
    """

    def __init__(self, access: Access) -> None:
        self.context, self.namespace, self.server = access.context, access.namespace, access.server
        self.skew = 0.0
        self._access = access
        self._lock = threading.Lock()
        self._credentials, self._connections = self._load()

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
        # The client reads a token's file, and runs a plugin, when the kubeconfig is loaded. A 401
        # may mean that the credentials have been renewed on disk since.
        renewed, connections = False, self._connections
        for tries_left in reversed(range(BUSY_TRIES)):
            answer = self._send(*request)
            if answer.status == 401 and not renewed:
                renewed = True
                answer.close()
                with self._lock:
                    # Else a request beside this one has read them.
                    if self._connections is connections:
                        files = self._access.kubeconfig
                        with suppress(BackendError):  # it is just being written
                            self._access = kubeconfig.access(self.context, files, self.namespace)
                        self._credentials, self._connections = self._load()
                answer = self._send(*request)
            # 429: the queues of the apiserver (API Priority and Fairness) are full; 500 and 503: it
            # cannot complete the request now (ServerTimeout).
            wait = answer.headers.get("Retry-After", "")
            if not (tries_left and wait.isdecimal() and answer.status in (429, 500, 503)):
                break
            answer.close()
            time.sleep(min(int(wait), 10))
        return answer

    def _send(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
    ) -> Answer:
        with self._lock:
            connections, secure = self._connections, self.server.startswith("https:")
            # Never over a connection that anybody can read; kubectl does the same.
            credentials = self._credentials() if secure else {}
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
            raise self._access.unreachable(_why(error)) from None

    # --- credentials ------------------------------------------------------------------------------

    def _load(self) -> tuple[Callable[[], dict[str, str]], Connections]:
        """What gives the headers that name the user, and the connections."""
        try:
            if _is_plain(self._access):
                headers = _authorization(self._access.user)
                return lambda: headers, _connections(self._access)
            from kubernetes import client, config  # noqa: PLC0415 - 0.3 to 0.6 s
        except (OSError, ValueError) as error:
            raise self._access.unusable(str(error)) from None
        except ImportError as error:
            raise BackendError(
                f"the Python client of Kubernetes is missing ({error})",
                f"{install_step('cluster')}, or use --client=kubectl",
            ) from None
        settings = client.Configuration()
        # The client logs the error of a plugin and continues without credentials, as an anonymous
        # user.
        with _captured_log() as heard:
            try:
                if self.context == kubeconfig.IN_CLUSTER:
                    config.load_incluster_config(client_configuration=settings)
                else:
                    files = self._access.kubeconfig
                    config.load_kube_config(files, self.context, client_configuration=settings)
                # The pool is the same in the client's versions 35, 36 and 37, in which `call_api`,
                # the classes of errors and the answers of logs differ.
                pool = client.ApiClient(settings).rest_client.pool_manager
                options = pool.connection_pool_kw
                connections = Connections(
                    self.server,
                    _tls_context(self.server, options),
                    options.get("server_hostname"),
                    pool.proxy.url if pool.proxy else "",
                )
            except (
                config.ConfigException,
                ImportError,
                OSError,
                ValueError,
                KeyError,
                TypeError,
            ) as error:
                raise self._access.unusable(str(error)) from None
        if self._access.plugin and not settings.api_key and not settings.cert_file:
            raise self._access.without_credentials(" ".join(heard) or "no reason is given")
        return partial(_renewed, settings), connections


def _is_plain(access: Access) -> bool:
    """Whether the kubeconfig itself has all that a connection needs: no plugin, no proxy."""
    programs = access.user.get("exec") or access.user.get("auth-provider")
    urls = {name.lower(): url for name, url in environment.variables().items() if url}
    proxied = access.cluster.get("proxy-url") or urls.keys() & {"http_proxy", "https_proxy"}
    return bool(access.cluster) and not (programs or proxied)


def _authorization(user: Mapping[str, Any]) -> dict[str, str]:
    """The header of a token or of a password; none where a certificate names the user."""
    # As kubectl does: a file, which may be renewed, goes before a token beside it.
    file = user.get("tokenFile")
    if token := Path(file).read_text(encoding="utf-8").strip() if file else user.get("token"):
        return {"authorization": f"Bearer {token}"}
    if user.get("username") and user.get("password"):
        return {"authorization": basic(f"{user['username']}:{user['password']}")}
    return {}


def _connections(access: Access) -> Connections:
    cluster, user = access.cluster, access.user
    trusts_all = cluster.get("insecure-skip-tls-verify")
    options: dict[str, Any] = {"cert_reqs": ssl.CERT_NONE if trusts_all else ssl.CERT_REQUIRED}
    with ExitStack() as stack:
        for option, fields, name in (
            ("ca_certs", cluster, "certificate-authority"),
            ("cert_file", user, "client-certificate"),
            ("key_file", user, "client-key"),
        ):
            data = fields.get(f"{name}-data")
            file = None if data else fields.get(name)
            if data and fields is cluster:
                # Python's ssl takes no text but ASCII, and comments may have other characters.
                options["ca_cert_data"] = base64.b64decode(data).decode("ascii", "ignore")
            elif data:
                from k8sjob.temporary import temporary_folder  # noqa: PLC0415 - tokens need none

                # Python's ssl reads the certificates and keys of users from files alone.
                file = stack.enter_context(temporary_folder("tls")) / name
                file.write_bytes(base64.b64decode(data))
            elif file and not Path(file).is_file():
                raise ValueError(f"there is no file {file}")
            options[option] = file
        context = _tls_context(access.server, options)
    return Connections(access.server, context, cluster.get("tls-server-name"))


def _tls_context(server: str, options: Mapping[str, Any]) -> ssl.SSLContext | None:
    """The TLS settings by the options of a urllib3 pool; None for a server without TLS.

    Certificates are accepted that kubectl accepts.
    """
    if not server.startswith("https:"):
        return None
    # From Python 3.13 on, ssl.create_default_context refuses a CA without a key identifier or a key
    # usage, as some providers' clusters and private CAs have it.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["http/1.1"])
    context.check_hostname = options["cert_reqs"] == ssl.CERT_REQUIRED
    context.verify_mode = options["cert_reqs"]
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the CA may be an intermediate one
    file, data = options.get("ca_certs"), options.get("ca_cert_data")
    if file or data:
        context.load_verify_locations(file, cadata=data)
    else:
        context.load_default_certs()
    if certificate := options.get("cert_file"):
        # With a password, a key that is encrypted is an error; without one, OpenSSL asks for it.
        context.load_cert_chain(certificate, options.get("key_file"), password="")
    return context


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


def _renewed(settings: Any) -> dict[str, str]:
    """The headers that name the user; runs a plugin again whose credentials are about to expire."""
    with _captured_log():  # a plugin that fails shows when the server refuses the old ones
        return {
            header["key"]: header["value"]
            for header in settings.auth_settings().values()
            if header.get("in") == "header" and header.get("value")
        }


@contextmanager
def _captured_log() -> Iterator[list[str]]:
    """The client's log messages about a failing plugin, which it sends to the root logger."""
    messages: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield messages
    finally:
        root.removeHandler(handler)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError) and "timed out" in str(error):
        return "it does not respond in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
