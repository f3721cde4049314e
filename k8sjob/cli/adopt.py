"""`k8sjob adopt`: a job.yaml from a manifest."""

from __future__ import annotations

from pathlib import Path

import click

from k8sjob.adopt import adopt
from k8sjob.cli.options import source_name
from k8sjob.cli.output import print_status, text
from k8sjob.yamldoc import content


@click.command("adopt")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
def adopt_command(file: Path) -> None:
    """Print a job.yaml that renders the same job as a manifest: FILE, or - for standard input.

    FILE has one job of a supported kind and the objects that belong to it. Anything without a field
    in job.yaml goes to its pod_template or overlay; nothing is dropped. Notes about it go to
    standard error, so that k8sjob adopt pytorchjob.yaml > job.yaml works.
    """
    adopted = adopt(content(file), source_name(file))
    text(adopted.spec.to_yaml())
    for note in adopted.notes:
        print_status(f"note: {note}")
