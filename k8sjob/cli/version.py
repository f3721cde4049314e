"""`k8sjob version` and `k8sjob completion`: the program itself."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from k8sjob.cli.completion import SCRIPTS
from k8sjob.cli.options import format_option
from k8sjob.cli.output import document
from k8sjob.contract import __version__


@click.command("completion")
@click.argument("shell", type=click.Choice([*SCRIPTS]))
def completion_command(shell: str) -> None:
    """Print the script that completes words in SHELL.

    For bash: source <(k8sjob completion bash), in ~/.bashrc to keep it; the same for zsh, after
    compinit. For fish: k8sjob completion fish > ~/.config/fish/completions/k8sjob.fish

    Commands, options, fields of --set and their values, names of jobs, namespaces and contexts are
    completed. The cluster is asked for at most a second. kubectl completes `kubectl k8sjob` by
    itself.
    """
    click.echo(SCRIPTS[shell].strip())


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
