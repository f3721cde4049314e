"""Contents that look like credentials: found by the form of the well-known ones, never shown.

A look at the literal beginning of each form comes first, so that a file without any costs little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

__all__ = ["Finding", "Scanner"]

_OVERLAP: Final = 4096
"""Bytes of the block before that are looked at again: a form may lie across two blocks."""


class Finding(NamedTuple):
    """Something that looks like a credential.

    Attributes:
        path: the file, relative to the context.
        line: counted from 1.
        what: which form it has; the value is nowhere.
    """

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


class _Form(NamedTuple):
    begin: bytes
    what: str
    pattern: bytes  # compiled when it is needed: most pushes need none


_FORMS: Final = tuple(
    _Form(begin.encode(), what, pattern.encode())
    for begin, what, pattern in (
        ("AKIA", "an AWS access key", r"\bAKIA[0-9A-Z]{16}\b"),
        ("aws_secret", "an AWS secret key", r"(?i:aws_secret_access_key)\W{1,6}[\w/+]{40}\b"),
        ("ghp_", "a GitHub token", r"\bghp_[A-Za-z0-9]{36}"),
        ("gho_", "a GitHub token", r"\bgho_[A-Za-z0-9]{36}"),
        ("ghs_", "a GitHub token", r"\bghs_[A-Za-z0-9]{36}"),
        ("github_pat_", "a GitHub token", r"\bgithub_pat_[A-Za-z0-9_]{40,}"),
        ("glpat-", "a GitLab token", r"\bglpat-[A-Za-z0-9_-]{20}"),
        ("hf_", "a Hugging Face token", r"\bhf_[A-Za-z0-9]{34}\b"),
        ("sk-", "an API key", r"\bsk-(?:[a-z]{1,12}[0-9]{0,2}-){0,2}(?=\w*\d)[A-Za-z0-9_]{32,}"),
        ("sk_live_", "a Stripe key", r"\bsk_live_[A-Za-z0-9]{24,}"),
        ("xox", "a Slack token", r"\bxox[abeoprs]-[A-Za-z0-9-]{20,}"),
        ("AIza", "a Google API key", r"\bAIza[A-Za-z0-9_-]{35}"),
        ("npm_", "an npm token", r"\bnpm_[A-Za-z0-9]{36}\b"),
        ("pypi-AgE", "a PyPI token", r"\bpypi-AgE[A-Za-z0-9_-]{50,}"),
        ("dckr_pat_", "a registry token", r"\bdckr_pat_[A-Za-z0-9_-]{20,}"),
        ("AccountKey=", "an Azure storage key", r"\bAccountKey=[A-Za-z0-9+/]{86}=="),
        ("WANDB_API_KEY", "a W&B key", r"\bWANDB_API_KEY\W{1,6}[0-9a-f]{40}\b"),
        ("PRIVATE KEY-----", "a private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
        ("client-key-data", "a client key", r"\bclient-key-data:\s*[A-Za-z0-9+/=]{64}"),
        ('"auth"', "a registry login", r'"auth"\s*:\s*"[A-Za-z0-9+/]{8,}={0,2}"'),
        ("password", "a netrc entry", r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+\S"),
        ("eyJ", "a JSON web token", r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
    )
)


@dataclass(slots=True)
class Scanner:
    """Looks through one file, block by block.

    Attributes:
        path: the file, for the findings.
        findings: in the order of the lines; one for each form and line.
    """

    path: str
    findings: set[Finding] = field(default_factory=set)
    _before: bytes = b""
    _lines: int = 1

    def feed(self, block: bytes) -> None:
        """Look through the next block."""
        data = self._before + block if self._before else block
        for form in _FORMS:
            if form.begin in data:
                for match in re.finditer(form.pattern, data):
                    line = self._lines + data.count(b"\n", 0, match.start())
                    self.findings.add(Finding(self.path, line, form.what))
        self._before = data[-_OVERLAP:]
        self._lines += data.count(b"\n", 0, len(data) - len(self._before))
