"""The types of the fields of objects, as an apiserver or a record has them. Pure."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from k8sjob.findings import field_path
from k8sjob.targets.api import CHILD
from k8sjob.targets.field_types import fit, fits, shown
from k8sjob.targets.jobs import TARGETS
from k8sjob.targets.shapes import JOB_SPEC, JOB_STATUS, OBJECT, OBJECTS

if TYPE_CHECKING:
    from k8sjob.kube.objects import Json

_OBJECTS: Final = OBJECTS | {kind: of for target in TARGETS for kind, of in target.objects.items()}
KINDS: Final = {f"{kind.lower()}s": kind for kind in _OBJECTS}
"""The kinds of objects whose fields are read, by their resource."""


@cache
def object_shape(kind: str) -> dict[str, Any]:
    """The shape of the objects of a kind, also of an unknown one; see fit."""
    # Looked for when it is needed, not when this is imported: a kind may be registered later.
    target = next((target for target in TARGETS if target.kind == kind), None)
    if target is None:
        return OBJECT | _OBJECTS.get(kind, {})
    job = {**OBJECT, "status": JOB_STATUS}
    child = {**job, "spec": JOB_SPEC}
    return {**target.shapes, **job, CHILD: child, "spec": target.shapes["spec"]}


def typed_object(of: str, item: Any) -> tuple[Json, str]:
    """An object without nulls, and a sentence about its first field of a wrong type; or empty.

    Args:
        of: its kind or its resource; an object of an unknown one may have any kind.
        item: the object.
    """
    target = next((target for target in TARGETS if of in (target.kind, target.resource)), None)
    kind = target.kind if target else KINDS.get(of, of)
    if not isinstance(item, dict):
        return {}, f"it is {shown(item)}, not a mapping"
    whole = object_shape(kind)
    fitted, wrong = (item, []) if fits(item, whole) else fit(item, whole)
    if (target or kind in _OBJECTS) and kind != "List" and (fitted.get("kind") or kind) != kind:
        return fitted, f"its kind is {shown(item['kind'])}, not {kind}"
    if wrong:
        path, value, expected = wrong[0]
        return fitted, f"{field_path(path)} is {shown(value)}, not {expected}"
    return fitted, ""
