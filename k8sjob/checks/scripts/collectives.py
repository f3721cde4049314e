"""Checks of collectives that only some ranks reach, through the program's own functions too.

Collectives are the calls that every rank must make: torch's, accelerate's, Lightning's, and
those of k8sjob's session. A line is looked at for rank 0 and for rank 1: a call that one of them
comes to and the other does not is found, unless the other comes to the same one elsewhere.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.checks.finding import table
from k8sjob.checks.scripts.code import followed, keyword, once
from k8sjob.checks.scripts.facts import MAKES_GROUP
from k8sjob.checks.scripts.modules import Function
from k8sjob.checks.scripts.ranks import RANKS
from k8sjob.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k8sjob.checks.scripts.facts import Script
    from k8sjob.checks.scripts.paths import Guard
    from k8sjob.findings import Finding

RULES: Final = Rules["Script"]("script")

_MAKES_GROUP: Final = "init_process_group"
_TORCH: Final = {
    name: int(at) if at.isdecimal() else None
    for at, names in table("collectives").items()
    for name in names.split()
}
"""Functions of torch.distributed, with the position of their argument `group`."""
_CHECKPOINTS: Final = frozenset({"save", "load", "async_save", "save_state_dict"})
_FORWARD: Final = "forward"
"""The call of a DistributedDataParallel model: it communicates if the model has buffers."""
_NO_PLACES: Final = (ast.Lambda, ast.ExceptHandler)
"""Code that runs later, or only when something has failed."""

_Reached = dict[str, str]
"""Collectives with the function that leads to them; empty: they are called directly."""


class _Place(NamedTuple):
    """A collective at a line that depends on the rank.

    Attributes:
        rank: the one of RANKS that comes to the line; None: that is not known.
        certain: whether who comes to the line certainly comes to the collective.
        function: what the line is in.
    """

    name: str
    via: str
    call: ast.Call
    guards: Sequence[Guard]
    rank: int | None
    certain: bool
    function: ast.AST

    def is_met(self, ranks: set[int | None]) -> bool:
        """Whether another rank may call the same, of those that do so."""
        return None in ranks or bool(ranks - {self.rank})


class _Reach:
    def __init__(self, script: Script) -> None:
        self._script, self._ranks = script, script.ranks
        self.calls: dict[ast.AST, list[ast.Call]] = {}
        """Calls by the function that they are in, or else the module."""
        for _, call in script.calls:
            function = script.function(call)
            around = (node for _, node in script.around(call) if isinstance(node, _NO_PLACES))
            if all(script.function(node) is not function for node in around):
                self.calls.setdefault(function or script.module(call).tree, []).append(call)

    def reaches(self, guards: Iterable[Guard], rank: int, *, certain: bool) -> bool:
        """Whether a rank comes to a line: certainly, or perhaps."""
        for guard in guards:
            holds = self._ranks.truth(guard.test)[rank]
            if holds is not guard.holds and (certain or holds is not None):
                return False
        return True

    def of(self, call: ast.Call, rank: int, *, certain: bool) -> _Reached:
        """The collectives that a call reaches: certainly, or perhaps."""
        function = self._callee(call)
        if not isinstance(function, Function):
            return {function: ""} if function else {}
        return dict.fromkeys(self._inside((function, rank, certain)), function.name)

    @followed({})
    def _inside(self, way: tuple[Function, int, bool]) -> _Reached:
        function, rank, certain = way
        inside: _Reached = {}
        for call in self.calls.get(function, ()):
            reached = self.of(call, rank, certain=certain)
            if reached and self.reaches(self._ranks.guards(call), rank, certain=certain):
                inside = reached | inside
        return inside

    @followed("")
    def _callee(self, call: ast.Call) -> str | Function | None:
        """The collective that a call is, or the function of the program that it runs."""
        called, origins = call.func, self._script.origins(call.func)
        if len(origins) == 1 and isinstance(origins[0], ast.Name | ast.Attribute):
            called = origins[0]  # `wait = dist.barrier`
        return self._collective(call, called) or self._function(called)

    def _function(self, called: ast.expr) -> Function | None:
        """The program's own function that a call runs."""
        script, function = self._script, self._script.definition(called)
        if isinstance(function, ast.ClassDef):
            return script.method(function, "__init__")
        if function is None and (owner := script.instance(called)):
            # torch calls the forward of a module that is called.
            return script.method(owner, "__call__") or script.method(owner, "forward")
        return function

    def _collective(self, call: ast.Call, called: ast.expr) -> str:
        """The name of what all ranks must call together, if a call of this is that; else empty."""
        name = self._script.name(called)
        if name.startswith("torch.distributed."):
            return _of_torch(name, call)
        kind = self._script.kind
        if isinstance(called, ast.Attribute) and called.attr in _all_call(kind(called.value)):
            return called.attr
        is_model = not isinstance(called, ast.Call) and _FORWARD in _all_call(kind(called))
        return _FORWARD if is_model else ""


def _all_call(kind: str) -> Sequence[str]:
    return table("methods").get(kind, "").split()


def _of_torch(name: str, call: ast.Call) -> str:
    last = name.rpartition(".")[2]
    if last in MAKES_GROUP:
        return _MAKES_GROUP
    if ".checkpoint." in name:
        # With a group of its own, or with none, not all ranks take part.
        alone = keyword(call, "process_group") or keyword(call, "no_dist")
        return last if last in _CHECKPOINTS and alone is None else ""
    return last if last in _TORCH and not _in_subgroup(last, call) else ""


def _in_subgroup(name: str, call: ast.Call) -> bool:
    """Whether a collective is given a group, which may have only these ranks."""
    position = _TORCH[name]
    group = keyword(call, "group", position) if position is not None else None
    if group is None or (isinstance(group, ast.Constant) and group.value is None):
        return False
    # dist.group.WORLD is the group of all ranks.
    return not ast.unparse(group).endswith("WORLD")


def _places(script: Script) -> Iterator[_Place]:
    """Every collective at a line that depends on the rank, but where some ranks make a group."""
    reach, ranks = _Reach(script), script.ranks
    for function, calls in reach.calls.items():
        places: list[_Place] = []
        for call in calls:
            possible = reach.of(call, 0, certain=False) | reach.of(call, 1, certain=False)
            guards = ranks.guards(call) if possible else []
            come = [rank for rank in RANKS if reach.reaches(guards, rank, certain=False)]
            unclear = any(
                None in ranks.truth(g.test) and ranks.mentioned_in(g.test) for g in guards
            )
            if len(come) == 1 or (come and unclear):
                rank = come[0] if len(come) == 1 else None
                certain = reach.of(call, rank, certain=True) if rank is not None else {}
                places += [
                    _Place(name, via, call, guards, rank, name in certain, function)
                    for name, via in possible.items()
                ]
        if all(place.name != _MAKES_GROUP for place in places):
            yield from places


@once
def _one_sided(script: Script) -> Sequence[tuple[_Place, str]]:
    """The collectives that one rank comes to and another does not, with what decides it."""
    setting = script.setting
    if setting.processes == 1:
        return ()
    places = list(_places(script))
    in_function, anywhere = (defaultdict[Any, set[int | None]](set) for _ in range(2))
    # A collective of one side is met where another rank comes to the same one: in the same
    # function, as in the `else`, or else anywhere in the program.
    for place in places:
        in_function[place.function, place.name].add(place.rank)
    free = [place for place in places if not place.is_met(in_function[place.function, place.name])]
    for place in free:
        anywhere[place.name].add(place.rank)
    lonely = [place for place in free if place.certain and not place.is_met(anywhere[place.name])]
    reasons = [(place, _where(script, place)) for place in lonely]
    # With one process in each pod all have the local rank 0.
    alone = setting.processes is not None and setting.processes == setting.nodes
    return [(place, where) for place, where in reasons if not (alone and "local" in where)]


def _where(script: Script, place: _Place) -> str:
    for guard in place.guards:
        truth = script.ranks.truth(guard.test)
        if guard.test and truth[place.rank == 0] is (not guard.holds):
            return guard.where.format(script.shown(guard.test))
    return ""


@RULES.error
def _collective_on_one_rank(script: Script) -> Iterator[Finding]:
    """A collective returns when every rank has called it; if only some do, it never does."""
    for place, where in _one_sided(script):
        if place.name == _FORWARD:
            continue
        name, via = place.name, place.via
        subject = f"{via} calls {name}, a collective, and" if via else f"{name} is a collective and"
        yield script.at(place.call, "collective-on-one-rank", subject=subject, where=where)


@RULES.warning
def _forward_on_one_rank(script: Script) -> Iterator[Finding]:
    """The forward pass of DistributedDataParallel broadcasts buffers, even under no_grad."""
    for place, where in _one_sided(script):
        if place.name == _FORWARD:
            yield script.at(place.call, "forward-on-one-rank", where=where)


@RULES.error
def _group_differs_by_rank(script: Script) -> Iterator[Finding]:
    """All ranks call new_group in one order with the same list, whether they are in it or not."""
    calls = [] if script.setting.processes == 1 else script.torch_calls("new_group")
    lonely = {place.call for place, _ in _one_sided(script)} if calls else set()
    opposites = defaultdict[str, set[_Way]](set)
    for call in calls:
        opposites[script.unparsed(call)] |= _opposites(script, [call])
    for call in calls:
        ranks = keyword(call, "ranks", 0)
        # Groups of one rank have nobody to confuse; local synchronization is made for such lists.
        alone = isinstance(ranks, ast.List) and len(ranks.elts) == 1
        if call in lonely or alone or keyword(call, "use_local_synchronization"):
            continue
        guards = [guard for guard in script.guards(call) if _selects(script, guard.test)]
        if ranks is not None and script.made_of_rank(ranks):
            reason = f"`{script.shown(ranks)}` is another list on other ranks"
        elif guards and guards[0][:2] not in opposites[script.unparsed(call)]:
            test = script.shown(guards[0].test or call)
            reason = f"only the ranks come here that `{test}` selects"
        else:
            continue
        yield script.at(call, "group-differs-by-rank", reason=reason)


def _selects(script: Script, test: ast.AST | None) -> bool:
    """Whether a condition holds on some ranks, perhaps on both rank 0 and rank 1."""
    match test:
        case ast.Compare(left=operand, ops=[ast.In() | ast.NotIn()], comparators=[right]):
            listed = getattr(right, "elts", ())
            selects = not listed or len(listed) != script.setting.processes
        case ast.Compare(left=operand, comparators=[ast.Constant(value=int(bound))]):
            selects = bound > 0  # `rank >= 0` and `rank != -1` ask whether there is a group
        case _:
            return False
    return selects and script.is_rank(operand)


_Way = tuple[ast.expr | None, bool]
"""A test, and whether it holds."""


def _opposites(script: Script, calls: Iterable[ast.Call]) -> set[_Way]:
    """The conditions under which some of several calls do not run."""
    return {(guard.test, not guard.holds) for call in calls for guard in script.guards(call)}


_ROOTED: Final = re.compile(
    r"torch\.distributed\.(broadcast|gather|reduce|scatter)(_object|_object_list)?"
)
"""Collectives with one rank that sends or receives: `src` or `dst`, before `group`."""


@RULES.error
def _root_differs_by_rank(script: Script) -> Iterator[Finding]:
    """All ranks name the same source or destination; its own rank is another one on each."""
    opposites: dict[str, set[_Way]] = {}
    for path, call in script.calls if script.setting.processes != 1 else ():
        name = script.last_name(call.func)
        if not _ROOTED.fullmatch(path) or name not in _TORCH:
            continue
        position = 1 if name == "reduce" else (_TORCH[name] or 0) - 1
        root = keyword(call, "src", position) or keyword(call, "dst")
        alone = _in_subgroup(name, call) or script.ranks.only_some_reach(call)
        # The rank that has a value sends it, and the others name that rank.
        if name not in opposites:
            opposites[name] = _opposites(script, script.method_calls(name))
        alone |= any(guard[:2] in opposites[name] for guard in script.guards(call))
        if root is not None and script.is_rank(root) and not alone:
            yield script.at(root, "root-differs-by-rank", root=script.shown(root), name=name)
