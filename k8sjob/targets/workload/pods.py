"""The Pods of any object, and what controllers say about their creation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.kube.objects import Object, Pod
from k8sjob.targets.api import Pods
from k8sjob.targets.indexed.pods import INDEX, NUMBER

if TYPE_CHECKING:
    from collections.abc import Collection

    from k8sjob.kube.objects import Json

_RANKS: Final = ("PET_NODE_RANK", "NODE_RANK", "GROUP_RANK", "RANK", "JOB_COMPLETION_INDEX")
_INDEXES: Final = (INDEX, "apps.kubernetes.io/pod-index")
"""Labels or annotations that Kubernetes' own controllers number Pods by."""
_LAUNCHES: Final = re.compile(r"\btorchrun\b|torch\.distributed")
_PROCESSES: Final = re.compile(r"--nproc[-_]per[-_]node[= ]([\w]+)")


class WorkloadPods(Pods):
    """The Pods of one object, by the label selector that it has; empty: it has none."""

    job_label = ""
    ended_stay = True
    creations = (
        ("FailedCreate", "SuccessfulCreate", "Created pod: "),
        ("FailedCreatePod", "SuccessfulCreatePod", "Created pod: "),
    )

    def __init__(self, selector: str) -> None:
        self._selector = selector

    def replica_of(self, pod: Json) -> str:  # noqa: ARG002 - its object alone tells
        """Empty: see Workload.replica_of."""
        return ""

    def selector(self, name: str, replicas: Collection[str] = ()) -> str:  # noqa: ARG002 - as above
        """The object's own selector."""
        return self._selector


def rank_of(raw: Json) -> int | None:
    """The rank of a Pod's node in a training with torch, as far as the Pod itself has it."""
    pod = Pod(raw)
    env = _env(pod)
    # A number alone is none: the Pods of a StatefulSet of databases have one, too.
    if not (
        any(name.startswith("PET_") or name in {"MASTER_ADDR", "WORLD_SIZE"} for name in env)
        or _LAUNCHES.search(_command(pod))
    ):
        return None
    about = {**pod.annotations, **pod.labels}
    texts = (*(env.get(name, "") for name in _RANKS), *(about.get(key, "") for key in _INDEXES))
    return next((int(text) for text in texts if re.fullmatch(NUMBER, text)), None)


def processes_of(raw: Json) -> str:
    """The processes of a Pod as torchrun is told: "2", "auto"; empty if it is not."""
    pod = Pod(raw)
    flag = _PROCESSES.search(_command(pod))
    return flag[1] if flag else _env(pod).get("PET_NPROC_PER_NODE", "")


def _env(pod: Pod) -> dict[str, str]:
    variables = pod.main.get("env") or ()
    return {str(v.get("name")): str(v.get("value") or "") for v in variables}


def _command(pod: Pod) -> str:
    return " ".join([*(pod.main.get("command") or ()), *(pod.main.get("args") or ())])


def stem(name: str) -> str:
    """A Pod's name without its last part, which its controller has chosen."""
    return name.rpartition("-")[0]


def controller_of(item: Json) -> Json:
    """The ownerReference of an object's controller, or of its first owner; empty if it has none."""
    owners = Object(item).owners
    return next((owner for owner in owners if owner.get("controller")), (owners or [{}])[0])
