"""`k8sjob version` and `k8sjob completion`: the program itself."""

from __future__ import annotations

import platform
from importlib import metadata

import click
from click.shell_completion import get_completion_class

from k8sjob.cli.options import format_option
from k8sjob.cli.output import document
from k8sjob.contract import __version__

__all__ = ["completion_command", "version_command"]


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and job names in SHELL.

    For bash: source <(k8sjob completion bash), in ~/.bashrc to keep it.
    """
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - the choice of shells above is what click knows
    click.echo(kind(ctx.find_root().command, {}, "k8sjob", "_K8SJOB_COMPLETE").source())


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
