"""The words that the script of a shell asks for: see `k8sjob completion`.

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
from typing import Final

import click
from click.shell_completion import CompletionItem, ShellComplete, split_arg_string

from k8sjob.cli.output import line
from k8sjob.cli.program import program
from k8sjob.environment import COMPLETE
from k8sjob.sanitize import safe_line

_NO_SPACE, _NO_FILES = 2, 4
"""The bits of the last line, `:4`, as kubectl reads them."""

_INERT: Final = re.compile(r"[\w@%+=:,./-]*")
"""What no shell expands."""


def complete(typed_line: str) -> None:
    """Print the candidates for the line that a shell's script has sent."""
    _silence()
    with suppress(Exception):
        words = split_arg_string(typed_line)[1:]
        # After a space a new word begins.
        typed = words.pop() if words and not typed_line[-1:].isspace() else ""
        # A shell replaces the whole word, also of --set=replicas.
        before = typed[: typed.find("=") + 1] if typed.startswith("--") else ""
        for candidate in _candidates(words, typed):
            meaning = safe_line(" ".join((candidate.help or "").split()))
            click.echo(f"{_kind(candidate)}\t{before}{candidate.value}\t{meaning}")


def main() -> None:
    """The program kubectl_complete-k8sjob, which kubectl asks; its arguments are the words."""
    _silence()
    candidates: list[CompletionItem] = []
    with suppress(Exception):
        *words, typed = sys.argv[1:] or [""]
        candidates = _candidates(words, typed)
    kinds = {_kind(item) for item in candidates}
    for word in (item.value for item in candidates if item.type == "plain"):
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
    # The descriptor and not sys.stderr: libraries and child processes write there, too.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
