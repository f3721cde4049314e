"""The calls that every rank must make: torch's, accelerate's, Lightning's, and k8sjob's own."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from k8sjob.lint.modules import Function
from k8sjob.lint.script_facts import keyword

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.lint.scopes import Scopes
    from k8sjob.lint.script_facts import Script

__all__ = ["FORWARD", "MAKES_GROUP", "Communication", "Given"]

FORWARD: Final = "forward"
"""The call of a DistributedDataParallel model: it communicates if the model has buffers."""
MAKES_GROUP: Final = "init_process_group"
_TORCH: Final[Mapping[str, int | None]] = {
    "all_gather": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "all_reduce": 2,
    "all_to_all": 2,
    "all_to_all_single": 4,
    "barrier": 0,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "gather": 3,
    "gather_object": 3,
    "monitored_barrier": 0,
    "new_group": None,
    "new_subgroups": None,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "scatter": 3,
    "scatter_object_list": 3,
}
"""Functions of torch.distributed, with the position of their argument `group`."""
_CHECKPOINTS: Final = frozenset({"save", "load", "async_save", "save_state_dict"})
_SESSION: Final = (
    "all_reduce barrier broadcast fit gather load main_first prepare reduce save save_model "
    "should_stop"
)
_ACCELERATOR: Final = (
    "backward gather gather_for_metrics local_main_process_first main_process_first "
    "pad_across_processes reduce wait_for_everyone"
)
_METHODS: Final[Mapping[str, frozenset[str]]] = {
    "session": frozenset(_SESSION.split()),
    "run": frozenset({"batches", "epochs", "evaluate", "step"}),
    "accelerator": frozenset(_ACCELERATOR.split()),
    "trainer": frozenset({"evaluate", "fit", "predict", "save_checkpoint", "test", "train"}),
    "fsdp": frozenset({"state_dict", "clip_grad_norm_", FORWARD}),
    "ddp": frozenset({FORWARD}),
    "zero": frozenset({"consolidate_state_dict"}),
}
"""What all ranks call of an object, by its kind."""
_MAKERS: Final = (
    ("session", re.compile(r"k8sjob\.runtime\.(sessions\.)?(session|Job|job\.Job)")),
    ("run", re.compile(r"k8sjob\.runtime\.(training\.)?Run")),
    ("accelerator", re.compile(r"accelerate\.(\w+\.)*Accelerator")),
    ("trainer", re.compile(r"(lightning|pytorch_lightning|transformers|trl)\.(\w+\.)*\w*Trainer")),
    ("ddp", re.compile(r"torch\.(\w+\.)*DistributedDataParallel")),
    ("fsdp", re.compile(r"torch\.(\w+\.)*FullyShardedDataParallel")),
    ("zero", re.compile(r"torch\.(\w+\.)*ZeroRedundancyOptimizer")),
)
"""What makes an object of a kind, or is its type."""
_BY_NAME: Final = {"job": "session", "run": "run", "accelerator": "accelerator"}
"""Kinds that parameters have by their names, where the library is imported."""
_SAME: Final = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16"})
_MAX_DEPTH: Final = 6


Given = frozenset[tuple[str, str]]
"""The kinds of a function's arguments in one call of it: (parameter, kind)."""


class Communication:
    """Which calls of a program are collective."""

    def __init__(self, script: Script, scopes: Scopes) -> None:
        self._script, self._scopes = script, scopes

    def collective(self, call: ast.Call, given: Given) -> str:
        """The name of what all ranks must call together, if a call is that; else empty."""
        name = self._script.name(call.func)
        if name.startswith("torch.distributed."):
            return _of_torch(name, call)
        if isinstance(call.func, ast.Attribute):
            kind = self.kind(call.func.value, given)
            if call.func.attr in _METHODS.get(kind, ()):
                return call.func.attr
        called = self.kind(call.func, given) if not isinstance(call.func, ast.Call) else ""
        return FORWARD if called in ("ddp", "fsdp") else ""

    def kind(self, node: ast.expr, given: Given, depth: int = 0) -> str:
        """What an object is, a key of _METHODS; empty if it is not known."""
        match node:
            case _ if depth > _MAX_DEPTH:
                return ""
            case ast.Call():
                return self._made(node, given, depth + 1)
            case ast.Name(id=name) if found := self._scopes.variable(node):
                if found.parameter_of is not None and not found.values:
                    return self._parameter(found.parameter_of, name, given)
                return self._of_values(found.values, given, depth)
            case ast.Attribute():
                return self._of_values(self._scopes.values(node), given, depth)
            case _:
                return ""

    def _of_values(self, values: list[ast.expr], given: Given, depth: int) -> str:
        if any(isinstance(value, ast.Attribute) and value.attr == "module" for value in values):
            return ""  # unwrapped again somewhere
        kinds = (self.kind(value, given, depth + 1) for value in values)
        return next(filter(None, kinds), "")

    def _made(self, call: ast.Call, given: Given, depth: int) -> str:
        name = self._script.name(call.func)
        for kind, made_by in _MAKERS:
            if made_by.fullmatch(name):
                return kind
        if name == "torch.compile" and call.args:
            return self.kind(call.args[0], given, depth)
        if isinstance(call.func, ast.Attribute):
            owner = self.kind(call.func.value, given, depth)
            if owner == "session" and call.func.attr == "prepare":
                return "run"
            if owner and call.func.attr in _SAME:
                return owner
        function = self._scopes.definition(call.func)
        if not isinstance(function, Function):
            return ""
        inner = self.arguments(call, function, given)
        values = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
        return self._of_values(values, inner, depth)

    def _parameter(self, function: Function, name: str, given: Given) -> str:
        if passed := dict(given).get(name):
            return passed
        arguments = function.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if one.arg == name and one.annotation is not None:
                text = one.annotation
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    text = ast.Name(text.value)
                typed = self._script.name(text)
                return next((kind for kind, made in _MAKERS if made.fullmatch(typed)), "")
        kind = _BY_NAME.get(name, "")
        library = "accelerate" in self._script.modules
        return kind if (library if kind == "accelerator" else self._script.has_runtime) else ""

    def arguments(self, call: ast.Call, function: Function, given: Given) -> Given:
        """The kinds of what a call gives to a function of the program."""
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        pairs = [*zip(names, call.args, strict=False)]
        pairs += [(one.arg, one.value) for one in call.keywords if one.arg]
        kinds = ((name, self.kind(value, given) or self._own(value)) for name, value in pairs)
        return frozenset((name, kind) for name, kind in kinds if kind)

    def _own(self, value: ast.expr) -> str:
        """A kind for objects of the program's own classes: their parameters' names mean nothing."""
        return "own" if self._scopes.instance(value) else ""


def _of_torch(name: str, call: ast.Call) -> str:
    last = name.rpartition(".")[2]
    if last in ("init_process_group", "init_rpc", "init_device_mesh"):
        return MAKES_GROUP
    if ".checkpoint." in name:
        alone = keyword(call, "process_group") or keyword(call, "no_dist")
        return last if last in _CHECKPOINTS and alone is None else ""
    return last if last in _TORCH and not _in_subgroup(last, call) else ""


def _in_subgroup(name: str, call: ast.Call) -> bool:
    """Whether a collective is given a group, which may have these ranks alone."""
    position = _TORCH[name]
    group = keyword(call, "group", position) if position is not None else None
    if group is None or (isinstance(group, ast.Constant) and group.value is None):
        return False
    return not ast.unparse(group).endswith("WORLD")
