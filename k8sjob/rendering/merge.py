"""The merge of JSON values, which knows where each part of its result comes from.

Mappings merge as RFC 7386 says (null deletes, everything else replaces). Lists whose items all
have a name merge by it, as Kubernetes' strategic merge does for containers, env, volumes and ports;
`$patch: delete` in an item removes the item of that name. All other lists are replaced whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import FieldPath

# Two mounts of one volume share its name, so where a mount path is given it distinguishes them.
_LIST_KEYS: Final = ("mountPath", "name")


def merge(base: Any, patch: Any, *, deletes: bool = True) -> Any:
    """The JSON value `base` changed by `patch`, which shares no mapping or list with either.

    Without `deletes` the base is a patch too, and the result does what one does after the other.
    """
    return Traced.of(base).merge(Traced.of(patch), deletes=deletes).plain()


@dataclass(slots=True, eq=False)
class Traced:
    """A JSON value that remembers where it comes from.

    Attributes:
        value: a scalar, or a mapping or list of such values.
        origin: the path of the change that gave the value or something in it, from "overlay" or
            "pod_template" on; empty: the value is the rendered job's.
        deleted: the change was null: the field is gone, and an error about that has a place.
    """

    value: Any = None
    origin: FieldPath = ()
    deleted: bool = False

    @classmethod
    def of(cls, value: Any, *origin: str | int) -> Traced:
        """A copy of a JSON value, whose parts have the paths below an origin, if there is one."""

        def part(step: str | int, inner: Any) -> Traced:
            return cls.of(inner, *origin, step) if origin else cls.of(inner)

        if isinstance(value, dict):
            value = {key: part(key, inner) for key, inner in value.items()}
        elif isinstance(value, list):
            value = [part(index, inner) for index, inner in enumerate(value)]
        return cls(value, origin)

    def plain(self) -> Any:
        """The JSON value."""
        if isinstance(self.value, dict):
            return {key: part.plain() for key, part in self.value.items() if not part.deleted}
        if isinstance(self.value, list):
            return [part.plain() for part in self.value]
        return self.value

    def merge(self, patch: Traced, *, deletes: bool = True) -> Traced:
        """Change this value in place, and return it; it and the patch may share parts then."""
        value = patch.value
        if isinstance(patch.value, dict):
            value = self.value if isinstance(self.value, dict) else {}
            for key, change in patch.value.items():
                if deletes and change.value is None:
                    value[key] = Traced(None, change.origin, deleted=True)
                else:
                    base = value.get(key) or Traced()
                    value[key] = base.merge(change, deletes=deletes)
        # An empty list replaces the other, so `tolerations: []` removes all tolerations.
        elif isinstance(patch.value, list) and patch.value:
            items = self.value if isinstance(self.value, list) else []
            if key := list_key([i.fields for i in items], [i.fields for i in patch.value]):
                named = {item.fields[key]: item for item in items}
                for change in patch.value:
                    name = change.fields[key]
                    if deletes and change.fields.get("$patch") == "delete":
                        named.pop(name, None)
                    else:
                        base = named.get(name) or Traced()
                        named[name] = base.merge(change, deletes=deletes)
                value = list(named.values())
        self.value, self.origin, self.deleted = value, patch.origin, False
        return self

    def at(self, path: FieldPath) -> Traced:
        """The part at a path; an empty one where there is none."""
        part = self
        for step in path:
            parts = dict(enumerate(part.value)) if isinstance(part.value, list) else part.value
            part = (parts.get(step) if isinstance(parts, dict) else None) or Traced()
        return part

    @property
    def fields(self) -> Any:
        """The scalars in a mapping, and the types of its other fields; another value as it is."""
        if not isinstance(self.value, dict):
            return self.value
        values = ((key, part.value) for key, part in self.value.items())
        return {key: type(v) if isinstance(v, dict | list) else v for key, v in values}

    @property
    def mappings(self) -> list[Traced]:
        """The mappings in a list; none where there is no list."""
        items = self.value if isinstance(self.value, list) else []
        return [item for item in items if isinstance(item.value, dict)]


def list_key(*lists: list[Any]) -> str | None:
    """The key by which lists merge; None: they are replaced."""
    for key in _LIST_KEYS:
        names = [_names(items, key) for items in lists]
        if all(unique is not None and len(unique) == len(set(unique)) for unique in names):
            return key
    return None


def _names(items: list[Any], key: str) -> list[str] | None:
    """The names of a list's items; None: one has none."""
    named = (item.get(key) for item in items if isinstance(item, dict))
    names = [name for name in named if isinstance(name, str)]
    return names if len(names) == len(items) else None


def repeated_names(patch: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, str]]:
    """Names that several items of a list have, which would be merged into one."""
    every = patch.items() if isinstance(patch, dict) else enumerate(patch)
    for step, value in every:
        if isinstance(value, dict | list):
            yield from repeated_names(value, (*path, step))
    items = patch if isinstance(patch, list) else []
    key = next((key for key in _LIST_KEYS if items and _names(items, key)), "")
    # An item may be removed, and another of its name put in its place.
    names = ["" if "$patch" in item else item[key] for item in items] if key else []
    for index, name in enumerate(names):
        if name and name in names[:index]:
            yield (*path, index, key), name


def leaves(patch: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """The paths at which a patch changes something; items of a list are called by their name."""
    if isinstance(patch, dict) and patch:
        for key, value in patch.items():
            yield from leaves(value, (*path, key))
    elif isinstance(patch, list) and patch and all(isinstance(item, dict) for item in patch):
        for index, item in enumerate(patch):
            names = [item.get(key) for key in reversed(_LIST_KEYS)]
            name = next((name for name in names if name and isinstance(name, str)), index)
            changes = {key: value for key, value in item.items() if key not in _LIST_KEYS}
            yield from leaves(changes or None, (*path, name))
    else:
        yield path
