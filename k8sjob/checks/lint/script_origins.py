"""The origin of a value, through variables and through calls with their arguments and returns.

Unlike `Code.values` this is all or nothing: where one way is not known, none is.
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
    from collections.abc import Sequence

    from k8sjob.checks.lint.script_code import Code

_UNKNOWN: Final = "{}"
"""A part of a text that is not known."""
_FIELD: Final = re.compile(r"\{(\w*)[^{}]*\}")
_MAX_TEXT: Final = 200


class Origins:
    """The expressions that values come from, and the texts that they are."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._known: dict[ast.expr, list[ast.expr]] = {}
        self._texts: dict[ast.expr, str] = {}

    def of(self, node: ast.expr) -> list[ast.expr]:
        """All origins of a value; empty if some are not known."""
        if node not in self._known:
            self._known[node] = []  # for one that is made of itself
            with suppress(RecursionError):
                self._known[node] = self._of(node)
        return self._known[node]

    def _of(self, node: ast.expr) -> list[ast.expr]:
        code, found = self._code, self._code.variable(node)
        values: Sequence[ast.expr | None] = code.values(node)
        if isinstance(node, ast.Call):
            if not isinstance(code.definition(node.func), Function):
                return [node]
        elif isinstance(node, ast.Name) and node.id in code.module(node).aliases:
            return [node]  # imported, perhaps instead
        elif found is None or found.definitions:
            return [node]
        elif found.parameter_of and isinstance(node, ast.Name):
            assigned = found.values or found.unknown
            values = [] if assigned else self.passed(found.parameter_of, node.id)
        several = [self.of(value) if value else [] for value in values]
        return list(dict.fromkeys(chain(*several))) if all(several) else []

    def passed(self, function: Function, name: str) -> list[ast.expr | None]:
        """The values that the program passes as a parameter, or its default; None is not known."""
        made = next(parent for _, parent in self._code.ancestors(function))
        if function.name != "__init__" or not isinstance(made, ast.ClassDef):
            made = function
        names = [one.arg for one in parameters(function) if one.arg not in ("self", "cls")]
        position = names.index(name) if name in names else None
        found: list[ast.expr | None] = [None] if made.decorator_list else []
        for use in self._code.uses(made.name):
            call = next(parent for _, parent in self._code.ancestors(use))
            defined = self._code.definition(use)
            if defined is made and isinstance(call, ast.Call) and call.func is use:
                given = keyword(call, name, position)
                several = any(isinstance(one, ast.Starred) for one in call.args)
                several |= any(one.arg is None for one in call.keywords)
                found.append(given or (None if several else defaults(function.args).get(name)))
            elif defined in (None, made):
                found.append(None)
        return found

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
                texts = {self.text(one) for one in self.of(node)}
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
