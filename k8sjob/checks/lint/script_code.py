"""Code of a training script with its local modules: names, variables, and where a line is.

Names are followed through the imports (`dist.all_reduce` is `torch.distributed.all_reduce`), values
through assignments, calls to the functions and methods of the program.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from k8sjob.checks.lint.script_modules import Definition, Function, Module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Code", "Scopes", "Variable", "is_main_guard", "parameters", "returned"]

_MAX_HOPS: Final = 20
"""Imports from one local module into another that a name is followed through."""
_MAX_DEPTH: Final = 8
"""Variables and functions that a value is followed through."""


class Code:
    """The modules of a program, their names and their ways.

    Attributes:
        files: its modules, the script first.
        nodes: everything in them; of local modules no function that nothing uses.
    """

    def __init__(self, files: Sequence[Module]) -> None:
        self.files = files
        self._by_name = {module.name: module for module in files}
        used = self._used_names()
        self.nodes: list[ast.AST] = []
        self._parents: dict[ast.AST, ast.AST] = {}
        self._home: dict[ast.AST, Module] = {}
        for module in files:
            self._add(module, used)

    def _used_names(self) -> set[str]:
        """Names that the program reads, calls or has as text (for getattr)."""
        used: set[str] = set()
        for node in (node for module in self.files for node in ast.walk(module.tree)):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                    used.add(name)
                case ast.Constant(value=str(name)) if name.isidentifier():
                    used.add(name)
                case _:
                    pass
        return used

    def _add(self, module: Module, used: set[str]) -> None:
        unused = [
            node
            for node in module.tree.body
            if module is not self.files[0]
            and isinstance(node, Function)
            and not node.decorator_list
            and node.name not in used
        ]
        queue: list[ast.AST] = [module.tree]
        for node in queue:
            for child in ast.iter_child_nodes(node):
                if child not in unused:
                    self._parents[child] = node
                    self._home[child] = module
                    queue.append(child)
        self.nodes += queue

    @cached_property
    def scopes(self) -> Scopes:
        """What its variables hold and its calls call."""
        return Scopes(self)

    def name(self, node: ast.AST) -> str:
        """The dotted name of an expression, imports followed: `torch.distributed.barrier`.

        What is no name gives "", and an attribute of such a thing `.attribute`.
        """
        if isinstance(node, ast.Name):
            target = self._imported(self._home.get(node, self.files[0]), node.id)
            return self._follow(target) if target else node.id
        if isinstance(node, ast.Attribute):
            return self._follow(f"{self.name(node.value)}.{node.attr}")
        return ""

    def _imported(self, module: Module, name: str) -> str | None:
        """What a module imports a name as."""
        if name in module.aliases or name in module.tops:
            return module.aliases.get(name)
        for star in module.stars:
            other = self._by_name.get(star)
            if other and (name in other.tops or name in other.aliases):
                return f"{star}.{name}"
        return None

    def _follow(self, dotted: str) -> str:
        """What a dotted name stands for, the imports of local modules followed."""
        for _ in range(_MAX_HOPS):
            module, rest = self._split(dotted)
            head, dot, tail = rest.partition(".")
            target = self._imported(module, head) if module else None
            if not target or f"{target}{dot}{tail}" == dotted:
                break
            dotted = f"{target}{dot}{tail}"
        return dotted

    def _split(self, dotted: str) -> tuple[Module | None, str]:
        """The local module that a dotted name begins with, and the rest of it."""
        end = dotted.rfind(".")
        while end > 0:
            if module := self._by_name.get(dotted[:end]):
                return module, dotted[end + 1 :]
            end = dotted.rfind(".", 0, end)
        return None, dotted

    def top_level(self, node: ast.AST) -> Definition | None:
        """The function or class at a module's top level that an expression names."""
        module, rest = self._split(self.name(node))
        if module is None and isinstance(node, ast.Name):
            module = self._home.get(node)
        return module.tops.get(rest) if module else None

    def module(self, node: ast.AST) -> Module:
        """The module that a node is in."""
        return self._home.get(node, self.files[0])

    # --- where a node is --------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs (child, parent) from a node up to the module."""
        while parent := self._parents.get(node):
            yield node, parent
            node = parent

    def function(self, node: ast.AST) -> Function | None:
        """The innermost function around a node."""
        for _, parent in self.ancestors(node):
            if isinstance(parent, Function):
                return parent
        return None

    def conditional(self, node: ast.AST) -> bool:
        """Whether a node runs only under a condition or as a reaction to an exception."""
        return self.always_passes(node, lambda _, parent: _is_condition(parent))

    def always_passes(self, node: ast.AST, passed: Callable[[ast.AST, ast.AST], bool]) -> bool:
        """Whether every way to a node leads through a (child, parent) for which `passed` holds.

        Ways are followed through the functions of the file; one that nothing in the file uses is
        taken for one that is reached in the asked way.
        """
        ways: list[ast.AST] = [node]
        seen: set[Function] = set()
        while ways:
            for child, parent in self.ancestors(ways.pop()):
                if passed(child, parent):
                    break
                if isinstance(parent, Function):
                    if parent not in seen:
                        seen.add(parent)
                        ways += self._uses.get(parent.name, ())
                    break
            else:
                return False
        return True

    @cached_property
    def _uses(self) -> dict[str, list[ast.AST]]:
        """Where each name is used, by its last part."""
        uses: dict[str, list[ast.AST]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                uses[self.name(node).rpartition(".")[2]].append(node)
        return uses

    def loops(self, node: ast.AST) -> list[ast.For | ast.While]:
        """The loops around a node within its function, the innermost first."""
        found: list[ast.For | ast.While] = []
        for _, parent in self.ancestors(node):
            if isinstance(parent, Function):
                break
            if isinstance(parent, ast.For | ast.While):
                found.append(parent)
        return found


def is_main_guard(node: ast.AST) -> bool:
    """`if __name__ == "__main__":`, which is true in every process."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _is_condition(node: ast.AST) -> bool:
    kinds = (ast.If, ast.IfExp, ast.ExceptHandler, ast.BoolOp, ast.Match)
    return isinstance(node, kinds) and not is_main_guard(node)


@dataclass(eq=False, slots=True)
class Variable:
    """One name in one scope.

    Attributes:
        values: the expressions that are assigned to it.
        unknown: whether it gets values in other ways too (loops, unpacking, +=).
        parameter_of: the function that it is a parameter of.
        definitions: the functions and classes of that name.
    """

    values: list[ast.expr] = field(default_factory=list)
    unknown: bool = False
    parameter_of: Function | None = None
    definitions: list[Definition] = field(default_factory=list)


class Scopes:
    """The variables of a program by their scopes."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._scopes: dict[ast.AST, dict[str, Variable]] = defaultdict(
            lambda: defaultdict(Variable)
        )
        self._attributes: dict[tuple[ast.AST, str], list[ast.expr]] = defaultdict(list)
        self._instances: dict[tuple[ast.expr, int], ast.ClassDef | None] = {}
        plain: set[ast.AST] = set()
        for node in code.nodes:
            for target, value in _assignments(node):
                plain.add(target)
                if isinstance(target, ast.Name):
                    self._in(target)[target.id].values.append(value)
                elif owner := self._of_self(target):
                    self._attributes[owner].append(value)
        for node in code.nodes:
            self._bind(node, plain)

    def _bind(self, node: ast.AST, plain: set[ast.AST]) -> None:
        if isinstance(node, Definition):
            self._in(node)[node.name].definitions.append(node)
        if isinstance(node, Function):
            for one in parameters(node):
                self._scopes[node][one.arg].parameter_of = node
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load | ast.Del):
            self._in(node)[node.id].unknown |= node not in plain

    def _in(self, node: ast.AST) -> dict[str, Variable]:
        return self._scopes[self._scope(node)]

    def _scope(self, node: ast.AST) -> ast.AST:
        for _, parent in self._code.ancestors(node):
            if isinstance(parent, Definition):
                return parent
        return self._code.module(node).tree

    def variable(self, use: ast.Name) -> Variable | None:
        """The variable that a name means here; None: it is imported, built in or never set."""
        scope = self._scope(use)
        innermost = scope
        while True:
            found = self._scopes.get(scope, {}).get(use.id)
            if found and (scope is innermost or not isinstance(scope, ast.ClassDef)):
                return found
            if isinstance(scope, ast.Module):
                return None
            scope = self._scope(scope)

    def values(self, use: ast.expr) -> list[ast.expr]:
        """All that a variable or an attribute of self can hold; empty if some is unknown."""
        if isinstance(use, ast.Name):
            found = self.variable(use)
            return found.values if found and not found.unknown and not found.parameter_of else []
        owner = self._of_self(use)
        return self._attributes.get(owner, []) if owner else []

    def assigned(self, use: ast.expr) -> list[ast.expr]:
        """Some of what a variable holds or a function returns, whatever else there may be."""
        found = self.variable(use) if isinstance(use, ast.Name) else None
        definition = self.definition(use)
        values = found.values if found else self.values(use)
        return [*values, *(returned(definition) if isinstance(definition, Function) else ())]

    def _of_self(self, node: ast.expr) -> tuple[ast.ClassDef, str] | None:
        """The class and the name of `self.name`."""
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if owner := self.owner(node):
                return owner, name
            case _:
                return None

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """The class in whose method a node is."""
        classes = (p for _, p in self._code.ancestors(node) if isinstance(p, ast.ClassDef))
        return next(classes, None)

    def definition(self, node: ast.expr, depth: int = 0) -> Definition | None:
        """The function or class that an expression names; None: it is not known, or one of two."""
        if depth > _MAX_DEPTH:
            return None
        if isinstance(node, ast.Name):
            found = self.variable(node)
            if found is None:
                return self._code.top_level(node)
            return found.definitions[0] if len(found.definitions) == 1 and _only(found) else None
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            made: ast.ClassDef | None = self.owner(node)
        else:
            made = self.instance(node.value, depth + 1)
        return self.method(made, node.attr) if made else self._code.top_level(node)

    def instance(self, node: ast.expr, depth: int = 0) -> ast.ClassDef | None:
        """The class of the program that an expression is an instance of."""
        if (node, depth) not in self._instances:
            self._instances[node, depth] = self._instance(node, depth)
        return self._instances[node, depth]

    def _instance(self, node: ast.expr, depth: int) -> ast.ClassDef | None:
        if isinstance(node, ast.Call):
            made = self.definition(node.func, depth + 1)
            return made if isinstance(made, ast.ClassDef) else None
        if depth > _MAX_DEPTH:
            return None
        made_here = [self.instance(value, depth + 1) for value in self.values(node)]
        return made_here[0] if made_here and all(one is made_here[0] for one in made_here) else None

    def method(self, of: ast.ClassDef, name: str, depth: int = 0) -> Function | None:
        """A method of a class, looked for in the program's base classes too."""
        for stmt in of.body:
            if isinstance(stmt, Function) and stmt.name == name:
                return stmt
        for base in of.bases if depth < _MAX_DEPTH else ():
            found = self.definition(base, depth + 1)
            if isinstance(found, ast.ClassDef) and (method := self.method(found, name, depth + 1)):
                return method
        return None


def _only(found: Variable) -> bool:
    return not (found.values or found.unknown or found.parameter_of)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets with the values that they get, where both stand in the text."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    if len(target.elts) == len(value.elts):
                        yield from zip(target.elts, value.elts, strict=True)
                elif not isinstance(target, ast.Tuple | ast.List):
                    yield target, value
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield target, value
        case ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
            yield target, value
        case _:
            pass


def parameters(function: Function) -> list[ast.arg]:
    """A function's parameters but for *args and **kwargs."""
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def returned(function: ast.AST) -> Iterator[ast.expr]:
    """What a function may return."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
