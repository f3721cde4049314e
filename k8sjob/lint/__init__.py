"""Lint: what will hang, be rejected by the operator, or go wrong silently; said before it runs."""

from __future__ import annotations

from k8sjob.lint.finding import Check, Finding, Severity
from k8sjob.lint.script import lint_script
from k8sjob.lint.script_facts import Setting

__all__ = ["Check", "Finding", "Setting", "Severity", "lint_script"]
