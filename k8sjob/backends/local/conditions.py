"""A job's conditions, kept as the operator keeps them (pkg/util/status.go)."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.conditions import is_true

if TYPE_CHECKING:
    from k8sjob.backends.api import Json

__all__ = ["fail", "set_condition", "stamp"]

_RIVALS: Final = {"Running": {"Restarting"}, "Restarting": {"Running"}}


def fail(status: Json, reason: str, message: str, now: datetime) -> Json:
    """A copy of a job's status with the Failed condition and the time of its end."""
    changed: Json = copy.deepcopy(status)
    changed.setdefault("completionTime", stamp(now))
    set_condition(changed, "Failed", reason, message, value=True, now=now)
    return changed


def set_condition(
    status: Json, kind: str, reason: str, message: str, *, value: bool, now: datetime
) -> None:
    """Put a condition into a job's status, in place.

    One that changes is removed and appended; Running and Restarting displace each other; an end
    makes Running false; nothing changes a job that has failed.
    """
    if is_true(status, "Failed"):
        return
    before = status.get("conditions", [])
    old: dict[str, Any] = next((c for c in before if c["type"] == kind), {})
    truth = "True" if value else "False"
    if old.get("status") == truth and old.get("reason") == reason:
        return
    kept = [c for c in before if c["type"] not in {kind, *_RIVALS.get(kind, ())}]
    if kind in ("Failed", "Succeeded"):
        kept = [{**c, "status": "False"} if c["type"] == "Running" else c for c in kept]
    same = old.get("status") == truth
    new = {
        "type": kind,
        "status": truth,
        "reason": reason,
        "message": message,
        "lastUpdateTime": stamp(now),
        "lastTransitionTime": old["lastTransitionTime"] if same else stamp(now),
    }
    status["conditions"] = [*kept, new]


def stamp(now: datetime) -> str:
    """A moment as the apiserver writes it: RFC 3339 in UTC, whole seconds."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
