"""The ranks that reach a line, by the values of conditions on rank 0 and on rank 1.

Every job of several processes has these two. For findings a condition must be certain (`truth`).
Where it would excuse what is found, whatever looks like a rank counts (`mentioned_in`), because a
finding that is not true costs more than one that is missed.
"""

from __future__ import annotations

import ast
import operator
import re
from contextlib import suppress
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Final

from k8sjob.checks.lint.script_code import Guard, constant, defaults, keyword

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from k8sjob.checks.lint.script_code import Code
    from k8sjob.checks.lint.script_origins import Origins

Truth = tuple[bool | None, ...]
"""The value of a test on each of RANKS; None: not known."""

RANKS: Final = (0, 1)
_UNKNOWN: Final[Truth] = (None, None)
_WORLD: Final = 1000
"""Names for the number of processes, nodes or GPUs: a test asks if there are several."""
_RANK: Final = re.compile(
    r"_?((global|world|local|node|ddp|dist|ddp_local|process|proc|my|cur|current|worker|host)_?)?"
    r"(rank|rank_id)|process_index|local_process_index|(get_)(global_|local_|node_)?rank",
    re.IGNORECASE,
)
_MAIN: Final = re.compile(
    r"_?(is|am|on)_(the_)?((local|global|world)_)?((main|master|primary|chief|leader|coordinator"
    r"|rank_?(0|zero)|(process_)?zero)(_(process|proc|rank|worker|node|device))?(_zero)?"
    r"|(root|first)_(process|proc|rank|worker))"
    r"|_?(main|master|primary)_(process|proc|rank)(_only)?|rank_?zero(_only)?|is_global_zero",
    re.IGNORECASE,
)
_COUNT: Final = re.compile(
    r"world_?size|(num|n)_?(gpus?|procs?|processes|nodes|replicas|ranks)", re.IGNORECASE
)
_SEVERAL: Final = re.compile(
    r"distributed|^(is_|use_)?(dist|ddp|fsdp|parallel)$|multi_?(gpu|proc|node)|initialized"
    r"|is_available",
    re.IGNORECASE,
)
"""Whether there are several processes, and a group of them."""
_RANK_NAME: Final = re.compile(
    r"rank|main|master|primary|chief|leader|coordinator|writer|zero|gpu|proc|(worker|device|node)_id",
    re.IGNORECASE,
)
_VARIABLES: Final = "RANK LOCAL_RANK GROUP_RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK"
_RANK_VARIABLES: Final = frozenset(_VARIABLES.split())
_OWN: Final = re.compile(
    r"socket\.(gethostname|getfqdn)|platform\.(node|uname)|os\.(getpid|uname)|uuid\.uuid[14]"
    r"|tempfile\.(mk[ds]temp|\w*Temporary\w+)"
)
"""Functions whose result differs in each process, like the rank."""
_PATHS: Final = re.compile(
    r"os\.path\.\w+|os\.fspath|(pathlib\.)?(Pure|Posix)*Path|str"
    r"|.*\.(format|join|joinpath|with_name|with_stem|with_suffix)"
)
"""Functions that return a text or a path made of their arguments."""
_NO_SIZE: Final = (None, -1, 0)
"""The values that a rank may have before it is known."""
_MAX_DEPTH: Final = 6
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
    """The ranks that the conditions of a program let through."""

    def __init__(self, code: Code, origins: Origins) -> None:
        self._code, self._origins = code, origins
        self._about_rank: dict[ast.expr, bool] = {}
        self._truths: dict[ast.expr | None, Truth] = {}
        self._guards: dict[ast.AST, list[Guard]] = {}

    def truth(self, test: ast.expr | None) -> Truth:
        """The value of a test on rank 0 and on rank 1, if there are several processes."""
        if test not in self._truths:
            self._truths[test] = _UNKNOWN  # where it is nested too deep to be followed
            with suppress(RecursionError):
                self._truths[test] = self._truth(test)
        return self._truths[test]

    def _truth(self, test: ast.expr | None, depth: int = 0) -> Truth:
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return tuple(
                    one if one is None else not one for one in self._truth(inner, depth + 1)
                )
            case ast.BoolOp(op=op, values=values):
                decides = isinstance(op, ast.Or)
                given = zip(*(self._truth(value, depth + 1) for value in values), strict=True)
                return tuple(
                    decides if decides in one else None if None in one else not decides
                    for one in given
                )
            case ast.NamedExpr(value=inner):
                return self._truth(inner, depth + 1)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compared(left, _OPERATORS[type(op)], right, depth)
            case ast.Name() | ast.Attribute() | ast.Call() | ast.Constant() if depth < _MAX_DEPTH:
                return self._named(test, depth)
            case _:
                return _UNKNOWN

    def _compared(
        self, left: ast.expr, compare: Callable[[Any, Any], bool], right: ast.expr, depth: int
    ) -> Truth:
        one, other = self._numbers(left, depth), self._numbers(right, depth)
        if one is None or other is None:
            return _UNKNOWN
        with suppress(TypeError):  # a number is compared with a list
            return tuple(compare(*pair) for pair in zip(one, other, strict=True))
        return _UNKNOWN

    def _numbers(self, node: ast.expr, depth: int = 0) -> Sequence[Any] | None:
        """The value of a number, or of a list of numbers, on each of RANKS; None: not known."""
        with suppress(ValueError, TypeError, SyntaxError):
            literal = ast.literal_eval(node)
            several = isinstance(literal, tuple | list | set)
            numbers = [_whole(one) for one in (literal if several else [literal])]
            return None if None in numbers else [numbers if several else numbers[0]] * len(RANKS)
        if self._is_rank(node, depth):
            return RANKS
        if isinstance(node, ast.Call) and self._code.name(node.func) == "int" and node.args:
            return self._numbers(node.args[0], depth)
        name = self.variable(node) or self._last_name(node)
        return (_WORLD, _WORLD) if _COUNT.search(name) else None

    def _last_name(self, node: ast.expr) -> str:
        return self._code.last_name(node.func if isinstance(node, ast.Call) else node)

    def variable(self, node: ast.expr) -> str:
        """The environment variable that an expression reads; empty if it is none."""
        match node:
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                reads = self._code.name(function) in ("os.environ.get", "os.getenv")
            case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
                reads = self._code.name(value) == "os.environ"
            case _:
                return ""
        return name if reads else ""

    def _is_rank(self, node: ast.expr, depth: int = 0) -> bool:
        """Whether a value is the rank: by its name, by the call, or by the environment."""
        match node:
            case ast.Name() | ast.Attribute():
                return self._holds_rank(node, depth)
            case (
                ast.Call(func=ast.Name(id="int"), args=[inner])
                | ast.IfExp(body=inner)
                | ast.NamedExpr(value=inner)
            ):
                return self._is_rank(inner, depth + 1)
            case ast.Call() | ast.Subscript() if name := self.variable(node):
                return name in _RANK_VARIABLES
            case ast.Call():
                return bool(_RANK.fullmatch(self._last_name(node)))
            case _:
                return False

    def _holds_rank(self, node: ast.Name | ast.Attribute, depth: int) -> bool:
        name = node.id if isinstance(node, ast.Name) else node.attr
        named = bool(_RANK.fullmatch(name)) and name not in self._sizes
        if values := self._code.values(node):
            if named and any(not isinstance(value, ast.Constant) for value in values):
                return True
            return depth < _MAX_DEPTH and all(self._is_rank(value, depth + 1) for value in values)
        found = self._code.variable(node)
        return named and not (found and found.unknown)

    @cached_property
    def _sizes(self) -> frozenset[str]:
        """Names that get a number which no rank has by default: `rank=8` is a matrix's."""
        given = (pair for node in self._code.nodes for pair in _with_defaults(node))
        return frozenset(name for name, value in given if _whole(constant(value)) not in _NO_SIZE)

    def _named(self, node: ast.expr, depth: int) -> Truth:
        """A rank, or a variable or a function that says something about it, or a literal."""
        if isinstance(node, ast.Constant):
            return (node.value, node.value) if isinstance(node.value, bool) else _UNKNOWN
        if self._is_rank(node, depth):
            return tuple(bool(rank) for rank in RANKS)
        values = self._code.values(node)
        known = {self.truth(value) for value in values}
        if several := [one for one in known if one[0] != one[1]]:
            return several[0] if len(several) == 1 else _UNKNOWN
        name = self._last_name(node)
        if _MAIN.fullmatch(name):
            about = any(self.mentioned_in(one) or self.only_some_reach(one) for one in values)
            return (True, False) if about or not values else _UNKNOWN
        return (True, True) if _SEVERAL.search(name) else _UNKNOWN

    def guards(self, node: ast.AST) -> list[Guard]:
        """The conditions on a node, decorators like `@rank_zero_only` included."""
        if node not in self._guards:
            says = [one for one in self._code.contexts(node) if len(set(self.truth(one))) > 1]
            more = [Guard(one, holds=True, where="under `{}`") for one in says]
            self._guards[node] = [*self._code.guards(node), *more]
        return self._guards[node]

    def mentioned_in(self, node: ast.AST | None) -> bool:
        """Whether an expression seems to depend on the rank, or on the process otherwise."""
        for part in ast.walk(node) if node else ():
            match part:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    if _RANK_NAME.search(name) or self._is_about_rank(part):
                        return True
                case ast.Call() if self._is_about_rank(part):
                    return True
                case ast.Constant(value=str(text)) if "RANK" in text or text == "HOSTNAME":
                    return True
                case _:
                    pass
        return False

    def _is_about_rank(self, use: ast.expr) -> bool:
        """`first = rank == 0`; not `model.to(rank)`, which is a model."""
        if use not in self._about_rank:
            self._about_rank[use] = False  # for one that is made of itself
            with suppress(RecursionError):
                values = self._code.values(use) or self._passed_values(use)
                own = isinstance(use, ast.Call) and _OWN.fullmatch(self._code.name(use.func))
                self._about_rank[use] = (
                    self._is_rank(use) or bool(own) or any(map(self._says_rank, values))
                )
        return self._about_rank[use]

    def _says_rank(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Call) and not _PATHS.fullmatch(self._code.name(value.func)):
            return self._is_about_rank(value)
        return self.mentioned_in(value)

    def _passed_values(self, use: ast.expr) -> list[ast.expr]:
        """The values that the program is known to pass as a parameter."""
        found = self._code.variable(use)
        if not isinstance(use, ast.Name) or not found or not found.parameter_of:
            return []
        return list(filter(None, self._origins.passed(found.parameter_of, use.id)))

    def only_some_reach(self, node: ast.AST) -> bool:
        """Whether only some ranks seem to come to a line, or to have an object of its class."""

        @cache
        def selected(place: ast.AST) -> bool:
            tests = [guard.test for guard in self._code.guards(place)]
            return any(map(self.mentioned_in, (*tests, *self._code.contexts(place))))

        def of_some(place: ast.AST) -> bool:
            parents = (parent for _, parent in self._code.ancestors(place))
            owner = next((one for one in parents if isinstance(one, ast.ClassDef)), None)
            uses = self._code.uses(owner.name) if owner else ()
            parents_of = ((use, next(self._code.ancestors(use))[1]) for use in uses)
            made = [one for use, one in parents_of if isinstance(one, ast.Call) and one.func is use]
            return bool(made) and all(self._code.always(one, selected) for one in made)

        return self._code.always(node, lambda place: selected(place) or of_some(place))


def _with_defaults(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names of parameters, attributes and options, with what they are by default."""
    match node:
        case ast.arguments():
            yield from defaults(node).items()
        case ast.Call(args=args, keywords=keywords):
            yield from ((one.arg or "", one.value) for one in keywords)
            texts = [text for one in args if isinstance(text := constant(one), str)]
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


def _whole(value: object) -> int | None:
    """The number that a literal is, or has as text; None for others."""
    text = str(value)
    is_number = isinstance(value, int | str) and text.removeprefix("-").isdecimal()
    return int(text) if is_number and text.isascii() else None
