"""`k8sjob render`: the manifest, the Dockerfile, or the folder that an image is built from."""

from __future__ import annotations

from pathlib import Path

import click

from k8sjob.cli.failure import say, warn
from k8sjob.cli.options import FILE, folder_of
from k8sjob.cli.output import text
from k8sjob.rendering import dockerfile, render, write_context
from k8sjob.spec import Image, load
from k8sjob.spec.load import located

__all__ = ["render_command"]


@click.command("render")
@FILE
@click.option("--dockerfile", "only_dockerfile", is_flag=True, help="Print the Dockerfile instead.")
@click.option(
    "-d",
    "--dir",
    "target",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write manifest, Dockerfile and what the image is built from into a folder.",
)
@click.option("--image", help="The image that the replicas run, best with its digest.")
@click.option("-n", "--namespace", help="Namespace of the job, instead of the file's.")
def render_command(
    file: Path, only_dockerfile: bool, target: Path | None, image: str | None, namespace: str | None
) -> None:
    """Print the PyTorchJob manifest of FILE (default: job.yaml), for kubectl apply -f -."""
    if only_dockerfile and (target or image or namespace):
        raise click.UsageError("--dockerfile goes with none of --dir, --image and --namespace")
    spec = load(file)
    if namespace:
        spec = spec.with_(namespace=namespace)
    if only_dockerfile:
        text(dockerfile(spec))
        return
    with located(file):
        if target is None:
            text(render(spec, image))
        else:
            context = spec.image.context if isinstance(spec.image, Image) else "."
            for path in write_context(spec, folder_of(file) / context, target, image=image):
                say(f"wrote {path}")
    for remark in spec.remarks:
        warn(remark)
