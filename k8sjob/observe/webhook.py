"""Messages to a webhook of the shape that Slack, Mattermost and others take, sent once each."""

from __future__ import annotations

import json
import ssl
import threading
from contextlib import suppress
from queue import Full, Queue
from typing import TYPE_CHECKING, Final

from k8sjob.connections import Connections, proxy_for, tls_context
from k8sjob.environment import variables
from k8sjob.errors import K8sJobError, StorageError
from k8sjob.image.registry import http_client

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.record import Records
    from k8sjob.backends.record_storage import StoredRecords

_MOST_WAITING: Final = 1000
"""Messages that wait to be sent; further ones are refused."""
_MOST_CHARACTERS: Final = 3000
"""Of a message: Slack cuts longer ones."""
_MARKUP: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "@\u200b", "]": "]\u200b"}
)
"""Slack's and Mattermost's markup, with which a job could mention people or hide a link."""
_PAUSES: Final = (0, 2, 4, 8, 16, 32, 64, 120)
"""Seconds between the tries to send a message: four minutes."""
_BUSY: Final = frozenset({429, 500, 502, 503, 504})
"""Statuses of a server that may accept the message later."""
_ANSWER_SECONDS: Final = 30.0


class _NotSentError(Exception):
    """A message has not arrived, as the server has refused it."""


class _BusyError(_NotSentError):
    """The server is busy or away, and may take it later."""


class Webhook:
    """Sends messages from a thread of its own, in their order; close() waits for the last one.

    Args:
        url: https, or http on this machine. It is a secret and never shown.
        records: keep a message until it is sent, for a later process.
        failed: called with the reason why a message was not sent, from that thread.

    Raises:
        K8sJobError: it is no such URL.
    """

    def __init__(
        self, url: str, records: Records | StoredRecords, failed: Callable[[str], object]
    ) -> None:
        url = url.strip()
        scheme, _, _ = url.partition(":")
        host = http_client.host_of(url)
        is_here = scheme == "http" and http_client.is_loopback(host)
        if not host or not (scheme == "https" or is_here):
            raise K8sJobError("the webhook's URL must begin with https://, and name a host")
        self._target, self._host = http_client.target_of(url), host
        self._records, self._failed = records, failed
        context = None if is_here else tls_context()
        proxy = proxy_for(url, variables())
        try:
            self._connections = Connections(f"{scheme}://{host}", context, proxy=proxy)
        except ValueError as error:
            raise K8sJobError(f"{error}; correct {scheme}_proxy") from None
        self._waiting: Queue[tuple[str, str] | None] = Queue(_MOST_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="webhook", daemon=True)
        self._thread.start()

    def send(self, name: str, message: str) -> None:
        """Send plain text some time soon, kept by its name; over 3,000 characters it is cut."""
        self._keep(name, message)
        try:
            self._waiting.put_nowait((name, message))
        except Full:
            self._failed(
                f"{_MOST_WAITING} messages wait to be sent to {self._host}; one more is sent at"
                " the next start"
            )

    def close(self, patience: float = 10.0) -> None:
        """Send what waits, for some seconds at most; the rest remains kept."""
        self._closing.set()
        with suppress(Full):
            self._waiting.put_nowait(None)  # wakes the thread, where nothing waits to be sent
        self._thread.join(patience)

    def _send_all(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            if not self._deliver(*waiting):
                return

    def _keep(self, name: str, message: str) -> None:
        with suppress(StorageError, OSError):  # it is then lost if this process ends before
            self._records.keep_message(name, message)

    def _deliver(self, name: str, message: str) -> bool:
        """Send a message or report why not; False: there is no time to wait, and it is kept."""
        for pause in (*_PAUSES, None):
            try:
                # Before the request: a process that ends within it must not send it again.
                self._records.drop_message(name)
                self._send(message[:_MOST_CHARACTERS].translate(_MARKUP))
            except _NotSentError as error:
                if isinstance(error, _BusyError) and pause is not None:
                    self._keep(name, message)
                    if self._closing.wait(pause):
                        return False
                    continue
                self._failed(f"a message was not sent to {self._host}: {error}")
            except Exception as error:  # noqa: BLE001 - no message may keep the others from being sent
                self._failed(f"{self._host} did not respond to a message: {type(error).__name__}")
            break
        return True

    def _send(self, text: str) -> None:
        """Raise _NotSentError where it has not arrived, others where it may have."""
        body, kind = json.dumps({"text": text}).encode(), ("Content-Type", "application/json")
        try:
            self._connections.open()
        except ssl.SSLError:
            raise
        except OSError as error:
            raise _BusyError(type(error).__name__) from None
        answer = self._connections.send("POST", self._target, [kind], body, _ANSWER_SECONDS)
        answer.close()  # its body says nothing, and may have no end
        if answer.status >= 300:
            refused = _BusyError if answer.status in _BUSY else _NotSentError
            raise refused(f"it returned {answer.status}")
