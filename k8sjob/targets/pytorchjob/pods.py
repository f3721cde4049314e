"""The Pods of PyTorchJobs, and the operator's Events about their creation."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.kube.objects import Object
from k8sjob.targets.api import Pods
from k8sjob.targets.pytorchjob.operator import JOB_NAME, REPLICA_INDEX, REPLICA_TYPE

if TYPE_CHECKING:
    from collections.abc import Collection

    from k8sjob.kube.objects import Json

_REPLICA: Final = r"(?:master|worker)-[0-9]{1,9}"


class PyTorchJobPods(Pods):
    """The Pods that the training operator creates."""

    job_label = JOB_NAME
    init_container = "init-pytorch"
    """It waits for the Master's name in front of the Workers."""
    creations = (
        ("FailedCreatePod", "SuccessfulCreatePod", "Created pod: "),
        ("FailedCreateService", "SuccessfulCreateService", "Created service: "),
    )
    service_each = True
    ended_stay = False

    def replica_of(self, pod: Json) -> str:
        """The replica by the operator's labels."""
        labels = Object(pod).labels
        name = f"{labels.get(REPLICA_TYPE)}-{labels.get(REPLICA_INDEX, 0)}"
        return name if re.fullmatch(_REPLICA, name) else ""

    def selector(self, name: str, replicas: Collection[str] = ()) -> str:
        """The selector by the operator's labels; it includes other replicas of the same indexes."""
        indexes = sorted({replica.rpartition("-")[2] for replica in replicas})
        more = f",{REPLICA_INDEX} in ({','.join(indexes)})" if indexes else ""
        return f"{JOB_NAME}={name}{more}"
