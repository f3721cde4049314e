"""Checks of orders that come from hashes: those of sets of texts differ in each process."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from k8sjob.checks.scripts.code import followed, once
from k8sjob.checks.scripts.values import of_origins
from k8sjob.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.checks.scripts.facts import Script
    from k8sjob.findings import Finding

RULES: Final = Rules["Script"]("script")

_REGISTERS: Final = frozenset({"register_buffer", "register_parameter", "add_module"})
_MODULES: Final = frozenset({"ModuleDict", "ParameterDict"})
_KEEP_ORDER: Final = frozenset({"enumerate", "iter", "list", "tuple", "tqdm"})
_FILES: Final = frozenset({"glob", "iglob", "iterdir", "listdir", "rglob", "scandir"})
_TEXTS: Final = _FILES | {"basename", "format", "join", "lower", "split", "splitlines", "str"}
_NUMBERS: Final = frozenset({"float", "int", "len"})


@RULES.warning
def _order_by_hash(script: Script) -> Iterator[Finding]:
    """Python hashes texts with a seed of each process, so sets of them have no common order."""
    for node in script.nodes:
        place: ast.expr | None = None
        match node:
            case ast.For(iter=items) if _registers(script, node):  # by names, so by texts
                place = items
            case ast.Call(args=[ast.DictComp() as entries]) if script.last_name(node) in _MODULES:
                place = entries.generators[0].iter
            case ast.Call(func=ast.Name(id="enumerate" | "list" | "tuple" as name), args=[items]):
                makers = _TEXTS if name == "enumerate" else _FILES
                if _holds(script, items, makers) and not _is_sorted(script, node):
                    place = items
            case ast.BinOp(left=ast.Call(func=ast.Name(id="hash"), args=[item]), op=ast.Mod()):
                around = [parent for _, parent in script.ancestors(node)][:2]
                seeds = any(_names_seed(script, parent) for parent in around)
                # `hash(x) % world == rank` shares data out; only an integer is its own hash.
                divides = isinstance(around[0], ast.Compare) and script.made_of_rank(around[0])
                of_texts = _holds(script, item, _TEXTS) and not seeds
                if of_texts or (divides and not _is_counted(script, item)):
                    yield _hit(script, node.left)
            case _:
                pass
        if place is not None and _is_set(script, place):
            yield _hit(script, place)


def _hit(script: Script, place: ast.expr) -> Finding:
    return script.at(place, "order-by-hash", place=script.shown(place))


@followed(unknown=False)
def _names_seed(script: Script, node: ast.AST) -> bool:
    return "seed" in script.unparsed(node).lower()


def _is_counted(script: Script, item: ast.expr) -> bool:
    """Whether a value certainly is an integer, which is its own hash: by its maker or its loop."""
    if names := script.makers(item):
        return set(names) <= _NUMBERS
    for _, parent in script.ancestors(item):
        for loop in (parent, *getattr(parent, "generators", ())):
            match loop:
                case (
                    ast.For(target=target, iter=ast.Call(func=ast.Name(id=maker)))
                    | ast.comprehension(target=target, iter=ast.Call(func=ast.Name(id=maker)))
                ):
                    first = target.elts[0] if isinstance(target, ast.Tuple) else target
                    counts = "range" if first is target else "enumerate"
                    if script.unparsed(first) == script.unparsed(item):
                        return maker == counts
                case _:
                    pass
    return False


def _registers(script: Script, loop: ast.For) -> bool:
    """Whether a loop registers parts of a model; setattr does so only in a Module."""
    owner = script.class_of(loop)
    is_module = any(script.last_name(base) == "Module" for base in (owner.bases if owner else ()))
    called = {script.last_name(part) for part in ast.walk(loop) if isinstance(part, ast.Call)}
    return bool(called & _REGISTERS) or (is_module and "setattr" in called)


@of_origins(unknown=False, join=all)
def _is_set(script: Script, node: ast.expr) -> bool:
    """Whether an expression certainly has the order of a set."""
    match node:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset"), args=[_]):
            return True
        case ast.BinOp(left=operand, op=ast.BitOr() | ast.BitAnd() | ast.Sub()):
            return _is_set(script, operand)
        case ast.Call(args=[inner, *_]) if script.last_name(node) in _KEEP_ORDER:
            return _is_set(script, inner) and not _is_sorted(script, node)
        case _:
            return False


def _is_sorted(script: Script, node: ast.expr) -> bool:
    """Whether a list is put in order, or only counted: here, or where its variable is used."""
    parent = script.parent(node)
    name = script.unparsed(parent.targets[0]) if isinstance(parent, ast.Assign) else ""
    nodes, texts = _sorting(script)
    return node in nodes or not texts.isdisjoint((name, f"{name}.sort"))


@once
def _sorting(script: Script) -> tuple[set[ast.expr], set[str]]:
    """What is put in order or counted, and its source."""
    calls = script.method_calls("sort", "sorted", "len")
    nodes = {use for call in calls for use in (*call.args, call.func)}
    return nodes, set(map(script.unparsed, nodes))


def _holds(script: Script, node: ast.expr, makers: frozenset[str]) -> bool:
    """Whether a value is made of texts that some functions return, and not of numbers."""
    names = _called(script, node)
    return bool(names & makers) and not names & _NUMBERS


@followed(frozenset[str]())
def _called(script: Script, node: ast.expr) -> frozenset[str]:
    """What is called for a value, of the names that matter; `str` for a text that stands there."""
    names = set[str]()
    for part in ast.walk(node):
        match part:
            case ast.Call():
                names.update({script.last_name(part)} & (_TEXTS | _NUMBERS))
            case ast.JoinedStr() | ast.Set(elts=[ast.Constant(value=str()), *_]):
                names.add("str")
            case ast.Name():
                names.update(*(_called(script, origin) for origin in script.origins(part)))
            case _:
                pass
    return frozenset(names)
