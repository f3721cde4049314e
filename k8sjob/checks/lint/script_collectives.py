"""Checks of collectives that only some ranks reach, through the program's own functions too.

Collectives are the calls that every rank must make: torch's, accelerate's, Lightning's, and
those of k8sjob's session.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from k8sjob.checks.lint.finding import Hit, Rules
from k8sjob.checks.lint.script_code import is_main_guard, parameters, returned
from k8sjob.checks.lint.script_facts import keyword
from k8sjob.checks.lint.script_modules import Definition, Function

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from k8sjob.checks.lint.script_facts import Script
    from k8sjob.checks.lint.script_ranks import Who

__all__ = ["RULES"]

RULES: Final = Rules["Script"]("script")

_FORWARD: Final = "forward"
"""The call of a DistributedDataParallel model: it communicates if the model has buffers."""
_MAKES_GROUP: Final = "init_process_group"
_GROUP_AT: Final[Mapping[int | None, str]] = {
    0: "barrier monitored_barrier",
    2: "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all broadcast "
    "broadcast_object_list",
    3: "gather gather_object reduce reduce_scatter reduce_scatter_tensor scatter "
    "scatter_object_list",
    4: "all_to_all_single",
    None: "new_group new_subgroups",
}
_TORCH: Final = {name: at for at, names in _GROUP_AT.items() for name in names.split()}
"""Functions of torch.distributed, with the position of their argument `group`."""
_CHECKPOINTS: Final = frozenset({"save", "load", "async_save", "save_state_dict"})
_SESSION: Final = (
    "all_reduce barrier broadcast fit gather load main_first prepare reduce save save_model "
    "should_stop"
)
_ACCELERATOR: Final = (
    "backward gather gather_for_metrics local_main_process_first main_process_first "
    "pad_across_processes reduce wait_for_everyone"
)
_METHODS: Final[Mapping[str, frozenset[str]]] = {
    "session": frozenset(_SESSION.split()),
    "run": frozenset({"batches", "epochs", "evaluate", "step"}),
    "accelerator": frozenset(_ACCELERATOR.split()),
    "trainer": frozenset({"evaluate", "fit", "predict", "save_checkpoint", "test", "train"}),
    "fsdp": frozenset({"state_dict", "clip_grad_norm_", _FORWARD}),
    "ddp": frozenset({_FORWARD}),
    "zero": frozenset({"consolidate_state_dict"}),
}
"""What all ranks call of an object, by its kind."""
_MAKERS: Final = (
    ("session", re.compile(r"k8sjob\.runtime\.(sessions\.)?(session|Job|job\.Job)")),
    ("run", re.compile(r"k8sjob\.runtime\.(training\.)?Run")),
    ("accelerator", re.compile(r"accelerate\.(\w+\.)*Accelerator")),
    ("trainer", re.compile(r"(lightning|pytorch_lightning|transformers|trl)\.(\w+\.)*\w*Trainer")),
    ("ddp", re.compile(r"torch\.(\w+\.)*DistributedDataParallel")),
    ("fsdp", re.compile(r"torch\.(\w+\.)*FullyShardedDataParallel")),
    ("zero", re.compile(r"torch\.(\w+\.)*ZeroRedundancyOptimizer")),
)
"""What makes an object of a kind, or is its type."""
_BY_NAME: Final = {"job": "session", "run": "run", "accelerator": "accelerator"}
"""Kinds that parameters have by their names, where the library is imported."""
_SAME: Final = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16"})
_ENDS: Final = frozenset({"sys.exit", "exit", "quit", "os._exit"})
_ONE_RANK_DECORATORS: Final = frozenset(
    {"rank_zero_only", "on_main_process", "on_local_main_process", "main_process_only"}
)
_MAX_CALLS: Final = 12
"""Calls from one function into the next that are followed."""


@dataclass(frozen=True, slots=True)
class _Reached:
    """A collective: the call here that leads to it, and the functions in between."""

    name: str
    call: ast.Call
    via: tuple[str, ...] = ()


_Found = dict[str, _Reached]
_Parts = list[ast.AST]
_Split = tuple["Who | None", str, _Parts, _Parts]
"""Who comes to a branch, how it is described, the branch, and what the others come to."""


@dataclass(frozen=True, slots=True)
class _Branch:
    """A collective that one branch of a test of the rank reaches and the other does not."""

    reached: _Reached
    who: Who | None
    where: str
    function: ast.AST


class _Kinds:
    """Which objects of a program are sessions, trainers or wrapped models: keys of _METHODS."""

    def __init__(self, script: Script) -> None:
        self._script, self._scopes = script, script.scopes
        self._known: dict[ast.expr, str] = {}

    def of(self, node: ast.expr) -> str:
        """What an object is; empty if it is not known."""
        if node not in self._known:
            self._known[node] = ""  # for one that is made of itself
            self._known[node] = self._find(node)
        return self._known[node]

    def _find(self, node: ast.expr) -> str:
        match node:
            case ast.Call():
                return self._made(node)
            case ast.Name(id=name) if found := self._scopes.variable(node):
                if found.parameter_of is not None and not found.values:
                    return self._parameter(found.parameter_of, name)
                return self._of_values(found.values)
            case ast.Attribute():
                return self._of_values(self._scopes.values(node))
            case _:
                return ""

    def _of_values(self, values: list[ast.expr]) -> str:
        if any(isinstance(value, ast.Attribute) and value.attr == "module" for value in values):
            return ""  # unwrapped again somewhere
        return next(filter(None, map(self.of, values)), "")

    def _made(self, call: ast.Call) -> str:
        name = self._script.name(call.func)
        if kind := _kind_named(name):
            return kind
        if name == "torch.compile" and call.args:
            return self.of(call.args[0])
        if isinstance(call.func, ast.Attribute):
            owner = self.of(call.func.value)
            if owner == "session" and call.func.attr == "prepare":
                return "run"
            if owner and call.func.attr in _SAME:
                return owner
        function = self._scopes.definition(call.func)
        return self._of_values(list(returned(function))) if isinstance(function, Function) else ""

    def _parameter(self, function: Function, name: str) -> str:
        """What the program's calls pass as a parameter, or else what its type or its name says."""
        passed = [self._passed(call, function, name) for call in _calls_of(self._script, function)]
        if known := set(filter(None, passed)):
            return known.pop() if len(known) == 1 else ""
        annotation = next(one.annotation for one in parameters(function) if one.arg == name)
        if annotation is not None:
            if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                annotation = ast.Name(annotation.value)
            return _kind_named(self._script.name(annotation))
        kind = _BY_NAME.get(name, "")
        library = "accelerate" in self._script.modules
        return kind if (library if kind == "accelerator" else self._script.has_runtime) else ""

    def _passed(self, call: ast.Call, function: Function, name: str) -> str:
        names = [one.arg for one in parameters(function)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        value = keyword(call, name, names.index(name) if name in names else None)
        if value is None:
            return ""
        if isinstance(value, ast.Attribute) and value.attr == "module":
            return "unwrapped"
        return self.of(value) or ("own" if self._scopes.instance(value) else "")


def _kind_named(name: str) -> str:
    return next((kind for kind, made_by in _MAKERS if made_by.fullmatch(name)), "")


def _calls_of(script: Script, function: Function) -> list[ast.Call]:
    """The program's calls of one of its functions."""
    named = script.calls_by_name.get(function.name, ())
    return [call for call in named if script.scopes.definition(call.func) is function]


def _of_torch(name: str, call: ast.Call) -> str:
    last = name.rpartition(".")[2]
    if last in ("init_process_group", "init_rpc", "init_device_mesh"):
        return _MAKES_GROUP
    if ".checkpoint." in name:
        alone = keyword(call, "process_group") or keyword(call, "no_dist")
        return last if last in _CHECKPOINTS and alone is None else ""
    return last if last in _TORCH and not _in_subgroup(last, call) else ""


def _in_subgroup(name: str, call: ast.Call) -> bool:
    """Whether a collective is given a group, which may have these ranks alone."""
    position = _TORCH[name]
    group = keyword(call, "group", position) if position is not None else None
    if group is None or (isinstance(group, ast.Constant) and group.value is None):
        return False
    return not ast.unparse(group).endswith("WORLD")


class _Reach:
    """Which collectives a piece of a program comes to.

    With `possible` everything that may be reached counts. Without it, what one branch alone
    reaches does not count if the rank, or an argument of the function `inner`, decides.
    """

    def __init__(self, script: Script) -> None:
        self._script, self._kinds = script, _Kinds(script)
        self._functions: dict[tuple[bool, Function], _Found] = {}

    def of(
        self,
        parts: Iterable[ast.AST],
        *,
        possible: bool,
        inner: Function | None = None,
        depth: int = 0,
    ) -> _Found:
        """What is reached by who comes to these statements or expressions, by name."""

        def reached(parts: Iterable[ast.AST]) -> _Found:
            return self.of(parts, possible=possible, inner=inner, depth=depth)

        found: _Found = {}
        rest = list(parts)
        while rest:
            part = rest.pop(0)
            if (
                isinstance(part, ast.If | ast.IfExp)
                and not possible
                and self._decides(part.test, inner)
            ):
                after = rest if _leaves(part, self._script) else []
                body, orelse = (reached(side) for side in _branches(part, after))
                both = {name: one for name, one in body.items() if name in orelse}
                found = reached([part.test]) | both | found
                if after:
                    break
            elif isinstance(part, ast.If):
                rest[:0] = [part.test, *part.body, *part.orelse]
            elif isinstance(part, ast.BoolOp) and inner is not None and not possible:
                rest.insert(0, part.values[0])
            elif not isinstance(part, Definition | ast.Lambda):
                for block in _blocks(part):
                    found = reached(block) | found
                if isinstance(part, ast.Call):
                    found = self._called(part, possible=possible, depth=depth) | found
        return found

    def _decides(self, test: ast.expr, inner: Function | None) -> bool:
        """Whether only what both branches reach is certain to be reached."""
        names = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)}
        if "__name__" in names:
            return False
        ranks = self._script.ranks
        if any(ranks.sides(test)):
            return True
        asks_argument = inner is not None and bool(names & _all_parameters(inner))
        return not ranks.is_guard(test) and (asks_argument or ranks.mentioned_in(test))

    def _called(self, call: ast.Call, *, possible: bool, depth: int) -> _Found:
        if name := self._collective(call):
            return {name: _Reached(name, call)}
        scopes = self._script.scopes
        function = scopes.definition(call.func)
        if isinstance(function, ast.ClassDef):
            function = scopes.method(function, "__init__")
        elif function is None and (made := scopes.instance(call.func)):
            function = scopes.method(made, "__call__") or scopes.method(made, "forward")
        if not isinstance(function, Function) or depth > _MAX_CALLS:
            return {}
        key = possible, function
        if key not in self._functions:
            self._functions[key] = {}  # for one that calls itself
            self._functions[key] = self.of(
                function.body, possible=possible, inner=function, depth=depth + 1
            )
        return {
            name: _Reached(name, call, (function.name, *one.via))
            for name, one in self._functions[key].items()
        }

    def _collective(self, call: ast.Call) -> str:
        """The name of what all ranks must call together, if a call is that; else empty."""
        name = self._script.name(call.func)
        if name.startswith("torch.distributed."):
            return _of_torch(name, call)
        if isinstance(call.func, ast.Attribute):
            kind = self._kinds.of(call.func.value)
            if call.func.attr in _METHODS.get(kind, ()):
                return call.func.attr
        called = self._kinds.of(call.func) if not isinstance(call.func, ast.Call) else ""
        return _FORWARD if called in ("ddp", "fsdp") else ""


def _branches(test: ast.If | ast.IfExp, after: _Parts) -> tuple[_Parts, _Parts]:
    """What runs if a test holds, and if not: also what follows, if the first branch leaves."""
    if isinstance(test, ast.IfExp):
        return [test.body], [test.orelse]
    return [*test.body], [*test.orelse, *after]


def _blocks(part: ast.AST) -> Iterator[list[ast.AST]]:
    """The statements and expressions inside of one, which run one after the other."""
    for name, value in ast.iter_fields(part):
        if isinstance(value, list):
            if name != "handlers":
                yield [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST):
            yield [value]


def _leaves(test: ast.AST, script: Script) -> bool:
    """Whether who comes into the body of an `if` never comes to what follows it."""
    if not isinstance(test, ast.If):
        return False
    match test.body[-1]:
        case ast.Return() | ast.Continue() | ast.Break():
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return script.name(function) in _ENDS
        case ast.Raise(exc=ast.Call(func=ast.Name(id=name)) | ast.Name(id=name)):
            return name == "SystemExit"
        case _:
            return False


def _all_parameters(function: Function) -> set[str]:
    more = (function.args.vararg, function.args.kwarg)
    return {one.arg for one in (*parameters(function), *more) if one is not None}


@lru_cache(maxsize=1)
def _one_sided(script: Script) -> Sequence[_Branch]:
    """The collectives that only one rank comes to, or all but one."""
    if script.setting.processes == 1:
        return ()
    try:
        found = _kept_from_some(script)
    except RecursionError:
        return ()  # nested too deep to be followed
    alone = (
        script.setting.processes is not None and script.setting.processes == script.setting.nodes
    )
    return [one for one in _unpaired(found) if not (alone and "local" in one.where)]


def _kept_from_some(script: Script) -> list[_Branch]:
    """Every collective that a test of the rank keeps from some ranks."""
    reach = _Reach(script)
    found: list[_Branch] = []
    for node in script.nodes:
        function = script.function(node) or script.module(node).tree
        for who, where, here, there in _splits(script, node):
            mine = reach.of(here, possible=False)
            theirs = reach.of(there, possible=True)
            if _MAKES_GROUP not in mine.keys() | theirs.keys():
                lonely = [one for name, one in mine.items() if name not in theirs]
                found += [_Branch(one, who, where, function) for one in lonely]
    return found


def _splits(script: Script, node: ast.AST) -> Iterator[_Split]:
    """The branches of a condition on the rank."""
    match node:
        case ast.FunctionDef(decorator_list=decorators, name=name):
            names = [script.name(one).rpartition(".")[2] for one in decorators]
            if one := next((one for one in names if one in _ONE_RANK_DECORATORS), ""):
                yield "one", f"in {name}, under @{one}", [*node.body], []
        case ast.BoolOp(op=op, values=values):
            for at, value in enumerate(values[:-1]):
                body, orelse = script.ranks.sides(value)
                if who := body if isinstance(op, ast.And) else orelse:
                    yield who, f"behind `{ast.unparse(value)}`", [*values[at + 1 :]], []
                    break
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            body, orelse = script.ranks.sides(test)
            if not is_main_guard(node) and (body or orelse or script.ranks.mentioned_in(test)):
                yield from _sides(script, node, body, orelse)
        case ast.Match(subject=subject, cases=cases) if script.ranks.is_rank(subject):
            yield from _cases(subject, cases)
        case _:
            pass


def _cases(subject: ast.expr, cases: list[ast.match_case]) -> Iterator[_Split]:
    """`match rank:`, each case with all others."""
    for case in cases:
        there: _Parts = [stmt for other in cases if other is not case for stmt in other.body]
        number = ast.unparse(case.pattern)
        who: Who = "one" if number == "0" else "another" if number.isdecimal() else "others"
        yield who, f"under `case {number}` of `match {ast.unparse(subject)}`", [*case.body], there


def _sides(
    script: Script, node: ast.If | ast.IfExp | ast.While, body: Who | None, orelse: Who | None
) -> Iterator[_Split]:
    shown = ast.unparse(node.test)
    if isinstance(node, ast.While):
        yield body, f"under `while {shown}`", [*node.body], []
        return
    leaves = _leaves(node, script)
    first, second = _branches(node, _after(script, node) if leaves else [])
    earlier = list(_earlier(script, node))
    yield body, f"under `if {shown}`", first, [*second, *earlier]
    where = f"after `if {shown}` has left" if leaves else f"under the `else` of `if {shown}`"
    yield orelse, where, second, [*first, *earlier]


def _earlier(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    """The branches before an `elif`."""
    for child, parent in script.ancestors(node):
        if not isinstance(parent, ast.If) or parent.orelse != [child]:
            return
        yield from parent.body


def _after(script: Script, node: ast.AST) -> _Parts:
    """The statements that follow one in its block."""
    _, parent = next(script.ancestors(node))
    for _, block in ast.iter_fields(parent):
        if isinstance(block, list) and node in block:
            return block[block.index(node) + 1 :]
    return []


def _unpaired(branches: list[_Branch]) -> Iterator[_Branch]:
    """Those for which no other place lets the other ranks call the same."""

    def meets(one: _Branch, other: _Branch) -> bool:
        differs = other.who is None or other.who != one.who
        return one.reached.name == other.reached.name and differs

    def within(one: _Branch) -> bool:
        return any(meets(one, other) for other in branches if other.function is one.function)

    free = [one for one in branches if not within(one)]
    for one in free:
        if one.who and not any(meets(one, other) for other in free):
            yield one


@RULES.error(
    "collective-on-one-rank",
    "A collective returns when every rank has called it; one that only rank 0 calls never returns.",
)
def _collective_on_one_rank(script: Script) -> Iterator[Hit]:
    for one in _one_sided(script):
        if one.reached.name == _FORWARD:
            continue
        name, via = one.reached.name, one.reached.via
        what = f"{via[0]} calls {name}, a collective, and" if via else f"{name} is a collective and"
        yield script.at(
            one.reached.call,
            f"{what} runs only {one.where}: it waits until the group's timeout for the ranks that "
            "never call it; call it on every rank, outside the condition",
        )


@RULES.warning(
    "forward-on-one-rank",
    "The forward pass of DistributedDataParallel broadcasts the buffers of the model (those of "
    "BatchNorm, for one), even under no_grad.",
)
def _forward_on_one_rank(script: Script) -> Iterator[Hit]:
    for one in _one_sided(script):
        if one.reached.name == _FORWARD:
            yield script.at(
                one.reached.call,
                f"the model is DistributedDataParallel and is called only {one.where}: if it has "
                "buffers, the call waits for the other ranks; call model.module there, or evaluate "
                "on every rank",
            )
