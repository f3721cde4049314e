"""Findings of lint, their messages, and the comments that silence them."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from k8sjob.contract import __version__, did_you_mean
from k8sjob.findings import Finding, Severity
from k8sjob.rules import Check

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_TABLES: Final[dict[str, dict[str, str]]] = tomllib.loads(
    Path(__file__).with_name("tables.toml").read_text(encoding="utf-8")
)
"""The known names of libraries and images, and the messages of checks."""
_IGNORE_COMMENT: Final = re.compile(r"#\s*k8sjob:\s*ignore\[([^\[\]\n]*)\]")


def table(name: str) -> dict[str, str]:
    """One of the tables."""
    return _TABLES[name]


def pattern(name: str) -> re.Pattern[str]:
    """A regular expression of the tables."""
    return re.compile(table("patterns")[name])


def message(name: str, /, **fields: object) -> str:
    """The message of that name, which is mostly the id of a check, with its fields filled in."""
    return table("messages")[name].format(**fields)


def sarif(findings: Sequence[Finding], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Findings as SARIF 2.1.0 (OASIS), which code hosts and editors show beside the lines."""
    ids = list(checks)
    results = [
        {
            "ruleId": finding.id,
            "ruleIndex": ids.index(finding.id),
            "level": str(finding.severity),
            "message": {"text": finding.text},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": quote(os.fsencode(finding.source))},
                        "region": {"startLine": finding.line, "startColumn": finding.column},
                    }
                }
            ],
        }
        for finding in findings
    ]
    rules = [
        {
            "id": check.id,
            "shortDescription": {"text": check.why},
            "defaultConfiguration": {"level": str(check.severity)},
        }
        for check in checks.values()
    ]
    driver = {"name": "k8sjob", "version": __version__, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


UNKNOWN_IGNORE: Final = Check(
    "unknown-ignore",
    Severity.WARNING,
    "any",
    "A comment that names no check of its file has no effect.",
)


def findings(
    hits: Iterable[Finding], texts: Mapping[str, str], checks: Iterable[str]
) -> list[Finding]:
    """Findings in the order of the files, without what comments silence.

    A finding without a file is in the first of the texts. A comment that names none of the
    checks, which are given by their ids, is a finding, too.
    """
    silenced = {source: dict(_silenced(text)) for source, text in texts.items()}
    first, order = next(iter(texts)), {source: at for at, source in enumerate(texts)}
    unsilenced = [
        finding._replace(source=source)
        for finding in hits
        for source in [finding.source or first]
        if finding.id not in silenced[source].get(finding.line, ())
    ]
    ids = {*checks, UNKNOWN_IGNORE.id}
    for source, lines in silenced.items():
        for line, names in lines.items():
            for name in (name for name in names if name not in ids):
                step = did_you_mean(name, ids, f"there are: {', '.join(sorted(ids))}")
                message = (
                    f"ignore[{name}]: there is no check of that name, so nothing is suppressed"
                )
                unsilenced.append(UNKNOWN_IGNORE.finding(message, step, source=source, line=line))
    return sorted(
        dict.fromkeys(unsilenced), key=lambda hit: (order[hit.source], hit.line, hit.column, hit.id)
    )


def _silenced(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        names = [
            name.strip() for group in _IGNORE_COMMENT.findall(line) for name in group.split(",")
        ]
        if names:
            yield number, names
