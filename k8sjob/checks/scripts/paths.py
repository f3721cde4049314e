"""Paths through a script: the conditions on a line, the calls that lead to it, its loops."""

from __future__ import annotations

import ast
from collections import defaultdict
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.checks.scripts.code import followed
from k8sjob.checks.scripts.modules import Function
from k8sjob.checks.scripts.values import Values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MAX_DEPTH: Final = 8
"""Statements in each other that are looked into for what leaves."""
_MAX_GUARDS: Final = 64
"""Conditions on a line; with more of them nobody can say who comes to it."""
_MAX_WAYS: Final = 200
"""Calls that lead to a line, directly or not; more of them are not looked at."""
_ENDS: Final = frozenset({"sys.exit", "exit", "quit", "os._exit"})


class Guard(NamedTuple):
    """A condition that a line depends on.

    Attributes:
        test: its expression; None for an exception that is handled.
        holds: whether the line runs if the test holds, or if it does not.
        where: the line's place, as `under {}` with the test in the braces.
    """

    test: ast.expr | None
    holds: bool
    where: str = ""


_ALWAYS: Final[ast.expr] = ast.Constant(value=True)
_SKIPPED: Final = (ast.For, ast.AsyncFor, ast.While, ast.Match)
"""Statements of which no block may be run."""


class Paths(Values):
    """The modules of a program, and the paths through them."""

    def guards(self, node: ast.AST) -> Iterator[Guard]:
        """The conditions on a node within its function, the innermost first.

        Besides the branches that it is in these are the ones before it that leave: after
        `if rank != 0: return` only rank 0 is left, wherever in a statement that is.
        """
        guards = self._every_guard(node)
        yield from islice(guards, _MAX_GUARDS)
        yield from (_MANY for _ in islice(guards, 1))

    def _every_guard(self, node: ast.AST) -> Iterator[Guard]:
        for child, parent in self.ancestors(node):
            places = self._places(parent) if isinstance(child, ast.stmt) else {}
            block, exits, before = places.get(child, ("", (), 0))
            yield from self._branch(child, parent, is_else=block == "orelse")
            yield from islice(exits, before)
            if isinstance(parent, Function):
                return

    @followed({})
    def _places(self, parent: ast.AST) -> dict[ast.AST, tuple[str, Sequence[Guard], int]]:
        """The block that each statement of a node is in, its exits, and how many are before it."""
        places: dict[ast.AST, tuple[str, Sequence[Guard], int]] = {}
        for name in ("body", "orelse", "finalbody"):
            block: Any = getattr(parent, name, None)
            exits = list[Guard]()
            for stmt in block if isinstance(block, list) else ():
                places[stmt] = name, exits, len(exits)
                if stmt is not block[-1] and len(exits) <= _MAX_GUARDS:
                    where = "after `if {}` has left"
                    exits += [Guard(test, holds=False, where=where) for test in self._exits(stmt)]
        return places

    def contexts(self, node: ast.AST) -> Iterator[ast.expr]:
        """The `with` and the decorators that a node is under, within its function."""
        for child, parent in self.around(node):
            if isinstance(parent, ast.With) and isinstance(child, ast.stmt):
                yield from (item.context_expr for item in parent.items[:_MAX_GUARDS])
            if isinstance(parent, Function):
                if isinstance(child, ast.stmt):
                    yield from parent.decorator_list[:_MAX_GUARDS]
                return

    def _exits(self, stmt: ast.stmt, depth: int = 0, *, looped: bool = False) -> list[ast.expr]:
        """The tests by which who comes to a statement does not come to what follows.

        An error ends the job and is no exit. `looped`: a loop lies between, which is all that
        `break` leaves.
        """
        match stmt:
            case (
                ast.Return()
                | ast.Raise(
                    exc=ast.Call(func=ast.Name(id="SystemExit")) | ast.Name(id="SystemExit")
                )
            ):
                return [_ALWAYS]
            case ast.Continue() | ast.Break():
                return [] if looped else [_ALWAYS]
            case ast.Expr(value=ast.Call(func=function)):
                return [_ALWAYS] if self.name(function) in _ENDS else []
            case ast.For() | ast.AsyncFor() | ast.While():
                looped = True
            case _:
                pass
        every = [
            (test, [end for line in block for end in self._exits(line, depth + 1, looped=looped)])
            for test, block in (_blocks(stmt) if depth < _MAX_DEPTH else ())
        ]
        if every and not isinstance(stmt, _SKIPPED) and all(_ALWAYS in exits for _, exits in every):
            return [_ALWAYS]
        # Which block of a try with handlers runs to its end is not known.
        tests: list[ast.expr] = []
        for test, exits in every if len(every) == 1 or not isinstance(stmt, ast.Try) else ():
            if test is None:
                tests += exits
            elif _ALWAYS in exits:
                tests.append(test)
            else:
                tests += [ast.BoolOp(ast.And(), [test, inner]) for inner in exits]
        return tests

    def conditional(self, node: ast.AST) -> bool:
        """Whether a node runs only under a condition or as a reaction to an exception."""
        return self.always(node, self._is_guarded)

    def _is_guarded(self, place: ast.AST) -> bool:
        return next(self.guards(place), None) is not None

    def always(self, node: ast.AST, holds: Callable[[ast.AST], bool]) -> bool:
        """Whether something holds for a node, or for whatever leads to it.

        Ways are followed through the functions of the program; one that nothing in it uses is
        taken for one that is reached in the asked way.
        """
        function = self.function(node)
        return holds(node) or bool(function and function.name not in self._reached(holds))

    @followed(frozenset[str]())
    def _reached(self, without: Callable[[ast.AST], bool]) -> set[str]:
        """Names of the functions that the modules' own lines lead to without what is asked for."""
        used = defaultdict[str, list[str]](list)
        for name in {node.name for node in self.nodes if isinstance(node, Function)}:
            for use in self.uses(name):
                if not without(use):
                    used[getattr(self.function(use), "name", "")].append(name)
        names = [""]
        for name in names:
            names += used.pop(name, ())
        return set(names)

    def loops(self, node: ast.AST) -> list[ast.For | ast.While]:
        """The loops around a node within its function, the innermost first."""
        around = (parent for _, parent in self.around(node))
        inside = takewhile(lambda parent: not isinstance(parent, Function), around)
        return [parent for parent in inside if isinstance(parent, ast.For | ast.While)]

    def all_loops(self, node: ast.AST) -> set[ast.For | ast.While]:
        """The loops around a node, and around what leads to its function."""
        ways, names = [node], set[str]()
        for way in islice(ways, _MAX_WAYS):
            function = self.function(way)
            if function and function.name not in names:
                names.add(function.name)
                ways += self.uses(function.name)[:_MAX_WAYS]
        return {loop for way in ways[:_MAX_WAYS] for loop in self.loops(way)}

    def _branch(self, child: ast.AST, parent: ast.AST, *, is_else: bool) -> Iterator[Guard]:
        """The condition under which the parent runs the child."""
        match parent:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                shown = "`while {}`" if isinstance(parent, ast.While) else "`if {}`"
                if is_else or child is parent.orelse:
                    yield Guard(test, holds=False, where=f"under the `else` of {shown}")
                elif child is not test and not self._is_main_guard(parent):
                    yield Guard(test, holds=True, where=f"under {shown}")
            case ast.BoolOp(op=op, values=values):
                before = takewhile(lambda value: value is not child, values)
                yield from (Guard(part, isinstance(op, ast.And), "behind `{}`") for part in before)
            # Its cases are not compared: none of a thousand foreign scripts asks for its rank so.
            case ast.Match():
                if isinstance(child, ast.match_case):
                    yield Guard(self._is_case(parent), holds=True)
            case ast.ExceptHandler():
                yield Guard(None, holds=True)
            case _:
                pass

    @followed(None)
    def _is_case(self, match: ast.Match) -> ast.expr | None:
        """The test of all its cases, which is one node: its value is computed once."""
        return _unknown(match.subject)

    @followed(unknown=False)
    def _is_main_guard(self, node: ast.AST) -> bool:
        return is_main_guard(node)


def is_main_guard(node: ast.AST) -> bool:
    """`if __name__ == "__main__":`, which is true in every process."""
    parts = ast.walk(node.test) if isinstance(node, ast.If) else ()
    return any(isinstance(part, ast.Name) and part.id == "__name__" for part in parts)


def _blocks(stmt: ast.stmt) -> Iterator[tuple[ast.expr | None, Sequence[ast.stmt]]]:
    """The ways through a statement, with the test that decides whether it is taken, if any."""
    match stmt:
        case ast.With() | ast.AsyncWith() | ast.If(test=ast.Constant(value=True)):
            yield None, stmt.body
        case ast.If(test=condition, body=body, orelse=orelse):
            yield condition, body
            yield ast.UnaryOp(ast.Not(), condition), orelse
        case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=last):
            # Either the body runs to its end or one of the handlers, and then the finally.
            yield None, [*body, *orelse, *last]
            yield from ((None, [*handler.body, *last]) for handler in handlers)
        case ast.While(test=about) | ast.For(iter=about) | ast.AsyncFor(iter=about):
            yield _unknown(about), stmt.body
        case ast.Match(subject=subject, cases=cases):
            yield from ((_unknown(subject), case.body) for case in cases)
        case _:
            pass


def _unknown(about: ast.expr) -> ast.expr:
    """A test of something, of which nobody can say on which ranks it holds."""
    return ast.Await(about)


_MANY: Final = Guard(_unknown(_ALWAYS), holds=True)
