"""`k8sjob rerun`: a job again, as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from k8sjob.backends.api import LOCAL
from k8sjob.backends.local import LocalBackend
from k8sjob.backends.record import RecordBackend
from k8sjob.cli.find_job import Place, find, job_argument, place_options
from k8sjob.cli.output import line, print_status
from k8sjob.cli.run import check_shown, run_here, run_options
from k8sjob.cli.watch import attach


@click.command("rerun")
@job_argument()
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="The folder with the job.yaml and the code, if it is not that of the run.",
)
@run_options
@place_options()
def rerun_command(job: str, folder: Path | None, place: Place, **shown: Any) -> int:
    """Run a job once more as it was: the same spec, the same code, from the beginning.

    NAME is a job that exists or has a record, or the file of a record: FILE.k8sjob. A job on this
    machine runs here again, with the code of that run, even if it has changed since. A job in a
    cluster is submitted there with the image that ran, as NAME-xxxxx, and followed.
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
        done = run_here(plan, LocalBackend(fresh=True, detached=shown["detach"]), **shown)
        return done.code if done else 0
    detach, quiet, no_logs = (shown.pop(name) for name in ("detach", "quiet", "no_logs"))
    if folder:
        raise click.UsageError("--folder: the code of a job in a cluster is in its image")
    if quiet:
        raise click.UsageError("-q is for jobs on this machine; --detach only submits the job")
    plan = plan_there(backend.snapshot(ref).job)
    cluster = place.connect(ref.namespace)
    made = submit_plan(plan, cluster, report=print_status)
    line(f"{made.ref} created")
    if detach:
        print_status(f"follow it: k8sjob watch {made.ref}{place.options}")
        return 0
    return attach(cluster, made.ref, place, logs=not no_logs, **shown)
