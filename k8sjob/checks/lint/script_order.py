"""Checks of orders that come from hashes: those of sets of texts differ in each process."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from k8sjob.rules import Hit, Rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.checks.lint.script_facts import Script

RULES: Final = Rules["Script"]("script")

_REGISTERS: Final = frozenset(
    {"setattr", "register_buffer", "register_parameter", "register_module", "add_module"}
)
_MODULES: Final = frozenset({"ModuleDict", "ModuleList", "ParameterDict", "ParameterList"})
_KEEP_ORDER: Final = frozenset({"enumerate", "iter", "list", "tuple", "tqdm"})
_FILES: Final = frozenset({"glob", "iglob", "iterdir", "listdir", "rglob", "scandir"})
_TEXTS: Final = _FILES | {"basename", "format", "join", "lower", "split", "splitlines", "strip"}


@RULES.warning
def _order_by_hash(script: Script) -> Iterator[Hit]:
    """Python hashes texts with a seed of each process, so sets of them have no common order."""
    for node in script.nodes:
        place: ast.expr | None = None
        match node:
            case ast.For(iter=items) if _registers(script, node):  # by names, so by texts
                place = items if _set(script, items) else None
            case ast.Call(args=[ast.DictComp() | ast.ListComp() as made, *_]):
                items = made.generators[0].iter
                named = isinstance(made, ast.DictComp) or _holds(script, items, _TEXTS)
                in_order = named and script.last_name(node) in _MODULES
                place = items if in_order and _set(script, items) else None
            case ast.Call(func=ast.Name(id="enumerate"), args=[items, *_]):
                place = items if _set(script, items) and _holds(script, items, _TEXTS) else None
            case ast.Call(func=ast.Name(id="list" | "tuple"), args=[items]):
                place = items if _set(script, node) and _holds(script, items, _FILES) else None
            case ast.BinOp(left=ast.Call(func=ast.Name(id="hash"), args=[item]), op=ast.Mod()):
                around = [parent for _, parent in script.ancestors(node)][:2]
                divides = any(isinstance(one, ast.Compare) for one in around[:1])
                is_text = divides and script.ranks.made_of_rank(around[0])
                seeds = any("seed" in ast.unparse(parent).lower() for parent in around)
                is_text |= _holds(script, item, _TEXTS) and not seeds
                place = node.left if is_text else None
            case _:
                pass
        if place is not None:
            yield script.at(
                place,
                f"the order or number that `{ast.unparse(place)}` gives comes from hashes of texts:"
                " it differs in each process and each run unless all have one PYTHONHASHSEED, and "
                "ranks exchange values that do not belong together, silently; write sorted(...), "
                "or zlib.crc32 instead of hash",
            )


def _registers(script: Script, loop: ast.For) -> bool:
    """Whether a loop registers parts of a model under the names that it is over."""
    names = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
    calls = (node for stmt in loop.body for node in ast.walk(stmt) if isinstance(node, ast.Call))
    return script.class_of(loop) is not None and any(
        isinstance(part, ast.Name) and part.id in names
        for call in calls
        if script.last_name(call) in _REGISTERS
        for argument in call.args[:2]
        for part in ast.walk(argument)
    )


def _set(script: Script, node: ast.expr) -> bool:
    """Whether an expression certainly has the order of a set."""
    match node:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset"), args=[_]):
            return True
        case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() | ast.Sub()):
            return _set(script, left)
        case ast.Call(args=[inner, *_]) if script.last_name(node) in _KEEP_ORDER:
            return _set(script, inner) and not _is_sorted(script, node)
        case _:
            origins = [one for one in script.values.origins(node) if one is not node]
            return bool(origins) and all(_set(script, one) for one in origins)


def _is_sorted(script: Script, node: ast.expr) -> bool:
    """Whether a list is put in order, or only counted: here, or where its variable is used."""
    parent = script.parent(node)
    targets = parent.targets if isinstance(parent, ast.Assign) else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    uses = [use.value for use in script.uses("sort") if isinstance(use, ast.Attribute)]
    uses += [argument for call in script.method_calls("sorted", "len") for argument in call.args]
    return node in uses or any(isinstance(use, ast.Name) and use.id in names for use in uses)


def _holds(script: Script, node: ast.expr, makers: frozenset[str]) -> bool:
    """Whether a collection, or an item, is certainly of texts: literals, or what makers return."""
    match node:
        case ast.Set(elts=items) | ast.List(elts=items) | ast.Tuple(elts=items):
            return any(_holds(script, item, makers) for item in items)
        case ast.SetComp(elt=item) | ast.ListComp(elt=item) | ast.GeneratorExp(elt=item):
            return _holds(script, item, makers)
        case ast.BinOp(left=item) | ast.Call(func=ast.Name(), args=[*_, item]):
            is_text = isinstance(node, ast.Call) and script.last_name(node) in {*makers, "str"}
            return is_text or _holds(script, item, makers)
        case ast.Constant(value=str()) | ast.JoinedStr():
            return makers is _TEXTS
        case ast.Call():
            return script.last_name(node) in makers
        case _:
            origins = [one for one in script.values.origins(node) if one is not node]
            return any(_holds(script, one, makers) for one in origins)
