"""`k8sjob rerun`: a job again, as it was."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from k8sjob.backends.api import LOCAL
from k8sjob.backends.local import LocalBackend
from k8sjob.backends.record import RecordBackend
from k8sjob.cli.find_job import Place, find, job_argument, place_options
from k8sjob.cli.options import view_options
from k8sjob.cli.output import line, print_status
from k8sjob.cli.watch import attach
from k8sjob.view.follow import follow

if TYPE_CHECKING:
    from k8sjob.view.views import Output


@click.command("rerun")
@job_argument()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder with the job.yaml and the code, if it is not that of the run.",
)
@view_options
@place_options()
def rerun_command(  # noqa: PLR0917 - click hands them over by name
    job: str, folder: Path | None, output: str, verbose: bool, no_logs: bool, place: Place
) -> int:
    """Run a job once more as it was: the same spec, the same code, from the beginning.

    NAME is a job that exists or of which a record was kept, or a record: FILE.k8sjob. A job of this
    machine runs on it again, with the code of that run, even if it has changed since. A job of a
    cluster is submitted there with the image that ran, as NAME-xxxxx, and followed.
    """
    from k8sjob.jobs.rerun import plan_here, plan_there  # noqa: PLC0415 - once the job is found
    from k8sjob.jobs.run import run_plan  # noqa: PLC0415 - the same
    from k8sjob.jobs.submit import submit_plan  # noqa: PLC0415 - the same

    backend, ref = find(job, place)
    logs = not no_logs
    if ref.namespace == LOCAL and isinstance(backend, LocalBackend | RecordBackend):
        plan, changed = plan_here(backend.launched(ref), folder)
        if changed:
            print_status(f"the code of that run is used; since then, changed: {', '.join(changed)}")
        shown = partial(follow, output=cast("Output", output), logs=logs, verbose=verbose)
        return run_plan(plan, LocalBackend(fresh=True), shown).code
    if folder:
        raise click.UsageError("--folder: the code of a job in a cluster is in its image")
    plan = plan_there(backend.snapshot(ref).job)
    cluster = place.connect(ref.namespace)
    made = submit_plan(plan, cluster, report=print_status)
    line(f"{made.ref} created")
    return attach(cluster, made.ref, place, output=output, logs=logs, verbose=verbose)
