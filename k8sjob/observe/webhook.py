"""Messages to a webhook of the shape that Slack, Mattermost and others take, sent once each."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from queue import Full, Queue
from typing import TYPE_CHECKING, Final

import urllib3
from urllib3.exceptions import MaxRetryError, ResponseError

from k8sjob.errors import K8sJobError
from k8sjob.image.registry.http_client import host_of, is_loopback, pool_manager, proxy_for

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_WAITING: Final = 1000
"""Messages that wait to be sent; further ones are refused."""
_MOST_CHARACTERS: Final = 3000
"""Of a message: Slack cuts longer ones."""
_MARKUP: Final = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "@\u200b", "]": "]\u200b"}
)
"""Slack's and Mattermost's markup, with which a job could mention people or hide a link."""
_RETRY: Final = urllib3.Retry(
    total=None,
    connect=8,
    status=8,
    read=False,
    other=False,
    redirect=False,
    allowed_methods=None,
    status_forcelist=(429, 500, 502, 503, 504),
    respect_retry_after_header=False,  # which may be a day, for all messages
    backoff_factor=1,
)
"""Four minutes of attempts; none where only the answer is missing, as the message may be there."""


class _NotSentError(Exception):
    """A message has certainly not arrived."""


class Webhook:
    """Sends messages from a thread of its own, in their order; close() waits for the last one.

    Args:
        url: https, or http on this machine. It is a secret and never shown.
        failed: called with the reason why a message was not sent, from that thread.

    Raises:
        K8sJobError: it is no such URL.
    """

    def __init__(self, url: str, failed: Callable[[str], object]) -> None:
        url = url.strip()
        scheme, _, _ = url.partition(":")
        host = host_of(url)
        if not host or not (scheme == "https" or (scheme == "http" and is_loopback(host))):
            raise K8sJobError("the webhook's URL must begin with https://, and name a host")
        self._url, self._host, self._failed = url, host, failed
        timeout = urllib3.Timeout(connect=10, read=30)
        try:
            self._pool = pool_manager(proxy_for(scheme, host), timeout=timeout)
        except ValueError as error:
            raise K8sJobError(f"{error}; correct {scheme}_proxy") from None
        self._waiting: Queue[tuple[str, Callable[[], object]] | None] = Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="webhook", daemon=True)
        self._thread.start()

    def send(self, message: str, unsent: Callable[[], object]) -> None:
        """Send plain text some time soon; what is more than 3,000 characters is cut.

        Where it certainly did not arrive, `unsent` is called, from the webhook's thread.
        """
        try:
            self._waiting.put_nowait((message, unsent))
        except Full:
            self._failed(f"{_MOST_WAITING} messages wait to be sent to {self._host}; one is lost")
            unsent()

    def close(self, patience: float = 10.0) -> None:
        """Send what waits, for some seconds at most."""
        with suppress(Full):
            self._waiting.put_nowait(None)
            self._thread.join(patience)

    def _send_all(self) -> None:
        while (one := self._waiting.get()) is not None:
            message, unsent = one
            try:
                self._send(message[:_MOST_CHARACTERS].translate(_MARKUP))
            except _NotSentError as error:
                self._failed(f"a message was not sent to {self._host}: {error}")
                unsent()
            except Exception as error:  # noqa: BLE001 - no message may keep the others from being sent
                self._failed(f"{self._host} gave no answer to a message: {type(error).__name__}")

    def _send(self, text: str) -> None:
        """Raise _NotSentError where the message has not arrived, another error where it may."""
        body, kind = json.dumps({"text": text}).encode(), {"Content-Type": "application/json"}
        try:
            answer = self._pool.request("POST", self._url, body=body, headers=kind, retries=_RETRY)
        except MaxRetryError as error:
            # Its own text has the path of the URL, which is the secret.
            reason = error.reason
            what = str(reason) if isinstance(reason, ResponseError) else type(reason).__name__
            raise _NotSentError(what) from None
        if answer.status >= 300:
            raise _NotSentError(f"it answered {answer.status}")
