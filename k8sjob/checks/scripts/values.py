"""Values in a script: the texts that they are, the kinds of objects that they hold."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from k8sjob.checks.finding import table
from k8sjob.checks.scripts.code import followed, parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.checks.scripts.code import Code
    from k8sjob.checks.scripts.modules import Function

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
SAME: Final = frozenset({"to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16"})
"""Methods of a model that give the model."""


class Values:
    """The values of a program's expressions."""

    def __init__(self, code: Code) -> None:
        self._code = code

    @followed(_UNKNOWN)
    def text(self, node: ast.expr | None) -> str:
        """The text of an expression, with `{}` for each unknown part."""
        return self._text(node)[:_MAX_TEXT]

    def _text(self, node: ast.expr | None) -> str:
        parts: Sequence[ast.expr]
        match node:
            case ast.Constant(value=value):
                return str(value)
            case ast.Name():
                texts = {self.text(one) for one in self._code.origins(node)}
                return texts.pop() if len(texts) == 1 else _UNKNOWN
            case ast.JoinedStr(values=parts):
                pass
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                parts = [left, right]
            case ast.FormattedValue(value=inner) | ast.Call(func=ast.Name(id="str"), args=[inner]):
                parts = [inner]
            case _:
                return _UNKNOWN
        return "".join(map(self.text, parts))

    @followed("")
    def kind(self, node: ast.expr) -> str:
        """The kind of an object, as `session` or `ddp`; empty if it is not known."""
        variable = self._code.variable(node)
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
        name = self._code.name(call.func)
        if kind := _kind_named(name):
            return kind
        if name == "torch.compile" and call.args:
            return self.kind(call.args[0])
        if isinstance(call.func, ast.Attribute) and (owner := self.kind(call.func.value)):
            if owner == "session" and call.func.attr == "prepare":
                return "run"
            return owner if call.func.attr in SAME else ""
        return self._first([*filter(None, self._code.sources(call))])

    def _parameter(self, function: Function, name: str) -> str:
        """The kind passed as a parameter by the program's calls, else that of its type or name."""
        passed = self._code.passed(function, name)
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
    constructors = table("constructors").items()
    return next((kind for kind, pattern in constructors if re.fullmatch(pattern, name)), "")
