"""Objects of a script whose methods all ranks call together: sessions, trainers, models."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from k8sjob.checks.lint.script_code import keyword, parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from k8sjob.checks.lint.script_facts import Script
    from k8sjob.checks.lint.script_modules import Function

__all__ = ["FORWARD", "METHODS", "Kinds"]

FORWARD: Final = "forward"
"""The call of a DistributedDataParallel model: it communicates if the model has buffers."""
_SESSION: Final = (
    "all_reduce barrier broadcast fit gather load main_first prepare reduce save save_model "
    "should_stop"
)
_ACCELERATOR: Final = (
    "backward gather gather_for_metrics local_main_process_first main_process_first "
    "pad_across_processes reduce wait_for_everyone"
)
METHODS: Final[Mapping[str, frozenset[str]]] = {
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
_SAME: Final = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16"})
"""Methods of a model that give the model."""


class Kinds:
    """Which objects of a program are sessions, trainers or wrapped models: keys of METHODS."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._known: dict[ast.expr, str] = {}

    def of(self, node: ast.expr) -> str:
        """What an object is; empty if it is not known."""
        if node not in self._known:
            self._known[node] = ""  # for one that is made of itself
            found = self._script.variable(node)
            if isinstance(node, ast.Call):
                self._known[node] = self._made(node)
            elif found and found.parameter_of and not found.values and isinstance(node, ast.Name):
                self._known[node] = self._parameter(found.parameter_of, node.id)
            elif found:
                self._known[node] = self._first(found.values)
        return self._known[node]

    def _first(self, values: Iterable[ast.expr]) -> str:
        if any(map(_is_unwrapped, values)):  # somewhere, so it may be here
            return ""
        return next(filter(None, map(self.of, values)), "")

    def _made(self, call: ast.Call) -> str:
        name = self._script.name(call.func)
        if kind := _kind_named(name):
            return kind
        if name == "torch.compile" and call.args:
            return self.of(call.args[0])
        if isinstance(call.func, ast.Attribute) and (owner := self.of(call.func.value)):
            if owner == "session" and call.func.attr == "prepare":
                return "run"
            return owner if call.func.attr in _SAME else ""
        return self._first(self._script.values(call))

    def _parameter(self, function: Function, name: str) -> str:
        """What the program's calls pass as a parameter, or else what its type or its name says."""
        given = parameters(function)
        names = [one.arg for one in given if one.arg not in ("self", "cls")]
        position = names.index(name) if name in names else None
        calls = self._script.method_calls(function.name)
        passed = (
            keyword(call, name, position)
            for call in calls
            if self._script.definition(call.func) is function
        )
        if known := {kind for value in passed if value and (kind := self._passed(value))}:
            return known.pop() if len(known) == 1 else ""
        annotation = next(one.annotation for one in given if one.arg == name)
        if annotation is not None:
            return _kind_named(self._script.name(annotation))
        if name == "accelerator":
            return name if "accelerate" in self._script.modules else ""
        return {"job": "session", "run": "run"}.get(name, "") if self._script.has_runtime else ""

    def _passed(self, value: ast.expr) -> str:
        if _is_unwrapped(value):
            return "unwrapped"
        return self.of(value) or ("own" if self._script.instance(value) else "")


def _is_unwrapped(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "module"


def _kind_named(name: str) -> str:
    return next((kind for kind, made_by in _MAKERS if made_by.fullmatch(name)), "")
