"""What a program's variables hold and what its calls call, as far as the text says it."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from k8sjob.lint.modules import Definition, Function

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.lint.script_code import Code

__all__ = ["Scopes", "Variable"]

_MAX_DEPTH: Final = 8
"""Variables and functions that a value is followed through."""


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
            arguments = node.args
            for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
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

    def _of_self(self, node: ast.expr) -> tuple[ast.ClassDef, str] | None:
        """The class and the name of `self.name`."""
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if owner := self.owner(node):
                return owner, name
            case _:
                return None

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """The class in whose method a node stands."""
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
