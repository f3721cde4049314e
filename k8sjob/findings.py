"""Findings: what is wrong or will go wrong, where, and the next step.

Errors carry them, and every command that looks for something returns them: each has an id for
programs, which docs/reference lists, and a text for people.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_T = TypeVar("_T")

FieldPath = tuple[str | int, ...]
"""Where a field is in a document: keys and list indices, as ("volumes", 1, "mount")."""


def field_path(path: FieldPath) -> str:
    """A path as it stands in messages: `volumes[1].mount`, `labels["app.io/name"]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"[\w-]+", part):
            text += f".{part}" if text else part
        else:
            text += f"[{part!a}]".replace("'", '"')
    return text


class Severity(StrEnum):
    """The severity of a finding, the least severe first."""

    OK = "ok"
    """All is well; doctor reports that, too."""
    UNKNOWN = "unknown"
    """It could not be looked at, and hinders nothing that is known."""
    WARNING = "warning"
    """It goes wrong silently, or only when something else fails."""
    ERROR = "error"
    """It hangs, crashes at the start or is rejected."""


class Finding(NamedTuple):
    """One thing that is wrong.

    Attributes:
        id: its stable name, for programs.
        message: what is wrong, and the value seen.
        next_step: what to do now; empty: the message says it, or there is nothing to do.
        severity: how bad it is.
        source: the file's name.
        path: of the field in its document; empty: the whole.
        option: of the command line, as "--set", where the value is not the document's.
        line: line in the file, counted from 1; 0 if there is none.
        column: column in the line, counted from 1; 0 if there is none.
        replicas: of a job, as "worker-2": those concerned; empty: the whole job.
        details: further lines about what was seen, as one for each node.
    """

    id: str
    message: str
    next_step: str = ""
    severity: Severity = Severity.ERROR
    source: str = ""
    path: FieldPath = ()
    option: str = ""
    line: int = 0
    column: int = 0
    replicas: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """The field in words, as `volumes[1].mount` or `--set image`; empty: the whole."""
        return " ".join(part for part in (self.option, field_path(self.path)) if part)

    @property
    def text(self) -> str:
        """The message with the next step, as one sentence."""
        return "; ".join(part for part in (self.message, self.next_step) if part)

    @property
    def replica(self) -> str:
        """The first of the replicas; empty if it concerns the whole job."""
        return next(iter(self.replicas), "")

    def __str__(self) -> str:
        place = f"{self.source or '<text>'}:{self.line}:{self.column}"
        return f"{place}: {self.severity}[{self.id}]: {self.text}"

    def as_dict(self, *place: str) -> dict[str, Any]:
        """What JSON has of it, with these parts of its place."""
        names = ("id", "severity", "message", "next_step", *place)
        return {name: getattr(self, name) for name in names}


def listed(replicas: Iterable[str]) -> str:
    """Replicas, or the like, at most three of them: `worker-3, worker-7 and 995 more`."""
    names = list(replicas)
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} more"]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


INVALID: Final = "invalid-document"
"""The id of what makes a document one that cannot be accepted."""


def invalid(
    path: FieldPath, message: str, next_step: str = "", *, line: int = 0, column: int = 0
) -> Finding:
    """Why a field of a document cannot be accepted; with an empty path: the whole document."""
    return Finding(INVALID, message, next_step, path=path, line=line, column=column)


MAX_FINDINGS: Final = 100
"""Most findings in one error: nobody reads more, and each takes up to a millisecond to explain."""


def first_findings(faults: Sequence[_T], explain: Callable[[_T], Finding]) -> list[Finding]:
    """The first of the faults, explained, and the number of the others."""
    findings = [explain(fault) for fault in faults[:MAX_FINDINGS]]
    if more := len(faults) - len(findings):
        findings.append(invalid((), f"{more} more problems", "correct these first"))
    return findings
