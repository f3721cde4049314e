"""`k8sjob submit` and `k8sjob diff`: a job.yaml and the cluster."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from k8sjob.cli.documents import (
    FILE,
    build_option,
    folder_of,
    onto_option,
    plain_http_option,
    show_lint_errors,
)
from k8sjob.cli.failure import fail, say, warn
from k8sjob.cli.output import document, line
from k8sjob.cli.place import Place, place_options
from k8sjob.document import parse
from k8sjob.errors import BackendError, JobExists, K8sJobError
from k8sjob.rendering import check_script
from k8sjob.sending import Outcome, compare, send
from k8sjob.spec import load
from k8sjob.spec.load import located
from k8sjob.submission import plan_submission, push_code, remarks
from k8sjob.view.safe import safe_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from k8sjob.backends.api import JobRef, Plan
    from k8sjob.backends.cluster import ClusterBackend
    from k8sjob.image.http_client import HttpClient
    from k8sjob.rendering.difference import Difference
    from k8sjob.sending import Submitted
    from k8sjob.spec import JobSpec

__all__ = ["diff_command", "submit_command"]

_SAID = {
    Outcome.CREATED: "created",
    Outcome.ATTACHED: "is there already, the same job and not ended: nothing was changed",
    Outcome.REPLACED: "replaced",
}
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}
_MOST_PATHS = 6
"""So many changed fields are named; the lines of the difference show all of them."""

image_option = click.option(
    "--image", metavar="REF", help="The image that the replicas run, best with its digest."
)


@click.command("submit")
@FILE
@image_option
@build_option
@onto_option
@plain_http_option
@click.option("--watch", is_flag=True, help="Follow the job to its end, as k8sjob watch does.")
@click.option("--replace", is_flag=True, help="Delete a job of that name, and make it anew.")
@click.option("--generate-name", is_flag=True, help="Add five random characters to the job's name.")
@click.option(
    "--dry-run",
    type=click.Choice(["client", "server"]),
    help="Make no job. client: ask no cluster. server: ask it whether it would take the job.",
)
@click.option(
    "-o",
    "--output",
    "output",
    type=click.Choice(["yaml", "json", "name"]),
    help="Print the PyTorchJob, or its name as other commands take it.",
)
@place_options(local=False)
def submit_command(  # noqa: PLR0917 - click hands them over by name
    file: Path,
    image: str | None,
    builds: bool,
    onto: str | None,
    plain_http: tuple[str, ...],
    watch: bool,
    replace: bool,
    generate_name: bool,
    dry_run: str | None,
    output: str | None,
    place: Place,
) -> int:
    """Make the job in FILE (default: job.yaml) in a cluster, after the cluster has checked it.

    Where the image has a base, the job's code is put on that in the registry first, as k8sjob push
    does it; where the job installs something, on the image of k8sjob build.

    Where the same job is there and has not ended, it is attached to. Another one of that name, or
    one that has ended, is never touched without --replace: the difference is shown, and the exit
    code is 1. The job is made by one request: a submission that is interrupted leaves a whole job
    or none.
    """
    if watch and (dry_run or output):
        raise click.UsageError("--watch shows the job as it goes; leave --dry-run and -o out")
    if image and onto:
        raise click.UsageError("--onto makes the image, and --image names one; say one only")
    if builds and (image or onto or dry_run):
        raise click.UsageError(
            "--build makes an image first; leave --image, --onto and --dry-run out"
        )
    if replace and generate_name:
        raise click.UsageError(
            "--generate-name takes a free name, so there is nothing to --replace"
        )
    spec = load(file)
    with located(file):
        made = plan_submission(
            spec,
            folder_of(file),
            image=image,
            namespace=place.namespace,
            generate_name=generate_name,
        )
    for remark in remarks(made):
        warn(remark)
    _check_code(spec, file, image)
    if dry_run == "client":
        _show_plan(made, place, output)
        return 0
    backend = place.connect(made.spec.namespace)
    if spec.builds_image and image is None:
        options = {"onto": onto, "http": _http(plain_http), "dry_run": dry_run is not None}
        with located(file):
            made = _with_image(spec, made, backend, options, builds=builds)
    try:
        done = send(made, backend, replace=replace, dry_run=dry_run == "server", tell=say)
    except JobExists as error:
        _show_lines(error.difference, err=True)
        raise JobExists(f"{error}: --replace, --generate-name") from error
    if dry_run:
        _show_dry(made, backend, done, output)
    else:
        _show_made(backend, done, output, place, watch=watch)
    _warn_of_needs(made, backend)  # the job is there, however long this takes
    return _watch(backend, done.ref, place) if watch else 0


def _check_code(spec: JobSpec, file: Path, image: str | None) -> None:
    """Refuse a job without its script, before lint says the same, and show what lint finds."""
    if image is None:
        with located(file):
            check_script(spec, folder_of(file))
    show_lint_errors(file)


def _warn_of_needs(made: Plan, backend: ClusterBackend) -> None:
    """Say what the job names and the cluster lacks: it would wait for that without a word."""
    from k8sjob.doctor import examine_needs, gather_needs  # noqa: PLC0415 - for clusters alone

    with suppress(BackendError):
        job = parse(made.manifest).data
        facts = gather_needs(backend.transport, backend.namespace, job)
        for check in examine_needs(facts):
            warn(f"{check.seen}; {check.next_step}")


def _with_image(
    spec: JobSpec, made: Plan, backend: ClusterBackend, options: dict[str, Any], *, builds: bool
) -> Plan:
    """The plan with the image that was made of the job's code."""
    from k8sjob.cli.building import build_and_tell, progress_line, tell  # noqa: PLC0415 - see push_code

    with progress_line() as progress:
        build = partial(build_and_tell, http=options["http"], progress=progress)
        told: dict[str, Any] = {"say": warn, "packing": progress.packing, "progress": progress}
        made, pushed = push_code(
            spec, made, backend, build=build if builds else None, **told, **options
        )
    tell(pushed, dry_run=options["dry_run"])
    return made


def _http(plain_http: tuple[str, ...]) -> HttpClient:
    from k8sjob.image.http_client import HttpClient  # noqa: PLC0415 - see push_code

    return HttpClient(plain_http=plain_http)


def _watch(backend: ClusterBackend, ref: JobRef, place: Place) -> int:
    from k8sjob.cli.running import attach  # noqa: PLC0415 - a screen takes longer than a submission

    return attach(backend, ref, output="auto", logs=True, again=f"watch {ref}{place.words}")


def _show_made(
    backend: ClusterBackend, done: Submitted, output: str | None, place: Place, *, watch: bool
) -> None:
    if output == "name":
        line(done.ref)
    elif output:
        document(backend.snapshot(done.ref).job, output)
    else:
        line(f"{done.ref} {_SAID[done.outcome]}")
        if not watch:
            say(f"follow it: k8sjob watch {done.ref}{place.words}")


def _show_plan(made: Plan, place: Place, output: str | None) -> None:
    """What would be sent, where no cluster is asked."""
    manifest = parse(made.manifest).data
    namespace = made.spec.namespace or place.namespace
    if namespace:
        # In front, where one looks for it; the rest of the metadata follows.
        identity = {"name": made.spec.name, "namespace": namespace}
        manifest["metadata"] = {**identity, **manifest["metadata"]}
    if output in {"yaml", "json"}:
        document(manifest, output)
    else:
        name = f"{namespace}/{made.spec.name}" if namespace else made.spec.name
        line(name if output == "name" else f"{name} created (dry run)")


def _show_dry(made: Plan, backend: ClusterBackend, done: Submitted, output: str | None) -> None:
    if output == "name":
        line(done.ref)
    elif output:
        document(backend.dry_run(parse(made.manifest).data, name_free=True), output)
    else:
        line(f"{done.ref} {_SAID[done.outcome]} (server dry run)")


@click.command("diff")
@FILE
@image_option
@onto_option
@plain_http_option
@place_options(local=False)
def diff_command(
    file: Path, image: str | None, onto: str | None, plain_http: tuple[str, ...], place: Place
) -> int:
    """Show what would be different if FILE (default: job.yaml) replaced the job in the cluster.

    The cluster fills its defaults in on both sides, so they are no differences. The exit code is
    that of kubectl diff: 0 the same, 1 different, 2 an error.
    """
    try:
        spec = load(file)
        with located(file):
            made = plan_submission(spec, folder_of(file), image=image, namespace=place.namespace)
        backend = place.connect(made.spec.namespace)
        if spec.builds_image and image is None:
            http = _http(plain_http)
            made, _ = push_code(spec, made, backend, dry_run=True, onto=onto, http=http)
        found = compare(made, backend)
    except K8sJobError as error:
        fail(str(error))
        return max(error.exit_code, 2)
    _show_lines(found.lines)
    edit = f"kubectl edit pytorchjob {made.spec.name} -n {backend.namespace}{place.words}"
    _explain(found, _submit_again(file, image, place), edit)
    return int(bool(found))


def _show_lines(lines: Sequence[str], *, err: bool = False) -> None:
    stream = sys.stderr if err else sys.stdout
    coloured = stream.isatty() and not os.environ.get("NO_COLOR")
    for one in lines:
        shown = safe_line(one)
        if coloured and one.startswith(("---", "+++")):
            shown = click.style(shown, bold=True)
        elif coloured:
            shown = click.style(shown, fg=_COLOURS.get(one[:1]))
        click.echo(shown, err=err)


def _submit_again(file: Path, image: str | None, place: Place) -> str:
    """The command that would bring the difference about."""
    given = {"--image": image, "-n": place.namespace}
    options = [word for name, value in given.items() if value for word in (name, value)]
    return shlex.join(["k8sjob", "submit", str(file), *options]) + place.words


def _explain(found: Difference, command: str, edit: str) -> None:
    """Which of the differences running pods would never see, and what brings each about."""
    if found.is_new:
        say(f"\nthe job is not there; make it: {command}")
        return
    if found.at_once:
        say(
            f"\nread again while the job runs; {edit} changes it, submit does not:\n"
            f"  {_some(found.at_once)}"
        )
    if found.anew:
        say(
            f"\npods keep what they were started with, so this takes effect only in a job that is"
            f" made anew, by {command} --replace:\n  {_some(found.anew)}"
        )


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MOST_PATHS} more" if len(paths) > _MOST_PATHS else ""
    return ", ".join(paths[:_MOST_PATHS]) + more
