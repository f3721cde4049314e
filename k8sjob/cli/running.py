"""`k8sjob run` and `k8sjob watch`: a job on the screen until it ends."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING, Any, cast

import click

from k8sjob.backends.local import LocalBackend
from k8sjob.cli.documents import FILE, folder_of
from k8sjob.cli.failure import say
from k8sjob.cli.naming import find, job_argument
from k8sjob.contract import Event, EventKind
from k8sjob.errors import JobNotFound
from k8sjob.launch import plan
from k8sjob.lifecycle.status import JobState, job_status
from k8sjob.lifecycle.watch import watch
from k8sjob.spec import load
from k8sjob.view.feed import Feed, Interrupts
from k8sjob.view.show import close_with_summary, viewer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from k8sjob.backends.api import JobRef
    from k8sjob.view.show import Format

__all__ = ["run_command", "watch_command"]


def _view_options(command: Callable[..., Any]) -> Callable[..., Any]:
    output = click.option(
        "-o",
        "--output",
        "output",
        type=click.Choice(["auto", "plain", "json"]),
        default="auto",
        show_default=True,
        help="auto: a live screen in a terminal, else plain lines. json: one event a line.",
    )
    no_logs = click.option(
        "--no-logs", is_flag=True, help="Only the job's state: neither output nor progress."
    )
    return output(no_logs(command))


@click.command("run")
@FILE
@click.option("--fresh", is_flag=True, help="Begin anew, not at the last run's checkpoint.")
@_view_options
def run_command(file: Path, fresh: bool, output: str, no_logs: bool) -> int:
    """Run the job in FILE (default: job.yaml) on this machine and follow it to its end.

    Ctrl-C stops it after a checkpoint, from which the same command goes on; Ctrl-C again ends it
    at once. The exit code is 0 if it succeeded, 100 if it failed, 130 after Ctrl-C.
    """
    spec = load(file)
    backend = LocalBackend(fresh=fresh)
    ref = backend.create(plan(spec, folder_of(file)))

    def stop(times: int) -> str | None:
        if times > 2:
            return None
        backend.stop(ref, now=times == 2, message="Ctrl-C")
        if times == 2:
            return "ending it at once"
        return "stopping after a checkpoint; Ctrl-C again ends it at once"

    try:
        code = _follow(backend, ref, output, logs=not no_logs, interrupted=stop)
    finally:
        backend.finish(ref)
    if code > 128 and spec.checkpoint and _was_stopped(backend, ref):
        say("the same command goes on from the newest checkpoint, if there is one")
    return code


@click.command("watch")
@job_argument()
@_view_options
def watch_command(job: str, output: str, no_logs: bool) -> int:
    """Follow a job to its end: its state, its progress, its output.

    Ctrl-C leaves the job alone. The exit code is that of its outcome: 0 if it succeeded, 100 if it
    failed, 103 if it was stopped or deleted.
    """
    backend, ref = find(job)
    code = _follow(backend, ref, output, logs=not no_logs, interrupted=lambda _times: None)
    if code > 128:
        say(f"the job goes on; again: k8sjob watch {shlex.quote(job)}")
    return code


def _follow(
    backend: LocalBackend,
    ref: JobRef,
    output: str,
    *,
    logs: bool,
    interrupted: Callable[[int], str | None],
) -> int:
    """Show a job to its end; the exit code.

    Args:
        backend: where it lives.
        ref: the job.
        output: "auto", "plain" or "json".
        logs: whether to read what the replicas write.
        interrupted: called at each Ctrl-C with how many there were; says what is done about it,
            or None where the job is left alone.
    """
    begun = job_status(backend.snapshot(ref)).created
    since = begun.timestamp() if begun else None
    with (
        viewer(cast("Format", output), job=ref.name, since=since) as view,
        Interrupts() as interrupts,
    ):
        answered = 0
        for batch in Feed(watch(backend, ref, logs=logs)):
            view.show(batch)
            while answered < interrupts.count:
                answered += 1
                answer = interrupted(answered)
                if answer is None:
                    return interrupts.exit_code
                view.show([Event(EventKind.WARNING, {"message": answer}, time.time())])
        seconds, more = _afterwards(backend, ref)
        close_with_summary(view, seconds=seconds, more=more)
    return interrupts.exit_code or view.story.exit_code or 0


def _was_stopped(backend: LocalBackend, ref: JobRef) -> bool:
    """Whether the job was stopped; it may have succeeded in the same moment, or be deleted."""
    try:
        return job_status(backend.snapshot(ref)).state is JobState.STOPPED
    except JobNotFound:
        return False


def _afterwards(backend: LocalBackend, ref: JobRef) -> tuple[float | None, dict[str, str]]:
    """How long an ended job ran, and where to look further; nothing of one that is gone."""
    try:
        status = job_status(backend.snapshot(ref))
    except JobNotFound:
        return None, {}
    seconds = None
    if status.started and status.finished:
        seconds = (status.finished - status.started).total_seconds()
    return seconds, {"files": str(backend.folder(ref).path), "logs": f"k8sjob logs {ref.name}"}
