"""One thing that the doctor looked at, what it saw, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Check", "Verdict", "fine", "problem", "unknown", "warning"]


class Verdict(StrEnum):
    """What a check means for a submission."""

    OK = "ok"
    UNKNOWN = "unknown"
    """The user may not look; it hinders nothing that is known."""
    WARNING = "warning"
    """A job can be submitted; something about it will not be as one may expect."""
    PROBLEM = "problem"
    """No job can be submitted, or none would run."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        topic: what it is about, as `server`, `webhook`, `devices`; stable, for programs.
        verdict: what it means.
        seen: what was seen, one line.
        next_step: what to do, or to know; empty where there is nothing.
        details: further lines about what was seen, as one for each node.
    """

    topic: str
    verdict: Verdict
    seen: str
    next_step: str = ""
    details: tuple[str, ...] = ()


def fine(topic: str, seen: str, next_step: str = "", *, details: tuple[str, ...] = ()) -> Check:
    """A check that hinders nothing."""
    return Check(topic, Verdict.OK, seen, next_step, details)


def unknown(topic: str, seen: str, next_step: str) -> Check:
    """A check that could not be made."""
    return Check(topic, Verdict.UNKNOWN, seen, next_step)


def warning(topic: str, seen: str, next_step: str, *, details: tuple[str, ...] = ()) -> Check:
    """A check that hinders nothing now, and has something to know."""
    return Check(topic, Verdict.WARNING, seen, next_step, details)


def problem(topic: str, seen: str, next_step: str, *, details: tuple[str, ...] = ()) -> Check:
    """A check that stands in the way."""
    return Check(topic, Verdict.PROBLEM, seen, next_step, details)
