"""Rules: checks of what was read, each a function with its reason; see k8sjob.checks.lint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from k8sjob.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")

Subject = Literal["manifest", "script", "any"]


class Check(NamedTuple):
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

    def finding(
        self, message: str, next_step: str = "", *, source: str = "", line: int = 1, column: int = 1
    ) -> Finding:
        """A finding of this check."""
        return Finding(
            self.id, message, next_step, self.severity, source=source, line=line, column=column
        )


class Rules(Generic[T]):
    """The checks of a subject, each with the function that makes it over what was read (a T)."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._rules: list[tuple[Check, Callable[[T], Iterable[Finding]]]] = []

    def error(self, hits: Callable[[T], Iterable[Finding]]) -> None:
        """Make a function a check whose findings are errors: its docstring is the reason."""
        self._add(hits, Severity.ERROR)

    def warning(self, hits: Callable[[T], Iterable[Finding]]) -> None:
        """Make a function a check whose findings are warnings."""
        self._add(hits, Severity.WARNING)

    def _add(self, hits: Callable[[T], Iterable[Finding]], severity: Severity) -> None:
        # The id is the function's name, so that a reader finds the one by the other.
        name = hits.__name__.strip("_").replace("_", "-")
        self._rules.append((Check(name, severity, self._subject, hits.__doc__ or ""), hits))

    @property
    def checks(self) -> list[Check]:
        """The checks, in the order of their functions."""
        return [check for check, _ in self._rules]

    def hits(self, subject: T) -> Iterator[Finding]:
        """The findings of all checks; the functions leave the id and the severity out."""
        for check, hits in self._rules:
            for hit in hits(subject):
                yield hit._replace(id=check.id, severity=check.severity)
