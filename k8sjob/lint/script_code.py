"""A parsed program, a script with its local modules: what a name means, and where a line stands.

Names are followed through the imports (`dist.all_reduce` is `torch.distributed.all_reduce`), and
"only some ranks come here" is decided generously: whatever looks like a test of the rank counts as
one, because a finding that is not true costs more than one that is missed.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cached_property
from typing import TYPE_CHECKING, Final

from k8sjob.lint.modules import Definition, Function, Module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Code", "is_main_guard"]

_RANKISH: Final = re.compile(
    r"rank|main|master|primary|chief|leader|coordinator|writer|zero|gpu|proc|(worker|device|node)_id",
    re.IGNORECASE,
)
_RANKISH_FUNCTION: Final = re.compile(
    r"rank|main_process|master_only|on_master|zero_only", re.IGNORECASE
)
_PLAIN_CALLS: Final = frozenset(
    {
        "int",
        "bool",
        "str",
        "get",
        "getenv",
        "get_rank",
        "get_world_size",
        "is_available",
        "is_initialized",
    }
)
"""Calls through which a value still is the rank, or a yes or no about it."""
_MAX_HOPS: Final = 20
"""Imports from one local module into another that a name is followed through."""
_LEAVES: Final = (ast.Return, ast.Continue, ast.Break, ast.Raise)


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
        """The module that a node stands in."""
        return self._home.get(node, self.files[0])

    # --- where a node stands --------------------------------------------------------------------

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
        return self._always_passes(node, lambda _, parent: _is_condition(parent))

    def _always_passes(self, node: ast.AST, passed: Callable[[ast.AST, ast.AST], bool]) -> bool:
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

    # --- ranks ----------------------------------------------------------------------------------

    @cached_property
    def _rank_names(self) -> frozenset[str]:
        """Variables and functions whose value is the rank or says something about it."""
        values = defaultdict(list)
        for node in self.nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        values[self.name(target)].append(value)
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    values[self.name(target)].append(value)
                case ast.FunctionDef(name=name):
                    returns = (n.value for n in ast.walk(node) if isinstance(n, ast.Return))
                    values[name] += [value for value in returns if value is not None]
                case _:
                    pass
        names: set[str] = set()
        while True:
            more = {
                name
                for name, given in values.items()
                if name and name not in names and any(self._is_about_rank(v, names) for v in given)
            }
            if not more:
                return frozenset(names)
            names |= more

    def _is_about_rank(self, value: ast.expr, names: Iterable[str]) -> bool:
        """`rank == 0`, `int(os.environ["RANK"])`; not `model.to(rank)`, which is a model."""
        called = (self.name(n.func) for n in ast.walk(value) if isinstance(n, ast.Call))
        plain = all(
            name.rpartition(".")[2] in _PLAIN_CALLS or name in names or _RANKISH.search(name)
            for name in called
        )
        return plain and self._says_rank(value, names)

    def _says_rank(self, node: ast.AST, names: Iterable[str]) -> bool:
        for part in ast.walk(node):
            match part:
                case ast.Name(id=identifier) | ast.Attribute(attr=identifier):
                    if _RANKISH.search(identifier) or self.name(part) in names:
                        return True
                case ast.Constant(value=str(text)):
                    if "RANK" in text:
                        return True
                case _:
                    pass
        return False

    def says_rank(self, node: ast.AST) -> bool:
        """Whether an expression seems to depend on the rank."""
        return self._says_rank(node, self._rank_names)

    def on_some_ranks(self, node: ast.AST) -> bool:
        """Whether only some ranks seem to come here."""
        return self._always_passes(node, self._selects_ranks)

    def _selects_ranks(self, child: ast.AST, parent: ast.AST) -> bool:
        match parent:
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                if child is not test and not is_main_guard(parent) and self.says_rank(test):
                    return True
            case ast.BoolOp(values=values):
                return any(self.says_rank(value) for value in values if value is not child)
            case ast.With(items=items):
                if any(self.says_rank(item.context_expr) for item in items):
                    return True
            case ast.FunctionDef(name=name, decorator_list=decorators):
                if _RANKISH_FUNCTION.search(name) or any(map(self.says_rank, decorators)):
                    return True
            case _:
                pass
        return self._after_the_others_left(child, parent)

    def _after_the_others_left(self, child: ast.AST, parent: ast.AST) -> bool:
        """`if rank != 0: return` among the statements before this one."""
        for field in ("body", "orelse", "finalbody"):
            block = getattr(parent, field, None)
            if isinstance(block, list) and child in block:
                return any(
                    isinstance(stmt, ast.If)
                    and isinstance(stmt.body[-1], _LEAVES)
                    and self.says_rank(stmt.test)
                    for stmt in block[: block.index(child)]
                )
        return False


def is_main_guard(node: ast.AST) -> bool:
    """`if __name__ == "__main__":`, which is true in every process."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _is_condition(node: ast.AST) -> bool:
    kinds = (ast.If, ast.IfExp, ast.ExceptHandler, ast.BoolOp, ast.Match)
    return isinstance(node, kinds) and not is_main_guard(node)
