"""The progress of a session in the status of its TrainJob, which Kubeflow Trainer writes.

Its controller names a server to the containers where its feature gate TrainJobStatus is on (alpha,
off by default). One thread posts there; training neither waits for it nor fails with it.

Source: trainer v2.3.0, pkg/statusserver and pkg/runtime/framework/plugins/trainjobstatus.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from datetime import UTC, datetime
from http.client import responses
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.errors import first_line
from k8sjob.runtime.base.event_lines import log_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.runtime.base.config import StatusServer

_PAUSE: Final = 60.0  # seconds between two tries to reach the server, at most
_MAX_SHOWN: Final = 200  # characters of an error, which may quote the server
_MAX_TEXT, _MAX_METRICS, _MAX_SECONDS = 64, 256, 2**31 - 1  # of the fields of TrainerStatus


class TrainerStatus:
    """`status.trainerStatus` of the TrainJob that this process belongs to, and its thread."""

    def __init__(self, server: StatusServer) -> None:
        """Start the thread, which waits for the first numbers."""
        self._server = server
        self._progress: Mapping[str, Any] | None = None
        self._metrics: dict[str, float] = {}
        self._end, self._down = "", False  # how the session ended; whether the last post failed
        self._news, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer-status", daemon=True)
        self._thread.start()

    def add(self, metrics: Mapping[str, float], progress: Mapping[str, Any] | None) -> None:
        """Note the newest numbers, and the data of an event of progress, without waiting."""
        numbers = {name[:_MAX_TEXT]: number for name, number in metrics.items() if name}
        # Capped here, since a script may give each step's a name of its own.
        self._metrics = dict(islice({**self._metrics, **numbers}.items(), _MAX_METRICS))
        self._progress = progress or self._progress
        self._news.set()

    def close(self, state: str, deadline: float) -> None:
        """Post the end (finished, failed, stopped), by `deadline` of the monotonic clock."""
        # A server that is down may be so for hours: one more try.
        patience = TIMEOUTS.join if self._down else TIMEOUTS.connect
        deadline = min(deadline, time.monotonic() + patience)
        self._end = state
        self._ending.set()
        self._news.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        pause, ended, logged = TIMEOUTS.track_every, False, False
        while not ended:
            self._news.wait()
            self._news.clear()
            ended = self._ending.is_set()  # asked first: what comes during a post needs another
            trouble = self._post()
            if trouble and not logged:
                log_line(f"{self._server.url} did not accept the progress: {trouble}")
            self._down, logged = bool(trouble), logged or bool(trouble)
            pause = min(2 * pause, _PAUSE) if trouble else TIMEOUTS.track_every
            self._ending.wait(pause)

    def _post(self) -> str:
        """Send the status; returns what went wrong."""
        # http.client uses no proxy and follows no redirect: the token leaves for this server alone.
        try:
            context = ssl.create_default_context(cafile=self._server.ca_file)
            # Python 3.13 refuses authorities without key usage, which Go takes, and a cluster has.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            # The kubelet replaces it every hour. In one word, since an error about a header with a
            # line break would show it.
            token = "".join(Path(self._server.token_file).read_text().split())
            url = urlsplit(self._server.url)
            connection = http.client.HTTPSConnection(
                url.hostname or "", url.port, timeout=TIMEOUTS.connect, context=context
            )
            try:
                headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
                body = json.dumps({"trainerStatus": self._status()})
                connection.request("POST", url.path, body, headers)
                status = connection.getresponse().status  # its text may be of any length
                return "" if status == 200 else f"HTTP {status} {responses.get(status, '')}"
            finally:
                connection.close()
        except (OSError, ValueError, ArithmeticError, http.client.HTTPException) as error:
            return first_line(error)[:_MAX_SHOWN]

    def _status(self) -> dict[str, Any]:
        """The fields of TrainerStatus (pkg/apis/trainer/v1alpha1); each post replaces them all."""
        metrics = [{"name": k, "value": f"{number:.6g}"} for k, number in self._metrics.items()]
        progress = self._progress or {}
        status: dict[str, Any] = {
            "lastUpdatedTime": f"{datetime.now(UTC):%FT%TZ}",
            "metrics": metrics,
        }
        if self._end == "finished":
            return {**status, "progressPercentage": 100, "estimatedRemainingSeconds": 0}
        if progress:
            # The steps of an epoch may be unknown, 0.
            share = progress["step"] / progress["steps"] if progress["steps"] else 0.0
            done = (progress["epoch"] + share) / max(1, progress["epochs"])
            status["progressPercentage"] = min(100, int(100 * done))
        if "eta_s" in progress:
            status["estimatedRemainingSeconds"] = min(_MAX_SECONDS, int(progress["eta_s"]))
        return status
