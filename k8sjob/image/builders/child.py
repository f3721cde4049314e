"""A builder's process: its words line by line, its end, and ours."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError, redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["Failed", "answers", "run"]

_LAST: Final = 12
"""Lines that an error repeats: pip's reason and the builder's own."""
_LONGEST: Final = 400
"""Characters of each of them."""
_PATIENCE: Final = 20.0
"""Seconds that a builder has to clean up behind itself."""
_ENDS: Final = (signal.SIGTERM, signal.SIGHUP)
"""What ends a process that does not say otherwise."""
_ASKED: Final = 20.0
"""Seconds for a question that a builder answers out of its head."""


class Failed(ImageError):  # noqa: N818 - a state of affairs, which a caller handles
    """A builder has said no.

    Attributes:
        words: the last lines that it wrote.
    """

    def __init__(self, program: str, code: int, words: Sequence[str]) -> None:
        self.words = words
        said = "".join(f"\n  {line[:_LONGEST]}" for line in words) or " and said nothing"
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        super().__init__(f"{program} failed ({end}), and nothing was pushed:{said}")


def run(
    argv: Sequence[str],
    say: Callable[[str], object],
    *,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a program to its end.

    Ctrl-C, SIGTERM and SIGHUP end it, and it is waited for: it takes its containers away.

    Args:
        argv: the program and its arguments.
        say: is called with each line that it writes.
        variables: beside this process's own.

    Raises:
        Failed: its exit code is not 0.
        ImageError: it cannot be started.
    """
    last: deque[str] = deque(maxlen=_LAST)
    with _terminable(), _started(argv, variables or {}) as process:
        assert process.stdout is not None  # noqa: S101 - a pipe, for mypy
        for line in process.stdout:
            if words := redacted(line.rstrip()):  # an index's address may hold a password
                last.append(words)
                say(words)
        code = process.wait()
    if code:
        raise Failed(argv[0], code, list(last))


def answers(argv: Sequence[str]) -> bool:
    """Whether a program is there and says yes."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASKED,
            check=False,
        )
        return done.returncode == 0
    return False


@contextmanager
def _started(argv: Sequence[str], variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, of which nothing is left where it does not end by itself."""
    try:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # or Ctrl-C would end its parts in any order
        )
    except OSError as error:
        raise ImageError(f"{argv[0]} cannot be started: {error.strerror}") from None
    with process:
        try:
            yield process
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[str]) -> None:
    """Ask it to stop, and hear it out."""
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired, ValueError):
            process.communicate(timeout=_PATIENCE)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _terminable() -> Iterator[None]:
    """These signals end this process as they would, but by the way that cleans up."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    numbers = [each for each in _ENDS if signal.getsignal(each) is signal.SIG_DFL]  # not by nohup
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
