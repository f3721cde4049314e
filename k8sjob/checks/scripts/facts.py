"""Facts about a training script: its calls, what it imports and makes, and how it is started."""

from __future__ import annotations

import ast
import sys
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.checks.finding import message, pattern, table
from k8sjob.checks.scripts.code import constant
from k8sjob.checks.scripts.paths import Paths, is_main_guard
from k8sjob.checks.scripts.ranks import Ranks
from k8sjob.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.checks.scripts.modules import Module

MANAGED: Final = frozenset(table("libraries")["managed"].split())
"""Frameworks that make the process group and divide the data by themselves."""
MAKES_GROUP: Final = frozenset({"init_process_group", "init_device_mesh", "init_rpc"})
_LIBRARIES: Final = frozenset(table("libraries")["plain"].split())
"""Known to make no process group behind the script's back."""
LOCAL_RANK_OPTIONS: Final = frozenset({"--local_rank", "--local-rank"})
_KERAS_MODEL: Final = pattern("keras-model")
_MAX_SHOWN: Final = 300
"""Characters of the source of an expression in a message."""


class Setting(NamedTuple):
    """The known facts about how a script is started; None is not known.

    Attributes:
        nodes: pods of the job.
        processes: processes in all pods together.
        gpus: GPUs of one pod.
        launcher: what starts the processes in a pod: "k8sjob" (its agent), "other" (torchrun and
            the like), "none" (a plain `python main.py`).
        local_rank_arg: the argument that k8sjob's agent appends, if any.
    """

    nodes: int | None = None
    processes: int | None = None
    gpus: int | None = None
    launcher: str | None = None
    local_rank_arg: str | None = None


class Script(Paths):
    """The facts about a script that checks use.

    Attributes:
        setting: how it is started.
    """

    def __init__(self, files: Sequence[Module], setting: Setting) -> None:
        super().__init__(files)
        self.setting = setting

    def at(self, node: ast.expr | ast.stmt, name: str, /, **fields: object) -> Finding:
        """A finding at the beginning of a node: a message of the tables, its fields filled in."""
        source, column = self.module(node).source, node.col_offset + 1
        text = message(name, **fields)
        return Finding("", text, source=source, line=node.lineno, column=column)

    def shown(self, node: ast.AST) -> str:
        """The source of a node for a message."""
        text = self.unparsed(node)
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."

    @cached_property
    def ranks(self) -> Ranks:
        """The values that differ by rank."""
        return Ranks(self)

    @cached_property
    def calls(self) -> Sequence[tuple[str, ast.Call]]:
        """Every call with the dotted name of what is called, in the order of the files."""
        calls = [(self.name(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]
        files = {module: at for at, module in enumerate(self.files)}
        return sorted(calls, key=lambda c: (files[self.module(c[1])], c[1].lineno, c[1].col_offset))

    def torch_calls(self, *last: str) -> list[ast.Call]:
        """Calls of torch's functions or classes with one of these last names."""
        return [
            call
            for name, call in self.calls
            if name.startswith("torch.") and name.rpartition(".")[2] in last
        ]

    def method_calls(self, *last: str) -> list[ast.Call]:
        """Calls of anything with one of these last names."""
        return [call for name, call in self.calls if name.rpartition(".")[2] in last]

    @cached_property
    def spawns(self) -> Sequence[ast.Call]:
        """Calls of mp.spawn, by either of its names."""
        names = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
        return [call for name, call in self.calls if name in names]

    @cached_property
    def makes_group(self) -> bool:
        """Whether the script makes a process group, by itself or through what it imports.

        What makes one need not be called by its name: `partial(dist.init_process_group, "gloo")`.
        """
        named = any(map(self.uses, MAKES_GROUP))
        # Also as a text, for getattr.
        named |= any(constant(node) in MAKES_GROUP for node in self.nodes)
        return named or self.has_runtime or bool(self.modules & MANAGED)

    @cached_property
    def has_runtime(self) -> bool:
        """Whether k8sjob's runtime is imported: its session makes the group."""
        imported = chain.from_iterable(module.aliases.values() for module in self.files)
        return any(name.startswith("k8sjob.runtime") for name in imported)

    @cached_property
    def self_contained(self) -> bool:
        """Whether nothing is imported that could do a part of the work unseen."""
        return self.modules <= _LIBRARIES | sys.stdlib_module_names

    @cached_property
    def is_program(self) -> bool:
        """Whether running the file does something, as a module of functions does not."""
        return any(
            is_main_guard(stmt)
            or isinstance(stmt, ast.For | ast.While | ast.With)
            or (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Call))
            for stmt in self.files[0].tree.body
        )

    @cached_property
    def trains(self) -> bool:
        """Whether it has a training loop of its own."""
        return bool(self.method_calls("backward"))

    @cached_property
    def keras_fits(self) -> Sequence[ast.Call]:
        """Calls of `fit` of Keras models, the session's left out."""
        # Besides these libraries a fit may be that of another object.
        alone = not self.modules & {"sklearn", "xgboost", "lightgbm", "tensorflow", "jax"}
        return [
            call
            for call in (self.method_calls("fit") if "keras" in self.modules else ())
            if isinstance(call.func, ast.Attribute) and self.kind(call.func.value) != "session"
            if alone or self.is_keras_model(call.func.value)
        ]

    def is_keras_model(self, node: ast.expr) -> bool:
        """Whether a value is always a model of Keras, or of a subclass, wrapped or not."""
        values = self.unwrapped(node)

        def is_keras(value: ast.expr) -> bool:
            of_program = self.instance(value)
            called = [value.func] if isinstance(value, ast.Call) else []
            bases = of_program.bases if of_program else called
            return any(_KERAS_MODEL.fullmatch(self.name(base)) for base in bases)

        return bool(values) and all(map(is_keras, values))
