"""Exceptions become lines on stderr and an exit code, in one place."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from k8sjob.errors import K8sJobError, redacted
from k8sjob.view.sanitize import safe_line, safe_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["INTERRUPTED", "TRACEBACK_ENV", "fail", "reported", "say", "warn"]

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C (128 + SIGINT), as shells show it."""
TRACEBACK_ENV: Final = "K8SJOB_TRACEBACK"
"""Set to 1 to see the traceback of an error."""


@contextmanager
def reported(options: Collection[str] = ()) -> Iterator[None]:
    """Run a command: any exception ends in a line on stderr and SystemExit with its code.

    Args:
        options: with "traceback" in it, it is shown where in k8sjob an error came from.
    """
    try:
        yield
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        raise SystemExit(end.exit_code) from None
    except (click.Abort, KeyboardInterrupt):
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader has closed the pipe, as head does; Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:  # noqa: BLE001 - the last resort: a bug gets its line, too
        if "traceback" in options or os.environ.get(TRACEBACK_ENV, "0") not in {"", "0"}:
            click.echo(safe_text(traceback.format_exc()), err=True, nl=False)
        raise SystemExit(_report(error)) from None


def say(text: str) -> None:
    """A line of progress, for people: on stderr."""
    click.echo(safe_text(text), err=True)


def warn(text: str) -> None:
    """What may not be intended, but stops nothing: on stderr."""
    _labelled("warning:", "yellow", text)


def fail(message: str) -> None:
    """An error on stderr, each line of it as one."""
    for line in message.splitlines() or [""]:
        _labelled("error:", "red", line)


def _labelled(label: str, colour: str, line: str) -> None:
    styled = label if os.environ.get("NO_COLOR") else click.style(label, fg=colour, bold=True)
    click.echo(f"{styled} {safe_line(line)}", err=True)


def _report(error: Exception) -> int:
    """Print the error on stderr; its exit code."""
    match error:
        case click.ClickException():
            fail(" ".join(error.format_message().split()))  # click puts choices on own lines
            if isinstance(error, click.UsageError) and error.ctx is not None:
                click.echo(f"try '{error.ctx.command_path} --help'", err=True)
            return error.exit_code
        case K8sJobError():
            fail(str(error) or type(error).__name__)
            return error.exit_code
        case OSError():
            place = f": {error.filename}" if error.filename else ""
            fail(f"{error.strerror or error}{place}")
        case _:
            fail(_bug(error))
    return 1


def _bug(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return (
        f"this is a bug in k8sjob: {type(error).__name__}: {redacted(str(error))}{where}\n"
        f"please report it with what {TRACEBACK_ENV}=1 shows when you run the command again"
    )
