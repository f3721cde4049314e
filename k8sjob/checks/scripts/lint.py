"""Lint of a training script: its checks, over the script with its local modules."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from k8sjob.checks.finding import findings
from k8sjob.checks.scripts import collectives, data, order, process_group
from k8sjob.checks.scripts.facts import Script, Setting
from k8sjob.checks.scripts.modules import TooLarge, parse_module, program, time_limit
from k8sjob.findings import Finding, Severity
from k8sjob.rules import Check

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SYNTAX: Final = Check(
    "script-syntax",
    Severity.ERROR,
    "script",
    "A file that Python cannot parse ends every replica at its first line.",
)
_UNFINISHED: Final = Check(
    "script-unfinished",
    Severity.ERROR,
    "script",
    "Code may be so long or so nested that the checks take too long; what they miss goes unseen.",
)
_RULES: Final = (process_group.RULES, collectives.RULES, data.RULES, order.RULES)
CHECKS: Final = (SYNTAX, _UNFINISHED, *(check for rules in _RULES for check in rules.checks))
"""All checks of scripts."""


def lint_script(
    text: str,
    source: str = "",
    setting: Setting | None = None,
    *,
    roots: Sequence[Path] = (),
    name: str = "__main__",
) -> list[Finding]:
    """Find what will hang, crash or go wrong silently when a script trains in a job.

    The script is parsed, never executed.

    Args:
        text: the script.
        source: its file name, for the findings.
        setting: how it is started; what is not known there is not held against the script.
        roots: folders in which its local modules are looked for, and read as parts of it.
        name: its own dotted name if it is started as a module.

    Returns:
        The findings in the order of the file; those on a line with `# k8sjob: ignore[id]` left out.
    """
    hits, texts = list[Finding](), {source: text}
    try:
        with time_limit():
            files = program(parse_module(text, source, name, name.rpartition(".")[0]), roots)
            script = Script(files, setting or Setting())
            texts = {module.source: module.text for module in files}
            hits.extend(hit for rules in _RULES for hit in rules.hits(script))
    except SyntaxError as error:
        line, column = error.lineno or 1, error.offset or 1
        version = ".".join(str(part) for part in sys.version_info[:2])
        message = f"Python {version} cannot parse this: {error.msg}; every replica ends at once"
        return [
            SYNTAX.finding(message, "correct it", source=source, line=line, column=max(column, 1))
        ]
    # Besides the time: nesting that Python parses and cannot walk, numbers of 5,000 digits.
    except (TooLarge, RecursionError, ValueError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        hits.append(_UNFINISHED.finding(f"not checked further: {why}"))
    return findings(hits, texts, (check.id for check in CHECKS))
