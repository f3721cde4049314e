"""What all parts of a spec share: frozen, no unknown keys, documented fields, rules over fields."""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    NamedTuple,
    NoReturn,
    TypeVar,
    get_args,
)

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic.config import JsonDict

__all__ = [
    "FROZEN_EMPTY",
    "UNEXPLAINED",
    "Broken",
    "Count",
    "Flag",
    "FrozenMap",
    "Part",
    "Whole",
    "doc",
    "refuse",
    "seen",
]

Loc = tuple[str | int, ...]
"""A path into a document: keys and list indices."""

UNEXPLAINED: Final = object()
"""The validation context under which a JobSpec leaves pydantic's errors as they are."""
_SHOWN: Final = 80


class Broken(NamedTuple):
    """A broken rule of a part: the field, relative to the part, and what to do about it."""

    field: Loc
    message: str


_K = TypeVar("_K")
_V = TypeVar("_V")


def doc(text: str, *examples: Any, unit: str = "", **constraints: Any) -> FieldInfo:
    """A field's documentation, as it appears in the JSON Schema and in the reference.

    Args:
        text: what the field means, what its default does.
        examples: values as they are written in a job.yaml; at least one.
        unit: what a number counts, or in what a quantity is written.
        constraints: pydantic's, as `ge=1`.
    """
    extra: JsonDict | None = {"unit": unit} if unit else None
    made = Field(description=text, examples=list(examples), json_schema_extra=extra, **constraints)
    assert isinstance(made, FieldInfo)  # noqa: S101 - Field is typed Any, the class is what it is
    return made


def refuse(message: str, meant: Sequence[Any] | None = None) -> NoReturn:
    """Refuse the value under validation.

    Args:
        message: what is wrong; braces are kept.
        meant: values that may have been meant. The error shows the first that the field takes, or
            the field's example. None: the message says the next step.
    """
    raise PydanticCustomError("k8sjob", "{message}", {"message": message, "meant": meant})


def seen(value: Any) -> str:
    """A value as messages show it: as YAML has it, printable, and not too long."""
    flags = {None: "null", True: "true", False: "false"}
    text = flags[value] if value is None or isinstance(value, bool) else ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _Frozen(dict[_K, _V]):
    """A dict that cannot be changed; equal to, printed and serialised as a plain one."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a spec is frozen; make a new one with spec.with_(...)")

    __setitem__ = __delitem__ = _refuse
    __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[type[_Frozen[_K, _V]], tuple[dict[_K, _V]]]:
        return type(self), (dict(self),)  # the default refills item by item, which is refused


FrozenMap = Annotated[dict[_K, _V], AfterValidator(_Frozen)]
"""A mapping that cannot be changed once it is part of a spec."""
FROZEN_EMPTY: Final[dict[Any, Any]] = _Frozen()

Whole = Annotated[int, Strict()]
"""A whole number: neither true nor "3" nor 3.0."""
Count = Annotated[int, Strict(), Field(ge=1)]
"""A whole number of at least 1."""
Flag = Annotated[bool, Strict()]
"""true or false, not "on" nor 1."""


class Part(BaseModel):
    """Base of JobSpec and of everything in it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=False,
        protected_namespaces=(),
        hide_input_in_errors=True,
        revalidate_instances="never",
        defer_build=True,  # one schema for the whole spec, at the first validation, not one a part
    )

    shorthand: ClassVar[str] = ""
    """The field that a text in place of this part probably means, for hints."""

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """What differs from the defaults, for a repr that fits a notebook's line."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if field.is_required() or value != field.default:
                yield name, value

    def __str__(self) -> str:
        return repr(self)

    def rules(self) -> Iterator[Broken]:
        """What the fields must hold together; each broken rule with the field to change."""
        yield from ()

    @model_validator(mode="after")
    def _keep_rules(self) -> Part:
        broken = list(self.rules())
        if broken:
            text = "; ".join(message for _, message in broken)
            raise PydanticCustomError("rules", "{text}", {"text": text, "broken": broken})
        return self


def part_types(annotation: Any) -> Iterator[type[Part]]:
    """The Part classes that appear anywhere in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for argument in get_args(annotation):
        yield from part_types(argument)
