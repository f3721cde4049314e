"""Findings of lint, the checks that make them, and the comments that silence them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import quote

from k8sjob.contract import __version__, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")

Subject = Literal["manifest", "script", "any"]

_IGNORE_COMMENT: Final = re.compile(r"#\s*k8sjob:\s*ignore\[([^\[\]\n]*)\]")


class Severity(StrEnum):
    """The severity of a finding."""

    ERROR = "error"
    """It hangs, crashes at the start or is rejected."""
    WARNING = "warning"
    """It goes wrong silently, or only when something else fails."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that will go wrong.

    Attributes:
        id: the check's stable name, a key of CHECKS.
        severity: error or warning.
        message: what, the value seen, the consequence, the next step.
        source: the file's name.
        line: counted from 1.
        column: counted from 1.
    """

    id: str
    severity: Severity
    message: str
    source: str = ""
    line: int = 1
    column: int = 1

    def __str__(self) -> str:
        place = f"{self.source or '<text>'}:{self.line}:{self.column}"
        return f"{place}: {self.severity}[{self.id}]: {self.message}"


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its name and its reason.

    Attributes:
        id: the stable name that a comment `# k8sjob: ignore[id]` silences it by.
        severity: of all its findings.
        subject: what it reads.
        why: the mechanism behind it, one sentence.
    """

    id: str
    severity: Severity
    subject: Subject
    why: str

    def finding(self, message: str, source: str, line: int = 1, column: int = 1) -> Finding:
        """A finding of this check."""
        return Finding(self.id, self.severity, message, source, line, column)


def sarif(found: Sequence[Finding], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Findings as SARIF 2.1.0 (OASIS), which code hosts and editors show beside the lines."""
    ids = list(checks)
    results = [
        {
            "ruleId": one.id,
            "ruleIndex": ids.index(one.id),
            "level": str(one.severity),
            "message": {"text": one.message},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": quote(os.fsencode(one.source))},
                        "region": {"startLine": one.line, "startColumn": one.column},
                    }
                }
            ],
        }
        for one in found
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
    "A comment that names no check of its file silences nothing.",
)


class Hit(NamedTuple):
    """A rule's result: line and column from 1, the message, and the file if it is another."""

    line: int
    column: int
    message: str
    source: str = ""


class Rules(Generic[T]):
    """The checks of a subject, each with the function that makes it over what was read (a T)."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._rules: list[tuple[Check, Callable[[T], Iterable[Hit]]]] = []

    def error(self, hits: Callable[[T], Iterable[Hit]]) -> None:
        """Make a function a check whose findings are errors: its docstring is the reason."""
        self._add(hits, Severity.ERROR)

    def warning(self, hits: Callable[[T], Iterable[Hit]]) -> None:
        """Make a function a check whose findings are warnings."""
        self._add(hits, Severity.WARNING)

    def _add(self, hits: Callable[[T], Iterable[Hit]], severity: Severity) -> None:
        name = hits.__name__.strip("_").replace("_", "-")
        self._rules.append((Check(name, severity, self._subject, hits.__doc__ or ""), hits))

    @property
    def checks(self) -> list[Check]:
        """The checks, in the order of their functions."""
        return [check for check, _ in self._rules]

    def hits(self, read: T) -> Iterator[tuple[Check, Hit]]:
        """The results of all checks."""
        for check, hits in self._rules:
            for hit in hits(read):
                yield check, hit


def findings(
    hits: Iterable[tuple[Check, Hit]], texts: Mapping[str, str], known: Iterable[str]
) -> list[Finding]:
    """Findings in the order of the files, without what comments silence.

    A hit without a file is in the first of the texts. A comment that names no check of all that are
    known is a finding, too.
    """
    silenced = {source: dict(_silenced(text)) for source, text in texts.items()}
    first, order = next(iter(texts)), {source: at for at, source in enumerate(texts)}
    found = [
        check.finding(hit.message, source, hit.line, hit.column)
        for check, hit in hits
        for source in [hit.source or first]
        if check.id not in silenced[source].get(hit.line, ())
    ]
    ids = {*known, UNKNOWN_IGNORE.id}
    for source, lines in silenced.items():
        for line, names in lines.items():
            for name in (name for name in names if name not in ids):
                step = did_you_mean(name, ids, "see docs/reference/lint.md")
                what = f"ignore[{name}]: there is no check of that name, so nothing is silenced"
                found.append(UNKNOWN_IGNORE.finding(f"{what}; {step}", source, line))
    return sorted(
        dict.fromkeys(found), key=lambda one: (order[one.source], one.line, one.column, one.id)
    )


def _silenced(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        names = [
            name.strip() for group in _IGNORE_COMMENT.findall(line) for name in group.split(",")
        ]
        if names:
            yield number, names
