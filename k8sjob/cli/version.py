"""`k8sjob version`."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from k8sjob.cli.options import format_option
from k8sjob.cli.output import document
from k8sjob.contract import __version__


@click.command("version")
@format_option("table", "json", "yaml")
def version_command(output: str) -> None:
    """Print the versions of k8sjob, of Python, and of torch if it is installed."""
    try:
        torch = metadata.version("torch")  # without importing it, which takes seconds
    except metadata.PackageNotFoundError:
        torch = None
    versions = {"k8sjob": __version__, "python": platform.python_version(), "torch": torch}
    if output != "table":
        document(versions, output)
        return
    for name, version in versions.items():
        click.echo(f"{name} {version or 'not installed'}")
