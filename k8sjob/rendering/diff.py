"""The differences between a job in a cluster and a job.yaml, and which of them reach pods.

Pure. Both sides are objects as an apiserver returns them, so that its defaults stand on both and
never show as differences.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob import yamldoc
from k8sjob.contract import CONFIG_ENV, decode_object
from k8sjob.findings import field_path
from k8sjob.kube.objects import (
    IMAGE_ORIGIN,
    MANIFEST_DIGEST,
    QUEUE,
    Json,
    Object,
    differing,
    same_manifest,
)
from k8sjob.targets.jobs import keyed

if TYPE_CHECKING:
    from k8sjob.targets.api import Job

_KUBECTL: Final = "kubectl.kubernetes.io/last-applied-configuration"
_BOOKKEEPING: Final = frozenset({MANIFEST_DIGEST, IMAGE_ORIGIN, _KUBECTL})
"""Annotations that repeat what stands elsewhere in the object."""
_KUEUE: Final = "kueue.x-k8s.io/"
_ASSIGNED: Final = frozenset({"nodeSelector", "tolerations", "parallelism", "completions"})
"""Fields that Kueue sets by the flavor and the quota, where the job.yaml has not changed."""
_IDENTITY: Final = ("name", "namespace", "labels", "annotations")
"""All of an object's metadata that its author writes."""
_LABELS: Final = ("labels", "annotations")


class ManifestDiff(NamedTuple):
    """The changes of a job; false if there are none.

    Attributes:
        lines: a unified diff of the two as YAML, from what is there to what is wanted.
        recreated: paths of fields whose new value reaches no existing pod: pods keep what they
            were started with, so the job must be recreated. A changed number of replicas is
            one of them: the other pods keep the old world size.
        at_once: paths of fields that the operator reads again whenever it looks at the job.
        is_new: whether there is no job yet; then no paths are named.
    """

    lines: tuple[str, ...] = ()
    recreated: tuple[str, ...] = ()
    at_once: tuple[str, ...] = ()
    is_new: bool = False

    def __bool__(self) -> bool:
        return bool(self.lines)


def difference(existing: Job | None, job: Job) -> ManifestDiff:
    """The changes that turn the existing job, with defaults filled in, into a job as it is planned.

    Where none exists (None), everything is new.
    """
    new = _written(job)
    planned = f"{_name(new)} as it would be"
    if existing is None:
        return ManifestDiff(_unified([], new, ("/dev/null", planned)), is_new=True)
    old = _written(existing)
    if QUEUE in existing.labels and QUEUE in job.labels:
        same = same_manifest(existing.raw, job.raw)
        old = _ordered(_without_kueue(old, new, _ASSIGNED if same else frozenset()))
    paths = list(differing(old, new, ()))
    acts = job.applies_at_once
    at_once = [path for path in paths if path[0] == "metadata" or acts(path)]
    return ManifestDiff(
        _unified(yamldoc.dump(old).splitlines(), new, (f"{_name(old)} in the cluster", planned)),
        tuple(field_path(path) for path in paths if path not in at_once),
        tuple(field_path(path) for path in at_once),
    )


def _without_kueue(old: Any, new: Any, assigned: frozenset[str]) -> Any:
    """A job in the cluster without what Kueue has written into it to start it."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [_without_kueue(*pair, assigned) for pair in zip(old, new, strict=True)]
    if not isinstance(old, dict) or not isinstance(new, dict):
        return old
    remaining = {
        key: _without_kueue(value, new.get(key) or {}, assigned)
        for key, value in old.items()
        if not key.startswith(_KUEUE) or key in new
    }
    for key in {"suspend", *assigned} & {*old, *new}:
        remaining[key] = new.get(key)
    return remaining


def lines_between(first: Job, second: Job) -> tuple[str, ...]:
    """A unified diff of what the authors of two jobs wrote, as YAML; empty if that is alike."""
    old, new = _written(first), _written(second)
    for document in (old, new):  # another name is not a difference
        document["metadata"] = {k: v for k, v in Object(document).metadata.items() if k in _LABELS}
    return _unified(yamldoc.dump(old).splitlines(), new, (_name(first.raw), _name(second.raw)))


def _unified(old: list[str], new: Json, headings: tuple[str, str]) -> tuple[str, ...]:
    lines = yamldoc.dump(new).splitlines()
    return tuple(difflib.unified_diff(old, lines, *headings, lineterm=""))


def _name(raw: Json) -> str:
    return "/".join(filter(None, (Object(raw).namespace, Object(raw).name)))


def _written(job: Job) -> Json:
    """The fields written by a job's author, with the server's defaults, in one order of keys."""
    metadata = {key: value for key, value in job.metadata.items() if key in _IDENTITY}
    metadata["annotations"] = {k: v for k, v in job.annotations.items() if k not in _BOOKKEEPING}
    document = {
        "apiVersion": job.raw.get("apiVersion"),
        "kind": job.raw.get("kind"),
        "metadata": {k: v for k, v in metadata.items() if v},
        "spec": job.written_spec,
    }
    if (companion := keyed(job.target)) and (beside := job.own.companion):
        document[companion.key] = {"spec": Object(beside).spec}
    ordered: Json = _ordered(document)
    return ordered


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get("name") == CONFIG_ENV:
            # The runtime's settings are one JSON text in the manifest; each shows by itself.
            text = value.get("value")
            opened = decode_object(text) if isinstance(text, str) else None
            value = {**value, "value": text if opened is None else opened}
        return {key: _ordered(value[key]) for key in sorted(value) if value[key] is not None}
    return [_ordered(item) for item in value] if isinstance(value, list) else value
