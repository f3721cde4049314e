"""Causes about volumes, secrets and config maps: missing ones, claims without a volume, mounts."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from k8sjob.kube.objects import Object, event_time
from k8sjob.observe.diagnose.finding import Cause, Explanation, first_match, load_rules, one_line

if TYPE_CHECKING:
    from k8sjob.observe.diagnose.facts import Facts, ReplicaPod

AFTER_MOUNTS: Final = ("FailedCreatePodSandBox", "Pulling", "Pulled", "Created")
"""Reasons of the kubelet's Events about a Pod whose volumes are mounted."""
_NOT_MOUNTED: Final = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_RETRIED: Final = timedelta(seconds=10)
"""A mount that failed once while caches were behind has succeeded or failed again by then."""
_AWAITS_POD: Final = re.compile(r"waiting for (?:first consumer|pod \S+ to be scheduled)")
"""In an Event about a claim, before the scheduler has chosen a node for its Pod."""
_AWAITS_VOLUME: Final = "unbound|find available persistent volumes|non-existent p|binding volumes"
"""In the scheduler's message; it gives up binding after ten minutes, and tries again."""
_CHOSEN: Final = "volume.kubernetes.io/selected-node"
"""An annotation of a claim: the node for which the scheduler asks for its volume."""


def missing_reference(facts: Facts, message: str) -> Explanation | None:
    """A secret or config map, or a key in one, that the kubelet did not find."""
    return first_match(load_rules("references"), message, namespace=facts.namespace)


def unbound(facts: Facts, pod: ReplicaPod, message: str) -> Explanation | None:
    """A claim that is missing or has no volume, where the scheduler waits for it."""
    if explanation := first_match(load_rules("claims"), message, namespace=facts.namespace):
        return explanation
    if not re.search(_AWAITS_VOLUME, message):
        return None
    claim, why = _pending_claim(facts, pod)
    return _without_volume(facts, claim, why or message.partition(": ")[2] or message)


def unprovisioned(facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """A claim whose volume is awaited for a node that the scheduler has already chosen.

    With WaitForFirstConsumer the scheduler says nothing about the Pod until the volume is there.
    """
    claim, why = _pending_claim(facts, pod)
    if not claim or not why:
        return None
    return _without_volume(facts, claim, why)._replace(since=pod.created_at)


def _without_volume(facts: Facts, claim: str, why: str) -> Explanation:
    step = f"kubectl describe pvc {claim} -n {facts.namespace}".replace("  ", " ")
    if external := re.search(r"""external provisioner ['"]([^'"]+)""", why):
        name = external[1]
        step = f"check whether the provisioner {name} runs in the cluster, and its logs ({step})"
    else:
        step = (
            f"see what it is waiting for ({step}): a storage class that makes volumes, or a volume"
            " of that size and access mode"
        )
    subject = f"the claim {claim!r}" if claim else "one of its claims"
    return Explanation(Cause.VOLUME_CLAIM, f"{subject} has no volume: {why}".rstrip("."), step)


def _pending_claim(facts: Facts, pod: ReplicaPod) -> tuple[str, str]:
    """The Pod's first claim that is not bound, and what its Events say."""
    mounted = {
        Object(volume).part("persistentVolumeClaim").get("claimName")
        for volume in pod.spec.get("volumes") or ()
    }
    for claim in map(Object, facts.of_kind("PersistentVolumeClaim")):
        if claim.name not in mounted or claim.status.get("phase") == "Bound":
            continue
        subject = ("PersistentVolumeClaim", claim.name)
        messages = [
            event.get("message", "")
            for event in sorted(facts.of_kind("Event"), key=event_time)
            if (about := Object(event).part("involvedObject"))
            and (about.get("kind"), about.get("name")) == subject
            and not _AWAITS_POD.search(event.get("message", ""))
        ]
        node = claim.annotations.get(_CHOSEN)
        awaited = f"it waits for its volume on node {node}" if node else ""
        return claim.name, messages[-1] if messages else awaited
    # Where claims cannot be read, the only one of a Pod must be the one.
    names = sorted(name for name in mounted if name)
    return (names[0] if len(names) == 1 else ""), ""


def not_mounted(facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """A volume that could not be attached or mounted on the Pod's node."""
    if pod.phase != "Pending" or not pod.node or pod.container.raw.get("started"):
        return None
    event = pod.last_event(*_NOT_MOUNTED, *AFTER_MOUNTS)
    if event.get("reason") not in _NOT_MOUNTED:
        return None
    # The first mount of a new Pod often fails while the kubelet's caches lack its Secret.
    if event.get("count", 1) == 1 and facts.now - event_time(event) < _RETRIED:
        return None
    message = event.get("message", "")
    if "context deadline exceeded" in message or "timed out waiting" in message:
        # The kubelet gives up waiting after two minutes; an earlier Event has the reason.
        earlier = [e["message"] for e in pod.events if e.get("reason") == event["reason"]]
        message = next((text for text in earlier if "SetUp failed" in text), message)
    if reference := missing_reference(facts, message):
        return reference
    volume = re.search(r'volume "([^"]+)"', message)
    subject = f"the volume {volume[1]!r}" if volume else "a volume"
    detail = re.sub(r'^\w+\.\w+ failed for volume "[^"]+" : ', "", message)
    detail = re.sub(r"(?s)\nMounting command:(?:(?!\nMounting command).)*?\nOutput: ", ": ", detail)
    detail = f"{subject} cannot be mounted: {one_line(detail)}"
    explanation = first_match(load_rules("mounts"), message, detail=detail)
    return explanation and explanation._replace(since=pod.created_at)
