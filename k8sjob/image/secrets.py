"""The search for credentials in files that go into an image."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_OVERLAP: Final = 4096
"""Bytes of the previous block that are scanned again: a secret may lie across two blocks."""
_TOKENS: Final = (
    ("an AWS access key", "AKIA ASIA", r"[0-9A-Z]{16}\b"),
    ("an Alibaba access key", "LTAI", r"[A-Za-z0-9]{20}\b"),
    ("a GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_", r"[A-Za-z0-9]{36}"),
    ("a GitHub token", "github_pat_", r"[A-Za-z0-9_]{40,}"),
    ("a GitLab token", "glpat- glrt- gldt- glptt- glcbt- glsoat-", r"[\w-]{20}"),
    ("an Atlassian token", "ATATT3 ATCTT3", r"[\w=-]{60,}"),
    ("a Bitbucket password", "ATBB", r"[A-Za-z0-9]{32}\b"),
    ("a Hugging Face token", "hf_ api_org_", r"[A-Za-z0-9]{34}\b"),
    ("an API key", "sk-", r"(?:[a-z]{1,12}[0-9]{0,2}-){0,2}(?=\w*\d)[A-Za-z0-9_]{32,}"),
    ("an API key", "sk-proj- sk-svcacct- sk-admin- sk-ant- sk-or-v1-", r"[\w-]{40,}"),
    ("an API key", "gsk_ xai- pplx- r8_ rpa_ pcsk_ tgp_v1_", r"(?=\w*\d)\w{36,}"),
    ("an NVIDIA key", "nvapi-", r"[\w-]{60,}"),
    ("a LangSmith key", "lsv2_pt_ lsv2_sk_", r"[0-9a-f]{32}"),
    ("a W&B key", "wandb_v1_", r"\w{40,}"),
    ("a Databricks token", "dapi", r"[0-9a-f]{32}\b"),
    ("a Stripe key", "sk_live_ rk_live_", r"[A-Za-z0-9]{24,}"),
    ("a Slack token", "xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs- xapp-", r"[A-Za-z0-9-]{20,}"),
    ("a Slack webhook", "hooks.slack.com/services/", r"T\w+/B\w+/\w{20,}"),
    ("a Discord webhook", "discord.com/api/webhooks/", r"\d{17,20}/[\w-]{60,}"),
    ("a Google API key", "AIza", r"[\w-]{35}"),
    ("a Google token", "ya29. GOCSPX-", r"[\w-]{28,}"),
    ("an npm token", "npm_", r"[A-Za-z0-9]{36}\b"),
    ("a PyPI token", "pypi-AgE", r"[\w-]{50,}"),
    ("a RubyGems key", "rubygems_", r"[0-9a-f]{48}"),
    ("a registry token", "dckr_pat_ dckr_oat_", r"[\w-]{20,}"),
    ("a DigitalOcean token", "dop_v1_ doo_v1_ dor_v1_", r"[0-9a-f]{64}"),
    ("a Grafana token", "glsa_ glc_", r"\w{32,}"),
    ("a Sentry token", "sntrys_ sntryu_", r"[\w+/=]{60,}"),
    ("a Vault token", "hvs. hvb.", r"[\w-]{80,}"),
    ("a SendGrid key", "SG.", r"[\w-]{22}\.[\w-]{43}"),
    ("a New Relic key", "NRAK-", r"[0-9A-Z]{27}"),
    ("a Notion or Linear key", "ntn_ lin_api_", r"[A-Za-z0-9]{40,}"),
    ("an age key", "AGE-SECRET-KEY-1", r"[0-9A-Z]{58}"),
    ("an Azure storage key", "AccountKey=", r"[A-Za-z0-9+/]{86}=="),
    ("a JSON web token", "eyJ", r"[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}"),
)
"""Tokens with a beginning of their own: the kind, the beginnings, and what follows each."""
_ASSIGNED: Final = r"\W{1,40}(?:value\W{1,6})?"
"""What may stand between a name and its value in code, shells, JSON, YAML, and lists of env."""
_NAMED: Final = (
    (
        "an AWS secret key",
        "secret",
        rf"(?i:secret[_-]?(?:access[_-]?)?key){_ASSIGNED}(?=\S{{0,39}}\d)[\w/+]{{40}}(?![\w/+])",
    ),
    ("a W&B key", "wandb", rf"(?i:wandb(?:_?api_?key|\.login\(\s*key)){_ASSIGNED}[0-9a-f]{{40}}\b"),
    ("an Azure client secret", "secret", r"(?<![\w~.])[\w~.]{3}\dQ~[\w~.-]{31,34}"),
    ("a Comet key", "comet_api_key", rf"(?i:comet_api_key){_ASSIGNED}[A-Za-z0-9]{{25}}\b"),
    ("a Neptune token", "neptune_api", rf"(?i:neptune_api_token){_ASSIGNED}eyJ[\w+/]{{40,}}"),
    ("a Kaggle key", "kaggle_key", rf"(?i:kaggle_key){_ASSIGNED}[0-9a-f]{{32}}\b"),
    ("a Kaggle key", '"username"', r'"username"\s*:\s*"[^"]*",\s*"key"\s*:\s*"[0-9a-f]{32}"'),
    ("a Telegram token", "telegram", r"\b\d{8,10}:AA[\w-]{33}(?![\w-])"),
    (
        "a private key",
        "private key",
        r"-----BEGIN [A-Z ]*PRIVATE KEY[A-Z -]*(?:[\s\"'+,]|\\[nr])*(?:[PVC][\w-]+:|[\w+/]{16})",
    ),
    ("a client key", "client-key-data", r"\bclient-key-data:\s*[A-Za-z0-9+/=]{64}"),
    (
        "a registry login",
        '"auth"',
        r'"auth"\s*:\s*"(?=[^"]*\d)(?=[^"]*[A-Z])[A-Za-z0-9+/]{12,}={0,2}"',
    ),
    (
        "a netrc entry",
        "password",
        r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+[^\s$<{%]",
    ),
)
"""What only its surroundings give away: the kind, a part of it in lower case, and the form."""
_PLACEHOLDER: Final = re.compile(rb"([\w*.-])\1{7}|EXAMPLE")
"""What the text of a match has that stands for a credential: documents have hf_xxxxxxxx."""
_BEGINS: Final = {
    begin.encode(): (kind, rf"\b{re.escape(begin)}{form}".encode())
    for kind, begins, form in _TOKENS
    for begin in begins.split()
}
"""The kind and the pattern by the beginning, which is cheap to look for; most pushes need none."""


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
    _findings: set[Secret] = field(default_factory=set)
    _before: bytes = b""
    _lines: int = 1

    def feed(self, block: bytes) -> None:
        """Look through the next block."""
        data = self._before + block
        self._scan(data, whole=False)
        self._before = data[-_OVERLAP:]
        self._lines += data.count(b"\n", 0, len(data) - len(self._before))

    def finish(self) -> list[Secret]:
        """What the file has, after its last block."""
        self._scan(self._before, whole=True)
        return sorted(self._findings)

    def _scan(self, data: bytes, *, whole: bool) -> None:
        continued = len(self._before) == _OVERLAP
        for kind, match in _matches(data):
            # At an edge of the data it may be a part of a longer word, which is no token; the
            # overlap brings it again with what follows, and had it before with what precedes.
            cut = match.end() == len(data) and len(match[0]) < _OVERLAP and not whole
            if not (cut or (continued and match.start() == 0) or _PLACEHOLDER.search(match[0])):
                line = self._lines + data.count(b"\n", 0, match.start())
                self._findings.add(Secret(self.path, line, kind))


def _matches(data: bytes) -> Iterator[tuple[str, re.Match[bytes]]]:
    """What has one of the forms, with its kind."""
    for begin, (kind, pattern) in _BEGINS.items():
        start = data.find(begin)
        while start >= 0:
            if match := re.compile(pattern).match(data, start):
                yield kind, match
            start = data.find(begin, start + 1)
    lowered = data.lower()
    for kind, part, form in _NAMED:
        if part.encode() in lowered:
            yield from ((kind, match) for match in re.finditer(form.encode(), data))
