"""Code of a training script with its local modules: what its names stand for, and where nodes are.

Names are followed through the imports (`dist.all_reduce` is `torch.distributed.all_reduce`).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from contextlib import suppress
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar

from k8sjob.checks.scripts.modules import Definition, Function, Module, check_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_Value = TypeVar("_Value")
_Method = TypeVar("_Method", bound="Callable[[Any, Any], Any]")

_MAX_HOPS: Final = 20
"""Imports from one local module into another that a name is followed through."""
MAX_VALUES: Final = 64
"""Values that a name, a call or a parameter may have; of one with more not all are known."""
_VALUES_PER_CHECK: Final = 16
"""Values that a method computes between two looks at the clock."""
_MAX_NAME: Final = 500
"""Length of a dotted name; of a longer one only the last part is known."""
_NAMES: Final[dict[type[ast.AST], str]] = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.alias: "name",
}
"""The field with the name that a node uses."""


def followed(unknown: _Value) -> Callable[[_Method], _Method]:
    """Make a method compute its value once for each node.

    Values are made of values: a node that is made of itself, or nested too deep, is unknown.
    """

    def once(compute: _Method) -> _Method:
        name = f"_{compute.__name__}_of"

        @wraps(compute)
        def read(code: Any, node: Any) -> Any:
            values = code.__dict__.setdefault(name, {})
            if node not in values:
                # One look at the clock, a system call, for each value was a tenth of the time.
                if len(values) % _VALUES_PER_CHECK == 0:
                    check_time()
                values[node] = unknown
                with suppress(RecursionError):
                    values[node] = compute(code, node)
            return values[node]

        return read  # type: ignore[return-value]  # of the type of the method that it stands for

    return once


def once(compute: Callable[[Any], _Value]) -> Callable[[Any], _Value]:
    """Make a function of a program compute its value once; nothing else keeps the program."""

    @wraps(compute)
    def read(code: Any) -> _Value:
        values: dict[str, _Value] = code.__dict__
        if compute.__name__ not in values:
            values[compute.__name__] = compute(code)
        return values[compute.__name__]

    return read


class Code:
    """The modules of a program, with their names.

    Attributes:
        files: its modules, the script first.
        nodes: everything in them; of local modules no function that nothing uses.
    """

    def __init__(self, files: Sequence[Module]) -> None:
        self.files = files
        self._by_tree: dict[ast.AST, Module] = {module.tree: module for module in files}
        self._parents: dict[ast.AST, ast.AST] = {}
        self._scopes: dict[ast.AST, ast.AST] = {}
        for module in files:
            self._parents |= module.parents
            self._scopes |= module.scopes
        self._tops = {f"{m.name}.{name}": node for m in files for name, node in m.tops.items()}
        self._aliases = {f"{m.name}.{name}": to for m in files for name, to in m.aliases.items()}
        members = defaultdict[str, list[str]](list)
        for dotted in [*self._tops, *self._aliases]:
            members[dotted.rpartition(".")[0]].append(dotted)
        stars = dict.fromkeys((into.name, star) for into in files for star in into.stars)
        for into, star in stars:
            for dotted in members.get(star, ()):
                name = f"{into}{dotted.removeprefix(star)}"
                # What a module defines itself hides a name that it gets by `import *`.
                if name not in self._tops:
                    self._aliases.setdefault(name, dotted)
        self.nodes: list[ast.AST] = []
        self._elifs: dict[ast.AST, ast.AST] = {}
        named = (node for module in files for node in module.nodes if type(node) in _NAMES)
        used = {getattr(node, _NAMES[type(node)]) for node in named}
        # A large repository has thousands of functions that this script does not use.
        left_out: set[ast.AST] = {
            node
            for module in files[1:]
            for node in module.tops.values()
            if isinstance(node, Function) and not node.decorator_list and node.name not in used
        }
        for node in (node for module in files for node in module.nodes):
            # An `elif` is an If in the `else` of the one before, so long chains are deep trees.
            if isinstance(node, ast.If) and len(node.orelse) == 1:
                self._elifs[node.orelse[0]] = self._elifs.get(node, node)
            if node in left_out or self._parents.get(node) in left_out:
                left_out.add(node)
            else:
                self.nodes.append(node)

    @cached_property
    def modules(self) -> frozenset[str]:
        """Top-level names of the libraries that are imported: what is no local module."""
        local = {module.name.partition(".")[0] for module in self.files[1:]}
        tops = {name.partition(".")[0] for module in self.files for name in module.imports}
        return frozenset(tops - local - {""})

    # --- names ------------------------------------------------------------------------------

    @followed("")
    def name(self, node: ast.AST) -> str:
        """The dotted name of an expression, imports followed: `torch.distributed.barrier`.

        Anything but a name gives "", and an attribute of such a thing `.attribute`.
        """
        dotted = ""
        if isinstance(node, ast.Name):
            dotted = self._aliases.get(f"{self.module(node).name}.{node.id}", node.id)
        elif isinstance(node, ast.Attribute):
            dotted = f"{self.name(node.value)}.{node.attr}"
            dotted = dotted if len(dotted) <= _MAX_NAME else f".{node.attr}"
        return self._follow(dotted)

    def last_name(self, node: ast.AST) -> str:
        """The last part of a name, or of what is called: `barrier`."""
        return self.name(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]

    def _follow(self, dotted: str) -> str:
        """The target of a dotted name, through imports of local modules."""
        for _ in range(_MAX_HOPS):
            head = dotted
            while head and head not in self._aliases:
                head = head.rpartition(".")[0]
            target = self._aliases.get(head, "") + dotted.removeprefix(head)
            if target == dotted:
                break
            dotted = target
        return dotted

    def uses(self, name: str) -> Sequence[ast.Name | ast.Attribute]:
        """The places where a name is read, alone or as the last part of a dotted one."""
        return self._uses.get(name, ())

    @cached_property
    def _uses(self) -> dict[str, list[ast.Name | ast.Attribute]]:
        uses: dict[str, list[ast.Name | ast.Attribute]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                uses[self.last_name(node)].append(node)
        return uses

    @followed("")
    def unparsed(self, node: ast.AST) -> str:
        """The source of a node."""
        return ast.unparse(node)

    # --- where a node is --------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs (child, parent) from a node up to the module."""
        while parent := self._parents.get(node):
            yield node, parent
            node = parent

    def around(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """The ancestors of a node, without those between an `elif` and the `if` of its chain."""
        while parent := self._parents.get(node):
            yield node, parent
            node = self._elifs.get(parent, parent)

    def parent(self, node: ast.AST) -> ast.AST | None:
        """What a node is directly in; None for a module."""
        return self._parents.get(node)

    def scopes(self, node: ast.AST) -> Iterator[ast.AST]:
        """The functions and classes around a node, the innermost first, and its module's tree."""
        scope = self._scopes.get(node, self.files[0].tree)
        while isinstance(scope, Definition):
            yield scope
            scope = self._scopes[scope]
        yield scope

    def module(self, node: ast.AST) -> Module:
        """The module that a node is in."""
        *_, tree = self.scopes(node)
        return self._by_tree[tree]

    def function(self, node: ast.AST) -> Function | None:
        """The innermost function around a node."""
        return next((scope for scope in self.scopes(node) if isinstance(scope, Function)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class around a node."""
        return next((scope for scope in self.scopes(node) if isinstance(scope, ast.ClassDef)), None)


def constant(node: ast.AST | None) -> object:
    """The value of a literal; None if it is anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def keyword(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """A call's argument by its name, or by its position among those without one."""
    for argument in call.keywords:
        if argument.arg == name:
            return argument.value
    if position is not None and position < len(call.args):
        return call.args[position]
    return None


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    """A function's parameters except *args and **kwargs."""
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def defaults(arguments: ast.arguments) -> dict[str, ast.expr | None]:
    """The parameters that may have a default, with it."""
    values = [*arguments.defaults, *arguments.kw_defaults]
    last = parameters(arguments)[-len(values) :]
    return {parameter.arg: value for parameter, value in zip(last, values, strict=False)}
