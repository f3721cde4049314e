"""Lint of training scripts: read by `ast`, never executed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from k8sjob.document.reading import MAX_BYTES, content
from k8sjob.errors import Problem, SpecError
from k8sjob.lint import script_collectives, script_data, script_device, script_group
from k8sjob.lint.finding import Check, Finding, Severity, findings
from k8sjob.lint.modules import encoding, parse_module, program
from k8sjob.lint.script_facts import Script, Setting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["CHECKS", "SYNTAX", "decoded", "lint_script", "read"]

SYNTAX: Final = Check(
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

CHECKS: Final = {check.id: check for check in (SYNTAX, *(rule.check for rule in _RULES))}


def read(file: Path) -> str:
    """The text of a file that is to be looked at.

    Raises:
        SpecError: it cannot be read.
    """
    try:
        return decoded(content(file), str(file))
    except OSError as error:
        step = "name a PyTorchJob manifest, a job.yaml or a script"
        message = f"cannot be read: {error.strerror or error}; {step}"
        raise SpecError([Problem("", message)], str(file)) from None


def decoded(data: bytes, source: str) -> str:
    """The text in bytes, or SpecError."""
    if len(data) > MAX_BYTES:
        message = f"longer than {MAX_BYTES} bytes; name a manifest, a job.yaml or a script"
        raise SpecError([Problem("", message)], source)
    try:
        is_python = source.endswith((".py", ".pyw"))
        return data.decode(encoding(data) if is_python else "utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise SpecError([Problem("", message)], source) from None


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
        return [Finding(SYNTAX.id, SYNTAX.severity, message, source, line, max(column, 1))]
