"""Transfers of several blobs at a time.

The threads are daemons: those of concurrent.futures' executors would keep the interpreter from
exiting while a registry does not answer.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import ImageError
from k8sjob.image.registry.blobs import RemoteContent, Sent, in_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8sjob.image.registry.blobs import Content
    from k8sjob.image.registry.manifest import Base
    from k8sjob.image.registry.oci_layout import Layout
    from k8sjob.image.registry.reference import Reference
    from k8sjob.image.registry.repository import Repository

_WIDTH: Final = 6
"""Blobs that are transferred at the same time; each takes some hundred kilobytes of memory."""


def start(function: Callable[[], Any]) -> Future[Any]:
    """Run a function in another thread."""
    future: Future[Any] = Future()
    threading.Thread(target=_run, args=(future, function), daemon=True).start()
    return future


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)


def run_parallel(functions: Sequence[Callable[[], Any]], width: int) -> list[Any]:
    """Call functions in at most `width` threads, the first ones first; their results, in order.

    Raises:
        The first failure; functions that have not started by then never do.
    """
    tasks = [(Future[Any](), function) for function in functions]
    waiting = deque(tasks)

    def work() -> None:
        with suppress(IndexError):
            while True:
                _run(*waiting.popleft())

    for _ in range(min(width, len(tasks))):
        threading.Thread(target=work, daemon=True).start()
    done, pending = wait([future for future, _ in tasks], return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    for future in done:
        future.result()  # raises the failure
    return [future.result() for future, _ in tasks]


@dataclass(frozen=True, slots=True)
class Blob:
    """A part of an image.

    Attributes:
        digest: its name.
        size: bytes.
        sent: how it came to the repository.
    """

    digest: str
    size: int
    sent: Sent


class Transfer:
    """The transfer of an image's blobs to a repository, or to a folder."""

    def __init__(
        self,
        target: Repository | Layout,
        below: Repository,
        progress: Callable[[int, int], object],
        *,
        dry_run: bool,
    ) -> None:
        self._target, self._below = target, below
        self._dry_run = dry_run
        self._progress = progress
        self._sent, self._total = 0, 0
        self._is_over = False
        self._lock = threading.Lock()

    def run(self, base: Base, layers: Sequence[Content], config: bytes) -> tuple[Blob, ...]:
        """Bring what is missing of a base, the layers on it, and the config of both together.

        Returns:
            The parts in the manifest's order, the config last.
        """
        client, reference = self._below.client, self._below.reference
        mount = reference if client is self._target.client else None
        parts: list[tuple[Content, Reference | None]] = [
            (RemoteContent(client, reference, descriptor), mount)
            for descriptor in dict.fromkeys(base.manifest.layers)
            if not descriptor.elsewhere
        ]
        parts += [(layer, None) for layer in layers]
        parts.append((in_memory(config), None))
        try:
            work = [lambda part=part: self._bring(*part) for part in parts]
            return tuple(run_parallel(work, _WIDTH))
        finally:
            self._is_over = True  # threads that are still at work end with their next block

    def _bring(self, content: Content, mount: Reference | None) -> Blob:
        if self._target.holds(content):
            return Blob(content.digest, content.size, Sent.THERE)
        if self._dry_run:
            return Blob(content.digest, content.size, Sent.MISSING)
        self._expect(content.size)
        sent = self._target.bring(content, self._note, mount)
        if sent is Sent.MOUNTED:
            self._expect(-content.size)
        return Blob(content.digest, content.size, sent)

    def _expect(self, size: int) -> None:
        with self._lock:
            self._total += size

    def _note(self, size: int) -> None:
        with self._lock:
            if self._is_over:
                raise ImageError("stopped, since another part has failed")
            self._sent += size
            self._progress(self._sent, self._total)
