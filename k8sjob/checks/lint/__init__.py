"""Lint: what will hang, be rejected by the operator, or go wrong silently, found before it runs.

`lint(path)` reads a manifest of a job, a job.yaml with the script that it names, or a script.
Nothing is executed. docs/reference/lint.md has every check with its reason.
"""

from k8sjob.checks.finding import sarif
from k8sjob.checks.lint.files import CHECKS, lint, lint_manifest
from k8sjob.checks.scripts import Setting, lint_script
from k8sjob.findings import Finding, Severity
from k8sjob.rules import Check

__all__ = [
    "CHECKS",
    "Check",
    "Finding",
    "Setting",
    "Severity",
    "lint",
    "lint_manifest",
    "lint_script",
    "sarif",
]
