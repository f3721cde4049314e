"""Code of a training script with its local modules: its names, variables, functions and classes.

Names are followed through the imports (`dist.all_reduce` is `torch.distributed.all_reduce`).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import chain
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
                check_time()
                values[node] = unknown
                with suppress(RecursionError):
                    values[node] = compute(code, node)
            return values[node]

        return read  # type: ignore[return-value]  # of the type of the method that it stands for

    return once


@dataclass(eq=False, slots=True)
class Variable:
    """One name in one scope.

    Attributes:
        values: the expressions that are assigned to it, the first MAX_VALUES.
        unknown: whether it gets values in other ways too (loops, unpacking, +=).
        parameter_of: the function that it is a parameter of.
        definitions: the functions and classes of that name.
    """

    values: list[ast.expr] = field(default_factory=list)
    unknown: bool = False
    parameter_of: Function | None = None
    definitions: list[Definition] = field(default_factory=list)

    def add(self, value: ast.expr) -> None:
        """Take one more value."""
        if len(self.values) < MAX_VALUES:
            self.values.append(value)
        else:
            self.unknown = True

    @property
    def sources(self) -> list[ast.expr | None]:
        """Its values, and None for those that are not known."""
        return [*self.values, *([None] if self.unknown else [])]


class Code:
    """The modules of a program, with their names and variables.

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
                if name not in self._tops:
                    self._aliases.setdefault(name, dotted)
        self.nodes: list[ast.AST] = []
        self._elifs: dict[ast.AST, ast.AST] = {}
        named = (node for module in files for node in module.nodes if type(node) in _NAMES)
        used = {getattr(node, _NAMES[type(node)]) for node in named}
        left_out: set[ast.AST] = {
            node
            for module in files[1:]
            for node in module.tops.values()
            if isinstance(node, Function) and not node.decorator_list and node.name not in used
        }
        for node in (node for module in files for node in module.nodes):
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
        return next((one for one in self.scopes(node) if isinstance(one, Function)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class around a node."""
        return next((one for one in self.scopes(node) if isinstance(one, ast.ClassDef)), None)

    # --- variables --------------------------------------------------------------------------

    @cached_property
    def _variables(self) -> dict[ast.AST, dict[str, Variable]]:
        """Variables by the module, class or function that they are in; `self.x` by its class."""
        found: dict[ast.AST, dict[str, Variable]] = defaultdict(lambda: defaultdict(Variable))
        plain: set[ast.AST] = set()
        for node in self.nodes:
            for target, value in _assignments(node):
                plain.add(target)
                if isinstance(target, ast.Name):
                    found[self._scope(target)][target.id].add(value)
                elif (owner := self._of_self(target)) and isinstance(target, ast.Attribute):
                    found[owner][f"self.{target.attr}"].add(value)
        for node in self.nodes:
            if isinstance(node, Definition):
                found[self._scope(node)][node.name].definitions.append(node)
            if isinstance(node, Function):
                for one in parameters(node):
                    found[node][one.arg].parameter_of = node
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load | ast.Del):
                found[self._scope(node)][node.id].unknown |= node not in plain
        return found

    def _scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module of which a name that is set here becomes a variable."""
        scope = next(self.scopes(node))
        is_global = isinstance(node, ast.Name) and (scope, node.id) in self._globals
        return self.module(node).tree if is_global else scope

    @cached_property
    def _globals(self) -> set[tuple[ast.AST, str]]:
        """Functions with the names that they declare to be global."""
        found = [node for node in self.nodes if isinstance(node, ast.Global)]
        return {(next(self.scopes(node)), name) for node in found for name in node.names}

    def variable(self, use: ast.AST) -> Variable | None:
        """The variable that a name or `self.name` means here; None: imported, or never set."""
        if (owner := self._of_self(use)) and isinstance(use, ast.Attribute):
            of_class = self._variables[owner]
            return of_class.get(f"self.{use.attr}") or of_class.get(use.attr)
        if not isinstance(use, ast.Name):
            return None
        innermost = self._scope(use)
        for scope in (innermost, *self.scopes(innermost)):
            found = self._variables[scope].get(use.id)
            if found and (scope is innermost or not isinstance(scope, ast.ClassDef)):
                return found
        return None

    def sources(self, node: ast.expr) -> Sequence[ast.expr | None]:
        """What a variable is given, or a call returns: one step back; None for what is not known.

        Anything else, as a call of a library, is a source itself.
        """
        if isinstance(node, ast.Call):
            function = self.definition(node.func)
            return self._returned[function].sources if isinstance(function, Function) else [node]
        variable = self.variable(node)
        imported = isinstance(node, ast.Name) and node.id in self.module(node).aliases
        if imported or not variable or variable.definitions:
            return [node]
        function = variable.parameter_of
        passed = self.passed(function, node.id) if function and isinstance(node, ast.Name) else []
        return [*variable.sources, *passed]

    def passed(self, function: Function, name: str) -> list[ast.expr | None]:
        """The values that the program passes as a parameter, or its default; None is not known."""
        called = self.parent(function)
        if function.name != "__init__" or not isinstance(called, ast.ClassDef):
            called = function
        positions, usual = self._signature(function)
        position, default, uses = positions.get(name), usual.get(name), self.uses(called.name)
        is_known = not called.decorator_list and len(uses) <= MAX_VALUES
        values: list[ast.expr | None] = [] if is_known else [None]
        for use in uses[:MAX_VALUES]:
            call, defined = self.parent(use), self.definition(use)
            if defined is called and isinstance(call, ast.Call) and call.func is use:
                several = len(call.args) + len(call.keywords) > MAX_VALUES
                argument = None if several else keyword(call, name, position)
                several |= any(isinstance(word, ast.Starred) for word in call.args[:MAX_VALUES])
                several |= any(option.arg is None for option in call.keywords[:MAX_VALUES])
                values.append(argument or (None if several else default))
            elif defined in (None, called):
                values.append(None)
        return values

    @followed(({}, {}))
    def _signature(self, function: Function) -> tuple[dict[str, int], dict[str, ast.expr | None]]:
        """The positions of a function's parameters without `self`, and their defaults."""
        names = [part.arg for part in parameters(function) if part.arg not in ("self", "cls")]
        return {name: at for at, name in enumerate(names)}, defaults(function.args)

    @followed([])
    def origins(self, node: ast.expr) -> list[ast.expr]:
        """All expressions that a value comes from; empty if some are not known."""
        origins = [
            [source] if source is node else self.origins(source) if source else []
            for source in self.sources(node)
        ]
        several = list(dict.fromkeys(chain(*origins))) if all(origins) else []
        return several if len(several) <= MAX_VALUES else []

    def makers(self, node: ast.expr) -> list[str]:
        """The names of what is called to make a value, "" where nothing is; empty if not known."""
        origins = self.origins(node)
        return [self.name(end.func) if isinstance(end, ast.Call) else "" for end in origins]

    @cached_property
    def _returned(self) -> dict[ast.AST | None, Variable]:
        """The values that functions return."""
        returned: dict[ast.AST | None, Variable] = defaultdict(Variable)
        for node in self.nodes:
            if isinstance(node, ast.Return) and node.value:
                returned[self.function(node)].add(node.value)
        return returned

    # --- functions and classes --------------------------------------------------------------

    def _of_self(self, node: ast.AST) -> ast.ClassDef | None:
        """The class of `self` in `self.name`, and of `super()`: the one whose method this is in."""
        match node:
            case ast.Attribute(
                value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))
            ):
                return self.class_of(node)
            case _:
                return None

    @followed(None)
    def definition(self, node: ast.expr) -> Definition | None:
        """The function or class that an expression names; None: it is not known, or one of two."""
        if isinstance(node, ast.Name) and (found := self.variable(node)):
            only = not (found.values or found.unknown or found.parameter_of)
            return found.definitions[0] if only and len(found.definitions) == 1 else None
        if isinstance(node, ast.Attribute):
            owner = self._of_self(node)
            made: Definition | None = owner or self.instance(node.value)
            made = made or self.definition(node.value)  # a static or class method
            if isinstance(made, ast.ClassDef):
                above = isinstance(node.value, ast.Call) and made is owner  # of super()
                return self._inherited((made, node.attr)) if above else self.method(made, node.attr)
        name = self.name(node)
        own = f"{self.module(node).name}.{name}" if isinstance(node, ast.Name) else ""
        return self._tops.get(name) or self._tops.get(own)

    def instance(self, node: ast.expr) -> ast.ClassDef | None:
        """The class of the program that an expression is an instance of; None of several."""
        match self.origins(node):
            case [ast.Call(func=function)]:
                definition = self.definition(function)
                return definition if isinstance(definition, ast.ClassDef) else None
            case _:
                return None

    def method(self, of: ast.ClassDef, name: str) -> Function | None:
        """A method of a class, looked for in the program's base classes, too."""
        return self._methods(of).get(name) or self._inherited((of, name))

    @followed({})
    def _methods(self, of: ast.ClassDef) -> dict[str, Function]:
        return {stmt.name: stmt for stmt in reversed(of.body) if isinstance(stmt, Function)}

    @followed(None)
    def _inherited(self, attribute: tuple[ast.ClassDef, str]) -> Function | None:
        """A method that a class has from the program's base classes."""
        of, name = attribute
        bases = (self.definition(base) for base in of.bases)
        methods = (self.method(base, name) for base in bases if isinstance(base, ast.ClassDef))
        return next((method for method in methods if method), None)


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
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.NamedExpr(target=target, value=value)
            | ast.withitem(context_expr=value, optional_vars=ast.expr() as target)
        ):
            yield target, value
        case _:
            pass


def constant(node: ast.AST | None) -> object:
    """The value of a literal; None if it is anything else."""
    return node.value if isinstance(node, ast.Constant) else None


def keyword(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """A call's argument by its name, or by its position among those without one."""
    for given in call.keywords:
        if given.arg == name:
            return given.value
    if position is not None and position < len(call.args):
        return call.args[position]
    return None


def parameters(function: Function) -> list[ast.arg]:
    """A function's parameters except *args and **kwargs."""
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def defaults(given: ast.arguments) -> dict[str, ast.expr | None]:
    """The parameters that may have a default, with it."""
    names = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    values = [*given.defaults, *given.kw_defaults]
    return {one.arg: value for one, value in zip(names[-len(values) :], values, strict=False)}
