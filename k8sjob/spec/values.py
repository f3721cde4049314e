"""Types of single values in a job spec: names, references, quantities, durations, free JSON.

A duration is `60s`, `10m`, `1h30m`, `2d`, or a whole number of seconds.
"""

from __future__ import annotations

import math
import re
import unicodedata
from decimal import Decimal
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, Strict, WithJsonSchema

from k8sjob.findings import field_path
from k8sjob.kube.quantity import MAX, canonical, parse
from k8sjob.references import REFERENCE, is_image_reference
from k8sjob.spec.base import refuse, seen

MAX_NAME: Final = 63
"""Longest DNS label: pods' host names and services must fit it."""

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DNS_1035 = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_DNS_1123 = re.compile(_LABEL)
_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_QUALIFIED = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def matching(
    pattern: re.Pattern[str], form: str, longest: int | None = None, *, next_step: str = ""
) -> AfterValidator:
    """A validator of texts that match a pattern as a whole and have at most `longest` characters.

    `form` says in the message what the text is not, and its form.
    """

    def check(value: str) -> str:
        if not pattern.fullmatch(value) or (longest is not None and len(value) > longest):
            refuse(f"{value!r} is not {form}", next_step)
        return value

    return AfterValidator(check)


def _text(value: Any) -> Any:
    """Numbers as their text, since `PORT: 8080` means "8080"; a boolean is a trap, see below."""
    if isinstance(value, bool):
        # YAML 1.1 reads on, off, yes and no as booleans: what was meant can no longer be known.
        word = "true" if value else "false"
        refuse(
            f"{word} is a boolean, not text",
            "YAML also reads on, off, yes and no as booleans, so"
            f' quote it: "{word}" or "{"on" if value else "off"}"',
        )
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return getattr(value, "text", None) or repr(value)
    if value is None:
        refuse("null is not text", 'write "" for an empty value, or remove the key')
    return value


def check_text(value: str) -> str:
    """Text that a container, YAML and JSON can all carry, as it is."""
    if "\0" in value:
        refuse(f"{value!r} has a NUL character, which no environment or argument can carry")
    if any("\ud800" <= character <= "\udfff" for character in value):
        refuse(f"{value!a} has half a surrogate pair, which is not text", "remove it")
    return value


def _job_name(value: str) -> str:
    if not _DNS_1035.fullmatch(value):
        plain = unicodedata.normalize("NFKD", value)
        plain = "".join(c for c in plain if not unicodedata.combining(c))
        name = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-").lstrip("0123456789-")
        refuse(
            f"{value!r} is not a DNS-1035 name: lower-case letters, digits and '-', starting with a"
            " letter and not ending with '-'",
            f"for example {name!r}" if name else "",
        )
    return value


def _label_key(value: str) -> str:
    prefix, slash, name = value.rpartition("/")
    fits = _QUALIFIED.fullmatch(name) and len(name) <= MAX_NAME
    if slash:
        fits = fits and _SUBDOMAIN.fullmatch(prefix) and len(prefix) <= 253
    if not fits:
        refuse(
            f"{value!r} is not a label key: [domain/]name, the name of at most"
            f" {MAX_NAME} letters, digits, '-', '_' and '.', starting and ending with a letter or"
            " digit"
        )
    return value


def _resource_name(value: str) -> str:
    if "/" not in value:
        refuse(
            f"{value!r} is not an extended resource: write domain/name, such as 'nvidia.com/gpu'"
        )
    return _label_key(value)


def _reference(value: str) -> str:
    if not is_image_reference(value):
        refuse(
            f"{value!r} is not an image reference: [registry/]path[:tag][@sha256:digest], registry"
            " and path in lower case"
        )
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        refuse(f"{value!r} is not an absolute path", meant=[f"/{value.removeprefix('./')}"])
    if ".." in value.split("/") or ":" in value:
        refuse(f"{value!r} contains '..' or ':', which a path in a container cannot")
    return value.rstrip("/") or "/"


def _of_form(pattern: re.Pattern[str]) -> WithJsonSchema:
    """The JSON Schema of a name, for editors."""
    return WithJsonSchema({"type": "string", "pattern": f"^(?:{pattern.pattern})$"})


_WRITTEN: Final = WithJsonSchema({"type": ["string", "number"]})  # numbers become their text

Text = Annotated[str, Strict(), AfterValidator(check_text), BeforeValidator(_text), _WRITTEN]
"""Any text; numbers become theirs, booleans are refused."""
JobName = Annotated[str, Strict(), AfterValidator(_job_name), _of_form(_DNS_1035)]
NamespaceName = Annotated[
    str,
    Strict(),
    matching(
        _DNS_1123,
        f"a DNS-1123 label: lower-case letters, digits and '-', at most {MAX_NAME} characters,"
        " starting and ending with a letter or digit",
        MAX_NAME,
    ),
    _of_form(_DNS_1123),
]
VolumeName = NamespaceName
ObjectName = Annotated[
    str,
    Strict(),
    matching(
        _SUBDOMAIN,
        "the name of a Kubernetes object: lower-case letters, digits, '-' and '.', at most 253"
        " characters, starting and ending with a letter or digit",
        253,
    ),
    _of_form(_SUBDOMAIN),
]
LabelKey = Annotated[str, Strict(), AfterValidator(_label_key)]
LabelValue = Annotated[
    str,
    Strict(),
    matching(
        re.compile(f"(?:{_QUALIFIED.pattern})?"),
        f"a label value: at most {MAX_NAME} letters, digits, '-', '_' and '.', starting and ending"
        " with a letter or digit",
        MAX_NAME,
        next_step="use annotations for any other text",
    ),
    BeforeValidator(_text),
    _WRITTEN,
]
ResourceName = Annotated[str, Strict(), AfterValidator(_resource_name)]
EnvName = Annotated[
    str,
    Strict(),
    matching(_ENV, "a variable's name: letters, digits and '_', not starting with a digit"),
]
ImageName = Annotated[str, Strict(), AfterValidator(_reference), _of_form(REFERENCE)]
AbsolutePath = Annotated[
    str,
    Strict(),
    AfterValidator(_absolute),
    AfterValidator(check_text),
    WithJsonSchema({"type": "string", "pattern": "^/"}),
]


_MAX_DEPTH: Final = 32


def _copy(value: Any, at: tuple[str | int, ...] = ()) -> Any:
    """A copy that is JSON through and through, so that no one else can change it."""
    where = f" in {field_path(at)}" if at else ""
    if len(at) > _MAX_DEPTH:
        refuse(f"nested more than {_MAX_DEPTH} levels deep, which no Kubernetes object is")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                refuse(f"the key {key!r}{where} is not text", "quote it")
            check_text(key)
        return {key: _copy(item, (*at, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item, (*at, index)) for index, item in enumerate(value)]
    if isinstance(value, str):
        return check_text(value)
    if value is None or isinstance(value, bool | int):
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        refuse(f"{value!r}{where} is not JSON", "write text, numbers, booleans, lists, mappings")
    return float(value)


TargetName = Literal["pytorchjob", "job", "jobset", "trainjob"]
"""The names of k8sjob.targets.jobs.TARGETS."""
FreeJson = Annotated[dict[str, Any], AfterValidator(_copy)]
"""A JSON object in Kubernetes' own form."""


# --- quantities and durations ---------------------------------------------------------------------


def _quantity(value: Any) -> str:
    text = value
    if isinstance(value, int | float) and not isinstance(value, bool):
        text = getattr(value, "text", None) or repr(value)
    try:
        number = parse(text) if isinstance(text, str) else None
    except ValueError:
        number = None
    if number is None:
        refuse(f"{seen(value)} is not a quantity", meant=[])
    if number < 0:
        refuse(
            f"{seen(value)} is negative",
            meant=[text.lstrip("-") if isinstance(value, str) else -value],
        )
    if number >= MAX:
        refuse(f"{seen(value)} is more than any node has", meant=[])
    return canonical(text)


def _cpu(value: Any) -> str:
    text = _quantity(value)
    cores = parse(text)
    if not cores:
        refuse(f"{seen(value)} requests no CPU", "leave cpu out for no limit, or write at least 1m")
    if cores % Decimal("0.001"):
        whole = f"{int(cores * 1000) + 1}m"
        refuse(f"{seen(value)} is finer than a thousandth of a core", meant=[whole])
    return text


def _memory(value: Any) -> str:
    text = _quantity(value)
    size = parse(text)
    if size % 1:
        meant = f"{(size * 1000).normalize():f}Mi"
        refuse(
            f"{seen(value)} is {size.normalize():f} bytes, since 'm' means a thousandth",
            meant=[meant],
        )
    if 0 < size < 10**6:
        refuse(f"{seen(value)} is {size:f} bytes, less than 1M", f"write {size:f}Mi or {size:f}Gi")
    return text


_SCHEMA: Final = WithJsonSchema(
    {
        "anyOf": [
            {
                "type": "string",
                "pattern": r"^[+]?([0-9]+\.?[0-9]*|\.[0-9]+)"
                r"([KMGTPE]i|[eE][+-]?[0-9]+|[numkMGTPE])?$",
            },
            {"type": "number", "minimum": 0},
        ]
    }
)

Quantity = Annotated[str, BeforeValidator(_quantity), _SCHEMA]
"""Canonical text of any quantity that is not negative."""
Cpu = Annotated[str, BeforeValidator(_cpu), _SCHEMA]
"""Canonical text of a number of cores, at least 1m."""
Memory = Annotated[str, BeforeValidator(_memory), _SCHEMA]
"""Canonical text of a number of bytes: 0, or at least 1M."""


_SECONDS: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION: Final = "(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?"
_MAX_SECONDS: Final = 2**31 - 1  # Kubernetes keeps seconds in 32 or 64 bits, depending on the field


def parse_duration(value: Any) -> int:
    """Whole seconds.

    Args:
        value: "90s", "1m30s", "2d", or an int of seconds.

    Raises:
        PydanticCustomError: anything else.
    """
    seconds = -1
    if isinstance(value, int) and not isinstance(value, bool):
        seconds = value
    elif isinstance(value, str) and value.isascii():
        if value.isdigit():
            seconds = int(value[:20])
        elif value and (match := re.fullmatch(_DURATION, value)):
            parts = zip(match.groups(), _SECONDS.values(), strict=True)
            seconds = sum(int(number[:20]) * unit for number, unit in parts if number)
    if not 0 <= seconds <= _MAX_SECONDS:
        message = f"{seen(value)} is not a duration, such as 90s, 10m, 1h30m or 2d"
        refuse(message, f"at most {_MAX_SECONDS}s" if seconds > 0 else "", meant=[])
    return seconds


def format_duration(seconds: int) -> str:
    """The shortest text that parse_duration reads back: 90 is "1m30s"."""
    text, remainder = "", seconds
    for letter, unit in _SECONDS.items():
        count, remainder = divmod(remainder, unit)
        text += f"{count}{letter}" if count else ""
    return text or "0s"


Duration = Annotated[
    int,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": rf"^(?:[0-9]+|{_DURATION})$", "minLength": 1},
                {"type": "integer", "minimum": 0, "maximum": _MAX_SECONDS},
            ]
        }
    ),
]
"""Whole seconds in Python; "10m" in a job.yaml."""
