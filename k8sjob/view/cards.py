"""The cards of specs, plans, statuses and results, as notebooks show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k8sjob.backends.api import Plan
from k8sjob.contract import counted
from k8sjob.html_card import card, curve, finding_parts, folded, moments, paragraph, table
from k8sjob.jobs.result import RunResult
from k8sjob.kube.objects import Object
from k8sjob.observe.status import JobStatus
from k8sjob.spec import JobSpec
from k8sjob.spec.base import Part
from k8sjob.targets.api import JobState
from k8sjob.yamldoc import dump

if TYPE_CHECKING:
    from k8sjob.html_card import HasCard, Html


def card_of(shown: HasCard) -> str:
    """The card of an object."""
    match shown:
        case JobSpec():
            return _spec(shown)
        case Plan():
            return _plan(shown)
        case RunResult():
            return _result(shown)
        case JobStatus():
            return _status(shown)
        case _:
            raise TypeError(f"a {type(shown).__name__} has no card")


def _spec(spec: JobSpec) -> str:
    """The fields that differ from the defaults, and the job.yaml."""
    rows = {name: _value(value) for name, value in spec.__repr_args__() if name != "name"}
    subtitle = f"{counted(spec.world_size, 'process', 'es')} on {counted(spec.nnodes, 'node')}"
    remarks = [paragraph("note:", remark) for remark in spec.remarks]
    return card(spec.name, rows, *remarks, folded("job.yaml", spec.to_yaml()), subtitle=subtitle)


def _value(value: Any) -> str:
    """A field's value in one line."""
    if isinstance(value, Part):
        pairs = ", ".join(f"{key}: {_value(part)}" for key, part in value.__repr_args__())
        return pairs or "with the defaults"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_value(part)}" for key, part in value.items())
    if isinstance(value, tuple) and value:
        return ("; " if isinstance(value[0], Part) else " ").join(map(_value, value))
    return str(value)


def _plan(plan: Plan) -> str:
    """What would be created."""
    *beside, _ = plan.job.objects
    rows = {
        "image": plan.image,
        "replicas": f"{plan.spec.nnodes} x {counted(plan.spec.nproc_per_node, 'process', 'es')}",
        "folder": plan.folder,
        "with it": ", ".join(f"{manifest['kind']} {Object(manifest).name}" for manifest in beside),
    }
    objects = "---\n".join(dump(manifest) for manifest in plan.job.objects)
    subtitle = f"plan of a {plan.job.target.kind}"
    return card(plan.spec.name, rows, folded("manifest", objects), subtitle=subtitle)


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
