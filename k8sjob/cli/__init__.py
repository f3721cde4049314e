"""The command line: one module per command or pair of related ones, which parses, calls and prints.

program   the commands by name, loaded when they are called
options   arguments and options that several commands share
find_job  which job a command means
output    tables, JSON and YAML on stdout, errors on stderr, and the exit code
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from pathlib import Path
from typing import Final, NoReturn

from k8sjob.cli.output import reported
from k8sjob.cli.program import program
from k8sjob.environment import take_completion

__all__ = ["main"]

_GARBAGE: Final = 100_000
"""New objects before the collector looks at them; Python's own number is 700."""


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code.

    Args:
        args: arguments without the program's name; None takes the process's own.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as by `k8sjob ... <&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115 - for the process's life
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a `?`
    # Modules are never garbage: looking through them again and again takes a tenth of a command.
    gc.set_threshold(_GARBAGE)
    if args is None:
        # Nor at the end: it would take a sixth of a `render`.
        atexit.register(gc.freeze)
        args = sys.argv[1:]
    if (typed := take_completion()) is not None:
        from k8sjob.cli.completion import complete  # noqa: PLC0415 - a shell asks, no person

        complete(typed)
        sys.exit(0)
    options = set[str]()
    with reported(options):
        code = program.main(
            args or ["--help"], prog_name=_called(), standalone_mode=False, obj=options
        )
    sys.exit(code or 0)


def _called() -> str:
    """The name that the user types."""
    name = Path(sys.argv[0]).name
    if name == "__main__.py":
        return "python -m k8sjob"
    return name.replace("-", " ") if name.startswith("kubectl-") else "k8sjob"
