"""Paths through a script: the conditions on a line, the calls that lead to it, its loops."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.checks.lint.script_code import Code, followed
from k8sjob.checks.lint.script_modules import Function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MAX_DEPTH: Final = 8
"""Statements in each other that are looked into for what leaves."""
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


class Paths(Code):
    """The modules of a program, and the paths through them."""

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
                        for test in self._exits_before(stmt):
                            yield Guard(test, holds=False, where="after `if {}` has left")
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

    @followed([])
    def _exits_before(self, stmt: ast.stmt) -> list[ast.expr]:
        """The exits of a statement that stands before the one that is asked about."""
        return self._exits(stmt)

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
            (test, [one for x in block for one in self._exits(x, depth + 1, looped=looped)])
            for test, block in (_blocks(stmt) if depth < _MAX_DEPTH else ())
        ]
        if every and not isinstance(stmt, _SKIPPED) and all(_ALWAYS in exits for _, exits in every):
            return [_ALWAYS]
        found: list[ast.expr] = []
        for test, exits in every if len(every) == 1 or not isinstance(stmt, ast.Try) else ():
            if test is None:
                found += exits
            elif _ALWAYS in exits:
                found.append(test)
            else:
                found += [ast.BoolOp(ast.And(), [test, inner]) for inner in exits]
        return found

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
            for before in values[: values.index(child)] if isinstance(child, ast.expr) else ():
                yield Guard(before, isinstance(op, ast.And), "behind `{}`")
        case ast.Match(subject=subject) if isinstance(child, ast.match_case):
            yield Guard(_unknown(subject), holds=True)
        case ast.ExceptHandler():
            yield Guard(None, holds=True)
        case _:
            pass


def _blocks(stmt: ast.stmt) -> Iterator[tuple[ast.expr | None, Sequence[ast.stmt]]]:
    """The ways through a statement, with the test that decides whether it is taken, if any."""
    match stmt:
        case ast.With() | ast.AsyncWith() | ast.If(test=ast.Constant(value=True)):
            yield None, stmt.body
        case ast.If(test=condition, body=body, orelse=orelse):
            yield condition, body
            yield ast.UnaryOp(ast.Not(), condition), orelse
        case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=last):
            yield None, [*body, *orelse, *last]
            yield from ((None, [*one.body, *last]) for one in handlers)
        case ast.While(test=about) | ast.For(iter=about) | ast.AsyncFor(iter=about):
            yield _unknown(about), stmt.body
        case ast.Match(subject=subject, cases=cases):
            yield from ((_unknown(subject), case.body) for case in cases)
        case _:
            pass


def _unknown(about: ast.expr) -> ast.expr:
    """A test of something, of which nobody can say on which ranks it holds."""
    return ast.Await(about)
