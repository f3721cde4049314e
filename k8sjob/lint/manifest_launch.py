"""Checks of how a PyTorchJob's processes are started and find each other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Role
from k8sjob.lint.finding import Hit, Rule, Severity, rule
from k8sjob.lint.manifest_facts import Job, Replica, get, launcher_flags, launcher_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RULES"]

_WORDS: Final = ("auto", "gpu", "cpu", "xpu")
_LOOPBACK: Final = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[?::1\]?)(:\d+)?")


@rule(
    "nproc-value",
    Severity.ERROR,
    "manifest",
    "nprocPerNode is a string in the CRD, which takes any text; torchrun knows numbers, auto, gpu "
    "and cpu.",
)
def _nproc_value(job: Job) -> Iterator[Hit]:
    path = ("spec", "nprocPerNode")
    value = job.get(*path)
    if value is None:
        return
    if not isinstance(value, str):
        yield job.at(
            path, f'nprocPerNode {value} is no string, and the CRD refuses it; write "{value}"'
        )
    elif value not in _WORDS and not (value.isascii() and value.isdigit() and int(value)):
        yield job.at(
            path,
            f"nprocPerNode {value!r} passes the CRD, and every launcher ends at its start; use a "
            f"number, or one of {', '.join(_WORDS[:3])}",
        )


@rule(
    "nproc-without-launcher",
    Severity.ERROR,
    "manifest",
    "nprocPerNode multiplies WORLD_SIZE and starts nothing: the processes of a pod are the "
    "launcher's business.",
)
def _nproc_without_launcher(job: Job) -> Iterator[Hit]:
    nproc = job.get("spec", "nprocPerNode") or get(job.elastic, "nProcPerNode")
    if not str(nproc).isdecimal() or int(str(nproc)) <= 1:
        return
    for replica, container in job.trainers():
        if launcher_of(container) == "none":
            processes = int(str(nproc)) * job.nodes
            yield job.at(
                (*container.path, "command"),
                f"nprocPerNode {nproc} makes WORLD_SIZE {processes}, but the {replica.role} starts "
                f"one process, {' '.join(container.argv)[:60]!r}: of {processes} ranks only "
                f"{job.nodes} can come, and they wait for the rest; start it by torchrun, or take "
                f"{job.step('nprocPerNode', 'replicas.nproc_per_node')} out",
            )


@rule(
    "launcher-hard-coded",
    Severity.ERROR,
    "manifest",
    "What torchrun is told on its command line wins over what the operator says in PET_NNODES, "
    "PET_NODE_RANK and PET_MASTER_ADDR, and it is the same in all pods of a role.",
)
def _launcher_hard_coded(job: Job) -> Iterator[Hit]:
    for replica, container in job.trainers():
        flags = launcher_flags(container)
        for name, said in flags.items():
            why = _contradiction(job, replica, name, said) if "$" not in said else ""
            if why:
                where = "command" if container.command else "args"
                shown = f"--{name}={said}" if said else f"--{name}"
                yield job.at(
                    (*container.path, where),
                    f"{shown} in the {replica.role}: {why}; leave it out, the operator's PET_* "
                    "variables say it",
                )


def _contradiction(job: Job, replica: Replica, name: str, said: str) -> str:
    """Why a flag of torchrun cannot be right in this job, or nothing."""
    nodes, why = job.nodes, ""
    if nodes == 1 or job.elastic is not None:
        return why
    match name:
        case "nnodes" if said.isdecimal() and int(said) > nodes:
            why = f"the job has {nodes} pods, so the rendezvous waits for ever"
        case "nnodes" if said.isdecimal() and int(said) < nodes:
            why = f"the job has {nodes} pods, so they do not form one group"
        case "node_rank" if said.isdecimal() and replica.count > 1:
            why = f"all {replica.count} pods get this rank and the rendezvous never completes"
        case "node_rank" if said.isdecimal() and said != _node_rank(job, replica):
            why = f"the operator gives this pod rank {_node_rank(job, replica)}"
        case "master_addr" | "rdzv_endpoint" if _LOOPBACK.fullmatch(said):
            why = f"each of the {nodes} pods waits for the others inside itself"
        case "standalone":
            why = f"each of the {nodes} pods does a whole training of its own"
        case _:
            pass
    return why


def _node_rank(job: Job, replica: Replica) -> str:
    return "1" if replica.role == Role.WORKER and job.replica(Role.MASTER) else "0"


@rule(
    "no-master",
    Severity.ERROR,
    "manifest",
    "Without a Master the operator sets neither MASTER_ADDR nor RANK nor WORLD_SIZE, and without "
    "an elasticPolicy no rendezvous endpoint.",
)
def _no_master(job: Job) -> Iterator[Hit]:
    worker = job.replica(Role.WORKER)
    if worker is None or worker.trainer is None or job.replica(Role.MASTER) is not None:
        return
    container = worker.trainer
    variables = container.data.get("env")
    names = {get(v, "name") for v in (variables if isinstance(variables, list) else ())}
    told = names & {"MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR"}
    told |= launcher_flags(container).keys() & {"master_addr", "rdzv_endpoint"}
    text = " ".join(container.argv)
    speaks_torch = launcher_of(container) == "none" or re.search(r"torchrun|torch\.dist", text)
    if worker.count > 1 and job.elastic is None and not told and speaks_torch:
        yield job.at(
            worker.path,
            f"{worker.count} Workers and no Master: nothing tells them where to meet, so each "
            "waits or fails by itself; add a Master (replicas: 1), or an elasticPolicy",
        )


RULES: Final[tuple[Rule[Job], ...]] = (
    _nproc_value,
    _nproc_without_launcher,
    _launcher_hard_coded,
    _no_master,
)
