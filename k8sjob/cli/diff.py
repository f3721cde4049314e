"""`k8sjob diff`: what submitting again would change."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Final

import click

from k8sjob.cli.find_job import Place, place_options
from k8sjob.cli.jobfile import JobFile, job_command, target_option, with_target
from k8sjob.cli.options import image_option, onto_option, plain_http_option
from k8sjob.cli.output import fail, first_names, print_status
from k8sjob.environment import no_colors
from k8sjob.errors import K8sJobError
from k8sjob.jobs.plan import plan_submission
from k8sjob.jobs.submit import compare, for_namespace, push_code
from k8sjob.sanitize import safe_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.rendering.diff import ManifestDiff

_COLORS: Final = {"+": "green", "-": "red", "@": "cyan"}
_MOST_PATHS: Final = 6
"""Maximum number of changed fields in a message; the lines of the difference show all of them."""


@job_command("diff")
@image_option
@onto_option
@plain_http_option
@target_option
@place_options(local=False)
def diff_command(  # noqa: PLR0917 - click hands them over by name
    job: JobFile,
    image: str | None,
    onto: str | None,
    plain_http: tuple[str, ...],
    target: str | None,
    place: Place,
) -> int:
    """Show what would be different if FILE (default: job.yaml) replaced the job in the cluster.

    The cluster fills in its defaults on both sides, so they are not shown as differences. The exit
    code is that of kubectl diff: 0 the same, 1 different, 2 an error.
    """
    try:
        spec = job.load()
        spec = with_target(spec, target, place)
        with job.located():
            plan = plan_submission(spec, job.folder, image=image, namespace=place.namespace)
        backend = place.connect(plan.spec.namespace)
        with job.located():
            plan = for_namespace(plan, backend)
        if spec.builds_image and image is None:
            from k8sjob.image.registry.http_client import HttpClient  # noqa: PLC0415 - see push_code

            http = HttpClient(plain_http=plain_http)
            plan, _ = push_code(spec, plan, backend, dry_run=True, onto=onto, http=http)
        changes = compare(plan, backend)
    except K8sJobError as error:
        # Not raised: errors have the exit code 1 elsewhere, which means "different" here.
        fail(str(error))
        return max(error.exit_code, 2)
    show_lines(changes.lines)
    name = f"{plan.job.target.kind.lower()} {plan.spec.name}"
    edit = f"kubectl edit {name} -n {backend.namespace}{place.options}"
    flags = {"--image": image, "--target": target and spec.target, "-n": place.namespace}
    options = [word for name, value in flags.items() if value for word in (name, value)]
    submit = shlex.join(["k8sjob", "submit", *job.words(spec), *options]) + place.options
    _explain(changes, submit, edit)
    return int(bool(changes))


def show_lines(lines: Sequence[str], *, err: bool = False) -> None:
    """Print the lines of a unified diff, in color on a terminal."""
    stream = sys.stderr if err else sys.stdout
    colored = stream.isatty() and not no_colors()
    for line in lines:
        shown = safe_line(line)
        if colored and line.startswith(("---", "+++")):
            shown = click.style(shown, bold=True)
        elif colored:
            shown = click.style(shown, fg=_COLORS.get(line[:1]))
        click.echo(shown, err=err)


def _explain(changes: ManifestDiff, submit: str, edit: str) -> None:
    """Explain which differences would not reach running pods, and how to apply each."""
    if changes.is_new:
        print_status(f"\nthe job does not exist; create it: {submit}")
    if changes.at_once:
        print_status(
            f"\nread again while the job runs; {edit} changes it, submit does not:\n"
            f"  {first_names(changes.at_once, _MOST_PATHS)}"
        )
    if changes.recreated:
        print_status(
            f"\npods keep what they were started with, so this takes effect only in a new job,"
            f" with {submit} --replace:\n  {first_names(changes.recreated, _MOST_PATHS)}"
        )
