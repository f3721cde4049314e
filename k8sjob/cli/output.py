"""The output of commands: data on stdout, progress and errors on stderr, and the exit code."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from k8sjob.environment import TRACEBACK, no_colors, wants_traceback
from k8sjob.errors import K8sJobError, redacted
from k8sjob.sanitize import safe_json, safe_line, safe_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

_COLUMN_GAP: Final = 3
_SHOWN: Final = 10
"""Contents that look like credentials that are named at most."""
INTERRUPTED: Final = 130
"""Exit code after Ctrl-C (128 + SIGINT), as shells show it."""


def document(data: Any, output: str) -> None:
    """Print JSON data as "json" or "yaml"."""
    from k8sjob.yamldoc import dump  # noqa: PLC0415 - a program that starts needs no YAML

    text(dump(data) if output == "yaml" else safe_json(data, indent=2) + "\n")


def text(content: str) -> None:
    """Print a document as it is, in UTF-8 whatever the terminal's encoding."""
    click.echo(content.encode(), nl=False)


def line(content: object) -> None:
    """Print one line for a person, without the control sequences of a cluster or a container."""
    click.echo(safe_line(str(content)))


def first_names(names: Sequence[str], limit: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns, as kubectl does; what does not fit a terminal is not cut off.

    Control sequences are taken out: header and cells may come from a cluster.
    """
    cells = [[safe_line(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(map(_width, column)) for column in zip(*cells, strict=True)]
    if sys.stdout.isatty():  # one long name goes over the edge alone, and wraps no other row
        import shutil  # noqa: PLC0415 - it loads all formats of archives

        spare = shutil.get_terminal_size().columns - sum(widths) - _COLUMN_GAP * (len(widths) - 1)
        widths[0] = max(_width(cells[0][0]), widths[0] + min(spare, 0))
    lines = []
    for row in cells:
        padded = (
            cell + " " * (max(width - _width(cell), 0) + _COLUMN_GAP)
            for cell, width in zip(row, widths, strict=True)
        )
        lines.append("".join(padded).rstrip())
    click.echo("\n".join(lines))


def _width(cell: str) -> int:
    """The columns of a cell; almost all are ASCII, for which nothing needs to be loaded."""
    if cell.isascii():
        return len(cell)
    from rich.cells import cell_len  # noqa: PLC0415 - as above

    return cell_len(cell)


@contextmanager
def reported(options: Collection[str] = ()) -> Iterator[None]:
    """Run a command: any exception ends in a line on stderr and SystemExit with its code.

    With "traceback" among the options it is shown where in k8sjob an error came from.
    """
    try:
        yield
        # Here, and not at exit, where an error of the pipe could not be handled any more.
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
        if "traceback" in options or wants_traceback():
            click.echo(safe_text(traceback.format_exc()), err=True, nl=False)
        raise SystemExit(_report(error)) from None


def print_status(message: str) -> None:
    """A line of progress, for people: on stderr."""
    click.echo(safe_text(message), err=True)


def warn(message: str) -> None:
    """Print a warning on stderr."""
    _labeled("warning:", "yellow", message)


def warn_of_secrets(findings: Sequence[object], step: str) -> None:
    """Warn of contents of an image that look like credentials, and say what to do about them."""
    for finding in findings[:_SHOWN]:
        warn(f"{finding}: it goes into the image; {step}")
    if len(findings) > _SHOWN:
        warn(f"and {len(findings) - _SHOWN} more contents that look like credentials")


def fail(message: str) -> None:
    """An error on stderr, each line of it as one."""
    for text in message.splitlines() or [""]:
        _labeled("error:", "red", text)


def _labeled(label: str, color: str, message: str) -> None:
    styled = label if no_colors() else click.style(label, fg=color, bold=True)
    click.echo(f"{styled} {safe_line(message)}", err=True)


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
            frames = traceback.extract_tb(error.__traceback__)
            where = f" in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            fail(
                f"this is a bug in k8sjob: {type(error).__name__}: {redacted(str(error))}{where}\n"
                f"please report it with what {TRACEBACK}=1 shows when you run the command again"
            )
    return 1
