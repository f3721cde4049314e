"""`k8sjob version`, and `k8sjob completion`: the script of each shell."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

import click

from k8sjob.checks.distributions import installed_version
from k8sjob.cli.options import format_option
from k8sjob.cli.output import document
from k8sjob.contract import __version__

_SHELLS: Final = ("bash", "zsh", "fish")
"""Each evaluates its script, completion.SHELL."""


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def completion_command(shell: str) -> None:
    """Print the script that completes words in SHELL.

    For bash: source <(k8sjob completion bash), in ~/.bashrc to keep it; the same for zsh, after
    compinit. For fish: k8sjob completion fish > ~/.config/fish/completions/k8sjob.fish

    Commands, options, fields of --set and their values, names of jobs, namespaces and contexts are
    completed. The cluster is queried for at most a second, and not at all where the kubeconfig has
    a program for the credentials: a tab runs none. kubectl completes `kubectl k8sjob` by itself.
    """
    script = Path(__file__).with_name(f"completion.{shell}").read_text(encoding="utf-8")
    click.echo(script, nl=False)


@click.command("version")
@format_option("table", "json", "yaml")
def version_command(output: str) -> None:
    """Print the versions of k8sjob, of Python, and of torch if it is installed."""
    torch = installed_version("torch") or None
    versions = {"k8sjob": __version__, "python": platform.python_version(), "torch": torch}
    if output != "table":
        document(versions, output)
        return
    for name, version in versions.items():
        click.echo(f"{name} {version or 'not installed'}")
