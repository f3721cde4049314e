"""Lint: what will hang, be rejected by the operator, or go wrong silently; said before it runs.

`lint(path)` reads a PyTorchJob manifest, a job.yaml with the script that it names, or a script.
Nothing is executed. docs/reference/lint.md has every check with its reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k8sjob.lint import job_yaml, manifest, script
from k8sjob.lint.files import lint
from k8sjob.lint.finding import UNKNOWN_IGNORE, Check, Finding, Severity
from k8sjob.lint.manifest import lint_manifest
from k8sjob.lint.script import lint_script
from k8sjob.lint.script_facts import Setting

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CHECKS",
    "Check",
    "Finding",
    "Setting",
    "Severity",
    "lint",
    "lint_manifest",
    "lint_script",
]

CHECKS: Final[Mapping[str, Check]] = {
    **manifest.CHECKS,
    **job_yaml.CHECKS,
    **script.CHECKS,
    UNKNOWN_IGNORE.id: UNKNOWN_IGNORE,
}
"""Every check by its id."""
