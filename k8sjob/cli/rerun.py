"""`k8sjob rerun`: a job again, as it was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k8sjob.backends.api import LOCAL
from k8sjob.backends.local import LocalBackend
from k8sjob.backends.record import RecordBackend
from k8sjob.cli.find_job import Place, find, is_record, job_argument, place_options
from k8sjob.cli.output import line, print_status
from k8sjob.cli.run import check_shown, run_here, run_options
from k8sjob.cli.watch import attach

if TYPE_CHECKING:
    from k8sjob.spec import JobSpec


@click.command("rerun")
@job_argument()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder with the job.yaml and the code, if it is not that of the run.",
)
@click.option(
    "-y", "--yes", is_flag=True, help="Do not ask before the job of a record's file is run."
)
@click.option(
    "--avoid-node",
    "avoid_nodes",
    metavar="NODE",
    multiple=True,
    help="In a cluster, keep all pods from this node, as policy.avoid_nodes does.",
)
@run_options
@place_options()
def rerun_command(
    job: str,
    folder: Path | None,
    yes: bool,
    avoid_nodes: tuple[str, ...],
    place: Place,
    **shown: Any,
) -> int:
    """Run a job once more as it was: the same spec, the same code, from the beginning.

    NAME is a job that exists or has a record, or the file of a record: FILE.k8sjob. A job on this
    machine runs here again, with the code of that run, even if it has changed since. A job in a
    cluster is submitted there with the image that ran, as NAME-xxxxx, and followed.

    Anybody may have written a FILE.k8sjob. So its job is shown first; in a terminal the command
    asks before it runs it, and elsewhere it needs --yes.
    """
    from k8sjob.jobs.rerun import plan_here, plan_there  # noqa: PLC0415 - once the job is found
    from k8sjob.jobs.submit import submit_plan  # noqa: PLC0415 - the same

    check_shown(**shown)
    backend, ref = find(job, place)
    if ref.namespace == LOCAL and isinstance(backend, LocalBackend | RecordBackend):
        plan, changed = plan_here(backend.launched(ref), folder)
        if changed:
            print_status(
                f"the code of that run is used; files changed since then: {', '.join(changed)}"
            )
        _confirm(job, plan.spec, f"on this machine in {plan.context}", yes=yes)
        # From the beginning: the checkpoints of the old run are of a training that may be complete.
        done = run_here(plan, LocalBackend(fresh=True, detached=shown["detach"]), **shown)
        return done.code if done else 0
    detach, quiet, no_logs = (shown.pop(name) for name in ("detach", "quiet", "no_logs"))
    if folder:
        raise click.UsageError("--folder: the code of a job in a cluster is in its image")
    if quiet:
        raise click.UsageError("-q is for jobs on this machine; --detach only submits the job")
    plan = plan_there(backend.snapshot(ref).job, avoid_nodes)
    cluster = place.connect(ref.namespace)
    _confirm(job, plan.spec, f"in {cluster.context}, namespace {cluster.namespace}", yes=yes)
    submitted = submit_plan(plan, cluster, report=print_status)
    line(f"{submitted.ref} created")
    if detach:
        print_status(f"follow it: k8sjob watch {submitted.ref}{place.options}")
        return 0
    return attach(cluster, submitted.ref, place, logs=not no_logs, **shown)


def _confirm(job: str, spec: JobSpec, where: str, *, yes: bool) -> None:
    """Show what the file of a record would run, and ask; UsageError where nobody can answer."""
    if yes or not is_record(job):
        return
    print_status(f"{job} may be from anybody; it runs this {where}:\n\n{spec.to_yaml()}")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError("nothing was run; read the job above, and add --yes to run it")
    click.confirm("Run it?", abort=True, err=True)
