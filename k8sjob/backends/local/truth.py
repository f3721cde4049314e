"""What is true of a job whose supervisor is gone without a last word."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from k8sjob.backends.local import pods
from k8sjob.backends.local.conditions import fail

if TYPE_CHECKING:
    from k8sjob.backends.api import Json
    from k8sjob.backends.local.store import JobFolder

__all__ = ["SUPERVISOR_GONE", "lost"]

SUPERVISOR_GONE = "PyTorchJobSupervisorGone"
_CANNOT_BE_LOCATED = "The container could not be located when the pod was terminated"


def lost(state: Json, folder: JobFolder) -> Json:
    """The state with the job failed, and each Pod that had not ended lost, as of its last change.

    The replicas hang on the supervisor's lifeline, so they have ended, or will within seconds.
    """
    when = datetime.now(UTC)
    with suppress(FileNotFoundError):
        when = datetime.fromtimestamp(folder.state.stat().st_mtime, UTC)
    job = state["job"]
    message = (
        f"PyTorchJob {job['metadata']['name']} was lost: its supervisor is gone (killed, or the"
        f" machine was restarted){_last_line(folder)}"
    )
    job = {**job, "status": fail(job.get("status") or {}, SUPERVISOR_GONE, message, when)}
    for pod in state["pods"]:
        if pods.is_live(pod):
            restarts = pod["status"].get("containerStatuses", [{}])[0].get("restartCount", 0)
            end = pods.End(137, "ContainerStatusUnknown", _CANNOT_BE_LOCATED, when, when)
            pods.ended(pod, restarts, end, final=True)
    return {**state, "job": job}


def _last_line(folder: JobFolder) -> str:
    """What it said last, where it failed by itself."""
    with suppress(OSError):
        lines = folder.log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
    return ""
