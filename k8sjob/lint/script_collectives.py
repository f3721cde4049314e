"""Checks of collectives that only some ranks reach, through the program's own functions too."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from k8sjob.lint.communication import FORWARD, MAKES_GROUP, Communication, Given
from k8sjob.lint.finding import Hit, Rules
from k8sjob.lint.modules import Definition, Function
from k8sjob.lint.rank_tests import RankTests, Who
from k8sjob.lint.script_code import is_main_guard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k8sjob.lint.script_facts import Script

__all__ = ["RULES"]

RULES: Final = Rules["Script"]("script")

_ENDS: Final = frozenset({"sys.exit", "exit", "quit", "os._exit"})
_ONE_RANK_DECORATORS: Final = frozenset(
    {"rank_zero_only", "on_main_process", "on_local_main_process", "main_process_only"}
)
_MAX_CALLS: Final = 12
"""Calls from one function into the next that are followed."""


@dataclass(frozen=True, slots=True)
class _Reached:
    """A collective: the call here that leads to it, and the functions in between."""

    name: str
    call: ast.Call
    via: tuple[str, ...] = ()


_Found = dict[str, _Reached]
_Parts = list[ast.AST]


@dataclass(frozen=True, slots=True)
class _Branch:
    """A collective that one branch of a test of the rank reaches and the other does not."""

    reached: _Reached
    who: Who | None
    where: str
    function: ast.AST


@dataclass(frozen=True, slots=True)
class _View:
    """How conditions are taken while calls are followed.

    Attributes:
        possible: everything that may be reached counts; else what one branch alone reaches does
            not count if the rank, or an argument of the function, decides between the branches.
        given: the kinds of the surrounding function's arguments.
        inner: the surrounding function, if the way there led through a call.
        depth: calls on that way.
    """

    possible: bool
    given: Given = frozenset()
    inner: Function | None = None
    depth: int = 0


class _Reach:
    """Which collectives a piece of a program comes to."""

    def __init__(self, script: Script) -> None:
        self.scopes = script.scopes
        self.tests = RankTests(script, self.scopes)
        self.calls = Communication(script, self.scopes)
        self._script = script
        self._functions: dict[tuple[bool, Function, Given], _Found] = {}

    def of(self, parts: Iterable[ast.AST], view: _View) -> _Found:
        """What is reached by who comes to these statements or expressions, by name."""
        found: _Found = {}
        rest = list(parts)
        while rest:
            part = rest.pop(0)
            if isinstance(part, ast.If | ast.IfExp) and self._decides(part.test, view):
                after = rest if _leaves(part, self._script) else []
                body, orelse = (self.of(side, view) for side in _branches(part, after))
                both = {name: one for name, one in body.items() if name in orelse}
                found = self.of([part.test], view) | both | found
                if after:
                    break
            elif isinstance(part, ast.If):
                rest[:0] = [part.test, *part.body, *part.orelse]
            elif isinstance(part, ast.BoolOp) and view.inner is not None and not view.possible:
                rest.insert(0, part.values[0])
            elif not isinstance(part, Definition | ast.Lambda):
                for block in _blocks(part):
                    found = self.of(block, view) | found
                if isinstance(part, ast.Call):
                    found = self._called(part, view) | found
        return found

    def _decides(self, test: ast.expr, view: _View) -> bool:
        """Whether only what both branches reach is certain to be reached."""
        if view.possible or "__name__" in _names(test):
            return False
        asks_argument = view.inner is not None and _names(test) & _parameters(view.inner)
        if any(self.tests.sides(test)):
            return True
        return not self.tests.is_guard(test) and (
            bool(asks_argument) or self._script.says_rank(test)
        )

    def _called(self, call: ast.Call, view: _View) -> _Found:
        if name := self.calls.collective(call, view.given):
            return {name: _Reached(name, call)}
        function = self.scopes.definition(call.func)
        if isinstance(function, ast.ClassDef):
            function = self.scopes.method(function, "__init__")
        elif function is None and (made := self.scopes.instance(call.func)):
            function = self.scopes.method(made, "__call__") or self.scopes.method(made, "forward")
        if not isinstance(function, Function) or view.depth > _MAX_CALLS:
            return {}
        given = self.calls.arguments(call, function, view.given)
        key = view.possible, function, given
        if key not in self._functions:
            self._functions[key] = {}  # for one that calls itself
            inner = _View(view.possible, given, function, view.depth + 1)
            self._functions[key] = self.of(function.body, inner)
        return {
            name: _Reached(name, call, (function.name, *one.via))
            for name, one in self._functions[key].items()
        }


def _branches(test: ast.If | ast.IfExp, after: _Parts) -> tuple[_Parts, _Parts]:
    """What runs if a test holds, and if not: also what follows, if the first branch leaves."""
    if isinstance(test, ast.IfExp):
        return [test.body], [test.orelse]
    return [*test.body], [*test.orelse, *after]


def _blocks(part: ast.AST) -> Iterator[list[ast.AST]]:
    """The statements and expressions inside of one, which run one after the other."""
    for name, value in ast.iter_fields(part):
        if isinstance(value, list):
            if name != "handlers":
                yield [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST):
            yield [value]


def _leaves(test: ast.AST, script: Script) -> bool:
    """Whether who comes into the body of an `if` never comes to what follows it."""
    if not isinstance(test, ast.If):
        return False
    match test.body[-1]:
        case ast.Return() | ast.Continue() | ast.Break():
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return script.name(function) in _ENDS
        case ast.Raise(exc=ast.Call(func=ast.Name(id=name)) | ast.Name(id=name)):
            return name == "SystemExit"
        case _:
            return False


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _parameters(function: Function) -> set[str]:
    arguments = function.args
    given = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return {one.arg for one in (*given, arguments.vararg, arguments.kwarg) if one is not None}


@lru_cache(maxsize=1)
def _one_sided(script: Script) -> Sequence[_Branch]:
    """The collectives that only one rank comes to, or all but one."""
    if script.setting.processes == 1:
        return ()
    try:
        found = _kept_from_some(script)
    except RecursionError:
        return ()  # nested too deep to be followed
    alone = (
        script.setting.processes is not None and script.setting.processes == script.setting.nodes
    )
    return [one for one in _unpaired(found) if not (alone and "local" in one.where)]


def _kept_from_some(script: Script) -> list[_Branch]:
    """Every collective that a test of the rank keeps from some ranks."""
    reach = _Reach(script)
    found: list[_Branch] = []
    for node in script.nodes:
        function = script.function(node) or script.module(node).tree
        for who, where, here, there in _splits(script, reach, node):
            for given in _given(script, reach, node):
                mine = reach.of(here, _View(possible=False, given=given))
                theirs = reach.of(there, _View(possible=True, given=given))
                if MAKES_GROUP not in mine.keys() | theirs.keys():
                    lonely = [one for name, one in mine.items() if name not in theirs]
                    found += [_Branch(one, who, where, function) for one in lonely]
    return found


def _splits(
    script: Script, reach: _Reach, node: ast.AST
) -> Iterator[tuple[Who | None, str, _Parts, _Parts]]:
    """The branches of a condition on the rank: who comes there, where, it, and the other one."""
    match node:
        case ast.FunctionDef(decorator_list=decorators, name=name):
            names = [script.name(one).rpartition(".")[2] for one in decorators]
            if one := next((one for one in names if one in _ONE_RANK_DECORATORS), ""):
                yield "one", f"in {name}, under @{one}", [*node.body], []
        case ast.BoolOp(op=op, values=values):
            for at, value in enumerate(values[:-1]):
                body, orelse = reach.tests.sides(value)
                if who := body if isinstance(op, ast.And) else orelse:
                    yield who, f"behind `{ast.unparse(value)}`", [*values[at + 1 :]], []
                    break
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            body, orelse = reach.tests.sides(test)
            if not is_main_guard(node) and (body or orelse or script.says_rank(test)):
                yield from _sides(script, node, body, orelse)
        case ast.Match(subject=subject, cases=cases) if reach.tests.is_rank(subject):
            yield from _cases(subject, cases)
        case _:
            pass


def _cases(
    subject: ast.expr, cases: list[ast.match_case]
) -> Iterator[tuple[Who | None, str, _Parts, _Parts]]:
    """`match rank:`, each case with all others."""
    for case in cases:
        there: _Parts = [stmt for other in cases if other is not case for stmt in other.body]
        number = ast.unparse(case.pattern)
        who: Who = "one" if number == "0" else "another" if number.isdecimal() else "others"
        yield who, f"under `case {number}` of `match {ast.unparse(subject)}`", [*case.body], there


def _sides(
    script: Script, node: ast.If | ast.IfExp | ast.While, body: Who | None, orelse: Who | None
) -> Iterator[tuple[Who | None, str, _Parts, _Parts]]:
    shown = ast.unparse(node.test)
    if isinstance(node, ast.While):
        yield body, f"under `while {shown}`", [*node.body], []
        return
    leaves = _leaves(node, script)
    first, second = _branches(node, _after(script, node) if leaves else [])
    earlier = list(_earlier(script, node))
    yield body, f"under `if {shown}`", first, [*second, *earlier]
    where = f"after `if {shown}` has left" if leaves else f"under the `else` of `if {shown}`"
    yield orelse, where, second, [*first, *earlier]


def _earlier(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    """What stands in the branches before an `elif`."""
    for child, parent in script.ancestors(node):
        if not isinstance(parent, ast.If) or parent.orelse != [child]:
            return
        yield from parent.body


def _after(script: Script, node: ast.AST) -> _Parts:
    """The statements that follow one in its block."""
    _, parent = next(script.ancestors(node))
    for _, block in ast.iter_fields(parent):
        if isinstance(block, list) and node in block:
            return block[block.index(node) + 1 :]
    return []


def _given(script: Script, reach: _Reach, node: ast.AST) -> set[Given]:
    """The kinds of arguments with which the program calls the function around a node."""
    function = script.function(node)
    if function is None:
        return {frozenset()}
    own = [
        call
        for call in script.calls_by_name.get(function.name, ())
        if reach.scopes.definition(call.func) is function
    ]
    return {reach.calls.arguments(call, function, frozenset()) for call in own} or {frozenset()}


def _unpaired(branches: list[_Branch]) -> Iterator[_Branch]:
    """Those for which no other place lets the other ranks call the same."""

    def meets(one: _Branch, other: _Branch) -> bool:
        differs = other.who is None or other.who != one.who
        return one.reached.name == other.reached.name and differs

    def within(one: _Branch) -> bool:
        return any(meets(one, other) for other in branches if other.function is one.function)

    free = [one for one in branches if not within(one)]
    for one in free:
        if one.who and not any(meets(one, other) for other in free):
            yield one


@RULES.error(
    "collective-on-one-rank",
    "A collective returns when every rank has called it; one that only rank 0 calls never returns.",
)
def _collective_on_one_rank(script: Script) -> Iterator[Hit]:
    for one in _one_sided(script):
        if one.reached.name == FORWARD:
            continue
        name, via = one.reached.name, one.reached.via
        what = f"{via[0]} calls {name}, a collective, and" if via else f"{name} is a collective and"
        yield script.at(
            one.reached.call,
            f"{what} runs only {one.where}: it waits until the group's timeout for the ranks that "
            "never call it; call it on every rank, outside the condition",
        )


@RULES.warning(
    "forward-on-one-rank",
    "The forward pass of DistributedDataParallel broadcasts the buffers of the model (those of "
    "BatchNorm, for one), even under no_grad.",
)
def _forward_on_one_rank(script: Script) -> Iterator[Hit]:
    for one in _one_sided(script):
        if one.reached.name == FORWARD:
            yield script.at(
                one.reached.call,
                f"the model is DistributedDataParallel and is called only {one.where}: if it has "
                "buffers, the call waits for the other ranks; call model.module there, or evaluate "
                "on every rank",
            )
