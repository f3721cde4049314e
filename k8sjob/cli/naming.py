"""How a job is named on the command line: NAME, or local/NAME."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from k8sjob.backends.local import LocalBackend

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from k8sjob.backends.api import JobRef

__all__ = ["find", "job_argument"]


def job_argument(
    name: str = "job", *, many: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The argument NAME (or NAMES), completed from the jobs that are there."""
    return click.argument(
        name,
        metavar="NAME..." if many else "NAME",
        nargs=-1 if many else 1,
        required=True,
        shell_complete=_complete,
    )


def find(job: str) -> tuple[LocalBackend, JobRef]:
    """The back end that has the job, and the job there.

    Raises:
        JobNotFound: there is none of that name.
        click.UsageError: the name speaks of somewhere else than this machine.
    """
    place, _, name = job.rpartition("/")
    if place not in {"", "local"}:
        raise click.UsageError(f"{job!r}: jobs of this machine are named {name} or local/{name}")
    backend = LocalBackend()
    return backend, backend.find(name)


def _complete(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    place = "local/" if incomplete.startswith("local/") else ""
    names = [snapshot.job["metadata"]["name"] for snapshot in LocalBackend().jobs()]
    return [place + name for name in names if (place + name).startswith(incomplete)]
