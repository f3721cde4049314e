"""`k8sjob run`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import click

from k8sjob.backends.local import LocalBackend
from k8sjob.cli.failure import say
from k8sjob.cli.lint import show_lint_errors
from k8sjob.cli.options import FILE, folder_of, view_options
from k8sjob.errors import JobNotFound
from k8sjob.jobs.run import plan_run, stop_on_interrupt
from k8sjob.observe.status import JobState, job_status
from k8sjob.spec import load
from k8sjob.spec.load import located
from k8sjob.view.follow import follow

if TYPE_CHECKING:
    from pathlib import Path

    from k8sjob.backends.api import JobRef
    from k8sjob.view.views import Output

__all__ = ["run_command"]


@click.command("run")
@FILE
@click.option("--fresh", is_flag=True, help="Start from scratch, ignoring checkpoints.")
@click.option(
    "--resume",
    metavar="RUN",
    default="",
    help="Resume the checkpoints of this earlier run, as `k8sjob list` names it: NAME@RUN.",
)
@click.option(
    "--oversubscribe", is_flag=True, help="Allow more than 4 processes a core (and more than 32)."
)
@view_options
def run_command(  # noqa: PLR0917 - click hands them over by name
    file: Path, fresh: bool, resume: str, oversubscribe: bool, output: str, no_logs: bool
) -> int:
    """Run the job in FILE (default: job.yaml) on this machine and follow it to its end.

    Ctrl-C stops it after a checkpoint; Ctrl-C again kills it. The same command then resumes from
    the newest checkpoint of the last run of this job and folder, unless that run succeeded. The
    exit code is 0 if it succeeded, 100 if it failed, 130 after Ctrl-C.
    """
    if fresh and resume:
        raise click.UsageError("--fresh ignores checkpoints and --resume uses some; give only one")
    spec = load(file)
    with located(file):
        plan = plan_run(spec, folder_of(file))
    show_lint_errors(file)
    backend = LocalBackend(fresh=fresh, resume=resume, oversubscribe=oversubscribe)
    ref = backend.create(plan)
    try:
        code = follow(
            backend,
            ref,
            output=cast("Output", output),
            logs=not no_logs,
            interrupted=stop_on_interrupt(backend, ref),
            files=backend.folder(ref).path,
        )
    finally:
        backend.finish(ref)
    if code > 128 and spec.checkpoint and _was_stopped(backend, ref):
        say("the same command resumes from the newest checkpoint, if there is one")
    return code


def _was_stopped(backend: LocalBackend, ref: JobRef) -> bool:
    """Whether the job was stopped; it may have succeeded in the same moment, or be deleted."""
    try:
        return job_status(backend.snapshot(ref)).state is JobState.STOPPED
    except JobNotFound:
        return False
