"""What a PyTorchJob says of itself: the truth of its conditions, wherever the job is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k8sjob.backends.api import Json

__all__ = ["finished", "is_suspended", "is_true", "true_conditions"]


def true_conditions(status: Json) -> dict[str, Json]:
    """A job's conditions by type, those whose status is "True": their order says nothing."""
    conditions = status.get("conditions") or ()
    return {str(c.get("type")): c for c in conditions if c.get("status") == "True"}


def is_true(status: Json, kind: str) -> bool:
    """Whether a condition's status is "True"."""
    return kind in true_conditions(status)


def finished(status: Json) -> bool:
    """Whether the job has succeeded or failed."""
    return not true_conditions(status).keys().isdisjoint(("Succeeded", "Failed"))


def is_suspended(job: Json) -> bool:
    """Whether the job is asked to be suspended (spec.runPolicy.suspend)."""
    return bool((job["spec"].get("runPolicy") or {}).get("suspend"))
