"""The base of all parts of a spec: frozen, no unknown keys, documented fields, rules."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from inspect import Parameter, Signature
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, model_validator
from pydantic_core import PydanticCustomError

from k8sjob.contract import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic import BaseModel as Described
    from pydantic.config import JsonDict
    from pydantic.fields import FieldInfo

    from k8sjob.findings import FieldPath, Finding

UNEXPLAINED: Final = object()
"""The validation context under which a JobSpec leaves pydantic's errors as they are."""
_SHOWN: Final = 80


_K = TypeVar("_K")
_V = TypeVar("_V")


def doc(text: str, *examples: Any, unit: str = "", **more: Any) -> Any:
    """A field's documentation, as it appears in the JSON Schema and in the reference.

    Args:
        text: what the field means, what its default does.
        examples: values as they are written in a job.yaml; at least one.
        unit: what a number counts, or in what a quantity is written.
        more: the default and pydantic's constraints, as `ge=1`.
    """
    extra: JsonDict | None = {"unit": unit} if unit else None
    return Field(description=text, examples=list(examples), json_schema_extra=extra, **more)


def refuse(message: str, next_step: str = "", *, meant: Sequence[Any] | None = None) -> NoReturn:
    """Refuse the value under validation.

    Args:
        message: what is wrong; braces are kept.
        next_step: what to do now; empty: the message says it.
        meant: values that may have been meant. The next step is to write the first that the field
            takes, or the field's example. None: `next_step` is all.
    """
    reason = {"message": message, "next_step": next_step, "meant": meant}
    raise PydanticCustomError("k8sjob", "{message}", reason)


def seen(value: Any) -> str:
    """A value as messages show it: as YAML has it, printable, and not too long."""
    flags = {None: "null", True: "true", False: "false"}
    text = flags[value] if value is None or isinstance(value, bool) else ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _Frozen(dict[_K, _V]):
    """A dict that cannot be changed; equal to, printed and serialized as a plain one."""

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


# --- what `help(JobSpec)`, `JobSpec?` in a notebook and completion by the tab key show ------------

_HIDDEN: Final = frozenset(dir(BaseModel)) - frozenset(dir(object))
"""Names of pydantic, which work as before."""


class _Unquoted(str):
    __slots__ = ()
    __repr__ = str.__str__


class _Type(type(BaseModel)):  # type: ignore[misc]
    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """The docstring of a class, and its fields; a property, because it is made when read."""
        fields = self.model_fields.items()
        lines = [_line(name, field) for name, field in fields]
        return "\n".join([vars(self).get("__doc__") or "", "", "Args:", *lines])

    @property
    def __signature__(self) -> Signature:
        parameters = [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                annotation=_Unquoted(_type(field.annotation)),
                default=Parameter.empty if field.is_required() else field.default,
            )
            for name, field in self.model_fields.items()
        ]
        return Signature(parameters)

    @__signature__.setter
    def __signature__(self, value: object) -> None:
        """Ignore pydantic's: it has the validators of each field."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _HIDDEN]


def _type(annotation: Any) -> str:
    """The type of a field as one writes it, without the validators."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in {Union, UnionType}:
        return " | ".join(map(_type, arguments))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin:
        inner = ", ".join(_type(argument) for argument in arguments if argument is not ...)
        return f"{origin.__name__}[{inner}]"
    return "None" if annotation is NoneType else getattr(annotation, "__name__", str(annotation))


def _line(name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra
    unit = extra.get("unit") if isinstance(extra, dict) else None
    unit = "seconds, or text as '10m'" if unit == "time" else unit
    default = None if field.is_required() else f"default {field.default!r}"
    about = ", ".join(str(part) for part in (_type(field.annotation), unit, default) if part)
    return f"    {name} ({about}): {field.description}"


if not TYPE_CHECKING:  # pydantic's plugin of mypy does not know other metaclasses

    class Described(BaseModel, metaclass=_Type):
        """A model whose signature, docstring and completion show its fields."""


class Part(Described):
    """Base of JobSpec and of everything in it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=False,
        protected_namespaces=(),
        hide_input_in_errors=True,
        revalidate_instances="never",
        defer_build=True,  # one schema for the spec, at its first validation, not one per part
    )

    shorthand: ClassVar[str] = ""
    """The field that a text in place of this part probably means, for hints."""

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """The fields that differ from the defaults, for a repr that fits a notebook's line."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if field.is_required() or value != field.default:
                yield name, value

    def __str__(self) -> str:
        return repr(self)

    def __dir__(self) -> list[str]:
        return [*type(self).model_fields, *dir(type(self))]

    if not TYPE_CHECKING:  # the type checker refuses it before

        def __setattr__(self, name: str, value: object) -> None:
            fields, step = type(self).model_fields, "make another one: spec.with_(...)"
            if name not in fields:
                step = did_you_mean(name, fields, f"valid fields: {', '.join(fields)}")
            text = f"{type(self).__name__}.{name} cannot be set: a spec is frozen; {step}"
            raise FrozenInstanceError(text)

        def __delattr__(self, name: str) -> None:
            self.__setattr__(name, None)

    def rules(self) -> Iterator[Finding]:
        """The broken rules over several fields, each at the field to change, below this part."""
        yield from ()

    @model_validator(mode="after")
    def _keep_rules(self) -> Part:
        # All at once: an error of pydantic's would name the first and hide the others.
        broken = list(self.rules())
        if broken:
            text = "; ".join(rule.text for rule in broken)
            raise PydanticCustomError("rules", "{text}", {"text": text, "broken": broken})
        return self


def part_types(annotation: Any) -> Iterator[type[Part]]:
    """The Part classes that appear anywhere in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, Part):
        yield annotation
    for argument in get_args(annotation):
        yield from part_types(argument)


def field_paths(part: type[Part], base: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields of a part, at every depth."""
    for name, info in part.model_fields.items():
        yield (*base, name)
        for nested in part_types(info.annotation):
            yield from field_paths(nested, (*base, name))


def parts_at(root: type[Part], loc: FieldPath) -> list[type[Part]]:
    """The classes that a value at a location may have."""
    parts = [root]
    for key in loc:
        if isinstance(key, str):
            fields = [part.model_fields[key] for part in parts if key in part.model_fields]
            parts = [nested for info in fields for nested in part_types(info.annotation)]
    return parts


def field_at(root: type[Part], loc: FieldPath) -> tuple[FieldInfo | None, FieldPath]:
    """The innermost field that contains a location, and the rest of the location below it."""
    for end in range(len(loc), 0, -1):
        name = loc[end - 1]
        if isinstance(name, str):
            for part in parts_at(root, loc[: end - 1]):
                if name in part.model_fields:
                    return part.model_fields[name], loc[end:]
    return None, ()
