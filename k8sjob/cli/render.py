"""`k8sjob render`: the manifest, the Dockerfile, or the folder that an image is built from."""

from __future__ import annotations

from pathlib import Path

import click

from k8sjob.cli.jobfile import AUTO, JobFile, job_command, target_option
from k8sjob.cli.options import image_option
from k8sjob.cli.output import print_status, text, warn, warn_of_secrets
from k8sjob.rendering.dockerfile import dockerfile, write_context
from k8sjob.rendering.manifest import remarks, render


@job_command("render")
@click.option("--dockerfile", "only_dockerfile", is_flag=True, help="Print the Dockerfile instead.")
@click.option(
    "-d",
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write manifest, Dockerfile and what the image is built from into a folder.",
)
@image_option
@click.option(
    "-n", "--namespace", metavar="NS", help="Namespace of the job, instead of the file's."
)
@target_option
def render_command(  # noqa: PLR0917 - click hands them over by name
    job: JobFile,
    only_dockerfile: bool,
    folder: Path | None,
    image: str | None,
    namespace: str | None,
    target: str | None,
) -> None:
    """Print the manifest of FILE (default: job.yaml), for kubectl apply -f -."""
    if only_dockerfile and (folder or image or namespace or target):
        raise click.UsageError(
            "--dockerfile cannot be combined with --dir, --image, --namespace or --target"
        )
    spec = job.load()
    if namespace:
        spec = spec.with_(namespace=namespace)
    if target == AUTO:
        raise click.UsageError(
            "--target auto needs a cluster, which render does not use; specify a target"
        )
    if target:
        spec = spec.with_(target=target)
    if only_dockerfile:
        text(dockerfile(spec))
        return
    with job.located():
        if folder is None:
            text(render(spec, image))
        else:
            source = job.folder / spec.code_folder
            for path in write_context(spec, source, folder, image=image):
                print_status(f"wrote {path}")
            if spec.builds_image:
                # Layers and registries take longer to import than a manifest to render.
                from k8sjob.image.build_context import read_context  # noqa: PLC0415 - see above
                from k8sjob.image.layers import find_secrets  # noqa: PLC0415 - see above

                secrets = find_secrets(read_context(source))
                warn_of_secrets(secrets, "remove it, or exclude the file in .dockerignore")
    for remark in remarks(spec):
        warn(remark)
