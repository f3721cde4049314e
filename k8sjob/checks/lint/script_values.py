"""Values in a script: their sources, the texts that they are, the kinds of objects that they hold.

They are followed through variables, and through calls with their arguments and returns.
"""

from __future__ import annotations

import ast
import re
from contextlib import suppress
from itertools import chain, count
from typing import TYPE_CHECKING, Final

from k8sjob.checks.lint.script_code import defaults, keyword, parameters
from k8sjob.checks.lint.script_modules import Function

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from k8sjob.checks.lint.script_code import Code

_UNKNOWN: Final = "{}"
"""A part of a text that is not known."""
_FIELD: Final = re.compile(r"\{(\w*)[^{}]*\}")
_MAX_TEXT: Final = 200
_CONSTRUCTORS: Final = (
    ("session", re.compile(r"k8sjob\.runtime\.(sessions\.)?(session|Job|job\.Job)")),
    ("run", re.compile(r"k8sjob\.runtime\.(training\.)?Run")),
    ("accelerator", re.compile(r"accelerate\.(\w+\.)*Accelerator")),
    ("fabric", re.compile(r"lightning(_fabric)?\.(\w+\.)*Fabric")),
    ("trainer", re.compile(r"(lightning|pytorch_lightning|transformers|trl)\.(\w+\.)*\w*Trainer")),
    ("ddp", re.compile(r"torch\.(\w+\.)*DistributedDataParallel")),
    ("fsdp", re.compile(r"torch\.(\w+\.)*FullyShardedDataParallel")),
    ("zero", re.compile(r"torch\.(\w+\.)*ZeroRedundancyOptimizer")),
)
"""The constructors or types of each kind of object."""
_PARAMETERS: Final = {
    "accelerator": ("accelerate", "accelerator"),
    "fabric": ("lightning", "fabric"),
    "job": ("k8sjob", "session"),
    "run": ("k8sjob", "run"),
}
"""Names of parameters with the library that has such objects, and their kind."""
SAME: Final = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16"})
"""Methods of a model that give the model."""


class Values:
    """The values of a program's expressions."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._origins: dict[ast.expr, list[ast.expr]] = {}
        self._texts: dict[ast.expr, str] = {}
        self._kinds: dict[ast.expr, str] = {}

    def sources(self, node: ast.expr) -> Sequence[ast.expr | None]:
        """What a variable is given, or a call returns: one step back; None for what is not known.

        Anything else, as a call of a library, is a source itself.
        """
        code, found = self._code, self._code.variable(node)
        if isinstance(node, ast.Call):
            is_own = isinstance(code.definition(node.func), Function)
            return code.assigned(node) if is_own else [node]
        imported = isinstance(node, ast.Name) and node.id in code.module(node).aliases
        if imported or not found or found.definitions:
            return [node]
        function = found.parameter_of
        given = self._passed(function, node.id) if function and isinstance(node, ast.Name) else []
        return [*found.values, *given, *([None] if found.unknown else [])]

    def _passed(self, function: Function, name: str) -> list[ast.expr | None]:
        """The values that the program passes as a parameter, or its default; None is not known."""
        made = self._code.parent(function)
        if function.name != "__init__" or not isinstance(made, ast.ClassDef):
            made = function
        names = [one.arg for one in parameters(function) if one.arg not in ("self", "cls")]
        position = names.index(name) if name in names else None
        found: list[ast.expr | None] = [None] if made.decorator_list else []
        for use in self._code.uses(made.name):
            call, defined = self._code.parent(use), self._code.definition(use)
            if defined is made and isinstance(call, ast.Call) and call.func is use:
                given = keyword(call, name, position)
                several = any(isinstance(one, ast.Starred) for one in call.args)
                several |= any(one.arg is None for one in call.keywords)
                found.append(given or (None if several else defaults(function.args).get(name)))
            elif defined in (None, made):
                found.append(None)
        return found

    def origins(self, node: ast.expr) -> list[ast.expr]:
        """All expressions that a value comes from; empty if some are not known."""
        if node not in self._origins:
            self._origins[node] = []  # for one that is made of itself
            with suppress(RecursionError):
                sources = self.sources(node)
                several = [
                    [one] if one is node else self.origins(one) if one else [] for one in sources
                ]
                self._origins[node] = list(dict.fromkeys(chain(*several))) if all(several) else []
        return self._origins[node]

    def makers(self, node: ast.expr) -> list[str]:
        """The names of what is called to make a value, "" where nothing is; empty if not known."""
        made = self.origins(node)
        return [self._code.name(one.func) if isinstance(one, ast.Call) else "" for one in made]

    def text(self, node: ast.expr | None) -> str:
        """The text of an expression, with `{}` for each unknown part."""
        if node is None:
            return _UNKNOWN
        if node not in self._texts:
            self._texts[node] = _UNKNOWN  # for one that is made of itself
            with suppress(RecursionError):
                self._texts[node] = self._text(node)[:_MAX_TEXT]
        return self._texts[node]

    def _text(self, node: ast.expr) -> str:
        parts: Sequence[ast.expr]
        match node:
            case ast.Constant(value=value):
                return str(value)
            case ast.Name():
                texts = {self.text(one) for one in self.origins(node)}
                return texts.pop() if len(texts) == 1 else _UNKNOWN
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str(pattern)), attr="format"),
                args=args,
                keywords=named,
            ):
                at, given = count(), {str(number): one for number, one in enumerate(args)}
                given |= {str(one.arg): one.value for one in named}
                return _FIELD.sub(
                    lambda field: self.text(given.get(field[1] or str(next(at)))), pattern
                )
            case ast.JoinedStr(values=parts):
                pass
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                parts = [left, right]
            case ast.FormattedValue(value=inner) | ast.Call(func=ast.Name(id="str"), args=[inner]):
                parts = [inner]
            case _:
                return _UNKNOWN
        return "".join(map(self.text, parts))

    def kind(self, node: ast.expr) -> str:
        """The kind of an object, as `session` or `ddp`; empty if it is not known."""
        if node not in self._kinds:
            self._kinds[node] = ""  # for one that is made of itself
            found = self._code.variable(node)
            if isinstance(node, ast.Call):
                self._kinds[node] = self._made(node)
            elif found and found.parameter_of and not found.values and isinstance(node, ast.Name):
                self._kinds[node] = self._parameter(found.parameter_of, node.id)
            elif found:
                self._kinds[node] = self._first(found.values)
        return self._kinds[node]

    def _first(self, values: Iterable[ast.expr]) -> str:
        if any(map(_is_unwrapped, values)):  # somewhere, so it may be here
            return ""
        return next(filter(None, map(self.kind, values)), "")

    def _made(self, call: ast.Call) -> str:
        name = self._code.name(call.func)
        if kind := _kind_named(name):
            return kind
        if name == "torch.compile" and call.args:
            return self.kind(call.args[0])
        if isinstance(call.func, ast.Attribute) and (owner := self.kind(call.func.value)):
            if owner == "session" and call.func.attr == "prepare":
                return "run"
            return owner if call.func.attr in SAME else ""
        return self._first(self._code.assigned(call))

    def _parameter(self, function: Function, name: str) -> str:
        """The kind passed as a parameter by the program's calls, else that of its type or name."""
        passed = self._passed(function, name)
        if any(known := {self._given(value) for value in passed if value}):
            return known.pop() if len(known) == 1 else ""
        annotation = next(one.annotation for one in parameters(function) if one.arg == name)
        if annotation is not None:
            return _kind_named(self._code.name(annotation))
        library, kind = _PARAMETERS.get(name, ("", ""))
        return kind if library in self._code.modules else ""

    def _given(self, value: ast.expr) -> str:
        if _is_unwrapped(value):
            return "unwrapped"
        return self.kind(value) or ("own" if self._code.instance(value) else "")


def _is_unwrapped(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "module"


def _kind_named(name: str) -> str:
    return next((kind for kind, made_by in _CONSTRUCTORS if made_by.fullmatch(name)), "")
