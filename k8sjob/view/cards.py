"""The cards of statuses and results, as notebooks show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k8sjob.html_card import card, curve, finding_parts, moments, table
from k8sjob.jobs.result import RunResult
from k8sjob.observe.status import JobStatus
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from k8sjob.html_card import HasCard, Html


def card_of(shown: HasCard) -> str:
    """The card of an object."""
    match shown:
        case RunResult():
            return _result(shown)
        case JobStatus():
            return _status(shown)
        case _:
            raise TypeError(f"a {type(shown).__name__} has no card")


def _status(status: JobStatus) -> str:
    times = moments(created=status.created, started=status.started, finished=status.finished)
    rows = {"reason": status.reason, "message": status.message, **times}
    return card(str(status.ref), rows, replica_table(status), state=status.state)


def replica_table(status: JobStatus) -> Html:
    """The replicas of a job."""
    rows = [
        [
            replica.name,
            replica.situation,
            replica.restarts or "",
            replica.exit_code,
            replica.node,
            replica.message,
        ]
        for replica in status.replicas
    ]
    rows = [["" if value is None else value for value in row] for row in rows]
    return table(("replica", "state", "restarts", "exit code", "node", "message"), rows)


def _result(result: RunResult) -> str:
    ok = result.state is JobState.SUCCEEDED
    columns = dict.fromkeys(name for row in result.history for name in row)
    rows: dict[str, object] = {
        "message": "" if ok or result.why else result.message,
        **moments(started=result.started, finished=result.finished),
        "checkpoint": result.checkpoint,
        "history": f"{len(result.history)} rows: {', '.join(columns)}" if columns else "",
    }
    rows |= {name: value for name, value in result.metrics.items() if name not in rows}
    losses = [loss for row in result.history if isinstance(loss := row.get("loss"), int | float)]
    parts = finding_parts(result.why)
    if not ok or len(result.replicas) > 1:
        parts.append(replica_table(result))
    drawn = curve(enumerate(losses), "loss")
    return card(result.ref.name, rows, *parts, drawn, state=result.state)
