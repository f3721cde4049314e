"""Ranks that come to a line: what conditions say about them.

For findings a condition must be certain (`sides`: one rank, or all the others). Where a condition
would excuse what is found, whatever looks like a rank counts (`mentioned_in`), because a finding
that is not true costs more than one that is missed.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final, Literal

from k8sjob.checks.lint.script_code import is_main_guard, returned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.checks.lint.script_code import Code

__all__ = ["Ranks", "Who"]

Who = Literal["one", "another", "others"]
"""Rank 0 (or each node's first), a rank of another number, or all but one."""

_OTHER: Final[dict[Who | None, Who | None]] = {
    "one": "others",
    "another": "others",
    "others": "one",
    None: None,
}
_RANK: Final = re.compile(
    r"_?((global|world|local|node|ddp|dist|ddp_local|process|proc|my|cur|current|worker|host)_?)?"
    r"(rank|rank_id)|process_index|local_process_index|(get_)(global_|local_|node_)?rank",
    re.IGNORECASE,
)
_MAIN: Final = re.compile(
    r"_?(is|am|on)_(the_)?((local|global|world)_)?(main|master|primary|chief|leader|coordinator|root"
    r"|rank_?(0|zero)|(process_)?zero|first)(_(process|proc|rank|worker|node|device))?(_zero)?"
    r"|_?(main|master|primary)_(process|proc|rank)|rank_?zero|is_global_zero",
    re.IGNORECASE,
)
_GUARD: Final = re.compile(
    r"distributed|^(is_|use_)?(dist|ddp|fsdp|parallel)$|multi_?(gpu|proc|node)|world_?size|initialized"
    r"|is_available|(num|n)_?(gpus?|procs?|processes|nodes|replicas|ranks)",
    re.IGNORECASE,
)
_RANKISH: Final = re.compile(
    r"rank|main|master|primary|chief|leader|coordinator|writer|zero|gpu|proc|(worker|device|node)_id",
    re.IGNORECASE,
)
_RANKISH_FUNCTION: Final = re.compile(
    r"rank|main_process|master_only|on_master|zero_only", re.IGNORECASE
)
_PLAIN: Final = "int bool str get getenv get_rank get_world_size is_available is_initialized"
_PLAIN_CALLS: Final = frozenset(_PLAIN.split())
"""Calls through which a value still is the rank, or a yes or no about it."""
_VARIABLES: Final = "RANK LOCAL_RANK GROUP_RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK"
_RANK_VARIABLES: Final = frozenset(_VARIABLES.split())
_LEAVES: Final = (ast.Return, ast.Continue, ast.Break, ast.Raise)
_MAX_DEPTH: Final = 6


class Ranks:
    """Which ranks the conditions of a program let through."""

    def __init__(self, code: Code) -> None:
        self._code, self._scopes = code, code.scopes
        self._about_rank: dict[ast.AST, bool] = {}

    def sides(self, test: ast.expr, depth: int = 0) -> tuple[Who | None, Who | None]:
        """Who comes into the body of a test, and who does not; None: unknown."""
        match test:
            case _ if depth > _MAX_DEPTH:
                pass
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                body, orelse = self.sides(inner, depth + 1)
                return orelse, body
            case ast.BoolOp():
                return self._of_several(test, depth)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                who = self._compared(left, op, right, depth)
                return who, _OTHER[who]
            case ast.Name() | ast.Attribute() | ast.Call():
                return self._named(test, depth)
            case _:
                pass
        return None, None

    def _of_several(self, test: ast.BoolOp, depth: int) -> tuple[Who | None, Who | None]:
        given = [self.sides(value, depth + 1) for value in test.values]
        body = next((who for who, _ in given if who), None)
        orelse = next((who for _, who in given if who), None)
        others = [v for v, (one, _) in zip(test.values, given, strict=True) if one is None]
        guarded = all(self.is_guard(value) for value in others)
        if isinstance(test.op, ast.And):
            return body, orelse
        return (body if guarded else None), orelse

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr, depth: int) -> Who | None:
        if isinstance(left, ast.Constant) and not isinstance(op, ast.In | ast.NotIn):
            left, right = right, left
            op = {ast.Lt: ast.Gt(), ast.Gt: ast.Lt(), ast.LtE: ast.GtE()}.get(type(op), op)
        if not self.is_rank(left, depth):
            return None
        numbers = [one for one in _numbers(right) if one >= 0]
        match op, numbers:
            case (ast.Eq() | ast.In() | ast.Is(), [0]) | (ast.LtE(), [0]) | (ast.Lt(), [1]):
                return "one"
            case (ast.Eq() | ast.In() | ast.Is(), [_]):
                return "another"
            case (ast.NotEq() | ast.NotIn() | ast.IsNot(), [_]) | (ast.Gt(), [0]):
                return "others"
            case ast.GtE(), [1]:
                return "others"
            case _:
                return None

    def is_rank(self, node: ast.expr, depth: int = 0) -> bool:
        """Whether a value is the rank: by its name, by the call, or by the environment."""
        match node:
            case ast.Name() | ast.Attribute():
                return self._holds_rank(node, depth)
            case ast.Call(func=ast.Name(id="int"), args=[inner]) | ast.IfExp(body=inner):
                return self.is_rank(inner, depth + 1)
            case ast.Call(func=function, args=args):
                name = self._code.name(function)
                if name in ("os.environ.get", "os.getenv"):
                    return bool(args) and _is_variable(args[0])
                return bool(_RANK.fullmatch(name.rpartition(".")[2]))
            case ast.Subscript(value=value, slice=key):
                return self._code.name(value) == "os.environ" and _is_variable(key)
            case _:
                return False

    def _holds_rank(self, node: ast.Name | ast.Attribute, depth: int) -> bool:
        named = bool(_RANK.fullmatch(node.id if isinstance(node, ast.Name) else node.attr))
        if values := self._scopes.values(node):
            varies = any(not isinstance(value, ast.Constant) for value in values)
            return (named and varies) or self._all_ranks(values, depth)
        found = self._scopes.variable(node) if isinstance(node, ast.Name) else None
        return named and not (found and found.unknown)

    def _all_ranks(self, values: list[ast.expr], depth: int) -> bool:
        return depth < _MAX_DEPTH and all(self.is_rank(value, depth + 1) for value in values)

    def _named(self, node: ast.expr, depth: int) -> tuple[Who | None, Who | None]:
        """A variable or a function that says whether this is the one."""
        if self.is_rank(node, depth):
            return "others", "one"
        function = node.func if isinstance(node, ast.Call) else node
        values = self._scopes.values(node)
        if isinstance(node, ast.Call):
            values = self._returned_by(function)
        known = [self.sides(value, depth + 1) for value in values]
        known = [sides for sides in known if any(sides)]
        if known:
            return known[0] if all(sides == known[0] for sides in known) else (None, None)
        name = self._code.name(function).rpartition(".")[2]
        if not name and isinstance(function, ast.Attribute):
            name = function.attr
        return ("one", "others") if _MAIN.fullmatch(name) else (None, None)

    def is_guard(self, test: ast.expr) -> bool:
        """Whether a test asks if there are several processes at all."""
        for part in ast.walk(test):
            match part:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    if _GUARD.search(name):
                        return True
                case ast.Constant(value=str(name)) if name == "WORLD_SIZE":
                    return True
                case ast.Compare(left=left, comparators=[ast.UnaryOp(op=ast.USub())]):
                    if self.is_rank(left, 0):
                        return True
                case _:
                    pass
        return False

    def _returned_by(self, function: ast.expr) -> list[ast.expr]:
        found = self._scopes.definition(function)
        return list(returned(found)) if found is not None else []

    def mentioned_in(self, node: ast.AST) -> bool:
        """Whether an expression seems to depend on the rank."""
        for part in ast.walk(node):
            match part:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    if _RANKISH.search(name) or self._is_about_rank(part):
                        return True
                case ast.Constant(value=str(text)) if "RANK" in text:
                    return True
                case _:
                    pass
        return False

    def _is_about_rank(self, use: ast.expr) -> bool:
        """`first = rank == 0`; not `model.to(rank)`, which is a model."""
        if use not in self._about_rank:
            self._about_rank[use] = False  # for one that is made of itself
            self._about_rank[use] = any(
                all(map(self._is_plain, ast.walk(value))) and self.mentioned_in(value)
                for value in self._scopes.assigned(use)
            )
        return self._about_rank[use]

    def _is_plain(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return True
        last = self._code.name(node.func).rpartition(".")[2]
        named = last in _PLAIN_CALLS or bool(_RANKISH.search(last))
        return named or self._is_about_rank(node.func)

    def only_some_reach(self, node: ast.AST) -> bool:
        """Whether only some ranks seem to come to a line."""
        return self._code.always_passes(node, self._selects)

    def _selects(self, child: ast.AST, parent: ast.AST) -> bool:
        match parent:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                if child is not test and not is_main_guard(parent) and self.mentioned_in(test):
                    return True
            case ast.BoolOp(values=values):
                return any(self.mentioned_in(value) for value in values if value is not child)
            case ast.With(items=items):
                if any(self.mentioned_in(item.context_expr) for item in items):
                    return True
            case ast.FunctionDef(name=name, decorator_list=decorators):
                if _RANKISH_FUNCTION.search(name) or any(map(self.mentioned_in, decorators)):
                    return True
            case _:
                pass
        return self._follows_exit(child, parent)

    def _follows_exit(self, child: ast.AST, parent: ast.AST) -> bool:
        """`if rank != 0: return` among the statements before this one."""
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if isinstance(block, list) and child in block:
                return any(
                    isinstance(stmt, ast.If)
                    and isinstance(stmt.body[-1], _LEAVES)
                    and self.mentioned_in(stmt.test)
                    for stmt in block[: block.index(child)]
                )
        return False


def _numbers(node: ast.expr) -> Iterator[int]:
    """The whole numbers in a literal; what is below 0 stands for "not distributed"."""
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(number)):
            yield number
        case ast.Constant(value=str(text)) if text.isascii() and text.isdecimal():
            yield int(text)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            yield -number
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            for item in items:
                yield from _numbers(item)
        case _:
            pass


def _is_variable(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in _RANK_VARIABLES
