"""What a check says, and how checks are told apart, run and silenced."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "UNKNOWN_IGNORE",
    "Check",
    "Finding",
    "Hit",
    "Rule",
    "Severity",
    "Subject",
    "findings",
    "rule",
]

T = TypeVar("T")

Subject = Literal["manifest", "script", "any"]

_SILENCE: Final = re.compile(r"#\s*k8sjob:\s*ignore\[([^\[\]\n]*)\]")


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """It hangs, crashes at the start or is rejected."""
    WARNING = "warning"
    """It goes wrong silently, or only on the day that something else fails."""


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
    """What a check is called, and why it is made.

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


UNKNOWN_IGNORE: Final = Check(
    "unknown-ignore",
    Severity.WARNING,
    "any",
    "A comment that names no check of its file silences nothing.",
)


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a rule struck: line and column from 1, the message, and the file if it is another."""

    line: int
    column: int
    message: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """A check together with the function that makes it over what was read (a T)."""

    check: Check
    hits: Callable[[T], Iterable[Hit]]


def rule(
    name: str, severity: Severity, subject: Subject, why: str
) -> Callable[[Callable[[T], Iterable[Hit]]], Rule[T]]:
    """Make a Rule of the function below: its findings bear this name and severity."""

    def decorate(hits: Callable[[T], Iterable[Hit]]) -> Rule[T]:
        return Rule(Check(name, severity, subject, why), hits)

    return decorate


def findings(
    rules: Sequence[Rule[T]], read: T, texts: Mapping[str, str], known: Iterable[str]
) -> list[Finding]:
    """What the rules find, in the order of the files, without what comments silence.

    Args:
        rules: the rules to run.
        read: what they run over.
        texts: each file's text by its name, for the comments; a hit without a file is in the first.
        known: the ids of all checks; a comment that names another one silences nothing and is told.
    """
    silenced = {source: dict(_silenced(text)) for source, text in texts.items()}
    first, order = next(iter(texts)), {source: at for at, source in enumerate(texts)}
    found = [
        Finding(rule.check.id, rule.check.severity, hit.message, source, hit.line, hit.column)
        for rule in rules
        for hit in rule.hits(read)
        for source in [hit.source or first]
        if rule.check.id not in silenced[source].get(hit.line, ())
    ]
    for source, names in silenced.items():
        found += _unknown_silences(names, frozenset(known) | {UNKNOWN_IGNORE.id}, source)
    return sorted(
        dict.fromkeys(found), key=lambda one: (order[one.source], one.line, one.column, one.id)
    )


def _silenced(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        names = [name.strip() for group in _SILENCE.findall(line) for name in group.split(",")]
        if names:
            yield number, names


def _unknown_silences(
    silenced: dict[int, list[str]], known: frozenset[str], source: str
) -> Iterator[Finding]:
    for line, names in silenced.items():
        for name in names:
            if name in known:
                continue
            close = difflib.get_close_matches(name, known, n=1)
            step = f"did you mean `{close[0]}`?" if close else "see docs/reference/lint.md"
            message = (
                f"ignore[{name}]: there is no check of that name, so nothing is silenced; {step}"
            )
            yield Finding(UNKNOWN_IGNORE.id, UNKNOWN_IGNORE.severity, message, source, line)
