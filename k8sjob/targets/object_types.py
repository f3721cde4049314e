"""The types of the fields of objects, as an apiserver or a record has them. Pure."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from k8sjob.findings import field_path
from k8sjob.targets.api import CHILD
from k8sjob.targets.field_types import fit, fits, shape, shown, tables
from k8sjob.targets.jobs import TARGETS

if TYPE_CHECKING:
    from k8sjob.kube.objects import Json

_KNOWN: Final = [name for name in tables() if name[0].isupper() and name != "Object"]
KINDS: Final = {f"{kind.lower()}s": kind for kind in _KNOWN}
"""The kinds of objects whose fields are read, by their resource."""


@cache
def object_shape(kind: str) -> dict[str, Any]:
    """The shape of the objects of a kind, also of an unknown one; see fit."""
    common = shape("Object")
    # Looked for when it is needed, not when this is imported: a kind may be registered later.
    target = next((target for target in TARGETS if target.kind == kind), None)
    if target is None:
        return {**common, **shape(kind if kind in _KNOWN else "Object")}
    job = {**common, "status": shape("job_status")}
    child = {**job, "spec": shape("Job")}
    return {**target.shapes, **job, CHILD: child, "spec": target.shapes["spec"]}


def typed_object(of: str, item: Any) -> tuple[Json, str]:
    """An object without nulls, and a sentence about its first field of a wrong type; or empty.

    Args:
        of: its kind or its resource; an object of an unknown one may have any kind.
        item: the object.
    """
    kind = next((target.kind for target in TARGETS if target.resource == of), KINDS.get(of, of))
    if not isinstance(item, dict):
        return {}, f"it is {shown(item)}, not a mapping"
    whole = object_shape(kind)
    fitted, wrong = (item, []) if fits(item, whole) else fit(item, whole)
    if kind in _KNOWN and kind != "List" and (fitted.get("kind") or kind) != kind:
        return fitted, f"its kind is {shown(item['kind'])}, not {kind}"
    if wrong:
        path, value, expected = wrong[0]
        return fitted, f"{field_path(path)} is {shown(value)}, not {expected}"
    return fitted, ""
