"""The rank and the size of the group, read from the environment and checked before anything hangs.

What starts a pod sets RANK or PET_NODE_RANK, which count nodes (a node is a pod); a launcher in the
pod, as torchrun, sets RANK to count processes, and LOCAL_RANK, by which it is known. An impossible
combination would make a group wait for ranks that never come, so it is refused. This module and
config.py alone read and write the process's environment.

Source: training-operator v1.9.4, pkg/controller.v1/pytorch/envvar.go, master.go and elastic.go;
trainer v2, pkg/runtime/framework/plugins/torch; torch/distributed/run.py.
"""

from __future__ import annotations

import os
import reprlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from k8sjob.runtime.base.errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOOPBACK: Final = "127.0.0.1"
_MAX_DIGITS: Final = 18
_RESTART: Final = "TORCHELASTIC_RESTART_COUNT"
_LAUNCHED: Final = "TORCHELASTIC_RUN_ID"
_ONE_PROCESS: Final = frozenset({"auto", "gpu", "cpu", "xpu"})
"""Words for "as many as fit" that the training operator counts as one process."""


def copy_environ() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def replace_environ(environ: Mapping[str, str]) -> None:
    """Give this process the environment that it would have been started with."""
    os.environ.clear()
    os.environ.update(environ)


def export(name: str, value: str, *, override: bool = True) -> None:
    """Set a variable for libraries and child processes."""
    if override or name not in os.environ:
        os.environ[name] = value


def stay_on_loopback(variable: str) -> None:
    """Name the loopback interface in a library's variable, unless the user has set it.

    The library would otherwise listen on the address that the machine's name resolves to.
    """
    export(variable, "lo0" if sys.platform == "darwin" else "lo", override=False)


@dataclass(frozen=True, slots=True)
class NodeEnv:
    """One node of a group, as the agent sees it before it starts the node's processes."""

    node_rank: int  # 0 to nnodes - 1; node 0 hosts the rendezvous
    nnodes: int
    nproc_per_node: int  # number of processes on each node
    master_addr: str  # name or address of node 0
    master_port: int  # port of the rendezvous; 0 means any free one (only for a single node)
    # processes of node 0 where they only serve the others (strategies.serving); 0: it is like all
    # nodes
    serving: int = 0

    @property
    def processes(self) -> int:
        """Number of processes on this node."""
        return self.serving if self.serving and self.node_rank == 0 else self.nproc_per_node

    @property
    def world_size(self) -> int:
        """Number of processes in the whole group."""
        return self._before(self.nnodes)

    def ranks(self, node: int) -> range:
        """The ranks of the processes of a node."""
        return range(self._before(node), self._before(node + 1))

    def process(self, local_rank: int, restart: int = 0) -> dict[str, str]:
        """The variables of one process of this node, under torchrun's names."""
        values = {
            "RANK": self._before(self.node_rank) + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.processes,
            "GROUP_RANK": self.node_rank,
            "GROUP_WORLD_SIZE": self.nnodes,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            _RESTART: restart,
            # Lightning takes ranks from the environment only where torch.distributed finds a launch
            # by torchrun, and computes others where it does not. "none" is torchrun's own default.
            _LAUNCHED: "none",
        }
        return {name: str(value) for name, value in values.items()}

    def _before(self, node: int) -> int:
        """The number of processes on the nodes before this one."""
        if self.serving and node:
            return self.serving + (node - 1) * self.nproc_per_node
        return node * self.nproc_per_node


@dataclass(frozen=True, slots=True)
class DistEnv:
    """One process of a group."""

    rank: int  # 0 to world_size - 1, over all nodes
    local_rank: int  # 0 to local_world_size - 1, on this node
    world_size: int  # number of processes in the group
    local_world_size: int  # number of processes on this node
    master_addr: str  # name or address of the node of rank 0
    master_port: int  # port of the rendezvous; 0 means any free one (only for a single node)
    restart: int = 0  # how often this process has been started again on its node

    def among_trainers(self, serving: int) -> DistEnv:
        """This trainer's place among the trainers if node 0 only serves (strategies.serving)."""
        return replace(self, rank=self.rank - serving, world_size=self.world_size - serving)


@dataclass(frozen=True, slots=True)
class ElasticEnv:
    """The rendezvous endpoint of an elastic group, and its bounds."""

    host: str  # name or address of the node that hosts the store
    port: int
    hosts: bool  # whether that is this node's name; agent/elastic.py compares the addresses, too
    run_id: str  # distinguishes the rendezvous from others in the same store
    min_nodes: int  # the fewest nodes that train
    max_nodes: int  # the most nodes that train
    nproc_per_node: int  # number of processes on each node


def elastic_env(environ: Mapping[str, str], hostname: str) -> ElasticEnv | None:
    """The rendezvous of an elastic group; None if the group's size is fixed.

    The nodes of an elastic group have PET_RDZV_ENDPOINT, which names the pod that hosts the store
    by its hostname, and the bounds; ranks have only those of a group of a fixed size.

    Raises:
        EnvError: the variables contradict each other.
    """
    # With a Master the operator gives RANK even to an elastic job: the ranks are fixed then.
    if not is_elastic(environ) or "RANK" in environ or "PET_NODE_RANK" in environ:
        return None
    low, high = _bounds(environ)
    endpoint = environ.get("PET_RDZV_ENDPOINT", "")
    host, _, port = endpoint.rpartition(":")
    if not host or not (_is_number(port) and 0 < int(port) <= 65535):
        raise EnvError(
            f"PET_NNODES={environ['PET_NNODES']} and PET_RDZV_ENDPOINT={endpoint!r}: the nodes of "
            "an elastic group join at HOST:PORT; set replicas.elastic, and remove both variables"
        )
    backend = environ.get("PET_RDZV_BACKEND", "c10d")
    if backend != "c10d":
        raise EnvError(
            f"PET_RDZV_BACKEND={backend}: k8sjob's agent uses c10d; set it to c10d "
            "(rdzvBackend in a manifest), or let torchrun start the job (run.command)"
        )
    return ElasticEnv(
        host=host,
        port=int(port),
        # The endpoint may be a short name or a full one, as may the machine's.
        hosts=hostname.partition(".")[0] == host.partition(".")[0],
        run_id=environ.get("PET_RDZV_ID") or "k8sjob",
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=_nproc(environ),
    )


def node_env(environ: Mapping[str, str]) -> NodeEnv:
    """The node that this container is.

    Accepts RANK, as a node's, and WORLD_SIZE (a PyTorchJob), only `PET_*` (a TrainJob), a single
    node's, and none at all (a single process).

    Raises:
        EnvError: the variables contradict each other, or a rank would wait forever.
    """
    if "LOCAL_RANK" in environ:
        raise EnvError(
            f"LOCAL_RANK={environ['LOCAL_RANK']} is set, so another launcher has started this "
            "process, or the container's env sets it; start the script itself under that launcher, "
            "or remove LOCAL_RANK"
        )
    nproc = _nproc(environ)
    nnodes = _nnodes(environ, nproc)
    node_rank = _node_rank(environ, nnodes)
    if is_elastic(environ):
        _bounds(environ)
    if node_rank >= nnodes:
        raise EnvError(
            f"RANK={node_rank} is not below the number of nodes, {nnodes} "
            f"({_seen(environ, 'WORLD_SIZE', 'PET_NNODES', 'PET_NPROC_PER_NODE')}); a node's RANK "
            f"is 0 to {nnodes - 1}: check replicas.workers and replicas.nproc_per_node"
            " (in a manifest, the processes of the whole job, not of its elastic policy)"
        )
    addr, port = _master(environ, nnodes)
    return NodeEnv(node_rank, nnodes, nproc, addr, port)


def dist_env(environ: Mapping[str, str] = os.environ) -> DistEnv:
    """The rank that this process is.

    Accepts what node_env accepts as long as each node has one process, and what a launcher gives
    each of its processes (LOCAL_RANK is set).

    Raises:
        EnvError: the variables contradict each other, or a rank would wait forever.
    """
    if "LOCAL_RANK" in environ:
        return _launched(environ)
    node = node_env(environ)
    if node.nproc_per_node > 1:
        raise EnvError(
            f"{_seen(environ, 'WORLD_SIZE', 'PET_NPROC_PER_NODE', 'PET_NNODES')}: this node is to "
            f"run {node.nproc_per_node} processes, and LOCAL_RANK is not set, so only this one"
            " starts and the others would never join; start it with `python -m k8sjob.runtime"
            " SCRIPT` or torchrun, or set replicas.nproc_per_node to 1"
        )
    restart = _number(environ, _RESTART)
    addr, port = node.master_addr, node.master_port
    return DistEnv(node.node_rank, 0, node.world_size, 1, addr, port, restart)


def rank_or_none() -> DistEnv | None:
    """dist_env() of this process; None where its environment cannot work."""
    try:
        return dist_env()
    except EnvError:
        return None


def world_size_or(default: int) -> int:
    """WORLD_SIZE, which the script may have set; the default if it is not a number."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else default


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the number of nodes may change."""
    return ":" in environ.get("PET_NNODES", "")


def max_ranks(local_world_size: int) -> int:
    """The most ranks that an elastic group may have; 0 where their number is fixed."""
    return _bounds(os.environ)[1] * local_world_size if is_elastic() else 0


def _launched(environ: Mapping[str, str]) -> DistEnv:
    """The process under a launcher: RANK and WORLD_SIZE count processes.

    A LOCAL_RANK that the user put in the manifest comes without LOCAL_WORLD_SIZE; it is harmless
    with one process per node, where a node's rank is the process's rank as well.
    """
    rank, world = _number(environ, "RANK", -1), _number(environ, "WORLD_SIZE", minimum=1)
    local = _number(environ, "LOCAL_RANK")
    local_world = _number(environ, "LOCAL_WORLD_SIZE", 1, minimum=1)
    ambiguous = "LOCAL_WORLD_SIZE" not in environ and _nproc(environ) > 1
    if ambiguous or not (0 <= rank < world and local < local_world <= world):
        variables = _seen(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        raise EnvError(
            f"{variables}: a launcher sets all four, RANK below WORLD_SIZE, LOCAL_RANK below"
            " LOCAL_WORLD_SIZE, and LOCAL_WORLD_SIZE at most WORLD_SIZE; correct what sets them, or"
            " remove LOCAL_RANK and start the script with `python -m k8sjob.runtime` or torchrun"
        )
    addr, port = _master(environ, world)
    return DistEnv(rank, local, world, local_world, addr, port, _number(environ, _RESTART))


def _nproc(environ: Mapping[str, str]) -> int:
    if environ.get("PET_NPROC_PER_NODE", "auto") in _ONE_PROCESS:
        return 1
    return _number(environ, "PET_NPROC_PER_NODE", 1, minimum=1)


def _nnodes(environ: Mapping[str, str], nproc: int) -> int:
    """The number of nodes: by WORLD_SIZE where it is set, and PET_NNODES must agree."""
    fixed = None
    if not is_elastic(environ) and "PET_NNODES" in environ:
        fixed = _number(environ, "PET_NNODES", 1, minimum=1)
    if "WORLD_SIZE" not in environ:
        if "RANK" in environ and fixed is None:
            raise EnvError(
                f"RANK={environ['RANK']} is set and WORLD_SIZE is not; set both, or neither for a"
                " single process"
            )
        return fixed or 1
    world = _number(environ, "WORLD_SIZE", 1, minimum=1)
    # WORLD_SIZE counts processes even where RANK counts nodes: both are the operator's.
    if world % nproc or (fixed is not None and world != fixed * nproc):
        raise EnvError(
            f"{_seen(environ, 'WORLD_SIZE', 'PET_NNODES', 'PET_NPROC_PER_NODE')}: WORLD_SIZE must "
            "be the number of nodes, PET_NNODES, times the processes on each, PET_NPROC_PER_NODE; "
            "remove those that run.env or the image sets, and set replicas.nproc_per_node"
        )
    return world // nproc


def _node_rank(environ: Mapping[str, str], nnodes: int) -> int:
    ranks = {name: _number(environ, name) for name in ("RANK", "PET_NODE_RANK") if name in environ}
    if len(set(ranks.values())) > 1:
        raise EnvError(
            f"{_seen(environ, *ranks)}: both are this node's rank and must be equal; remove the "
            "one that run.env or the image sets"
        )
    if ranks:
        return next(iter(ranks.values()))
    if is_elastic(environ):
        raise EnvError(
            f"PET_NNODES={environ['PET_NNODES']} without RANK: the group is elastic, so its nodes "
            "get their ranks at the rendezvous; start the script with `python -m k8sjob.runtime "
            "SCRIPT` or torchrun, or remove replicas.elastic"
        )
    if nnodes > 1:
        raise EnvError(
            f"{_seen(environ, 'WORLD_SIZE', 'PET_NNODES')}: {nnodes} nodes, and neither RANK nor "
            "PET_NODE_RANK is set; set RANK in each pod, or add a Master "
            "replica, for which the operator sets it"
        )
    return 0


def _bounds(environ: Mapping[str, str]) -> tuple[int, int]:
    """The two numbers of PET_NNODES."""
    text = environ["PET_NNODES"]
    low, _, high = text.partition(":")
    if not (_is_number(low) and _is_number(high) and 1 <= int(low) <= int(high)):
        raise EnvError(
            f"PET_NNODES={text!r} is neither a number nor MIN:MAX; set replicas.elastic.min and max"
        )
    return int(low), int(high)


def _master(environ: Mapping[str, str], members: int) -> tuple[str, int]:
    """Address and port of the rendezvous; a single member needs none."""
    addr = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR") or ""
    name = "MASTER_PORT" if environ.get("MASTER_PORT") else "PET_MASTER_PORT"
    port = _number(environ, name) if environ.get(name) else 0
    if members > 1 and not (addr and port):
        missing = " and ".join(
            name for name, value in (("MASTER_ADDR", addr), ("MASTER_PORT", port)) if not value
        )
        raise EnvError(
            f"{missing} not set, and {members} members need an address to connect to; set both, "
            "the same for all, or add a Master replica, for which the operator sets them"
        )
    if port > 65535:
        raise EnvError(f"{name}={port} is not a port; set it to 1..65535")
    return addr or _LOOPBACK, port


def _number(environ: Mapping[str, str], name: str, default: int = 0, minimum: int = 0) -> int:
    text = environ.get(name)
    if text is None:
        return default
    if not _is_number(text) or int(text) < minimum:
        kind = "a whole number" if minimum == 0 else f"a whole number of at least {minimum}"
        raise EnvError(f"{name}={reprlib.repr(text)} is not {kind}; correct or remove it")
    return int(text)


def _is_number(text: str) -> bool:
    """Whether the text is a whole number that every part of torch can hold.

    int() alone would accept "1_0", " 1 " and digits of other scripts, which torch does not, and
    raise a ValueError for more than 4300 digits.
    """
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def _seen(environ: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
