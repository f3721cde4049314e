"""Names as Kubernetes and the registries accept them, and free JSON: each refusal says why."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Strict, WithJsonSchema

from k8sjob.errors import field_path
from k8sjob.spec.base import refuse

MAX_NAME: Final = 63
"""Longest DNS label: pods' host names and services must fit it."""

_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DNS_1035 = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_DNS_1123 = re.compile(_LABEL)
_SUBDOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_QUALIFIED = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*(?::[0-9]+)?"
_PATH = rf"(?:{_DOMAIN}/)?{_COMPONENT}(?:/{_COMPONENT})*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_REPOSITORY = re.compile(_PATH)
_REFERENCE = re.compile(rf"({_PATH})(?::{_TAG})?(?:@sha256:[0-9a-f]{{64}})?")


def _text(value: Any) -> Any:
    """Numbers as their text, since `PORT: 8080` means "8080"; a boolean is a trap, see below."""
    if isinstance(value, bool):
        # YAML 1.1 reads on, off, yes and no as booleans: what was meant can no longer be known.
        word = "true" if value else "false"
        refuse(
            f"{word} is a boolean and this is text; YAML also reads on, off, yes and no as"
            f' booleans, so quote it, as "{word}" or "{"on" if value else "off"}"'
        )
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return getattr(value, "text", None) or repr(value)
    if value is None:
        refuse('null is not text; write "" for an empty value, or leave the key out')
    return value


def check_text(value: str) -> str:
    """Text that a container, YAML and JSON can all carry, as it is."""
    if "\0" in value:
        refuse(f"{value!r} has a NUL character, which no environment or argument can carry")
    if any("\ud800" <= character <= "\udfff" for character in value):
        refuse(f"{value!a} has half a surrogate pair, which is no text; take it out")
    return value


def _job_name(value: str) -> str:
    if not _DNS_1035.fullmatch(value):
        name = suggested_name(value)
        refuse(
            f"{value!r} is not a DNS-1035 name: lower-case letters, digits and '-', a letter first"
            f" and no '-' last" + (f"; {name!r} would do" if name else "")
        )
    return value


def suggested_name(value: str) -> str:
    """The name of a job that is nearest to a text; empty where there is none."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", value) if not unicodedata.combining(c))
    name = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-").lstrip("0123456789-")
    return name if _DNS_1035.fullmatch(name) else ""


def _namespace(value: str) -> str:
    if not _DNS_1123.fullmatch(value) or len(value) > MAX_NAME:
        refuse(
            f"{value!r} is not a DNS-1123 label: lower-case letters, digits and '-', at most"
            f" {MAX_NAME} of them, a letter or digit first and last"
        )
    return value


def _object_name(value: str) -> str:
    if not _SUBDOMAIN.fullmatch(value) or len(value) > 253:
        refuse(
            f"{value!r} is not the name of a Kubernetes object: lower-case letters, digits, '-' and"
            " '.', at most 253 of them, a letter or digit first and last"
        )
    return value


def _label_key(value: str) -> str:
    prefix, slash, name = value.rpartition("/")
    fits = _QUALIFIED.fullmatch(name) and len(name) <= MAX_NAME
    if slash:
        fits = fits and _SUBDOMAIN.fullmatch(prefix) and len(prefix) <= 253
    if not fits:
        refuse(
            f"{value!r} is not a key as Kubernetes takes it: [domain/]name, the name of at most"
            f" {MAX_NAME} letters, digits, '-', '_' and '.', a letter or digit first and last"
        )
    return value


def is_label_value(value: str) -> bool:
    """Whether Kubernetes takes the text as the value of a label."""
    return not value or (len(value) <= MAX_NAME and bool(_QUALIFIED.fullmatch(value)))


def _label_value(value: str) -> str:
    if not is_label_value(value):
        refuse(
            f"{value!r} is not a label value: at most {MAX_NAME} letters, digits, '-', '_' and '.',"
            " a letter or digit first and last; longer or freer text belongs into annotations"
        )
    return value


def _resource_name(value: str) -> str:
    if "/" not in value:
        refuse(f"{value!r} is not an extended resource: write domain/name, as 'nvidia.com/gpu'")
    return _label_key(value)


def _env_name(value: str) -> str:
    if not _ENV.fullmatch(value):
        refuse(f"{value!r} is not a variable's name: letters, digits and '_', no digit first")
    return value


def _reference(value: str) -> str:
    if not is_image_reference(value):
        refuse(
            f"{value!r} is not an image reference: [registry/]path[:tag][@sha256:digest], registry"
            " and path in lower case"
        )
    return value


def is_image_reference(text: str) -> bool:
    """Whether the text names an image as registries do."""
    match = _REFERENCE.fullmatch(text)
    return match is not None and len(match[1]) <= 255


def is_repository(reference: str) -> bool:
    """Whether an image reference has neither a tag nor a digest."""
    return bool(_REPOSITORY.fullmatch(reference))


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        refuse(f"{value!r} is not an absolute path", [f"/{value.removeprefix('./')}"])
    if ".." in value.split("/") or ":" in value:
        refuse(f"{value!r} has '..' or ':' in it, which a path in a container cannot have")
    return value.rstrip("/") or "/"


def _of_form(pattern: re.Pattern[str]) -> WithJsonSchema:
    """What an editor can check of a name while it is written."""
    return WithJsonSchema({"type": "string", "pattern": f"^(?:{pattern.pattern})$"})


_WRITTEN: Final = WithJsonSchema({"type": ["string", "number"]})  # numbers become their text

Text = Annotated[str, Strict(), AfterValidator(check_text), BeforeValidator(_text), _WRITTEN]
"""Any text; numbers become theirs, booleans are refused."""
JobName = Annotated[str, Strict(), AfterValidator(_job_name), _of_form(_DNS_1035)]
NamespaceName = Annotated[str, Strict(), AfterValidator(_namespace), _of_form(_DNS_1123)]
VolumeName = Annotated[str, Strict(), AfterValidator(_namespace), _of_form(_DNS_1123)]
ObjectName = Annotated[str, Strict(), AfterValidator(_object_name), _of_form(_SUBDOMAIN)]
LabelKey = Annotated[str, Strict(), AfterValidator(_label_key)]
LabelValue = Annotated[
    str, Strict(), AfterValidator(_label_value), BeforeValidator(_text), _WRITTEN
]
ResourceName = Annotated[str, Strict(), AfterValidator(_resource_name)]
EnvName = Annotated[str, Strict(), AfterValidator(_env_name)]
ImageReference = Annotated[str, Strict(), AfterValidator(_reference), _of_form(_REFERENCE)]
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
        refuse(f"nested more than {_MAX_DEPTH} deep, which Kubernetes never is")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                refuse(f"the key {key!r}{where} is not text; quote it")
            check_text(key)
        return {key: _copy(item, (*at, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy(item, (*at, index)) for index, item in enumerate(value)]
    if isinstance(value, str):
        return check_text(value)
    if value is None or isinstance(value, bool | int):
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        refuse(f"{value!r}{where} is not JSON; write text, numbers, booleans, lists, mappings")
    return float(value)


TargetName = Literal["pytorchjob", "job", "jobset", "trainjob"]
"""The names of k8sjob.targets.jobs.TARGETS."""
FreeJson = Annotated[dict[str, Any], AfterValidator(_copy)]
"""A JSON object in Kubernetes' own form."""
