"""`k8sjob run` and `k8sjob watch`: a job is shown until it ends or its reader leaves."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, cast

import click

from k8sjob.backends.local import LocalBackend
from k8sjob.cli.find_job import Place, find, job_argument, jobs_here, keep_record, place_options
from k8sjob.cli.jobfile import JobCommand, JobFile, job_file_options
from k8sjob.cli.options import selector_option, view_options
from k8sjob.cli.output import fail, line, print_status
from k8sjob.errors import JobNotFound
from k8sjob.observe.status import job_status
from k8sjob.observe.watch import poll_all, watch_all
from k8sjob.targets.api import JobState
from k8sjob.view.follow import follow, follow_all, stop_on_interrupt

if TYPE_CHECKING:
    from k8sjob.backends.api import Backend, JobRef
    from k8sjob.view.views import Format, Output


@click.command("run", cls=JobCommand)
@job_file_options()
@click.option("--fresh", is_flag=True, help="Start from scratch, ignoring checkpoints.")
@click.option(
    "--resume",
    metavar="RUN",
    default="",
    help="Resume the checkpoints of this earlier run, as `k8sjob list` names it: NAME@RUN.",
)
@click.option(
    "--oversubscribe", is_flag=True, help="Allow more than 4 processes per core (and more than 32)."
)
@click.option("--detach", is_flag=True, help="Leave it running, even after the terminal closes.")
@click.option("-q", "--quiet", is_flag=True, help="Show only why it failed.")
@view_options
def run_command(  # noqa: PLR0917 - click hands them over by name
    job: JobFile,
    fresh: bool,
    resume: str,
    oversubscribe: bool,
    detach: bool,
    quiet: bool,
    output: str,
    verbose: bool,
    no_logs: bool,
) -> int:
    """Run the job in FILE (default: job.yaml) on this machine and follow it to its end.

    FILE may be a Python script, too: k8sjob run train.py --workers 1 --nproc 2 -- --lr 0.1
    Words after `--` are added to the arguments of the script.

    Ctrl-C stops it after a checkpoint; Ctrl-C again kills it. The same command then resumes from
    the newest checkpoint of the last run of this job and folder, unless that run succeeded. The
    exit code is 0 if it succeeded, 100 if it failed, 130 after Ctrl-C.
    """
    from k8sjob.cli.validate import show_lint_errors  # noqa: PLC0415 - of no use for watch
    from k8sjob.jobs.plan import plan_run  # noqa: PLC0415 - the same

    if detach and (quiet or verbose or no_logs or output != "auto"):
        raise click.UsageError(
            "--detach shows nothing of the job; leave -q, -v, -o and --no-logs out"
        )
    if fresh and resume:
        raise click.UsageError("--fresh ignores checkpoints and --resume uses some; give only one")
    spec = job.load(here=True)
    with job.located():
        plan = plan_run(spec, job.folder)
    show_lint_errors(job)
    backend = LocalBackend(fresh=fresh, resume=resume, oversubscribe=oversubscribe, detached=detach)
    ref = backend.create(plan)
    if detach:
        line(f"{ref} started")
        print_status(f"follow it: k8sjob watch {ref}; end it: k8sjob delete {ref}")
        return 0
    shown = not (no_logs or quiet)
    code = follow_here(backend, ref, output="" if quiet else output, logs=shown, verbose=verbose)
    if code > 128 and spec.checkpoint and _was_stopped(backend, ref):
        print_status("the same command resumes from the newest checkpoint, if there is one")
    return code


def follow_here(
    backend: LocalBackend, ref: JobRef, *, output: str, logs: bool, verbose: bool
) -> int:
    """Follow a job of this machine to its end, which comes with its reader's; the exit code.

    Args:
        backend: what has created it.
        ref: the job.
        output: as of `follow`; "" shows nothing but why it failed.
        logs: show its output.
        verbose: show all of the runtime's events.
    """
    try:
        code = follow(
            backend,
            ref,
            output=cast("Output", output) if output else (lambda _event: None),
            logs=logs,
            verbose=verbose,
            interrupted=stop_on_interrupt(backend, ref),
            files=backend.folder(ref).path,
        )
        if not output and code in {JobState.FAILED.exit_code, JobState.STOPPED.exit_code}:
            from k8sjob.jobs.result import Reached, result  # noqa: PLC0415 - for this alone

            try:
                result(backend, backend.snapshot(ref), Reached(), check=True)
            except JobNotFound:
                fail(f"{ref}: Deleted")
    finally:
        backend.finish(ref)
    return code


def _was_stopped(backend: LocalBackend, ref: JobRef) -> bool:
    """Whether the job was stopped; it may have succeeded in the same moment, or be deleted."""
    try:
        return job_status(backend.snapshot(ref)).state is JobState.STOPPED
    except JobNotFound:
        return False


@click.command("watch")
@job_argument(required=False)
@click.option(
    "--replay",
    "factor",
    type=click.FloatRange(min=0.01),
    metavar="FACTOR",
    help="Replay a job that has ended, FACTOR times as fast as it ran.",
)
@view_options
@selector_option
@place_options(everywhere=True)
def watch_command(  # noqa: PLR0917 - click hands them over by name
    job: str | None,
    factor: float | None,
    output: str,
    verbose: bool,
    no_logs: bool,
    labels: str,
    place: Place,
) -> int:
    """Follow a job to its end: its state, its progress, its output.

    Without NAME it follows all jobs: those of the cluster if one is configured, else those of this
    machine. Ctrl-C leaves the jobs alone. The exit code is that of the job's outcome: 0 if it
    succeeded, 100 if it failed, 103 if it was stopped or deleted.
    """
    if factor and (job is None or no_logs):
        raise click.UsageError("--replay shows the output of one job: give NAME, without --no-logs")
    if job is None:
        return _watch_all(output, labels, place)
    if labels or place.all_namespaces:
        raise click.UsageError("-l and -A select among all jobs; leave them or NAME out")
    backend, ref = find(job, place)
    return attach(
        backend, ref, place, output=output, logs=not no_logs, verbose=verbose, factor=factor
    )


def _watch_all(output: str, labels: str, place: Place) -> int:
    """Many jobs of one place, until an interrupt comes."""
    stop = threading.Event()
    if not place.asks_cluster:
        jobs = partial(jobs_here, labels)
        if not jobs():
            print_status("no jobs on this machine yet; waiting for the first")
        events = poll_all(jobs, stop)
    else:
        changes = place.connect().watch_jobs(
            stop=stop, all_namespaces=place.all_namespaces, selector=labels
        )
        events = watch_all(changes)
    try:
        return follow_all(events, output=cast("Format", output))
    finally:
        stop.set()


def attach(
    backend: Backend,
    ref: JobRef,
    place: Place,
    *,
    output: str = "auto",
    logs: bool = True,
    verbose: bool = False,
    factor: float | None = None,
) -> int:
    """Follow a job that continues when its reader leaves; the exit code."""
    files = backend.folder(ref).path if isinstance(backend, LocalBackend) else None
    kind = cast("Output", output)
    code = follow(backend, ref, output=kind, logs=logs, verbose=verbose, files=files, factor=factor)
    if code > 128:
        print_status(f"Detached; reattach with k8sjob watch {ref}{place.options}")
    elif code in {JobState.SUCCEEDED.exit_code, JobState.FAILED.exit_code}:
        keep_record(backend, ref)
    return code
