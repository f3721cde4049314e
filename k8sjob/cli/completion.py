"""`k8sjob completion`: the script of each shell, and the words that it asks for; `version`.

A script sends the line up to the cursor and gets a candidate a line: its kind (`word`, `part` for a
word that does not end here, `file`, `dir`), the word, and what it means, with tabs between.
Nothing is written on stderr, whatever goes wrong: it would land in the line that is typed. A word
that a shell would expand, as `$(...)`, is not offered: bash puts it into the line as it is.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from k8sjob.cli.options import format_option
from k8sjob.cli.output import document, line
from k8sjob.cli.program import program
from k8sjob.contract import __version__
from k8sjob.environment import COMPLETE
from k8sjob.sanitize import safe_line

_NO_SPACE, _NO_FILES = 2, 4
"""The bits of the last line, `:4`, as kubectl reads them."""

_INERT: Final = re.compile(r"[\w@%+=:,./-]*")
"""What no shell expands."""

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
    script = Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")
    click.echo(script, nl=False)


@click.command("version")
@format_option("table", "json", "yaml")
def version_command(output: str) -> None:
    """Print the versions of k8sjob, of Python, and of torch if it is installed."""
    import platform  # noqa: PLC0415 - not for a completion
    from importlib import metadata  # noqa: PLC0415 - the same

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


def complete(sent: str) -> None:
    """Print the candidates for the line that a shell's script has sent."""
    _silence()
    with suppress(Exception):
        words = split_arg_string(sent)[1:]
        typed = words.pop() if words and not sent[-1:].isspace() else ""
        # A shell replaces the whole word, also of --set=replicas.
        before = typed[: typed.find("=") + 1] if typed.startswith("--") else ""
        for item in _candidates(words, typed):
            meaning = safe_line(" ".join((item.help or "").split()))
            click.echo(f"{_kind(item)}\t{before}{item.value}\t{meaning}")


def main() -> None:
    """The program kubectl_complete-k8sjob, which kubectl asks; its arguments are the words."""
    _silence()
    found: list[CompletionItem] = []
    with suppress(Exception):
        *words, typed = sys.argv[1:] or [""]
        found = _candidates(words, typed)
    kinds = {_kind(item) for item in found}
    for word in (item.value for item in found if item.type == "plain"):
        line(word)  # kubectl's shells find files where no word is offered
    no_files, no_space = kinds.isdisjoint({"file", "dir"}), "part" in kinds
    click.echo(f":{no_files * _NO_FILES + no_space * _NO_SPACE}")


def _candidates(words: list[str], typed: str) -> list[CompletionItem]:
    items = ShellComplete(program, {}, "k8sjob", COMPLETE).get_completions(words, typed)
    # Of files the word is what was typed, as `~/jo`; the shell itself finds and quotes the rest.
    return [item for item in items if item.type != "plain" or _INERT.fullmatch(item.value)]


def _kind(item: CompletionItem) -> str:
    if item.type in {"file", "dir"}:
        return str(item.type)
    return "part" if item.value.endswith("=") else "word"


def _silence() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
