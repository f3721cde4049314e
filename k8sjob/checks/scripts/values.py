"""Values of a script's expressions, followed through its variables, parameters and functions.

`origins` is what all checks ask: the expressions that a value comes from, if all of them are known.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

from k8sjob.checks.finding import table
from k8sjob.checks.scripts.code import MAX_VALUES, Code, defaults, followed, keyword, parameters
from k8sjob.checks.scripts.modules import Definition, Function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_Value = TypeVar("_Value")
_Method = TypeVar("_Method", bound="Callable[[Any, Any], Any]")

_UNKNOWN: Final = "{}"
"""A part of a text that is not known."""
_MAX_TEXT: Final = 200
_PARAMETERS: Final = {
    "accelerator": ("accelerate", "accelerator"),
    "fabric": ("lightning", "fabric"),
    "job": ("k8sjob", "session"),
    "run": ("k8sjob", "run"),
}
"""Names of parameters with the library that has such objects, and their kind."""
_SAME: Final = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16"})
"""Methods of a model that give the model."""
_FOLLOWED: Final = (ast.Name, ast.Attribute, ast.Call)
"""Expressions that may stand for others; any other is its own origin."""


@dataclass(eq=False, slots=True)
class Variable:
    """One name in one scope.

    Attributes:
        values: the expressions that are assigned to it, the first MAX_VALUES.
        unknown: whether it gets values in other ways too (loops, unpacking, +=).
        parameter_of: the function that it is a parameter of.
        definitions: the functions and classes of that name.
    """

    values: list[ast.expr] = field(default_factory=list)
    unknown: bool = False
    parameter_of: Function | None = None
    definitions: list[Definition] = field(default_factory=list)

    def add(self, value: ast.expr) -> None:
        """Take one more value."""
        if len(self.values) < MAX_VALUES:
            self.values.append(value)
        else:
            self.unknown = True

    @property
    def sources(self) -> list[ast.expr | None]:
        """Its values, and None for those that are not known."""
        return [*self.values, *([None] if self.unknown else [])]


def of_origins(
    unknown: _Value, join: Callable[[list[_Value]], _Value] | None = None
) -> Callable[[_Method], _Method]:
    """Make a method, or function, of an origin that of any expression, computed once for each.

    Args:
        unknown: its value where not all origins are known.
        join: makes its value of those of several origins; None: they must be the same.
    """

    def followed_to(compute: _Method) -> _Method:
        @followed(unknown)
        @wraps(compute)
        def evaluate(code: Any, node: Any) -> Any:
            origins = code.origins(node) if isinstance(node, _FOLLOWED) else [node]
            if origins == [node]:
                return compute(code, node)
            values = [evaluate(code, origin) for origin in origins]
            if join and values:
                return join(values)
            return values[0] if len(set(values)) == 1 else unknown

        return evaluate  # type: ignore[return-value]  # of the type that it stands for

    return followed_to


def _all_of(several: Iterable[list[ast.expr]]) -> list[ast.expr]:
    """The different ones of several origins; none if they are too many."""
    origins = list(dict.fromkeys(chain(*several)))
    return origins if len(origins) <= MAX_VALUES else []


class Values(Code):
    """The modules of a program, and the values in it."""

    # --- variables --------------------------------------------------------------------------

    @cached_property
    def _variables(self) -> dict[ast.AST, dict[str, Variable]]:
        """Variables by the module, class or function that they are in; `self.x` by its class."""
        variables: dict[ast.AST, dict[str, Variable]] = defaultdict(lambda: defaultdict(Variable))
        plain: set[ast.AST] = set()
        for node in self.nodes:
            for target, value in _assignments(node):
                plain.add(target)
                if isinstance(target, ast.Name):
                    variables[self._scope(target)][target.id].add(value)
                elif (owner := self._of_self(target)) and isinstance(target, ast.Attribute):
                    variables[owner][f"self.{target.attr}"].add(value)
        for node in self.nodes:
            if isinstance(node, Definition):
                variables[self._scope(node)][node.name].definitions.append(node)
            if isinstance(node, Function):
                for parameter in parameters(node.args):
                    variables[node][parameter.arg].parameter_of = node
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load | ast.Del):
                # Loops, unpacking and += give values that stand nowhere in the text.
                variables[self._scope(node)][node.id].unknown |= node not in plain
        return variables

    def _scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module of which a name that is set here becomes a variable."""
        scope = next(self.scopes(node))
        is_global = isinstance(node, ast.Name) and (scope, node.id) in self._globals
        return self.module(node).tree if is_global else scope

    @cached_property
    def _globals(self) -> set[tuple[ast.AST, str]]:
        """Functions with the names that they declare to be global."""
        statements = [node for node in self.nodes if isinstance(node, ast.Global)]
        return {(next(self.scopes(stmt)), name) for stmt in statements for name in stmt.names}

    def variable(self, use: ast.AST) -> Variable | None:
        """The variable that a name or `self.name` means here; None: imported, or never set."""
        if (owner := self._of_self(use)) and isinstance(use, ast.Attribute):
            of_class = self._variables[owner]
            return of_class.get(f"self.{use.attr}") or of_class.get(use.attr)
        if not isinstance(use, ast.Name):
            return None
        innermost = self._scope(use)
        for scope in (innermost, *self.scopes(innermost)):
            variable = self._variables[scope].get(use.id)
            # The names of a class are no names in its methods, as in Python.
            if variable and (scope is innermost or not isinstance(scope, ast.ClassDef)):
                return variable
        return None

    def sources(self, node: ast.expr) -> Sequence[ast.expr | None]:
        """What a variable is given, or a call returns: one step back; None for what is not known.

        Anything else, as a call of a library, is a source itself.
        """
        if isinstance(node, ast.Call):
            function = self.definition(node.func)
            return self._returned[function].sources if isinstance(function, Function) else [node]
        variable = self.variable(node)
        imported = isinstance(node, ast.Name) and node.id in self.module(node).aliases
        if imported or not variable or variable.definitions:
            return [node]
        function = variable.parameter_of
        passed = self.passed(function, node.id) if function and isinstance(node, ast.Name) else []
        return [*variable.sources, *passed]

    def passed(self, function: Function, name: str) -> list[ast.expr | None]:
        """The values that the program passes as a parameter, or its default; None is not known."""
        called = self.parent(function)
        # A class is called by its own name, not by __init__.
        if function.name != "__init__" or not isinstance(called, ast.ClassDef):
            called = function
        positions, usual = self._signature(function)
        position, default, uses = positions.get(name), usual.get(name), self.uses(called.name)
        # A decorator may call the function with anything.
        is_known = not called.decorator_list and len(uses) <= MAX_VALUES
        values: list[ast.expr | None] = [] if is_known else [None]
        for use in uses[:MAX_VALUES]:
            call, defined = self.parent(use), self.definition(use)
            if defined is called and isinstance(call, ast.Call) and call.func is use:
                several = len(call.args) + len(call.keywords) > MAX_VALUES
                argument = None if several else keyword(call, name, position)
                several |= any(isinstance(word, ast.Starred) for word in call.args[:MAX_VALUES])
                several |= any(option.arg is None for option in call.keywords[:MAX_VALUES])
                values.append(argument or (None if several else default))
            # It is handed on, so it may be called elsewhere, or the name may mean it.
            elif defined in (None, called):
                values.append(None)
        return values

    @followed(({}, {}))
    def _signature(self, function: Function) -> tuple[dict[str, int], dict[str, ast.expr | None]]:
        """The positions of a function's parameters without `self`, and their defaults."""
        names = [arg.arg for arg in parameters(function.args) if arg.arg not in ("self", "cls")]
        return {name: at for at, name in enumerate(names)}, defaults(function.args)

    @followed([])
    def origins(self, node: ast.expr) -> list[ast.expr]:
        """All expressions that a value comes from; empty if some are not known."""
        origins = [
            [source] if source is node else self.origins(source) if source else []
            for source in self.sources(node)
        ]
        return _all_of(origins) if all(origins) else []

    def makers(self, node: ast.expr) -> list[str]:
        """The names of what is called to make a value, "" where nothing is; empty if not known."""
        origins = self.origins(node)
        return [self.name(end.func) if isinstance(end, ast.Call) else "" for end in origins]

    @cached_property
    def _returned(self) -> dict[ast.AST | None, Variable]:
        """The values that functions return."""
        returned: dict[ast.AST | None, Variable] = defaultdict(Variable)
        for node in self.nodes:
            if isinstance(node, ast.Return) and node.value:
                returned[self.function(node)].add(node.value)
        return returned

    # --- functions and classes --------------------------------------------------------------

    def _of_self(self, node: ast.AST) -> ast.ClassDef | None:
        """The class of `self` in `self.name`, and of `super()`: the one whose method this is in."""
        match node:
            case ast.Attribute(
                value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))
            ):
                return self.class_of(node)
            case _:
                return None

    @followed(None)
    def definition(self, node: ast.expr) -> Definition | None:
        """The function or class that an expression names; None: it is not known, or one of two."""
        if isinstance(node, ast.Name) and (variable := self.variable(node)):
            # Of functions with one name, as in two branches, nobody knows which one runs.
            is_assigned = variable.values or variable.unknown or variable.parameter_of
            several = is_assigned or len(variable.definitions) != 1
            return None if several else variable.definitions[0]
        if isinstance(node, ast.Attribute):
            owner = self._of_self(node)
            holder: Definition | None = owner or self.instance(node.value)
            holder = holder or self.definition(node.value)  # a static or class method
            if isinstance(holder, ast.ClassDef):
                if isinstance(node.value, ast.Call) and holder is owner:  # of super()
                    return self._inherited((holder, node.attr))
                return self.method(holder, node.attr)
        name = self.name(node)
        of_module = f"{self.module(node).name}.{name}" if isinstance(node, ast.Name) else ""
        return self._tops.get(name) or self._tops.get(of_module)

    def instance(self, node: ast.expr) -> ast.ClassDef | None:
        """The class of the program that an expression is an instance of; None of several."""
        match self.origins(node):
            case [ast.Call(func=function)]:
                definition = self.definition(function)
                return definition if isinstance(definition, ast.ClassDef) else None
            case _:
                return None

    def method(self, of: ast.ClassDef, name: str) -> Function | None:
        """A method of a class, looked for in the program's base classes, too."""
        return self._methods(of).get(name) or self._inherited((of, name))

    @followed({})
    def _methods(self, of: ast.ClassDef) -> dict[str, Function]:
        return {stmt.name: stmt for stmt in reversed(of.body) if isinstance(stmt, Function)}

    @followed(None)
    def _inherited(self, attribute: tuple[ast.ClassDef, str]) -> Function | None:
        """A method that a class has from the program's base classes."""
        of, name = attribute
        bases = (self.definition(base) for base in of.bases)
        methods = (self.method(base, name) for base in bases if isinstance(base, ast.ClassDef))
        return next((method for method in methods if method), None)

    # --- texts and objects ------------------------------------------------------------------

    @of_origins(_UNKNOWN)
    def text(self, node: ast.expr | None) -> str:
        """The text of an expression, with `{}` for each unknown part."""
        parts: Sequence[ast.expr]
        match node:
            case ast.Constant(value=value):
                return str(value)[:_MAX_TEXT]
            case ast.JoinedStr(values=parts):
                pass
            case ast.BinOp(left=first, op=ast.Add(), right=second):
                parts = [first, second]
            case ast.FormattedValue(value=inner) | ast.Call(func=ast.Name(id="str"), args=[inner]):
                parts = [inner]
            case _:
                return _UNKNOWN
        return "".join(map(self.text, parts))[:_MAX_TEXT]

    def environ_key(self, node: ast.expr) -> str:
        """The environment variable that an expression reads; empty if it is none."""
        match node:
            case ast.Call(func=function, args=[ast.Constant(value=str(key)), *_]):
                reads = self.name(function) in ("os.environ.get", "os.getenv")
            case ast.Subscript(value=holder, slice=ast.Constant(value=str(key))):
                reads = self.name(holder) == "os.environ"
            case _:
                return ""
        return key if reads else ""

    @of_origins("")
    def environment(self, node: ast.expr) -> str:
        """The environment variable that a value certainly is, as get_rank() is RANK; or ""."""
        match node:
            case ast.Call(func=ast.Name(id="int"), args=[inner]):
                return self.environment(inner)
            case ast.Call(func=function, args=[]):
                return "RANK" if self.name(function) == "torch.distributed.get_rank" else ""
            case _:
                return self.environ_key(node)

    def is_rank(self, node: ast.expr) -> bool:
        """Whether a value certainly is the rank over all pods."""
        return self.environment(node) == "RANK"

    @followed(unknown=False)
    def made_of_rank(self, node: ast.AST) -> bool:
        """Whether an expression certainly has the rank in it, directly or through variables."""
        parts = [part for part in ast.walk(node) if isinstance(part, (*_FOLLOWED, ast.Subscript))]
        origins = [origin for part in parts for origin in self.origins(part) if origin is not part]
        return any(map(self.is_rank, parts)) or any(map(self.made_of_rank, origins))

    @of_origins(list[ast.expr](), join=_all_of)
    def unwrapped(self, node: ast.expr) -> list[ast.expr]:
        """Where a model comes from, whatever DistributedDataParallel or `.to()` is around it."""
        match node:
            case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in _SAME:
                return self.unwrapped(inner)
            case ast.Call(args=[inner, *_]) if self.kind(node) in ("ddp", "fsdp"):
                return self.unwrapped(inner)
            case _:
                return [node]

    @followed("")
    def kind(self, node: ast.expr) -> str:
        """The kind of an object, as `session` or `ddp`; empty if it is not known."""
        variable = self.variable(node)
        if isinstance(node, ast.Call):
            return self._made(node)
        if not variable or variable.values or not variable.parameter_of:
            return self._first(variable.values) if variable else ""
        return self._parameter(variable.parameter_of, getattr(node, "id", ""))

    def _first(self, values: Sequence[ast.expr]) -> str:
        if any(map(_is_unwrapped, values)):  # somewhere, so it may be here
            return ""
        return next(filter(None, map(self.kind, values)), "")

    def _made(self, call: ast.Call) -> str:
        name = self.name(call.func)
        if kind := _kind_named(name):
            return kind
        if name == "torch.compile" and call.args:
            return self.kind(call.args[0])
        if isinstance(call.func, ast.Attribute) and (owner := self.kind(call.func.value)):
            if owner == "session" and call.func.attr == "prepare":
                return "run"
            return owner if call.func.attr in _SAME else ""
        return self._first([*filter(None, self.sources(call))])

    def _parameter(self, function: Function, name: str) -> str:
        """The kind passed as a parameter by the program's calls, else that of its type or name."""
        passed = self.passed(function, name)
        if any(kinds := {self._kind_passed(value) for value in passed if value}):
            # Wrapped in one call and plain in another, it is not taken for wrapped.
            return kinds.pop() if len(kinds) == 1 else ""
        annotation = next(arg.annotation for arg in parameters(function.args) if arg.arg == name)
        if annotation is not None:
            return _kind_named(self.name(annotation))
        library, kind = _PARAMETERS.get(name, ("", ""))
        return kind if library in self.modules else ""

    def _kind_passed(self, value: ast.expr) -> str:
        if _is_unwrapped(value):
            return "unwrapped"
        return self.kind(value) or ("own" if self.instance(value) else "")


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets with the values that they get, where both stand in the text."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    if len(target.elts) == len(value.elts):
                        yield from zip(target.elts, value.elts, strict=True)
                elif not isinstance(target, ast.Tuple | ast.List):
                    yield target, value
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.NamedExpr(target=target, value=value)
            | ast.withitem(context_expr=value, optional_vars=ast.expr() as target)
        ):
            yield target, value
        case _:
            pass


def _is_unwrapped(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "module"


def _kind_named(name: str) -> str:
    constructors = table("constructors").items()
    return next((kind for kind, pattern in constructors if re.fullmatch(pattern, name)), "")
