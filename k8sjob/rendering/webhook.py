"""What the training operator's admission webhook refuses, as a pure function.

The source is pkg/webhooks/pytorch/pytorchjob_webhook.go of kubeflow/training-operator v1.9.4. The
apiserver asks the webhook after it has checked the CRD's schema; here a manifest of any shape is
taken, and what has the wrong shape counts as absent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONTAINER_NAME, Role
from k8sjob.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["API_VERSION", "KIND", "webhook_problems"]

API_VERSION: Final = "kubeflow.org/v1"
KIND: Final = "PyTorchJob"

_Json = dict[str, Any]
_DNS_1035: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MANAGERS: Final = ("kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue")
_REPLICAS: Final = "spec.pytorchReplicaSpecs"


def webhook_problems(manifest: _Json) -> list[Problem]:
    """All reasons for which a cluster with the training operator would refuse the manifest.

    Args:
        manifest: a PyTorchJob as parsed from YAML or JSON.

    Returns:
        One Problem for each; empty for a manifest that is accepted. The kind is checked too, since
        the webhook is not even asked about another one.
    """
    spec = _mapping(manifest.get("spec"))
    return [
        *_identity(manifest),
        *_run_policy(_mapping(spec.get("runPolicy"))),
        *_elastic(spec),
        *_replicas(spec.get("pytorchReplicaSpecs")),
    ]


def _identity(manifest: _Json) -> Iterator[Problem]:
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if (seen := manifest.get(key)) != expected:
            yield Problem(key, f"{seen!r} is not what the training operator watches: {expected!r}")
    name = _mapping(manifest.get("metadata")).get("name")
    if not isinstance(name, str) or len(name) > 63 or not _DNS_1035.fullmatch(name):
        yield Problem(
            "metadata.name",
            f"{name!r} is not a DNS-1035 label; use at most 63 lower-case letters, digits and '-',"
            " a letter first and no '-' last",
        )


def _run_policy(policy: _Json) -> Iterator[Problem]:
    manager = policy.get("managedBy")
    if manager is not None and manager not in _MANAGERS:
        yield Problem(
            "spec.runPolicy.managedBy",
            f"{manager!r} is not a controller that is known; use {' or '.join(_MANAGERS)}",
        )


def _elastic(spec: _Json) -> Iterator[Problem]:
    policy = spec.get("elasticPolicy")
    if not isinstance(policy, dict):
        return
    if Role.WORKER not in _mapping(spec.get("pytorchReplicaSpecs")):
        yield Problem(
            f"{_REPLICAS}[Worker]",
            "absent, but there is an elasticPolicy, which is about Workers; add Worker",
        )
    own, general = policy.get("nProcPerNode"), spec.get("nprocPerNode")
    if own is not None and general is not None:
        yield Problem(
            "spec.elasticPolicy.nProcPerNode",
            f"{own!r} stands beside spec.nprocPerNode {general!r}; keep the latter alone",
        )


def _replicas(replicas: Any) -> Iterator[Problem]:
    if not isinstance(replicas, dict):
        yield Problem(_REPLICAS, f"{replicas!r} is not a mapping; add Master, Worker or both")
        return
    for role, replica in replicas.items():
        at = f"{_REPLICAS}[{role}]"
        if role not in list(Role):
            yield Problem(at, f"{role!r} is not a replica type; use exactly 'Master' or 'Worker'")
        yield from _containers(at, _mapping(replica))
        yield from _count(at, role, _mapping(replica).get("replicas"))


def _containers(at: str, replica: _Json) -> Iterator[Problem]:
    at = f"{at}.template.spec.containers"
    pod = _mapping(_mapping(replica.get("template")).get("spec"))
    containers = pod.get("containers")
    if not isinstance(containers, list) or not containers:
        yield Problem(at, f"no containers; add one that is named {CONTAINER_NAME!r}")
        return
    names = [_mapping(container).get("name") for container in containers]
    for index, container in enumerate(containers):
        if not _mapping(container).get("image"):
            yield Problem(
                f"{at}[{index}].image", f"container {names[index]!r} has no image; add it"
            )
    if CONTAINER_NAME not in names:
        yield Problem(
            at, f"containers are named {names!r}; name the one that trains {CONTAINER_NAME!r}"
        )


def _count(at: str, role: str, count: Any) -> Iterator[Problem]:
    if role == Role.MASTER:
        if type(count) is not int or count != 1:
            yield Problem(f"{at}.replicas", f"{count!r} is not 1; a Master needs `replicas: 1`")
    elif count is not None and (type(count) is not int or count < 1):
        yield Problem(
            f"{at}.replicas", f"{count!r} is less than 1; set it to 1 or more, or take {role} out"
        )


def _mapping(value: Any) -> _Json:
    return value if isinstance(value, dict) else {}
