"""Code of a training script with its local modules: names, variables, conditions of a line.

Names are followed through the imports (`dist.all_reduce` is `torch.distributed.all_reduce`), values
through assignments and calls to the functions and methods of the program.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.checks.lint.script_modules import Definition, Function, Module, statements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MAX_HOPS: Final = 20
"""Imports from one local module into another that a name is followed through."""
_MAX_DEPTH: Final = 8
"""Variables, functions and base classes that a value is followed through."""
_WHOLE: Final = 40
"""Modules, the nearest to the script first, that are looked at whole."""
_ASKED: Final = re.compile(
    r"torch\.distributed|\bdist\.|_rank\b|\brank *[!=<>]|RANK|NODE|MASTER_|WORLD_SIZE|add_argument"
    r"|Sampler|DataLoader|DataParallel|Trainer|Fabric|ccelerat(e|or)\b|k8sjob|barrier|all_reduce"
    r"|\bspawn\b|\.(save|backward|fit|session)\(|download=|[\"']\.\./"
)
"""What rules look for, in the text of a module."""
_WORD: Final = re.compile(r"\w+")
_NAMES: Final[dict[type[ast.AST], str]] = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.alias: "name",
}
"""The field with the name that a node uses."""
_INNER: Final = (ast.expr, ast.arguments, ast.arg, ast.pattern)
"""What a field of a node may hold, besides a list of nodes."""
_ENDS: Final = frozenset({"sys.exit", "exit", "quit", "os._exit"})


class Guard(NamedTuple):
    """A condition that a line depends on.

    Attributes:
        test: its expression; None for an exception that is handled.
        holds: whether the line runs if the test holds, or if it does not.
        where: the line's place, as `under {}` with the test in the braces.
        shown: what stands in the braces instead, where the test is not in the text.
    """

    test: ast.expr | None
    holds: bool
    where: str = ""
    shown: ast.expr | None = None


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


def _descendants(tree: ast.AST, parents: dict[ast.AST, ast.AST]) -> list[ast.AST]:
    """A node and all below it, level by level, without operators and contexts.

    `ast.walk` takes three times as long, which is seconds in a program of 300 modules.
    """
    found = [tree]
    for node in found:
        for value in vars(node).values():
            if isinstance(value, list):
                inner = [one for one in value if isinstance(one, ast.AST)]
                parents.update(dict.fromkeys(inner, node))
                found += inner
            elif isinstance(value, _INNER):
                parents[value] = node
                found.append(value)
    return found


class Code:
    """The modules of a program, their names, variables and ways.

    Attributes:
        files: its modules, the script first.
        nodes: everything in them; of local modules no function that nothing uses. Of a large
            program's modules that name nothing which a rule looks for, only statements.
    """

    def __init__(self, files: Sequence[Module]) -> None:
        self.files = files
        self._by_name = {module.name: module for module in files}
        self.nodes: list[ast.AST] = []
        self._parents: dict[ast.AST, ast.AST] = {}
        self._home: dict[ast.AST, Module] = {}
        self._past: dict[ast.AST, list[Guard]] = {}
        self._functions: dict[ast.AST, Function | None] = {}
        self._plain = plain = {one for one in files[_WHOLE:] if not _ASKED.search(one.text)}
        every = [
            (statements if module in plain else _descendants)(module.tree, self._parents)
            for module in files
        ]
        named = (node for nodes in every for node in nodes if type(node) in _NAMES)
        used = {getattr(node, _NAMES[type(node)]) for node in named}
        used.update(word for module in plain for word in _WORD.findall(module.text))
        for module, nodes in zip(files, every, strict=True):
            unused = {
                node
                for node in module.tops.values()
                if isinstance(node, Function) and not node.decorator_list and node.name not in used
            }
            kept = nodes
            if unused and module is not files[0]:
                left_out = {inner for node in unused for inner in _descendants(node, {})}
                kept = [node for node in nodes if node not in left_out]
            self._home.update(dict.fromkeys(kept, module))
            self.nodes += kept

    # --- names ------------------------------------------------------------------------------

    def name(self, node: ast.AST) -> str:
        """The dotted name of an expression, imports followed: `torch.distributed.barrier`.

        Anything but a name gives "", and an attribute of such a thing `.attribute`.
        """
        if isinstance(node, ast.Name):
            target = self._imported(self.module(node), node.id)
            return self._follow(target) if target else node.id
        if isinstance(node, ast.Attribute):
            return self._follow(f"{self.name(node.value)}.{node.attr}")
        return ""

    def last_name(self, node: ast.AST) -> str:
        """The last part of a name: `barrier`."""
        return self.name(node).rpartition(".")[2]

    def _imported(self, module: Module, name: str) -> str | None:
        if name in module.aliases or name in module.tops:
            return module.aliases.get(name)
        for star in module.stars:
            other = self._by_name.get(star)
            if other and (name in other.tops or name in other.aliases):
                return f"{star}.{name}"
        return None

    def _follow(self, dotted: str) -> str:
        """The target of a dotted name, through imports of local modules."""
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

    # --- variables --------------------------------------------------------------------------

    @cached_property
    def _scopes(self) -> dict[ast.AST, dict[str, Variable]]:
        """Variables by the module, class or function that they are in; `self.x` by its class."""
        scopes: dict[ast.AST, dict[str, Variable]] = defaultdict(lambda: defaultdict(Variable))
        plain: set[ast.AST] = set()
        for node in self.nodes:
            for target, value in _assignments(node):
                plain.add(target)
                if isinstance(target, ast.Name):
                    scopes[self._scope(target)][target.id].values.append(value)
                elif (owner := self._of_self(target)) and isinstance(target, ast.Attribute):
                    scopes[owner][f"self.{target.attr}"].values.append(value)
        for node in self.nodes:
            if isinstance(node, Definition):
                scopes[self._scope(node)][node.name].definitions.append(node)
            if isinstance(node, Function):
                for one in parameters(node):
                    scopes[node][one.arg].parameter_of = node
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load | ast.Del):
                scopes[self._scope(node)][node.id].unknown |= node not in plain
        return scopes

    def _scope(self, node: ast.AST) -> ast.AST:
        around = (parent for _, parent in self.ancestors(node) if isinstance(parent, Definition))
        inner, outer = next(around, None), self.module(node).tree
        is_global = isinstance(node, ast.Name) and (inner, node.id) in self._globals
        return outer if inner is None or is_global else inner

    @cached_property
    def _globals(self) -> set[tuple[ast.AST | None, str]]:
        """Functions with the names that they declare to be global."""
        found = [node for node in self.nodes if isinstance(node, ast.Global)]
        return {(self.function(node), name) for node in found for name in node.names}

    def variable(self, use: ast.expr) -> Variable | None:
        """The variable that a name or `self.name` means here; None: imported, or never set."""
        if (owner := self._of_self(use)) and isinstance(use, ast.Attribute):
            of_class = self._scopes[owner]
            return of_class.get(f"self.{use.attr}") or of_class.get(use.attr)
        if not isinstance(use, ast.Name):
            return None
        scope = innermost = self._scope(use)
        while True:
            found = self._scopes[scope].get(use.id)
            if found and (scope is innermost or not isinstance(scope, ast.ClassDef)):
                return found
            if isinstance(scope, ast.Module):
                return None
            scope = self._scope(scope)

    def values(self, use: ast.expr) -> list[ast.expr]:
        """All values that a variable can hold, or a call return; empty if some are unknown."""
        if isinstance(use, ast.Call):
            made = self.definition(use.func)
            nodes = ast.walk(made) if isinstance(made, Function) else ()
            ends = (one for one in nodes if isinstance(one, ast.Return))
            return [one.value for one in ends if one.value and self.function(one) is made]
        found = self.variable(use)
        return found.values if found and not found.unknown and not found.parameter_of else []

    def _of_self(self, node: ast.AST) -> ast.ClassDef | None:
        """The class of `self` in `self.name`, and of `super()`: the one whose method this is in."""
        match node:
            case ast.Attribute(
                value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))
            ):
                around = (parent for _, parent in self.ancestors(node))
                return next((one for one in around if isinstance(one, ast.ClassDef)), None)
            case _:
                return None

    def definition(self, node: ast.expr, depth: int = 0) -> Definition | None:
        """The function or class that an expression names; None: it is not known, or one of two."""
        if depth > _MAX_DEPTH:
            return None
        if isinstance(node, ast.Name) and (found := self.variable(node)):
            only = not (found.values or found.unknown or found.parameter_of)
            return found.definitions[0] if only and len(found.definitions) == 1 else None
        if isinstance(node, ast.Attribute):
            owner = self._of_self(node)
            made: Definition | None = owner or self.instance(node.value, depth + 1)
            made = made or self.definition(node.value, depth + 1)  # a static or class method
            if isinstance(made, ast.ClassDef):
                above = isinstance(node.value, ast.Call) and made is owner  # of super()
                return self.method(made, node.attr, inherited=above)
        module, rest = self._split(self.name(node))
        if module is None and isinstance(node, ast.Name):
            module = self.module(node)
        return module.tops.get(rest) if module and module not in self._plain else None

    def meant(self, node: ast.expr, depth: int = 0) -> ast.expr:
        """The target of an alias: `dist.barrier` after `wait = dist.barrier`."""
        found = self.variable(node) if depth <= _MAX_DEPTH else None
        values = self.values(node) if found and not found.definitions else []
        if len(values) == 1 and isinstance(values[0], ast.Name | ast.Attribute):
            return self.meant(values[0], depth + 1)
        return node

    def instance(self, node: ast.expr, depth: int = 0) -> ast.ClassDef | None:
        """The class of the program that an expression is an instance of."""
        if isinstance(node, ast.Call):
            made = self.definition(node.func, depth + 1)
            return made if isinstance(made, ast.ClassDef) else None
        values = self.values(node) if depth <= _MAX_DEPTH else []
        if len(values) != 1:  # one of several is not known
            return None
        return self.instance(values[0], depth + 1)

    def method(
        self, of: ast.ClassDef, name: str, depth: int = 0, *, inherited: bool = False
    ) -> Function | None:
        """A method of a class, looked for in the program's base classes too, or only there."""
        for stmt in () if inherited else of.body:
            if isinstance(stmt, Function) and stmt.name == name:
                return stmt
        for base in of.bases if depth < _MAX_DEPTH else ():
            found = self.definition(base, depth + 1)
            if isinstance(found, ast.ClassDef) and (method := self.method(found, name, depth + 1)):
                return method
        return None

    # --- where a node is --------------------------------------------------------------------

    def module(self, node: ast.AST) -> Module:
        """The module that a node is in."""
        return self._home.get(node, self.files[0])

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs (child, parent) from a node up to the module."""
        while parent := self._parents.get(node):
            yield node, parent
            node = parent

    def function(self, node: ast.AST) -> Function | None:
        """The innermost function around a node."""
        if node not in self._functions:
            found = (parent for _, parent in self.ancestors(node) if isinstance(parent, Function))
            self._functions[node] = next(found, None)
        return self._functions[node]

    def guards(self, node: ast.AST) -> Iterator[Guard]:
        """The conditions on a node within its function, the innermost first.

        Besides the branches that it is in these are the ones before it that leave: after
        `if rank != 0: return` only rank 0 is left, wherever in a statement that is.
        """
        for child, parent in self.ancestors(node):
            yield from _branch(child, parent)
            for name in ("body", "orelse", "finalbody"):
                block = getattr(parent, name, None)
                if isinstance(block, list) and child in block:
                    for stmt in block[: block.index(child)]:
                        if stmt not in self._past:
                            self._past[stmt] = list(self._passed(stmt))
                        yield from self._past[stmt]
            if isinstance(parent, Function):
                return

    def contexts(self, node: ast.AST) -> Iterator[ast.expr]:
        """The `with` and the decorators that a node is under, within its function."""
        for child, parent in self.ancestors(node):
            if isinstance(parent, ast.With) and isinstance(child, ast.stmt):
                yield from (item.context_expr for item in parent.items)
            if isinstance(parent, Function):
                yield from parent.decorator_list if isinstance(child, ast.stmt) else ()
                return

    def _passed(self, stmt: ast.stmt, depth: int = 0, *, looped: bool = False) -> Iterator[Guard]:
        """The conditions that hold after a statement of which some branches leave.

        `looped`: a loop lies between, which is all that `break` leaves.
        """
        looped |= isinstance(stmt, ast.For | ast.AsyncFor | ast.While)
        for test, block in _branches(stmt) if depth < _MAX_DEPTH else ():
            if any(self._leaves(inner, depth, looped=looped) for inner in block):
                if test is not None:
                    yield Guard(test, holds=False, where="after `if {}` has left")
                continue
            for inner in block:
                for guard in self._passed(inner, depth + 1, looped=looped):
                    if test is None or guard.test is None:
                        yield guard
                        continue
                    holds = guard.test if guard.holds else _negated(guard.test)
                    either = ast.BoolOp(ast.Or(), [_negated(test), holds])
                    shown = guard.shown or guard.test
                    yield Guard(either, holds=True, where=guard.where, shown=shown)

    def _leaves(self, stmt: ast.stmt, depth: int = 0, *, looped: bool = False) -> bool:
        """Whether who comes to a statement does not come to what follows; an error ends all."""
        if ways := _ways(stmt):
            return depth < _MAX_DEPTH and all(
                any(self._leaves(inner, depth + 1, looped=looped) for inner in block)
                for block in ways
            )
        match stmt:
            case ast.Return():
                return True
            case ast.Continue() | ast.Break():
                return not looped
            case ast.Expr(value=ast.Call(func=function)):
                return self.name(function) in _ENDS
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name)) | ast.Name(id=name)):
                return name == "SystemExit"
            case _:
                return False

    def conditional(self, node: ast.AST) -> bool:
        """Whether a node runs only under a condition or as a reaction to an exception."""
        return self.always(node, lambda place: next(self.guards(place), None) is not None)

    def always(self, node: ast.AST, holds: Callable[[ast.AST], bool]) -> bool:
        """Whether something holds for a node, or for whatever leads to it.

        Ways are followed through the functions of the program; one that nothing in it uses is
        taken for one that is reached in the asked way.
        """
        return all(self.function(way) or holds(way) for way in self._ways(node, holds))

    def _ways(
        self, node: ast.AST, stop: Callable[[ast.AST], bool] = lambda _: False
    ) -> Iterator[ast.AST]:
        """A node, the calls that lead to its function, and so on, except those before a stop."""
        ways: list[ast.AST] = [node]
        seen: set[Function] = set()
        for way in ways:
            yield way
            function = self.function(way)
            if function and function not in seen and not stop(way):
                seen.add(function)
                ways += self.uses(function.name)

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

    def loops(self, node: ast.AST) -> list[ast.For | ast.While]:
        """The loops around a node within its function, the innermost first."""
        function = self.function(node)
        return [
            parent
            for _, parent in self.ancestors(node)
            if isinstance(parent, ast.For | ast.While) and self.function(parent) is function
        ]

    def all_loops(self, node: ast.AST) -> set[ast.For | ast.While]:
        """The loops around a node, and around what leads to its function."""
        return {loop for way in self._ways(node) for loop in self.loops(way)}


def is_main_guard(node: ast.AST) -> bool:
    """`if __name__ == "__main__":`, which is true in every process."""
    parts = ast.walk(node.test) if isinstance(node, ast.If) else ()
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in parts)


def _branch(child: ast.AST, parent: ast.AST) -> Iterator[Guard]:
    """The condition under which the parent runs the child."""
    match parent:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            shown = "`while {}`" if isinstance(parent, ast.While) else "`if {}`"
            orelse = parent.orelse if isinstance(parent.orelse, list) else [parent.orelse]
            if child in orelse:
                yield Guard(test, holds=False, where=f"under the `else` of {shown}")
            elif child is not test and not is_main_guard(parent):
                yield Guard(test, holds=True, where=f"under {shown}")
        case ast.BoolOp(op=op, values=values):
            for before in values:
                if before is child:
                    break
                yield Guard(before, isinstance(op, ast.And), "behind `{}`")
        case ast.Match() if isinstance(child, ast.match_case):
            yield Guard(_chosen(parent, child), holds=True, where="where `{}`")
        case ast.ExceptHandler():
            yield Guard(None, holds=True)
        case _:
            pass


def _branches(stmt: ast.stmt) -> Iterator[tuple[ast.expr | None, Sequence[ast.stmt]]]:
    """The blocks of a statement with what decides whether they run; None: they do."""
    match stmt:
        case ast.If(test=test, body=body, orelse=orelse):
            yield test, body
            yield _negated(test), orelse
        case ast.With(body=body) | ast.AsyncWith(body=body):
            yield None, body
        case ast.Try(body=body, handlers=[], orelse=orelse, finalbody=last):
            yield None, [*body, *orelse, *last]
        case ast.While(test=test, body=body):
            yield _unknown(test), body
        case ast.For(iter=test, body=body) | ast.AsyncFor(iter=test, body=body):
            yield _unknown(test), body
        case ast.Match(cases=cases):
            yield from ((_chosen(stmt, case), case.body) for case in cases)
        case _:
            pass


def _ways(stmt: ast.stmt) -> list[list[ast.stmt]]:
    """The ways through a statement, except loops and `match`, of which none may be taken."""
    match stmt:
        case ast.If(test=ast.Constant(value=True), body=body):
            return [body]
        case ast.If(body=body, orelse=orelse):
            return [body, orelse]
        case ast.With(body=body) | ast.AsyncWith(body=body):
            return [body]
        case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=last):
            return [[*body, *orelse, *last], *([*one.body, *last] for one in handlers)]
        case _:
            return []


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _unknown(about: ast.expr) -> ast.expr:
    """A test of something, of which nobody can say on which ranks it holds."""
    return ast.Tuple([about])


def _chosen(stmt: ast.Match, case: ast.match_case) -> ast.expr:
    """The conditions for a case of `match`: its pattern, and none of those before it."""
    before = stmt.cases[: stmt.cases.index(case)]
    tests = [_negated(_fits(stmt.subject, one)) for one in before] + [_fits(stmt.subject, case)]
    return ast.BoolOp(ast.And(), tests) if before else tests[0]


def _fits(subject: ast.expr, case: ast.match_case) -> ast.expr:
    """Whether a case fits, except those before it; for patterns of values."""

    def fits(pattern: ast.pattern) -> ast.expr:
        match pattern:
            case ast.MatchValue(value=value):
                return ast.Compare(subject, [ast.Eq()], [value])
            case ast.MatchOr(patterns=patterns):
                return ast.BoolOp(ast.Or(), [fits(one) for one in patterns])
            case ast.MatchAs(pattern=None):
                return ast.Constant(value=True)
            case _:
                return _unknown(subject)

    own = fits(case.pattern)
    return ast.BoolOp(ast.And(), [own, case.guard]) if case.guard else own


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
    positional = [*given.posonlyargs, *given.args]
    pairs = chain(
        zip(reversed(positional), reversed(given.defaults), strict=False),
        zip(given.kwonlyargs, given.kw_defaults, strict=True),
    )
    return {one.arg: value for one, value in pairs}
