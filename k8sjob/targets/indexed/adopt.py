"""Indexed Jobs that others wrote, and the kinds of job that are made of one.

Their Pods keep their indexes, and so their ranks. They do not keep their names: the headless
Service of what k8sjob renders has the job's name, so addresses in commands and variables change.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.contract import CONTAINER_NAME, ExitCode
from k8sjob.errors import SpecError
from k8sjob.findings import Finding, invalid
from k8sjob.kube.objects import MANAGED_BY, Object, at_path, containers, training
from k8sjob.targets.api import Authored, ManifestReader
from k8sjob.targets.indexed.job import own_labels
from k8sjob.targets.indexed.pods import JOB_NAME
from k8sjob.targets.indexed.target import BATCH_JOB, RETRIED, IndexedTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from k8sjob.kube.objects import Json
    from k8sjob.targets.indexed.job import Indexed

_STOPPED: Final = {"operator": "In", "values": [int(ExitCode.STOPPED)]}
_COMPLETION_INDEX: Final = re.compile(r"\bJOB_COMPLETION_INDEX\b")
_MASTER: Final = {"MASTER_ADDR", "PET_MASTER_ADDR"}
_NPROC: Final = re.compile(r"--nproc[-_]per[-_]node[=\s]+(\d{1,4})\b")


class IndexedReader(ManifestReader):
    """The reader of Indexed Jobs; see ManifestReader."""

    target: IndexedTarget = BATCH_JOB

    def problems(self, job: Json) -> Iterator[Finding]:
        """Fields of another type, and no name."""
        return self.target.basic_problems(job)

    def authored(self, job: Json, documents: Sequence[Json]) -> Authored:
        """With k8sjob's names of the container, the Service and the Pods."""
        job["spec"] = self.target.job(job).written_spec
        job["metadata"] = {**job["metadata"], "labels": own_labels(job)}
        name, pod = Object(job).name, Object(job).part("spec", "template", "spec")
        network = pod.get("subdomain") or name
        services = [doc for doc in documents if _is_its_service(doc, name, network)]
        notes = [
            f"the Service {Object(service).name} is left out; k8sjob renders one of the job's name,"
            f" with its own port: the other had {Object(service).spec.get('ports') or 'none'}"
            for service in services
            if Object(service).labels.get(MANAGED_BY) != "k8sjob"
        ]
        notes += self.rendered_names(job)
        before, after = f"{name}-#.{network}", f"{name}-#.{name}"
        notes += replace_addresses(pod, before, after)
        return Authored(job, notes, services)

    def rendered_names(self, job: Json) -> Iterator[str]:
        """Give the Indexed Job of a job the names that k8sjob renders, with notes.

        Raises:
            SpecError: nobody knows which container trains, or Pods have no index.
        """
        spec: Json = at_path(job, *self.target.job_type.job_at) or {}
        if spec.get("completionMode") != "Indexed" and (spec.get("completions") or 1) == 1:
            spec["completionMode"] = "Indexed"  # of a single Pod the index is always 0
        if problems := IndexedTarget.job_problems(self.target, self.target.job(job)):
            raise SpecError(problems)
        pod = Object(spec).part("template", "spec")
        pod["subdomain"] = Object(job).name
        if pod.get("restartPolicy", "OnFailure") == "OnFailure" and "backoffLimit" not in spec:
            from k8sjob.spec.replicas import Policy  # noqa: PLC0415 - with it comes pydantic

            restarts = Policy().max_restarts
            spec["backoffLimit"] = restarts * (spec.get("completions") or 1) + 1
            yield f"no backoffLimit is given; policy.max_restarts is {restarts}, as by default"
        candidates = pod.get("containers") or []
        trains = training(candidates)
        if not trains.get("image"):
            at = (*self.target.job_type.job_at, "template", "spec", "containers")
            names = [container.get("name") for container in candidates]
            message = f"{names!r}: none with an image is named {CONTAINER_NAME!r}"
            raise SpecError([invalid(at, message, "give that name to the one that trains")])
        called = self.target.container_name
        old, trains["name"] = trains.get("name"), called
        rules = Object(spec).part("podFailurePolicy").get("rules") or ()
        for codes in (rule["onExitCodes"] for rule in rules if rule.get("onExitCodes")):
            if codes.get("containerName") == old:
                codes["containerName"] = called
        if _replace_in_commands(pod, _COMPLETION_INDEX, lambda _: "PET_NODE_RANK"):
            yield "in the command JOB_COMPLETION_INDEX became PET_NODE_RANK, which every kind has"
        if old not in {CONTAINER_NAME, called}:
            yield f"the container {old} is called {called} in the rendered manifest"

    def settle(self, job: Json) -> None:
        """Fill in the apiserver's defaults; drop what k8sjob adds for suspensions and twins."""
        job["spec"].setdefault("suspend", False)
        if not self.target.job(job).managed_by:
            job["spec"].pop("managedBy", None)
        spec: Json = at_path(job, *self.target.job_type.job_at)
        for key, value in (("completions", 1), ("parallelism", 1), ("backoffLimit", 6)):
            spec.setdefault(key, value)
        if spec.get("podReplacementPolicy") in ("Failed", "TerminatingOrFailed"):
            del spec["podReplacementPolicy"]
        if policy := spec.get("podFailurePolicy"):
            policy["rules"] = [rule for rule in policy.get("rules") or () if not _of_stop(rule)]
            if not policy["rules"]:
                del spec["podFailurePolicy"]
        container = training(Object(spec).part("template", "spec").get("containers"))
        ports = [port for port in container.pop("ports", []) if port.get("name") != "rendezvous"]
        if ports:
            container["ports"] = ports

    def fields(self, document: Json) -> Json:
        """The fields of the Indexed Job; nproc_per_node is that of a variable or of the command."""
        job = self.target.job(document)
        spec = job.at(*job.job_at)
        nodes = sum(role.count for role in job.replicas)
        replicas: Json = {"workers": nodes - 1}
        if (nproc := _nproc(job, nodes)) > 1:
            replicas["nproc_per_node"] = nproc
        most = nodes
        if job.is_elastic:
            nnodes = job.variable("PET_NNODES")
            if bounds := re.fullmatch(r"(\d{1,6}):(\d{1,6})", nnodes):
                most = int(bounds[2])
                replicas["elastic"] = {"min": int(bounds[1]), "max": most}
        limit, policy = spec["backoffLimit"], at_path(spec, "template", "spec", "restartPolicy")
        rules = Object(spec).part("podFailurePolicy").get("rules") or ()
        new_pods = any(rule.get("onPodConditions") for rule in rules)
        if policy == "Never" and RETRIED in [at_path(r, "onExitCodes", "values") for r in rules]:
            policy, restarts = "ExitCode", limit // most
        elif policy == "Never" and new_pods and limit % most == 0:
            policy, restarts = None, limit // most  # as k8sjob renders it by default
        else:
            restarts = max(1, (limit - 1) // most) if limit else 0
        return {
            "replicas": replicas,
            "policy": {
                "restart_policy": policy,
                "max_restarts": None if policy == "Never" else restarts,
                "ttl_after_finished": job.spec.get("ttlSecondsAfterFinished"),
                "active_deadline": job.active_deadline,
                "suspend": job.spec["suspend"],
            },
        }


def _nproc(job: Indexed, nodes: int) -> int:
    """The processes of each node; 0 if unknown."""
    nproc = job.nproc_per_node
    container = training(job.replicas[0].pod.get("containers"))
    words = " ".join([*(container.get("command") or ()), *(container.get("args") or ())])
    if not nproc and (match := _NPROC.search(words)):
        nproc = match[1]
    world = job.variable("WORLD_SIZE")
    if not nproc and world.isdecimal() and int(world) % nodes == 0:
        nproc = str(int(world) // nodes)
    return int(nproc) if nproc.isdecimal() else 0


def _is_its_service(item: Json, job: str, network: str) -> bool:
    if item.get("kind") != "Service":
        return False
    selector = Object(item).part("spec", "selector")
    return Object(item).name == network or job in (selector.get(JOB_NAME), selector.get("job-name"))


def _of_stop(rule: Json) -> bool:
    codes = {k: v for k, v in (rule.get("onExitCodes") or {}).items() if k != "containerName"}
    return rule.get("action") == "Ignore" and codes == _STOPPED


def replace_addresses(pod: Json, before: str, after: str, shift: int = 0) -> Iterator[str]:
    """Change the Pods' addresses in commands and variables, in place, with a note on each.

    Args:
        pod: a Pod's spec.
        before: "digits-#.train", with # for the index.
        after: the same as k8sjob renders it.
        shift: what is added to the index.
    """
    address = re.escape(before).replace(re.escape("#"), r"(\d+)")
    pattern = re.compile(rf"(?<![\w.-]){address}(?![\w-])")
    moved: dict[str, str] = {}

    def new_address(match: re.Match[str], master: str = "") -> str:
        index = int(match[1]) + shift
        moved[match[0]] = after.replace("#", str(index)) if index or not master else master
        return moved[match[0]]

    def in_command(match: re.Match[str]) -> str:
        return new_address(match, "$(MASTER_ADDR)")  # which the Pods of every kind have

    for container in containers(pod):
        for variable in container.get("env") or ():
            if isinstance(variable.get("value"), str) and variable.get("name") not in _MASTER:
                variable["value"] = pattern.sub(new_address, variable["value"])
    _replace_in_commands(pod, pattern, in_command)
    for old, new in moved.items():
        if old != new:
            yield f"the address {old} became {new}"


def _replace_in_commands(
    pod: Json, pattern: re.Pattern[str], new: Callable[[re.Match[str]], str]
) -> bool:
    """Replace a pattern, in place; whether it was there."""
    changed = False
    for container in containers(pod):
        for key in ("command", "args"):
            for index, word in enumerate(container.get(key) or ()):
                container[key][index] = pattern.sub(new, word)
                changed |= container[key][index] != word
    return changed
