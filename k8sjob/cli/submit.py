"""`k8sjob submit`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from k8sjob.cli.diff import show_lines
from k8sjob.cli.find_job import Place, place_options
from k8sjob.cli.jobfile import (
    AUTO,
    JobFile,
    job_command,
    old_base,
    target_option,
    with_target,
)
from k8sjob.cli.lint import show_lint_errors
from k8sjob.cli.options import (
    build_option,
    image_option,
    onto_option,
    plain_http_option,
)
from k8sjob.cli.output import document, line, print_status, text, warn
from k8sjob.errors import BackendError, JobExists
from k8sjob.jobs.plan import plan_submission, warnings
from k8sjob.jobs.submit import Outcome, Submitted, for_namespace, push_code, submit_plan
from k8sjob.rendering.dockerfile import check_script
from k8sjob.spec.changes import Change
from k8sjob.yamldoc import dump

if TYPE_CHECKING:
    from k8sjob.backends.api import Plan
    from k8sjob.backends.cluster.backend import ClusterBackend
    from k8sjob.spec import JobSpec

_OUTCOMES = {
    Outcome.CREATED: "created",
    Outcome.ATTACHED: "already exists as the same job and has not ended: nothing was changed",
    Outcome.REPLACED: "replaced",
}


@job_command("submit")
@image_option
@build_option
@onto_option
@plain_http_option
@target_option
@click.option("--watch", is_flag=True, help="Follow the job to its end, as k8sjob watch does.")
@click.option("--replace", is_flag=True, help="Delete an existing job of that name first.")
@click.option("--generate-name", is_flag=True, help="Add five random characters to the job's name.")
@click.option(
    "--dry-run",
    type=click.Choice(["client", "server"]),
    help="Do not create the job. client: use no cluster. server: check that it accepts the job.",
)
@click.option(
    "-o",
    "--output",
    "output",
    type=click.Choice(["yaml", "json", "name"]),
    help="Print the job's object, or its name as other commands accept it.",
)
@place_options(local=False)
def submit_command(  # noqa: PLR0917 - click hands them over by name
    job: JobFile,
    image: str | None,
    builds: bool,
    onto: str | None,
    plain_http: tuple[str, ...],
    target: str | None,
    watch: bool,
    replace: bool,
    generate_name: bool,
    dry_run: str | None,
    output: str | None,
    place: Place,
) -> int:
    """Create the job in FILE (default: job.yaml) in a cluster, after the cluster has checked it.

    If the image has a base, the job's code is first added to it in the registry, as k8sjob push
    does; if the job has dependencies, the code is added to the image of k8sjob build.

    If the same job exists and has not ended, the command attaches to it. A different job of that
    name, or one that has ended, is never touched without --replace: the difference is shown, and
    the exit code is 1. An interrupted submission leaves a complete job or none.
    """
    for contradict, message in (
        (watch and (dry_run or output), "--watch follows the job; omit --dry-run and -o"),
        (
            target == AUTO and dry_run == "client",
            "--target auto asks the cluster; specify a target, or omit --dry-run=client",
        ),
        (image and onto, "--onto makes the image, and --image names one; give only one"),
        (
            builds and (image or onto or dry_run),
            "--build builds an image first; omit --image, --onto and --dry-run",
        ),
        (
            replace and generate_name,
            "--generate-name uses a free name, so there is nothing to --replace",
        ),
    ):
        if contradict:
            raise click.UsageError(message)
    spec, folder = job.load(), job.folder
    spec = with_target(spec, target, place)
    with job.located():
        plan = plan_submission(
            spec, folder, image=image, namespace=place.namespace, generate_name=generate_name
        )
        for warning in [*warnings(plan), *old_base(spec, linted=True)]:
            warn(warning)
        # With --image the code is in that image, and the script need not be here.
        if image is None:
            check_script(spec, folder)
    pushes = spec.builds_image and image is None
    # It may answer while lint reads the files.
    backend = None if dry_run == "client" else _asked_ahead(plan, place, creates=not pushes)
    of_target = [Change(("target",), spec.target)] if target else []
    show_lint_errors(JobFile(job.path, (*job.changes, *of_target)))
    if dry_run == "client":
        _show_plan(plan, place, output)
        return 0
    backend = backend or place.connect(plan.spec.namespace)
    with job.located():
        plan = for_namespace(plan, backend)
    if pushes:
        options = {"onto": onto, "dry_run": dry_run is not None}
        with job.located():
            plan = _with_image(spec, plan, backend, options, plain_http, builds=builds)
    try:
        done = submit_plan(
            plan, backend, replace=replace, dry_run=dry_run == "server", report=print_status
        )
    except JobExists as error:
        # stdout is for the job's name alone, which scripts read.
        show_lines(error.difference, err=True)
        ways = "--replace, --generate-name" if error.replaceable else "--generate-name"
        raise JobExists(f"{error}: {ways}") from error
    _show(plan, backend, done, output, dry_run=dry_run is not None)
    if not (watch or output or dry_run):
        print_status(f"follow it: k8sjob watch {done.ref}{place.options}")
    _warn_of_needs(plan, backend)  # the job exists, however long this takes
    if not watch:
        return 0
    from k8sjob.cli.watch import attach  # noqa: PLC0415 - a screen takes longer than a submission

    return attach(backend, done.ref, place)


def _asked_ahead(plan: Plan, place: Place, *, creates: bool) -> ClusterBackend | None:
    """The cluster, to which first requests are on their way; None: to connect has failed."""
    with suppress(BackendError):  # raised again by the next connection, after what lint says
        backend = place.connect(plan.spec.namespace)
        backend.look_at_namespace_ahead()
        if creates:
            backend.look_ahead(plan.job)
        return backend
    return None


def _warn_of_needs(plan: Plan, backend: ClusterBackend) -> None:
    """Warn of what the job names and the cluster lacks: it would wait for that silently."""
    from k8sjob.checks.doctor import examine_needs, gather_needs  # noqa: PLC0415 - only for clusters

    with suppress(BackendError):
        facts = gather_needs(backend.transport, backend.namespace, plan.job, backend.own_namespace)
        for check in examine_needs(facts):
            warn(check.text)


def _with_image(
    spec: JobSpec,
    plan: Plan,
    backend: ClusterBackend,
    options: dict[str, Any],
    plain_http: tuple[str, ...],
    *,
    builds: bool,
) -> Plan:
    """The plan with the image that was made of the job's code."""
    from k8sjob.cli.push import (  # noqa: PLC0415 - see push_code
        build_and_report,
        report_push,
        transfer_options,
    )

    with transfer_options(plain_http) as how:
        build = partial(build_and_report, **how) if builds else None
        options |= {
            "say": warn,
            "packs": print_status,
            "packing": how["progress"].packing,
            "build": build,
        }
        plan, pushed = push_code(spec, plan, backend, **options, **how)
    report_push(pushed, dry_run=options["dry_run"])
    return plan


def _show_plan(plan: Plan, place: Place, output: str | None) -> None:
    """Print the objects that would be sent, without asking a cluster."""
    job, namespace = plan.job, plan.spec.namespace or place.namespace
    if namespace:
        # First, where one looks for it; the rest of the metadata follows.
        identity = {"name": plan.spec.name, "namespace": namespace}
        metadata = {**identity, **job.metadata}
        job = job.with_document({**job.document, "metadata": metadata})
    if output == "yaml":
        text("---\n".join(map(dump, job.objects)))
    elif output == "json":
        every = {"apiVersion": "v1", "kind": "List", "items": job.objects}
        document(every if job.objects[1:] else job.raw, output)
    else:
        name = f"{namespace}/{plan.spec.name}" if namespace else plan.spec.name
        line(name if output == "name" else f"{name} created (dry run)")


def _show(
    plan: Plan, backend: ClusterBackend, done: Submitted, output: str | None, *, dry_run: bool
) -> None:
    if output == "name":
        line(done.ref)
    elif output and dry_run:
        document(backend.dry_run(plan.job, name_free=True).raw, output)
    elif output:
        document(backend.snapshot(done.ref).job.raw, output)
    else:
        line(f"{done.ref} {_OUTCOMES[done.outcome]}{' (server dry run)' if dry_run else ''}")
