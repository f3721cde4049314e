"""Processes of builders: their output line by line, and their end with ours."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from k8sjob import environment
from k8sjob.errors import ImageError, redacted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_LAST_LINES: Final = 12
"""Lines that an error repeats: pip's reason and the builder's own."""
_MAX_LINE: Final = 400
"""Characters of each of them."""
_LONGEST_LINE: Final = 1 << 14
"""Characters of a line that are read; a step of a build may write one without an end."""
_CLEANUP_SECONDS: Final = 20.0
"""How long a builder may clean up."""
_CHECK_SECONDS: Final = 20.0
"""How long a builder may take to answer whether it is there."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)


class BuilderError(ImageError):
    """A builder failed.

    Attributes:
        lines: the last lines that it wrote.
    """

    def __init__(self, program: str, code: int, lines: Sequence[str]) -> None:
        self.lines = lines
        output = "".join(f"\n  {line[:_MAX_LINE]}" for line in lines) or " no output"
        end = f"signal {-code}" if code < 0 else f"exit code {code}"
        super().__init__(f"{program} failed ({end}), and nothing was pushed:{output}")


def run(
    argv: Sequence[str],
    say: Callable[[str], object],
    *,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a program to its end; `say` is called with each line that it writes.

    Ctrl-C, SIGTERM and SIGHUP end it, and it is waited for: it removes its containers.

    Raises:
        BuilderError: its exit code is not 0.
        ImageError: it cannot be started.
    """
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with signals_as_exit(), _started(argv, variables or {}) as process:
        assert process.stdout is not None  # noqa: S101 - a pipe, for mypy
        whole = True
        while line := process.stdout.readline(_LONGEST_LINE):
            # An index's address may hold a password.
            if whole and (text := redacted(line.rstrip())):
                last.append(text)
                say(text)
            whole = line.endswith("\n")
        code = process.wait()
    if code:
        raise BuilderError(argv[0], code, list(last))


def succeeds(argv: Sequence[str]) -> bool:
    """Whether a program exists and ends with exit code 0."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return not subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CHECK_SECONDS,
            check=False,
        ).returncode
    return False


@contextmanager
def _started(argv: Sequence[str], variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process in its own group, which is ended as a whole when the block fails."""
    try:
        process = subprocess.Popen(
            argv,
            env=environment.variables() | dict(variables),
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
            try:
                # SIGTERM to the builder alone: it stops its own children in order. What is left
                # after its time is killed as a group.
                process.terminate()
                with suppress(subprocess.TimeoutExpired, ValueError):
                    process.communicate(timeout=_CLEANUP_SECONDS)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            raise


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP end this process with SystemExit, so that it cleans up."""

    def stop(number: int, _frame: object) -> None:
        # 128 and the number is how a shell shows that a signal ended a process.
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # the only one that gets signals
        yield
        return
    # Except those that nohup makes them ignore.
    numbers = [each for each in _SIGNALS if signal.getsignal(each) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
