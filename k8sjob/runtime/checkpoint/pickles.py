"""Bounds of a pickle, checked over its operations before anything is made of it.

A pickle can put a tuple into another one many times, and that one into a third. From a few hundred
bytes comes a value whose text or copy never ends, nor its hash, which a key of a dict needs while
it is loaded.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import re

MOST_SHARED: Final = 32
"""How many times its bytes an honest file may hold, since its values share some."""
_ANY_FILE_HOLDS: Final = 1_000_000
# Python hashes a tuple by recursion in C: two million levels end the process.
_DEEPEST: Final = 100
_CHARACTERS: Final = 64
"""Characters of a text that count as one value more."""

_PUT: Final = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GET: Final = {"GET", "BINGET", "LONG_BINGET"}
_CHANGE: Final = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
# Python's pickler writes POP and POP_MARK for a tuple that holds itself, LONG4 for a number of 256
# bytes or more, and DUP never.
_NEVER_WRITTEN: Final = {"POP", "POP_MARK", "DUP", "LONG4"}
_OF_STORAGE: Final = {
    f"torch._utils _rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "qtensor")
}
"""Functions that make a tensor of some shape: a stride of 0 repeats an element without end."""


@dataclass(slots=True, eq=False)
class _Value:
    """What an operation pushes.

    Attributes:
        content: an atom, or a tuple of the contents; of a class or function its module and name.
        count: the values in it, each as often as it occurs.
        depth: of the values one in the other.
        complete: whether it is in another value, or may be, and so changes no more.
    """

    content: Any
    count: int = 1
    depth: int = 1
    complete: bool = False


def check(pickled: bytes, size: int, names: re.Pattern[str] | None = None) -> None:
    """Refuse a pickle that becomes far larger than it is.

    Args:
        pickled: the pickle.
        size: bytes of the file that it is part of; a tensor has no more elements.
        names: of classes and functions that it may name, as "module name"; None: any.

    Raises:
        ValueError: it is refused. Of one that is damaged, any error.
    """
    most = max(MOST_SHARED * len(pickled), _ANY_FILE_HOLDS)
    stack, marks, memo = list[_Value](), list[int](), dict[Any, _Value]()
    for operation, argument, _ in pickletools.genops(pickled):
        name = operation.name
        _check_name(name, argument, names)
        if name == "MARK":
            marks.append(len(stack))
        elif name in _PUT:
            # MEMOIZE has no argument: it counts the entries.
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif name in _GET:
            # The value is in several places from here on, which count it by its present size.
            memo[argument].complete = True
            stack.append(memo[argument])
        else:
            parts = _popped(operation.stack_before, stack, marks)
            if name == "REDUCE":
                _check_call(parts[0].content, parts[1].content, size)
            if operation.stack_after:
                stack.append(_pushed(name, argument, parts))
                if stack[-1].count > most:
                    raise ValueError(f"it holds {stack[-1].count} values, and has {size} bytes")
    # STOP has taken the value. A loader would take no notice of others below it.
    if stack or marks:
        raise ValueError("its pickle is damaged: it holds more than one value")


def _check_name(name: str, argument: Any, names: re.Pattern[str] | None) -> None:
    if name in _NEVER_WRITTEN:
        raise ValueError(f"its pickle has the operation {name}, which no checkpoint has")
    if name == "GLOBAL" and names and not names.fullmatch(argument):
        raise ValueError(f"it names {argument.replace(' ', '.'):.200}, which no checkpoint does")


def _popped(before: list[Any], stack: list[_Value], marks: list[int]) -> list[_Value]:
    """The values that an operation takes from the stack; those above a mark, where it takes one."""
    begin = len(stack) - len(before)
    if pickletools.markobject in before:
        begin = marks.pop() - before.index(pickletools.markobject)
    parts = stack[begin:]
    del stack[begin:]
    return parts


def _pushed(name: str, argument: Any, parts: list[_Value]) -> _Value:
    """The value that an operation makes of others, or changes."""
    if name in _CHANGE:
        value, *parts = parts
        # What holds it was counted without the change. Torch writes no list that holds itself.
        if value.complete:
            raise ValueError("it holds a list or dict that changes after it is in another one")
    elif name == "BINPERSID":
        # A storage, which torch takes from the archive; _check_call bounds what is made of it.
        value = _Value(parts[0].content)
    else:
        within = tuple(part.content for part in parts)
        value = _Value(within if "TUPLE" in name else argument)
    if isinstance(argument, str | bytes):
        value.count += len(argument) // _CHARACTERS
    for part in parts:
        part.complete = True
        value.count += part.count
        value.depth = max(value.depth, part.depth + 1)
    if value.depth > _DEEPEST:
        raise ValueError(f"it holds more than {_DEEPEST} lists or dicts, one in the other")
    return value


def _check_call(function: Any, arguments: Any, size: int) -> None:
    """Refuse arguments from which a call makes more than the file has."""
    # In protocol 2 pickle writes bytes as a text in latin1. Other codecs, in a chain, double their
    # text at each step.
    if function == "_codecs encode" and arguments[1:] != ("latin1",):
        raise ValueError("it encodes a text as no checkpoint does")
    if function in _OF_STORAGE:
        shape = arguments[2]
        elements = math.prod(shape) if len(shape) <= 64 else math.inf
        if elements > size:
            raise ValueError(f"it holds a tensor of {elements} elements, and has {size} bytes")
