"""Checks of the local rank: where a script takes it from, and which device it makes of it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from k8sjob.lint.finding import Hit, Rule, Severity, rule
from k8sjob.lint.script_facts import MANAGED, Script, constant, keyword

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RULES"]


@rule(
    "local-rank-without-launcher",
    Severity.ERROR,
    "script",
    "The operator sets RANK and WORLD_SIZE, never LOCAL_RANK: that one comes from a launcher. Made "
    "only where it is known that there is none (run.command with a plain python).",
)
def _local_rank_without_launcher(script: Script) -> Iterator[Hit]:
    if script.setting.launcher != "none":
        return
    for node in script.nodes:
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        if script.name(node.value) == "os.environ" and constant(node.slice) == "LOCAL_RANK":
            yield script.at(
                node,
                'os.environ["LOCAL_RANK"] is read, and nothing sets it: the operator never does, '
                "so this is a KeyError in every pod; start the script by run.script (k8sjob's "
                "agent sets it) or by torchrun",
            )


@rule(
    "local-rank-argument",
    Severity.WARNING,
    "script",
    "torchrun and k8sjob give the local rank by LOCAL_RANK; an argument stays at its default in "
    "every process, and torch.distributed.launch spells it --local-rank since torch 2.0.",
)
def _local_rank_argument(script: Script) -> Iterator[Hit]:
    setting, strings = script.setting, [n for n in script.nodes if isinstance(n, ast.Constant)]
    alone = setting.processes is not None and setting.processes == setting.nodes
    if alone or setting.gpus == 0:
        return  # a process has its pod, or the CPU, to itself
    if script.modules & MANAGED or any(n.value == "LOCAL_RANK" for n in strings):
        return
    for call in script.method_calls("add_argument"):
        names = [constant(argument) for argument in call.args]
        spelled = [name for name in names if name in ("--local_rank", "--local-rank")]
        if len(spelled) != 1 or spelled[0] == script.setting.local_rank_arg:
            continue
        yield script.at(
            call,
            f"{spelled[0]} is expected as an argument and LOCAL_RANK is never read: under torchrun "
            "or k8sjob it keeps its default and all processes of a pod take the same GPU; set "
            f'run.local_rank_arg: {spelled[0]}, or default=int(os.environ.get("LOCAL_RANK", 0))',
        )


@rule(
    "device-by-global-rank",
    Severity.ERROR,
    "script",
    "A pod counts its GPUs from 0; the global rank goes on counting over all pods.",
)
def _device_by_global_rank(script: Script) -> Iterator[Hit]:
    if script.setting.nodes == 1:
        return
    for call in (call for _, call in script.calls):
        for device in _devices(script, call):
            if _is_global_rank(script, device):
                yield script.at(
                    device,
                    f"`{ast.unparse(device)}` is the rank over all pods, used as the number of a "
                    "GPU in this pod: from the second pod on there is no such GPU; use LOCAL_RANK, "
                    "or the rank modulo torch.cuda.device_count()",
                )


def _devices(script: Script, call: ast.Call) -> Iterator[ast.expr]:
    """Expressions that a call takes as the number of a GPU."""
    last = script.name(call.func).rpartition(".")[2]
    is_method = isinstance(call.func, ast.Attribute)
    candidates: list[ast.expr | None] = []
    if (is_method and last in ("cuda", "to")) or last == "set_device":
        candidates.append(keyword(call, "device", 0))
    elif script.name(call.func) == "torch.device":
        candidates += [keyword(call, "type", 0), keyword(call, "index", 1)]
    elif last == "DistributedDataParallel":
        ids = keyword(call, "device_ids", 1)
        candidates += [*(ids.elts if isinstance(ids, ast.List) else [])]
    for candidate in candidates:
        match candidate:
            case ast.JoinedStr(
                values=[ast.Constant(value="cuda:"), ast.FormattedValue(value=inner)]
            ):
                yield inner
            case ast.expr():
                yield candidate
            case None:
                pass


def _is_global_rank(script: Script, node: ast.expr) -> bool:
    """get_rank() or int(os.environ["RANK"]), directly or by a variable that is nothing else."""
    if isinstance(node, ast.Name):
        values = script.scopes.values(node)
        return bool(values) and all(_is_rank_call(script, value) for value in values)
    return _is_rank_call(script, node)


def _is_rank_call(script: Script, node: ast.expr) -> bool:
    match node:
        case ast.Call(func=function, args=[]):
            return script.name(function) == "torch.distributed.get_rank"
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            return ast.unparse(inner).startswith(
                ("os.environ['RANK']", "os.environ.get('RANK'", "os.getenv('RANK'")
            )
        case _:
            return False


RULES: Final[tuple[Rule[Script], ...]] = (
    _local_rank_without_launcher,
    _local_rank_argument,
    _device_by_global_rank,
)
