"""Volumes that keep a replica from starting: claims without a volume, mounts that fail."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from k8sjob.backends.events import event_time
from k8sjob.lifecycle.diagnose.finding import Cause, Seen, plain

if TYPE_CHECKING:
    from k8sjob.lifecycle.diagnose.case import Case, Pod

__all__ = ["not_mounted", "reference", "unbound", "unprovisioned"]

_AWAITS_POD: Final = re.compile(r"waiting for (?:first consumer|pod \S+ to be scheduled)")
"""What an Event says of a claim before the scheduler has chosen a node for its Pod."""
_CHOSEN: Final = "volume.kubernetes.io/selected-node"
"""An annotation of a claim: the node for which the scheduler asks for its volume."""

_REFERENCES: Final = (
    (re.compile(r'secret "(?P<name>[^"]+)" not found'), Cause.SECRET, "secret"),
    (re.compile(r'configmap "(?P<name>[^"]+)" not found'), Cause.CONFIG_MAP, "config map"),
    (
        re.compile(r"couldn't find key (?P<key>\S+) in Secret (?:[^/\s]+/)?(?P<name>\S+)"),
        Cause.SECRET,
        "secret",
    ),
    (
        re.compile(r"couldn't find key (?P<key>\S+) in ConfigMap (?:[^/\s]+/)?(?P<name>\S+)"),
        Cause.CONFIG_MAP,
        "config map",
    ),
    (
        re.compile(r'"(?P<name>[^"]+)" : references non-existent secret key: (?P<key>\S+)'),
        Cause.SECRET,
        "secret of volume",
    ),
    (
        re.compile(r'"(?P<name>[^"]+)" : references non-existent config key: (?P<key>\S+)'),
        Cause.CONFIG_MAP,
        "config map of volume",
    ),
)


def reference(case: Case, pod: Pod, said: str) -> Seen | None:
    """A secret or config map, or a key in one, that the kubelet looked for in vain."""
    for pattern, cause, kind in _REFERENCES:
        found = pattern.search(said)
        if found:
            parts = found.groupdict()
            key, name = parts.get("key"), parts["name"]
            noun = "secret" if cause is Cause.SECRET else "configmap"
            if key:
                what = f"the {kind} {name!r} has no key {key!r}"
                step = f"add the key (kubectl edit {noun} {name} -n {case.namespace})"
            else:
                what = f"there is no {kind} {name!r} in namespace {case.namespace}"
                sort = " generic" * (cause is Cause.SECRET)
                step = f"make it (kubectl create {noun}{sort} {name} ... -n {case.namespace})"
            step += ", or correct its name in the job; the replica starts by itself then"
            return Seen(cause, what, step, pod.replica)
    return None


def unbound(case: Case, pod: Pod, said: str) -> Seen | None:
    """A claim that is missing or has no volume, where the scheduler waits for it."""
    if found := re.search(r'persistentvolumeclaim "([^"]+)" not found', said):
        return Seen(
            Cause.VOLUME_CLAIM,
            f"there is no claim {found[1]!r} in namespace {case.namespace}",
            f"create it (kubectl get pvc -n {case.namespace} shows those there are), or correct"
            " volumes[].pvc in the job",
            pod.replica,
        )
    if found := re.search(r'persistentvolumeclaim "([^"]+)" is being deleted', said):
        return Seen(
            Cause.VOLUME_CLAIM,
            f"the claim {found[1]!r} is being deleted",
            "create it anew, or use another claim",
            pod.replica,
        )
    waits = re.search(r"unbound|find available persistent volumes|non-existent p", said)
    if not waits:
        return None
    pending, why = _pending(case, pod)
    return _without_volume(case, pod, pending, why or said.partition(": ")[2] or said)


def unprovisioned(case: Case, pod: Pod) -> Seen | None:
    """A claim whose volume is awaited for a node that the scheduler has chosen already.

    With WaitForFirstConsumer the scheduler says nothing about the Pod until the volume is there.
    """
    pending, why = _pending(case, pod)
    if not pending or not why:
        return None
    return replace(_without_volume(case, pod, pending, why), since=pod.created)


def _without_volume(case: Case, pod: Pod, claim: str, why: str) -> Seen:
    step = f"kubectl describe pvc {claim} -n {case.namespace}".replace("  ", " ")
    if found := re.search(r"""external provisioner ['"]([^'"]+)""", why):
        step = f"see whether the provisioner {found[1]} runs in the cluster, and its logs ({step})"
    else:
        step = (
            f"see what it waits for ({step}): a storage class that makes volumes, or a volume of"
            " that size and access mode"
        )
    name = f"the claim {claim!r} has no volume" if claim else "a claim of its has no volume"
    return Seen(Cause.VOLUME_CLAIM, f"{name}: {why}".rstrip("."), step, pod.replica)


def _pending(case: Case, pod: Pod) -> tuple[str, str]:
    """The Pod's first claim that is not bound, and what its Events say."""
    mounted = {
        (volume.get("persistentVolumeClaim") or {}).get("claimName")
        for volume in pod.spec.get("volumes") or ()
    }
    for claim in case.of_kind("PersistentVolumeClaim"):
        name = claim["metadata"]["name"]
        if name not in mounted or (claim.get("status") or {}).get("phase") == "Bound":
            continue
        told = [
            event.get("message", "")
            for event in sorted(case.of_kind("Event"), key=event_time)
            if (event.get("involvedObject") or {}).get("kind") == "PersistentVolumeClaim"
            and event["involvedObject"].get("name") == name
            and not _AWAITS_POD.search(event.get("message", ""))
        ]
        chosen = (claim["metadata"].get("annotations") or {}).get(_CHOSEN)
        waits = f"its volume is awaited on node {chosen}" if chosen else ""
        return name, told[-1] if told else waits
    names = sorted(name for name in mounted if name)
    return (names[0] if len(names) == 1 else ""), ""


def not_mounted(case: Case, pod: Pod) -> Seen | None:
    """A volume that could not be attached or mounted on the Pod's node."""
    trainer = pod.trainer
    if pod.phase != "Pending" or not pod.node or (trainer and trainer.status.get("started")):
        return None
    event = pod.last_event("FailedMount", "FailedAttachVolume", "FailedMapVolume")
    if not event:
        return None
    said = event.get("message", "")
    if "context deadline exceeded" in said or "timed out waiting" in said:  # the first one tells
        told = [e for e in pod.events if e.get("reason") == event["reason"]]
        said = next((e["message"] for e in told if "SetUp failed" in e["message"]), said)
    if seen := reference(case, pod, said):
        return seen
    volume = re.search(r'volume "([^"]+)"', said)
    what = f"the volume {volume[1]!r}" if volume else "a volume"
    return Seen(
        Cause.VOLUME,
        f"{what} cannot be mounted: {_short(said)}",
        _mount_step(said),
        pod.replica,
        pod.created,
    )


def _short(said: str) -> str:
    said = re.sub(r'^\w+\.\w+ failed for volume "[^"]+" : ', "", said)
    said = re.sub(r"(?s)\nMounting command:.*?\nOutput: ", ": ", said)
    return plain(said)


def _mount_step(said: str) -> str:
    if "Multi-Attach" in said:
        return (
            "the claim can be used on one node at a time: use one with ReadWriteMany for jobs of"
            " several nodes, or end the pod that has it"
        )
    if "hostPath type check failed" in said:
        return "make that path on every node the job may run on, or correct volumes[].host_path"
    return "have the storage looked at; the kubelet tries again by itself"
