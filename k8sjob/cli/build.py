"""`k8sjob build`: the image with a job's dependencies."""

from __future__ import annotations

from dataclasses import asdict

import click

from k8sjob.cli.jobfile import JobFile, job_command
from k8sjob.cli.options import format_option, plain_http_option
from k8sjob.cli.output import document, line
from k8sjob.cli.push import build_and_report, transfer_options
from k8sjob.image.builders import AUTO, BUILDERS


@job_command("build")
@click.option(
    "--builder",
    type=click.Choice([AUTO, *BUILDERS]),
    default=AUTO,
    show_default=True,
    help="The builder; auto is the first of these that works here.",
)
@click.option(
    "--platform",
    "platforms",
    multiple=True,
    metavar="OS/ARCH",
    help="Instead of image.platform; may be given more than once, one image for each.",
)
@click.option("--no-cache", is_flag=True, help="Build again, even if the image exists.")
@click.option(
    "--zstd",
    is_flag=True,
    help="Compress the dependencies with zstd: smaller; for nodes with containerd 1.5 or newer.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be built, without building it.")
@plain_http_option
@format_option("name", "json", text="Print the image's reference, or all that is known about it.")
def build_command(  # noqa: PLR0917 - click hands them over by name
    job: JobFile,
    builder: str,
    platforms: tuple[str, ...],
    no_cache: bool,
    zstd: bool,
    dry_run: bool,
    plain_http: tuple[str, ...],
    output: str,
) -> None:
    """Build the image with the dependencies of FILE (default: job.yaml): apt, pip and requirements.

    It is pushed to the job's repository under a tag derived from the base and the dependencies.
    While these stay the same nothing is built again; k8sjob push and submit add the code to it.
    Prints the image with its digest, or the base if there is nothing to install.
    """
    spec, images = job.load(), []
    how = {"builder": builder, "cached": not no_cache, "zstd": zstd, "dry_run": dry_run}
    for platform in platforms or (None,):
        with transfer_options(plain_http) as options:
            built = build_and_report(spec, job.folder, platform=platform, **how, **options)
        images.append(built)
        # At once: a second platform may take minutes, or fail. After a dry run there is no
        # reference.
        if output == "name" and built.reference:
            line(built.reference)
    if output == "json":
        document([asdict(built) for built in images], output)
