"""`k8sjob run`: a job on this machine, shown until it ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from k8sjob.backends.local import LocalBackend
from k8sjob.backends.local.outputs import copy_written
from k8sjob.cli.jobfile import JobFile, job_command
from k8sjob.cli.options import view_options
from k8sjob.cli.output import line, print_status, warn
from k8sjob.contract import counted
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.api import Plan
    from k8sjob.jobs.run import LocalRun
    from k8sjob.view.views import Output

_KEEPS: Final = "the same command resumes from the newest checkpoint, if there is one"


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that starts a job here: --detach, -q, and those of the view."""
    quiet = click.option("-q", "--quiet", is_flag=True, help="Show only why the job failed.")
    text = "Leave it running, even after the terminal closes."
    return click.option("--detach", is_flag=True, help=text)(quiet(view_options(command)))


@job_command("run")
@click.option("--fresh", is_flag=True, help="Start from scratch, ignoring checkpoints.")
@click.option(
    "--resume",
    metavar="RUN",
    default="",
    help="Resume from the checkpoints of this earlier run, as `k8sjob list` names it: NAME@RUN.",
)
@click.option(
    "--oversubscribe", is_flag=True, help="Allow more than 4 processes per core (and more than 32)."
)
@click.option(
    "--copy-to",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="At the end copy the files that the job wrote to DIR, never over a file.",
)
@run_options
def run_command(
    job: JobFile, fresh: bool, resume: str, oversubscribe: bool, copy_to: Path | None, **shown: Any
) -> int:
    """Run the job in FILE (default: job.yaml) on this machine and follow it to its end.

    FILE may also be a Python script, for example: k8sjob run train.py --nproc 2 -- --lr 0.1.
    Arguments after `--` are passed to the script.

    A relative path that it writes is in a copy of the job's folder; the end of the output lists
    these files, and `k8sjob delete` removes them.

    Ctrl-C stops it, after a checkpoint if the job has `checkpoint`; Ctrl-C again kills it. The same
    command then resumes from the newest checkpoint of the last run of this job and folder, unless
    that run succeeded. The exit code is 0 if it succeeded, 100 if it failed, 130 after Ctrl-C.
    """
    from k8sjob.cli.lint import show_lint_errors  # noqa: PLC0415 - once the options are right
    from k8sjob.jobs.plan import plan_run  # noqa: PLC0415 - the same
    from k8sjob.jobs.run import NO_CHECKPOINT  # noqa: PLC0415 - the same

    check_shown(**shown)
    if copy_to and shown["detach"]:
        raise click.UsageError(
            "--copy-to copies at the job's end, which --detach does not wait for"
        )
    if fresh and resume:
        raise click.UsageError("--fresh ignores checkpoints and --resume uses some; give only one")
    spec = job.load(local=True)
    with job.located():
        plan = plan_run(spec, job.folder)
    show_lint_errors(job)
    script = plan.context / (spec.run.script or "")
    # Of any other script it is not known whether it saves checkpoints of its own.
    trains_here = script.is_file() and "runtime.session(" in script.read_text(errors="replace")
    if trains_here and not (spec.checkpoint or shown["quiet"]):
        print_status(NO_CHECKPOINT)
    if spec.runtime is not None and not shown["quiet"]:
        print_status("runtime has no effect here: what it adds to the pods is only in the cluster")
    backend = LocalBackend(
        fresh=fresh, resume=resume, oversubscribe=oversubscribe, detached=shown["detach"]
    )
    done = run_here(plan, backend, copy_to=copy_to, **shown)
    if done is None:
        return 0
    from k8sjob.observe.status import job_status  # noqa: PLC0415 - the ranks start before

    # It may have succeeded in the moment of the interrupt, or be deleted.
    stopped = done.snapshot and job_status(done.snapshot).state is JobState.STOPPED
    if done.code > 128 and stopped:
        print_status(_KEEPS if spec.checkpoint else NO_CHECKPOINT)
    return done.code


def check_shown(*, detach: bool, quiet: bool, output: str, verbose: bool, no_logs: bool) -> None:
    """Refuse --detach together with options about what is shown."""
    if detach and (quiet or verbose or no_logs or output != "auto"):
        raise click.UsageError("--detach shows nothing of the job; omit -q, -v, -o and --no-logs")


def run_here(
    plan: Plan,
    backend: LocalBackend,
    *,
    detach: bool,
    quiet: bool,
    output: str,
    verbose: bool,
    no_logs: bool,
    copy_to: Path | None = None,
) -> LocalRun | None:
    """Run a job as these options say, and show it to its end; None: it is left running."""
    from k8sjob.jobs.run import run_plan  # noqa: PLC0415 - once the options are right

    if detach:
        ref = backend.create(plan)
        line(f"{ref} started")
        print_status(f"follow it: k8sjob watch {ref}; end it: k8sjob delete {ref}")
        return None
    shown = (lambda _event: None) if quiet else cast("Output", output)
    logs = not (no_logs or quiet)

    def show(*job: Any, **settings: Any) -> int:
        # What shows a job takes a third of a second to load, in which its ranks start.
        from k8sjob.view.follow import follow  # noqa: PLC0415 - see above

        settings |= {"output": shown, "logs": logs, "verbose": verbose}
        return follow(*job, outlives_reader=True, **settings)

    done = run_plan(plan, backend, show)
    if copy_to and done.snapshot:
        copies, existing = copy_written(backend.folder(done.ref), copy_to)
        print_status(f"copied {counted(copies, 'file')} to {copy_to}")
        if existing:
            warn(f"not copied, as these files exist: {', '.join(map(str, existing))}")
    # Raises the error that explains the end, which nothing has shown yet.
    if quiet and done.code in {JobState.FAILED.exit_code, JobState.STOPPED.exit_code}:
        done.result(check=True)
    return done
