"""JobSets that others wrote, with one replicated Job or several whose Pods are alike.

Behavior: JobSet 0.12, jobset_webhook.go for the defaults.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Final

from k8sjob.errors import SpecError
from k8sjob.findings import invalid
from k8sjob.kube.objects import PODSET_GROUP, Object, at_path, differing, training
from k8sjob.targets.api import Authored
from k8sjob.targets.indexed.adopt import IndexedReader, replace_addresses
from k8sjob.targets.indexed.pods import CHILD_NAME, NODE
from k8sjob.targets.jobset.target import JOBSET

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.findings import Finding
    from k8sjob.kube.objects import Json

_LEADING: Final = ("master", "leader", "launcher", "driver", "coordinator", "head")
_RANKS: Final = {"RANK", "NODE_RANK", "PET_NODE_RANK", "MASTER_ADDR", "PET_MASTER_ADDR"}
"""Variables that may differ between replicated Jobs whose Pods are alike."""


class JobSetReader(IndexedReader):
    """The reader of JobSets."""

    target = JOBSET

    def authored(self, job: Json, documents: Sequence[Json]) -> Authored:  # noqa: ARG002 - it has none
        """With one replicated Job, `node`."""
        notes = list(join(Object(job).spec, Object(job).name, ("spec",)))
        return Authored(job, [*notes, *self.rendered_names(job)], [])

    def settle(self, job: Json) -> None:
        """Fill in defaults as the webhook does."""
        settle_set(job["spec"])
        super().settle(job)


def settle_set(spec: Json) -> None:
    """Fill in the webhook's defaults of a JobSet's spec with one replicated Job."""
    spec.setdefault("successPolicy", {"operator": "All"})
    spec.setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    node = spec["replicatedJobs"][0]
    node.setdefault("replicas", 1)
    if node.get("groupName") == "default":
        del node["groupName"]
    if not node["template"].get("metadata"):
        node["template"].pop("metadata", None)
    node["template"]["spec"]["template"]["spec"].setdefault("restartPolicy", "OnFailure")


def join(spec: Json, name: str, at: tuple[str | int, ...]) -> Iterator[str]:
    """Make one replicated Job `node` of one replica of all of a JobSet's, in place, with notes.

    Args:
        spec: of the JobSet.
        name: of the JobSet.
        at: where the spec is, for messages.

    Raises:
        SpecError: their Pods are not alike, or several Jobs have several Pods each.
    """
    path = (*at, "replicatedJobs")
    parts = spec.get("replicatedJobs") or []
    if not parts:
        raise SpecError([invalid(path, "no replicated Jobs", "add one")])
    parts.sort(key=lambda part: not any(word in part.get("name", "") for word in _LEADING))
    network = (spec.get("network") or {}).pop("subdomain", name)
    nodes = 0
    problems: list[Finding] = []
    moves: list[tuple[str, int]] = []
    for part in parts:
        of_job = part.setdefault("template", {}).setdefault("spec", {})
        replicas, pods = part.pop("replicas", 1), of_job.get("completions") or 1
        old = part.get("name", "")
        if replicas > 1 and pods > 1:
            message = f"{replicas} Jobs of {pods} Pods each have no single rank"
            problems.append(invalid((*path, old), message, "use one of them"))
        moves.append((f"{name}-{old}-{'#-0' if replicas > 1 else '0-#'}.{network}", nodes))
        of_job.setdefault("completionMode", "Indexed")
        of_job["parallelism"] = replicas if replicas > 1 else of_job.get("parallelism") or pods
        nodes += replicas * pods
    notes: dict[str, None] = {}
    for part in parts:
        for before, first in moves:
            pod = Object(part["template"]["spec"]).part("template", "spec")
            changed = replace_addresses(pod, before, f"{name}{CHILD_NAME}-#.{name}", first)
            notes |= dict.fromkeys(changed)
    yield from notes
    if problems := [*problems, *_differences(parts, path)]:
        raise SpecError(problems)
    names = [part.get("name", "") for part in parts]
    about = Object(parts[0]["template"]["spec"]).part("template", "metadata", "annotations")
    if parts[1:] and about.pop(PODSET_GROUP, None):
        yield f"left out: {PODSET_GROUP}, since Kueue refuses it in a job of one Pod template"
    of_job = parts[0]["template"]["spec"]
    of_job["completions"] = nodes
    of_job["parallelism"] = nodes if parts[1:] else of_job["parallelism"]
    spec["replicatedJobs"] = [{**parts[0], "name": NODE, "replicas": 1}]
    if names != [NODE]:
        joined = " and ".join(names)
        message = f"the replicated Jobs {joined} are one, {NODE}, of {nodes} Pods"
        yield f"{message} in the rendered manifest"
    yield from _policies(spec, names)


def _policies(spec: Json, names: list[str]) -> Iterator[str]:
    """Let policies speak of the one replicated Job."""
    for rule in (spec.get("failurePolicy") or {}).get("rules") or ():
        if rule.get("targetReplicatedJobs"):
            rule["targetReplicatedJobs"] = [NODE]
    success = spec.pop("successPolicy", None) or {}
    asked = success.get("targetReplicatedJobs") or names
    if names[1:] and (success.get("operator") == "Any" or set(asked) != set(names)):
        how = f"{success.get('operator')} of {', '.join(asked)}"
        yield f"successPolicy is {how}; in the rendered manifest all Pods must succeed"


def _differences(parts: list[Json], path: tuple[str | int, ...]) -> Iterator[Finding]:
    first = _alike(parts[0])
    for part in parts[1:]:
        for where in differing(first, _alike(part), (*path, part.get("name", ""))):
            message = "the replicated Jobs differ here, and all Pods of k8sjob's JobSet are alike"
            yield invalid(where, message, "make them alike, or keep the manifest")


def _alike(part: Json) -> Json:
    """What must be the same in all replicated Jobs."""
    alike = {key: value for key, value in copy.deepcopy(part).items() if key != "name"}
    for key in ("completions", "parallelism"):
        alike["template"]["spec"].pop(key, None)
    trains = training(at_path(alike, "template", "spec", "template", "spec", "containers"))
    env = [variable for variable in trains.pop("env", []) if variable.get("name") not in _RANKS]
    if env:
        trains["env"] = env
    return alike
