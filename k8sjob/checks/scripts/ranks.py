"""Values on rank 0 and on rank 1, which every job of several processes has.

For findings a value must be certain (`truth`). Where it would excuse what is found, whatever looks
like a rank counts (`mentioned_in`), because a false finding costs more than one that is missed.
"""

from __future__ import annotations

import ast
import operator
from collections import defaultdict
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from k8sjob.checks.finding import pattern
from k8sjob.checks.scripts.code import constant, defaults, followed, keyword
from k8sjob.checks.scripts.paths import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from k8sjob.checks.scripts.paths import Paths

OnRanks = tuple[Any, ...]
"""A value on each of RANKS; None: not known."""
Truth = tuple[bool | None, ...]
"""The value of a test on each of RANKS."""

RANKS: Final = (0, 1)
_UNKNOWN: Final[OnRanks] = (None, None)
_MAX_DIGITS: Final = 20
_WORLD: Final = 1000
"""Names for the number of processes, nodes or GPUs: a test asks if there are several."""
_RANK: Final = pattern("rank")
_MAIN: Final = pattern("main")
_COUNT: Final = pattern("count")
_SEVERAL: Final = pattern("several")
_RANK_NAME: Final = pattern("about-rank")
_VARIABLES: Final = "RANK LOCAL_RANK GROUP_RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK"
_RANK_VARIABLES: Final = frozenset(_VARIABLES.split())
_OWN: Final = pattern("of-process")
_PATHS: Final = pattern("paths")
_OPERATORS: Final[dict[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq,
    ast.Is: operator.eq,
    ast.NotEq: operator.ne,
    ast.IsNot: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda rank, numbers: rank in numbers,
    ast.NotIn: lambda rank, numbers: rank not in numbers,
}


class Ranks:
    """The values of a program's expressions on each rank."""

    def __init__(self, code: Paths) -> None:
        self._code = code

    def truth(self, test: ast.AST | None) -> Truth:
        """The value of a test on rank 0 and on rank 1, if there are several processes."""
        return tuple(None if value is None else bool(value) for value in self.of(test))

    @followed(_UNKNOWN)
    def of(self, node: ast.AST | None) -> OnRanks:
        """The value of an expression on each of RANKS: a number, a text, a bool, a list."""
        with suppress(TypeError, ValueError, OverflowError):  # `1 in 2`, int("a"), int(1e999)
            return self._of(node)
        return _UNKNOWN

    def _of(self, node: ast.AST | None) -> OnRanks:
        pair = _UNKNOWN
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                pair = tuple(None if truth is None else not truth for truth in self.truth(inner))
            case ast.BoolOp(op=op, values=values):
                # One true part decides an `or`, one false part an `and`, whatever the others are.
                decides = isinstance(op, ast.Or)
                pair = tuple(
                    decides if decides in truths else None if None in truths else not decides
                    for truths in zip(*map(self.truth, values), strict=True)
                )
            case ast.Compare(left=first, ops=[op], comparators=[second]):
                compare = _OPERATORS[type(op)]
                sides = zip(self.of(first), self.of(second), strict=True)
                pair = tuple(None if None in both else compare(*both) for both in sides)
            case ast.NamedExpr(value=inner):
                pair = self.of(inner)
            case ast.IfExp(body=body, orelse=orelse):
                pair = self._either([body, orelse])
            case ast.Call(func=ast.Name(id="int"), args=[inner, *_]):
                pair = tuple(None if number is None else int(number) for number in self.of(inner))
            case ast.Name() | ast.Attribute() | ast.Call() | ast.Subscript():
                pair = self._named(node)
            case ast.expr():
                pair = (ast.literal_eval(node),) * len(RANKS)
            case _:
                pass
        return pair

    def _either(self, values: Iterable[ast.expr]) -> OnRanks:
        """The value that differs by rank, if one of several does; a number only of known ones."""
        pairs = [self.of(value) for value in values]
        differ = next((pair for pair in pairs if pair[0] != pair[1]), _UNKNOWN)
        several = any(pair[0] != pair[1] and pair != differ for pair in pairs)
        unclear = _UNKNOWN in pairs and not isinstance(differ[0], bool)
        return _UNKNOWN if several or unclear else differ

    def _named(self, node: ast.expr) -> OnRanks:
        """The value of a variable or a call, by what is assigned or returned, else by its name."""
        if variable := self._code.environ_key(node):
            texts = ("0", "1") if variable in _RANK_VARIABLES else (str(_WORLD), str(_WORLD))
            return texts if variable in _RANK_VARIABLES or _COUNT.search(variable) else _UNKNOWN
        sources = self._code.sources(node)
        values = [] if None in sources or node in sources else [*filter(None, sources)]
        pair, name = self._either(values), self._code.last_name(node)
        # A name says what a value is only where nothing else does: `is_main = True` of a class
        # is no test of the rank.
        if pair == _UNKNOWN:
            if self._is_called_rank(node, values):
                pair = RANKS
            elif _MAIN.fullmatch(name):
                about = any(self.mentioned_in(end) or self.only_some_reach(end) for end in values)
                pair = (True, False) if about or not values else _UNKNOWN
            elif _COUNT.search(name):
                pair = (_WORLD, _WORLD)
            elif _SEVERAL.search(name):
                pair = (True, True)
        return pair

    def _is_called_rank(self, node: ast.expr, values: Sequence[ast.expr]) -> bool:
        if not isinstance(node, ast.Name | ast.Attribute):
            return bool(_RANK.fullmatch(self._code.last_name(node)))
        name = node.id if isinstance(node, ast.Name) else node.attr
        # `rank=8` is that of a matrix, as LoRA's.
        if not _RANK.fullmatch(name) or name in self._sizes:
            return False
        # `rank = 0` is that number on all ranks.
        if values:
            return any(not isinstance(value, ast.Constant) for value in values)
        variable = self._code.variable(node)
        # A loop over ranks gives the name each of them.
        return not (variable and variable.unknown)

    @cached_property
    def defaults(self) -> dict[str, set[object]]:
        """Names of parameters, attributes and options, with their defaults; None: no literals."""
        values = defaultdict[str, set[object]](set)
        for name, value in chain.from_iterable(map(_with_defaults, self._code.nodes)):
            values[name].add(constant(value))
        return values

    @cached_property
    def _sizes(self) -> frozenset[str]:
        """Names that get a number which no rank has by default: `rank=8` is a matrix's."""
        return frozenset(
            name for name, values in self.defaults.items() if any(map(_is_size, values))
        )

    @followed([])
    def guards(self, node: ast.AST) -> list[Guard]:
        """The conditions on a node, decorators like `@rank_zero_only` included."""
        tests = [test for test in self._code.contexts(node) if len(set(self.truth(test))) > 1]
        more = [Guard(test, holds=True, where="under `{}`") for test in tests]
        return [*self._code.guards(node), *more]

    @followed(unknown=False)
    def mentioned_in(self, node: ast.AST | None) -> bool:
        """Whether an expression seems to depend on the rank, or on the process otherwise."""
        return any(map(self._mentions, ast.walk(node) if node else ()))

    def _mentions(self, part: ast.AST) -> bool:
        match part:
            case ast.Name(id=name) | ast.Attribute(attr=name) if _RANK_NAME.search(name):
                return True
            case ast.Constant(value=str(text)):
                return "RANK" in text or text == "HOSTNAME"
            case ast.Name() | ast.Attribute() | ast.Call():
                return self._is_about_rank(part)
            case _:
                return False

    @followed(unknown=False)
    def _is_about_rank(self, use: ast.expr) -> bool:
        """`first = rank == 0`; not `model.to(rank)`, which is a model."""
        pair, values = self.of(use), self._code.sources(use)
        called = self._code.name(use.func) if isinstance(use, ast.Call) else ""
        return (
            pair[0] != pair[1]
            or bool(_OWN.fullmatch(called))
            or any(self._says_rank(value) for value in values if value and value is not use)
        )

    def _says_rank(self, value: ast.expr) -> bool:
        is_call = isinstance(value, ast.Call) and not _PATHS.fullmatch(self._code.name(value.func))
        return self._mentions(value) if is_call else self.mentioned_in(value)

    def only_some_reach(self, node: ast.AST) -> bool:
        """Whether only some ranks seem to come to a line, or to have an object of its class."""
        return self._code.always(node, self._of_some)

    def _of_some(self, place: ast.AST) -> bool:
        owner = self._code.class_of(place)
        return self._selected(place) or (owner is not None and self._made_by_some(owner.name))

    @followed(unknown=False)
    def _made_by_some(self, name: str) -> bool:
        """Whether only some ranks seem to make objects of a class."""
        calls = ((use, self._code.parent(use)) for use in self._code.uses(name))
        makers = [call for use, call in calls if isinstance(call, ast.Call) and call.func is use]
        return bool(makers) and all(self._code.always(call, self._selected) for call in makers)

    @followed(unknown=False)
    def _selected(self, place: ast.AST) -> bool:
        """Whether a condition around a line, in its function, seems to ask for the rank."""
        tests = [guard.test for guard in self._code.guards(place)]
        return any(map(self.mentioned_in, (*tests, *self._code.contexts(place))))


def _with_defaults(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names of parameters, attributes and options, with what they are by default."""
    match node:
        case ast.arguments():
            yield from defaults(node).items()
        case ast.Call(args=args, keywords=keywords):
            yield from ((option.arg or "", option.value) for option in keywords)
            texts = [text for argument in args if isinstance(text := constant(argument), str)]
            if default := keyword(node, "default"):  # of an option on the command line
                yield from ((text.lstrip("-").replace("-", "_"), default) for text in texts)
        case (
            ast.AnnAssign(target=ast.Name(id=name), value=value)
            | ast.AnnAssign(target=ast.Attribute(attr=name), value=value)
            | ast.Assign(targets=[ast.Attribute(attr=name)], value=value)
        ):
            yield name, value
        case _:
            pass


def _is_size(value: object) -> bool:
    """Whether a literal is a number that no rank has before it is known."""
    if isinstance(value, str) and value.isascii() and value.removeprefix("-").isdecimal():
        return len(value) > _MAX_DIGITS or int(value) not in (-1, 0)
    return isinstance(value, int) and not isinstance(value, bool) and value not in (-1, 0)
