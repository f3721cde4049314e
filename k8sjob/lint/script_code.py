"""A parsed script: what a name means, and on which ranks a line runs.

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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Code", "Function", "is_main_guard"]

Function = ast.FunctionDef | ast.AsyncFunctionDef

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
_LEAVES: Final = (ast.Return, ast.Continue, ast.Break, ast.Raise)


class Code:
    """A module, its names and its ways.

    Attributes:
        tree: the module.
        aliases: what each imported name stands for.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.aliases = dict(_imports(tree))
        self._parents = {
            child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }

    def name(self, node: ast.AST) -> str:
        """The dotted name of an expression, imports followed: `torch.distributed.barrier`.

        What is no name gives "", and an attribute of such a thing `.attribute`.
        """
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.name(node.value)}.{node.attr}"
        return ""

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
        for node in ast.walk(self.tree):
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
        for node in ast.walk(self.tree):
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


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
