"""Checks of a script's process group, of how it finds its local rank, and of its devices."""

from __future__ import annotations

import ast
import re
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from k8sjob.checks.finding import message, pattern
from k8sjob.checks.scripts.code import constant, keyword
from k8sjob.checks.scripts.facts import LOCAL_RANK_OPTIONS, MANAGED, Script
from k8sjob.contract import LAUNCHES
from k8sjob.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.findings import Finding

RULES: Final = Rules["Script"]("script")

_LOOPBACK: Final = pattern("loopback")
_NODE_NAMES: Final = pattern("pod-number")


def _environ_writes(script: Script) -> Iterator[tuple[str, ast.expr]]:
    """Variables that the script sets for itself, with their values."""
    for node in script.nodes:
        pairs: list[tuple[object, ast.expr]] = []
        match node:
            case ast.Assign(targets=[ast.Subscript(value=owner, slice=key), *_], value=value):
                pairs = [(constant(key), value)]
            case ast.Call(func=ast.Attribute(value=owner, attr="update"), args=args):
                pairs = [(option.arg, option.value) for option in node.keywords]
                for table in args:
                    if isinstance(table, ast.Dict) and None not in table.keys:  # **os.environ
                        pairs += zip(map(constant, table.keys), table.values, strict=True)
            case _:
                continue
        if pairs and script.name(owner) == "os.environ":
            yield from ((str(name), value) for name, value in pairs)


def _spawns(script: Script) -> Sequence[ast.Call]:
    """mp.spawn calls of a script that never asks which pod this is."""
    if script.setting.nodes == 1 or script.has_runtime or script.modules & MANAGED:
        return []
    items = (node for node in script.nodes if isinstance(node, ast.Subscript))
    written = {item.slice for item in items if isinstance(item.ctx, ast.Store)}
    texts = (constant(node) for node in script.nodes if node not in written)
    # It computes the ranks of all pods by itself, or may do so.
    if any(isinstance(text, str) and _NODE_NAMES.search(text) for text in texts):
        return []
    if not script.torch_calls("init_process_group"):
        return []
    return script.spawns


def _spawns_one(script: Script, count: ast.expr | None) -> bool:
    """Whether mp.spawn starts one process in each pod, which then has the pod's rank."""
    if count is None:
        return True  # its default
    numbers = {
        script.setting.gpus if script.last_name(origin) == "device_count" else constant(origin)
        for origin in script.origins(count)
    }
    name = getattr(count, "attr", "")
    return numbers == {1} or script.ranks.defaults.get(name, set()) - {None} == {1}


@RULES.warning
def _spawn_in_every_pod(script: Script) -> Iterator[Finding]:
    """mp.spawn counts the processes of its own pod; the environment has one rank for each pod."""
    # Ranks or the number of processes may come from the script, not from the environment.
    groups = script.torch_calls("init_process_group")
    makes_world = any(keyword(call, "rank") or keyword(call, "world_size") for call in groups)
    makes_world |= any(name in ("RANK", "WORLD_SIZE") for name, _ in _environ_writes(script))
    kind = "own-world" if makes_world else "one-rank"
    for call in _spawns(script):
        if kind == "one-rank" and _spawns_one(script, keyword(call, "nprocs", 2)):
            continue
        yield script.at(call, "spawn-in-every-pod", reason=message(f"spawn-of-{kind}"))


_STARTS: Final = pattern("starts")
_IN_PROCESS: Final = pattern("launches-here")


@RULES.warning
def _own_launcher(script: Script) -> Iterator[Finding]:
    """Each process of the job would start all processes of its own training once more."""
    # A program that a plain python starts, and that only launches others, is right to do so.
    launched = (script.setting.launcher or "none") != "none"
    trains = script.setting.launcher is None and (script.makes_group or script.trains)
    if script.setting.processes == 1 or not (launched or trains):
        return

    def asks_rank(place: ast.AST) -> bool:
        return any(script.ranks.mentioned_in(guard.test) for guard in script.guards(place))

    for name, call in script.calls:
        text = _IN_PROCESS.fullmatch(name) and name
        if constant(keyword(call, "num_processes", 2)) == 1:  # of a notebook_launcher
            continue
        if _STARTS.fullmatch(name):
            launcher = re.search(LAUNCHES, _words(script, call))
            text = launcher and launcher[0].strip("/;&| ")
        if text and not script.always(call, asks_rank):
            yield script.at(call, "own-launcher", launcher=text)


_MAX_PARTS: Final = 1000
_MAX_COMMAND: Final = 4000
"""Parts and characters of a command in which a launcher is looked for."""


def _words(script: Script, node: ast.AST) -> str:
    """The texts in a command, those of its variables included."""
    names = (part for part in ast.walk(node) if isinstance(part, ast.Name | ast.Constant))
    origins = (origin for name in names for origin in script.origins(name))
    parts = islice(chain.from_iterable(map(ast.walk, origins)), _MAX_PARTS)
    return " ".join(word for word in map(constant, parts) if isinstance(word, str))[:_MAX_COMMAND]


@RULES.error
def _hard_coded_address(script: Script) -> Iterator[Finding]:
    """The operator injects MASTER_ADDR; with a loopback address each pod waits for itself."""
    if script.setting.nodes == 1 or _spawns(script):
        return
    for name, value in _environ_writes(script):
        address = script.text(value)
        # Under a condition it is mostly a fallback for a run without a launcher.
        if name == "MASTER_ADDR" and _LOOPBACK.match(address) and not script.conditional(value):
            yield script.at(value, "hard-coded-address", address=address)
    several = len(script.torch_calls("init_process_group")) > 1  # one of them for a debug run
    for node, method in _init_methods(script):
        address = script.text(method)
        if _LOOPBACK.match(address) and not (several and script.conditional(node)):
            yield script.at(node, "hard-coded-method", address=address)


def _init_methods(script: Script) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Rendezvous addresses: init_method of groups and of RPC's options, and TCPStore."""
    for name, call in script.calls:
        if not name.startswith("torch.distributed."):
            continue
        position = {"init_process_group": 1, "TCPStore": 0}.get(name.rpartition(".")[2])
        yield call, keyword(call, "init_method", position)
        if position == 0:
            yield call, keyword(call, "host_name")


@RULES.error
def _hard_coded_rank(script: Script) -> Iterator[Finding]:
    """RANK and WORLD_SIZE differ by pod and job; a constant repeats a rank or waits forever."""
    if script.setting.processes == 1 or _spawns(script):
        return
    for name, value in _environ_writes(script):
        fixed = constant(value)
        if name in ("RANK", "WORLD_SIZE") and fixed is not None and not script.conditional(value):
            yield script.at(value, "hard-coded-rank", reason=f"{name} is set to {fixed!r}")
    for call in script.torch_calls("init_process_group"):
        for name in ("rank", "world_size"):
            fixed = constant(keyword(call, name))
            if isinstance(fixed, int) and fixed >= 0 and not script.conditional(call):
                reason = f"{name}={fixed} in init_process_group"
                yield script.at(call, "hard-coded-rank", reason=reason)


@RULES.error
def _backend_not_built_in(script: Script) -> Iterator[Finding]:
    """The released wheels of torch are built without MPI, and 1.0 removed the tcp backend."""
    for call in script.torch_calls("init_process_group", "new_group"):
        position = 0 if script.name(call.func).endswith("init_process_group") else None
        backend = constant(keyword(call, "backend", position))
        if isinstance(backend, str) and backend.lower() in ("mpi", "tcp"):
            yield script.at(call, "backend-not-built-in", backend=backend)


@RULES.error
def _nccl_without_gpu(script: Script) -> Iterator[Finding]:
    """NCCL works only on GPUs. Checked only where the job's GPUs are known (a job.yaml)."""
    if script.setting.gpus != 0:
        return
    for call in script.torch_calls("init_process_group"):
        if constant(keyword(call, "backend", 0)) == "nccl" and not script.conditional(call):
            yield script.at(call, "nccl-without-gpu")


@RULES.error
def _process_group_missing(script: Script) -> Iterator[Finding]:
    """DistributedDataParallel and DistributedSampler need a process group that exists."""
    if script.makes_group or not script.self_contained or not script.is_program:
        return
    for call in script.torch_calls("DistributedDataParallel", "DistributedSampler"):
        # With num_replicas, a sampler does not ask the default group for its size.
        if keyword(call, "num_replicas", 1) or keyword(call, "process_group"):
            continue
        yield script.at(call, "process-group-missing", name=script.last_name(call.func))
        return


@RULES.warning
def _training_not_distributed(script: Script) -> Iterator[Finding]:
    """Each process does the whole training. Checked only where their number is known."""
    processes = script.setting.processes or 1
    strings = (constant(node) for node in script.nodes)
    aware = script.makes_group or any(text in ("RANK", "WORLD_SIZE") for text in strings)
    aware |= any(name.startswith("keras.distribution") for name, _ in script.calls)
    if processes == 1 or aware or not script.self_contained:
        return
    for first in (*script.method_calls("backward"), *script.keras_fits)[:1]:
        yield script.at(first, "training-not-distributed", processes=processes)


@RULES.warning
def _group_not_destroyed(script: Script) -> Iterator[Finding]:
    """A process that leaves with its group alive may abort after success (exit code 134)."""
    handled = script.setting.launcher == "k8sjob" or script.has_runtime or not script.self_contained
    groups = script.torch_calls("init_process_group")
    if handled or not groups or script.method_calls("destroy_process_group"):
        return
    yield script.at(groups[-1], "group-not-destroyed")


@RULES.error
def _local_rank_without_launcher(script: Script) -> Iterator[Finding]:
    """A launcher sets LOCAL_RANK, not the operator. Checked only for a plain python command."""
    if script.setting.launcher != "none":
        return
    for node in script.nodes:
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        if script.name(node.value) == "os.environ" and constant(node.slice) == "LOCAL_RANK":
            yield script.at(node, "local-rank-without-launcher")


@RULES.warning
def _local_rank_argument(script: Script) -> Iterator[Finding]:
    """Both torchrun and k8sjob set LOCAL_RANK; the argument keeps its default in all processes."""
    setting, strings = script.setting, [n for n in script.nodes if isinstance(n, ast.Constant)]
    alone = setting.processes is not None and setting.processes == setting.nodes
    if alone or setting.gpus == 0:
        return  # a process has its pod, or the CPU, to itself
    if script.modules & MANAGED or any(n.value == "LOCAL_RANK" for n in strings):
        return
    for call in script.method_calls("add_argument"):
        names = [constant(argument) for argument in call.args]
        spelled = [name for name in names if name in LOCAL_RANK_OPTIONS]
        if len(spelled) != 1 or spelled[0] == script.setting.local_rank_arg:
            continue
        yield script.at(call, "local-rank-argument", option=spelled[0])


@RULES.error
def _device_by_global_rank(script: Script) -> Iterator[Finding]:
    """A pod counts its GPUs from 0; the global rank counts over all pods."""
    if script.setting.nodes == 1:
        return
    for call in (call for _, call in script.calls):
        for device in _devices(script, call):
            if script.is_rank(device):
                yield script.at(device, "device-by-global-rank", device=script.shown(device))


def _devices(script: Script, call: ast.Call) -> Iterator[ast.expr]:
    last = script.last_name(call.func)
    is_method = isinstance(call.func, ast.Attribute)
    candidates: list[ast.expr | None] = []
    if (is_method and last in ("cuda", "to")) or last == "set_device":
        candidates.append(keyword(call, "device", 0))
    elif script.name(call.func) == "torch.device":
        candidates += [keyword(call, "type", 0), keyword(call, "index", 1)]
    elif last == "DistributedDataParallel":
        ids = keyword(call, "device_ids", 1)
        candidates += [*(ids.elts if isinstance(ids, ast.List) else [])]
    for candidate in filter(None, candidates):
        match candidate:
            case ast.JoinedStr(
                values=[ast.Constant(value="cuda:"), ast.FormattedValue(value=rank)]
            ):
                yield rank
            case _:
                yield candidate
