"""The search for credentials in files that go into an image."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

_OVERLAP: Final = 4096
"""Bytes of the previous block that are scanned again: a secret may lie across two blocks."""
_SECRETS: Final = tuple(
    (begin.encode(), what, pattern.encode())  # compiled when it is needed: most pushes need none
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
"""Well-known credentials: their literal beginning, which is cheap to look for, and their form."""


class Secret(NamedTuple):
    """A line (from 1) that looks like a credential, and of which kind; its value is never shown."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(slots=True)
class SecretScanner:
    """Looks through one file, block by block; one finding for each form and line."""

    path: str
    findings: set[Secret] = field(default_factory=set)
    _before: bytes = b""
    _lines: int = 1

    def feed(self, block: bytes) -> None:
        """Look through the next block."""
        data = self._before + block if self._before else block
        for begin, what, pattern in _SECRETS:
            if begin in data:
                for match in re.finditer(pattern, data):
                    line = self._lines + data.count(b"\n", 0, match.start())
                    self.findings.add(Secret(self.path, line, what))
        self._before = data[-_OVERLAP:]
        self._lines += data.count(b"\n", 0, len(data) - len(self._before))
