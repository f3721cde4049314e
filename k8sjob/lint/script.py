"""Lint of training scripts: read by `ast`, never executed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from k8sjob.lint import script_collectives, script_data, script_device, script_group
from k8sjob.lint.finding import Check, Finding, Severity, findings
from k8sjob.lint.modules import parse_module, program
from k8sjob.lint.script_facts import Script, Setting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["CHECKS", "lint_script"]

_SYNTAX: Final = Check(
    "script-syntax",
    Severity.ERROR,
    "script",
    "A file that Python cannot parse ends every replica at its first line.",
)
_RULES: Final = (
    *script_group.RULES,
    *script_collectives.RULES,
    *script_device.RULES,
    *script_data.RULES,
)

CHECKS: Final = {check.id: check for check in (_SYNTAX, *(rule.check for rule in _RULES))}


def lint_script(
    text: str,
    source: str = "",
    setting: Setting | None = None,
    *,
    roots: Sequence[Path] = (),
    name: str = "__main__",
) -> list[Finding]:
    """What will hang, crash or go wrong silently when a script trains in a PyTorchJob.

    Args:
        text: the script.
        source: its file name, for the findings.
        setting: how it is started; what is not known there is not held against the script.
        roots: folders in which its local modules are looked for, and read as parts of it.
        name: its own dotted name if it is started as a module.

    Returns:
        The findings in the order of the file; those on a line with `# k8sjob: ignore[id]` left out.
    """
    try:
        entry = parse_module(text, source, name, name.rpartition(".")[0])
        files = program(entry, roots)
        texts = {module.source: module.text for module in files}
        return findings(_RULES, Script(files, setting or Setting()), texts, CHECKS)
    except (SyntaxError, ValueError, RecursionError) as error:
        line, column = getattr(error, "lineno", 1) or 1, getattr(error, "offset", 1) or 1
        version = ".".join(str(part) for part in sys.version_info[:2])
        message = (
            f"Python {version} cannot parse this: {getattr(error, 'msg', error)}; every replica "
            "ends at once; correct it"
        )
        return [Finding(_SYNTAX.id, _SYNTAX.severity, message, source, line, max(column, 1))]
