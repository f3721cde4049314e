"""The types of a manifest's fields, as far as k8sjob reads them; other fields may hold anything.

A shape is a mapping with the types of its keys (ANY: of all others), a list with that of its items,
a type, or None for anything. An apiserver refuses a field of another type.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.findings import invalid
from k8sjob.kube.quantity import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding

_Path = tuple[str | int, ...]
ANY: Final = "*"
_MAX_SHOWN: Final = 80
_MAX_MESSAGE: Final = 4096


class WrongType(NamedTuple):
    """A field of another type than the CRD's: where, the value, and what it must be."""

    path: _Path
    value: Any
    expected: str


class Seconds:
    """A whole number of 64 bits, as times are; others have 32."""


class Quantity:
    """A quantity of Kubernetes', as text or as a number."""


class Message:
    """A text for people; of one that is longer than Kubernetes' own, the beginning and the end."""


_BITS: Final = {int: 32, Seconds: 64}
_NAMES: Final = {
    str: "text",
    int: "a whole number",
    Seconds: "a whole number",
    bool: "true or false",
    Message: "text",
    Quantity: "a quantity, such as 500m or 16Gi",
}


def fit(manifest: dict[str, Any], shape: Any) -> tuple[dict[str, Any], list[WrongType]]:
    """The manifest without its fields of a wrong type and without nulls, and those fields.

    Items of lists keep their index: a wrong one is emptied.
    """
    wrong: list[WrongType] = []
    fitted: dict[str, Any] = _fit(manifest, shape, (), wrong)
    return fitted, wrong


def fits(value: Any, shape: Any) -> bool:
    """Whether a value is one that fit leaves as it is; to see that takes a third of the time."""
    if isinstance(shape, dict) and isinstance(value, dict):
        every = shape.get(ANY)
        # A loop: of 300 jobs these are 40,000 values; a generator takes half as long again.
        for key, item in value.items():
            expected = shape.get(key, every)
            if expected is None:
                if item is None:
                    return False
            elif (type(item) is not expected or expected is int) and not fits(item, expected):
                return False
        return True
    if isinstance(shape, list) and isinstance(value, list):
        return all(item is not None and fits(item, shape[0]) for item in value)
    if shape is Message and isinstance(value, str):
        return len(value) <= _MAX_MESSAGE
    return shape is None or (isinstance(shape, type) and _is_instance(value, shape))


def _fit(value: Any, shape: Any, path: _Path, wrong: list[WrongType]) -> Any:
    """The value if it has the shape; None if it has another or is null."""
    null = value is None and not (path and isinstance(path[-1], int))  # in a list it is an item
    if null or shape is None:
        return value
    if isinstance(shape, dict) and isinstance(value, dict):
        fitted = {}
        every = shape.get(ANY)
        for key, item in value.items():
            expected = shape.get(key, every)
            # Most values of 10,000 Pods are text, or may be anything, and come no further; of a
            # number the bits count.
            if expected is None or (type(item) is expected and expected is not int):
                part = item
            else:
                part = _fit(item, expected, (*path, key), wrong)
            if part is not None:
                fitted[key] = part
        return fitted
    if isinstance(shape, list) and isinstance(value, list):
        empty: Any = {} if isinstance(shape[0], dict) else ""
        items = (_fit(item, shape[0], (*path, i), wrong) for i, item in enumerate(value))
        return [empty if item is None else item for item in items]
    if shape is Message and isinstance(value, str):
        half = _MAX_MESSAGE // 2
        return value if len(value) <= _MAX_MESSAGE else f"{value[:half]} ... {value[-half:]}"
    if isinstance(shape, type) and _is_instance(value, shape):
        return value
    type_name = "a mapping" if isinstance(shape, dict) else "a list"
    type_name = _NAMES[shape] if isinstance(shape, type) else type_name
    if isinstance(shape, type) and shape in _BITS and _is_whole(value):
        type_name = f"a number of {_BITS[shape]} bits"
    wrong.append(WrongType(path, value, type_name))
    return None


def _is_instance(value: Any, shape: type) -> bool:
    if shape is Quantity:
        # A number may be kept as its author wrote it.
        return not isinstance(value, bool) and _is_quantity(str(getattr(value, "text", value)))
    if shape not in _BITS:
        return isinstance(value, shape)
    return _is_whole(value) and value.bit_length() < _BITS[shape]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@lru_cache(1024)  # thousands of pods ask for the same
def _is_quantity(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def type_problems(wrong: list[WrongType]) -> Iterator[Finding]:
    """Each field of a wrong type."""
    step = "correct it, a cluster would refuse the manifest"
    for path, value, expected in wrong:
        yield invalid(path, f"{shown(value)} is not {expected}", step)


def shown(value: Any) -> str:
    """A value of any size in a message."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
