"""Pods of a failed job that are gone, rebuilt from their Events so that their causes are found.

The training operator deletes the Pods when a job reaches its backoff limit or its deadline; the
apiserver keeps their Events for an hour.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from k8sjob.kube.objects import Object, event_time, stamp, training
from k8sjob.observe.diagnose.facts import SIGKILLED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import Facts

_FIELD: Final = re.compile(r"spec\.(?P<kind>initContainers|containers)\{(?P<name>[^}]+)\}")
_START_FAILED: Final = re.compile(r"unable to start container process|failed to create \w+ task")
_WAITING: Final = {"InspectFailed": "InvalidImageName", "ErrImageNeverPull": "ErrImageNeverPull"}
"""The reason for which a container waits, by that of its Event."""


def with_gone_pods(facts: Facts) -> Facts | None:
    """The facts with the Pods that are gone beside those that are there; None if none is known."""
    present = {pod.replica for pod in facts.pods}
    newest: dict[str, Json] = {}
    by_uid: defaultdict[tuple[str, str], list[Json]] = defaultdict(list)
    for event in facts.snapshot.events:
        subject = Object(event).part("involvedObject")
        # An earlier job of the same name may have had Pods of the same names.
        older = facts.status.created and event_time(event) < facts.status.created
        if subject.get("kind") == "Pod" and not older:
            by_uid[subject.get("name", ""), subject.get("uid", "")].append(event)
    for (name, uid), events in by_uid.items():  # the newest Pod of a replica has the last Events
        replica = facts.job.replica_named(name)
        if replica and replica not in present:
            newest.pop(replica, None)
            newest[replica] = _pod(facts, replica, {"name": name, "uid": uid}, events)
    if not newest:
        return None
    pods = (*facts.snapshot.pods, *(newest[name] for name in facts.ranks if name in newest))
    return replace(facts, snapshot=facts.snapshot._replace(pods=pods))


def _pod(facts: Facts, replica: str, metadata: Json, events: Sequence[Json]) -> Json:
    """The Pod as it was at its last Event."""
    roles = facts.job.replicas
    spec = dict(next((role.pod for role in roles if replica in role), {}))
    status: Json = {"phase": "Pending"}
    states: dict[tuple[str, str], Json] = defaultdict(dict)
    for event in events:
        field = _FIELD.fullmatch(Object(event).part("involvedObject").get("fieldPath") or "")
        if event.get("reason") == "Scheduled":
            spec["nodeName"] = event.get("message", "").rpartition(" to ")[2]
            status.pop("conditions", None)  # of the tries before there was room
        elif event.get("reason") == "FailedScheduling":
            waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            status["conditions"] = [{**waits, "message": event.get("message", "")}]
        elif event.get("reason") == "Started" and field and field["kind"] == "containers":
            status["phase"] = "Running"
        if field:
            key = field["kind"], field["name"]
            states[key] = _state(event, states[key])
    # No Event has the exit code: that of a container that outlasts its grace stands for it.
    if kill := facts.kubelet_kills.get(metadata["uid"]):
        killed = {"exitCode": SIGKILLED, "reason": "Error", "finishedAt": stamp(event_time(kill))}
        trains = str(training(spec.get("containers")).get("name", ""))
        states["containers", trains] = {"terminated": killed}
    for (kind, name), state in states.items():
        statuses = status.setdefault(f"{kind.removesuffix('s')}Statuses", [])
        statuses.append({"name": name, "state": state})
    return {"metadata": metadata, "spec": spec, "status": status}


def _state(event: Json, before: Json) -> Json:
    """The state of a container after an Event about it."""
    reason, message = event.get("reason"), event.get("message", "")
    error = message.removeprefix("Error: ")
    if reason == "Started" or (reason == "Pulled" and "waiting" in before):
        return {}
    if reason in _WAITING:
        return {"waiting": {"reason": _WAITING[reason], "message": message}}
    if reason != "Failed" or re.fullmatch(r"\w+", error):  # "Error: ImagePullBackOff" says no more
        return before
    if _START_FAILED.search(error):
        # The kubelet's own code for a container whose process did not start.
        end = {"exitCode": 128, "reason": "StartError", "message": error}
        return {"terminated": {**end, "finishedAt": stamp(event_time(event))}}
    pull = error.startswith("Failed to pull image")
    why = "ErrImagePull" if pull else "CreateContainerConfigError"
    return {"waiting": {"reason": why, "message": error}}
