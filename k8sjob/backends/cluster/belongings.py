"""Which pods and events are a job's own, in the order that a Snapshot promises. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.backends.events import event_time, moment
from k8sjob.backends.references import pod_specs
from k8sjob.contract import Role
from k8sjob.labels import REPLICA_INDEX, REPLICA_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k8sjob.backends.api import Json

__all__ = ["in_time", "is_of_pods", "own_pods", "owned", "seconds_to_end"]

_GRACE_SECONDS: Final = 30
"""terminationGracePeriodSeconds of a pod that names none (Kubernetes' default)."""
_SPARE_SECONDS: Final = 60
"""How long pods may take to go beyond their grace: a kubelet that was away for a moment."""


def own_pods(job: Json, pods: Iterable[Json]) -> tuple[Json, ...]:
    """The job's pods, Master first and by index; not those of a job of its name before it."""
    uid = job["metadata"]["uid"]
    return tuple(sorted((pod for pod in pods if owned(pod, uid)), key=_place))


def is_of_pods(job: Json, event: Json) -> bool:
    """Whether an event is about one of the job's pods, also one that is not there any more."""
    name = re.escape(job["metadata"]["name"])
    about = (event.get("involvedObject") or {}).get("name", "")
    if not re.fullmatch(rf"{name}-(?:master|worker)-\d+", about):
        return False
    made = moment(job["metadata"].get("creationTimestamp"))
    return made is None or event_time(event) >= made


def in_time(events: Iterable[Json]) -> tuple[Json, ...]:
    """Events, oldest first."""
    return tuple(sorted(events, key=event_time))


def seconds_to_end(job: Json) -> float:
    """How long the job's pods may take to end and be gone."""
    asked = (pod.get("terminationGracePeriodSeconds") for _, _, pod in pod_specs(job))
    grace = max((_GRACE_SECONDS if seconds is None else seconds for seconds in asked), default=0)
    return float(grace) + _SPARE_SECONDS


def owned(pod: Json, uid: str) -> bool:
    """Whether a pod of the job's name is the job's: nobody else's, that is."""
    owners = [o for o in pod["metadata"].get("ownerReferences") or [] if o.get("controller")]
    return all(owner.get("uid") == uid for owner in owners)


def _place(pod: Json) -> tuple[bool, int]:
    labels = pod["metadata"].get("labels") or {}
    index = str(labels.get(REPLICA_INDEX, ""))
    return labels.get(REPLICA_TYPE) != Role.MASTER.lower(), int(index) if index.isdecimal() else -1
