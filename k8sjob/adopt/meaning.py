"""When two PyTorchJobs mean the same, and by which overlay one becomes the other.

Both come down to one function, `difference`, over manifests in normal form.
"""

from __future__ import annotations

from typing import Any, Final

from k8sjob.adopt.normal import Json, config_of, normal

__all__ = ["SAME", "combined", "difference", "same", "same_meaning"]

SAME: Final = object()
"""What `difference` gives for two values that mean the same."""
_LIST_KEYS: Final = ("mountPath", "name")
_ORDERED: Final = frozenset({"initContainers", "command", "args", "envFrom"})


def same_meaning(one: Json, other: Json) -> bool:
    """Whether two PyTorchJobs make the operator do the same, k8sjob's own marks left aside."""
    config = config_of(one) is not None and config_of(other) is not None
    return same(normal(one, config=config), normal(other, config=config))


def same(one: Any, other: Any) -> bool:
    """Whether two values in normal form mean the same."""
    return difference(one, other) is SAME


def difference(base: Any, wanted: Any, name: str = "") -> Any:
    """The overlay that turns one JSON value into another, or SAME.

    It is a patch for k8sjob.rendering.overlay.merge: null deletes, lists whose items all have a
    name merge by it, other lists are replaced.

    Args:
        base: the value that is there.
        wanted: the value that the merge shall give; without nulls.
        name: the key that the values stand under, which says whether an order has a meaning.
    """
    if isinstance(base, dict) and isinstance(wanted, dict):
        return _mappings_differ(base, wanted)
    if isinstance(base, list) and isinstance(wanted, list):
        return _lists_differ(base, wanted, name)
    same = isinstance(base, bool) == isinstance(wanted, bool) and base == wanted
    return SAME if same else wanted


def combined(first: Any, second: Any) -> Any:
    """One overlay that changes what two change one after the other."""
    if isinstance(first, dict) and isinstance(second, dict):
        added = {k: combined(first[k], v) if k in first else v for k, v in second.items()}
        return {**first, **added}
    if isinstance(first, list) and isinstance(second, list):
        key = _key_of(first, second)
        if key is not None:
            items = {item[key]: item for item in first}
            for item in second:
                items[item[key]] = combined(items.get(item[key], {}), item)
            return list(items.values())
    return second


def _mappings_differ(base: Json, wanted: Json) -> Any:
    patch: Json = {key: None for key in base if key not in wanted}
    for key, value in wanted.items():
        change = difference(base[key], value, key) if key in base else value
        if change is not SAME:
            patch[key] = change
    return patch or SAME


def _lists_differ(base: list[Any], wanted: list[Any], name: str) -> Any:
    pairs = zip(base, wanted, strict=False)
    if len(base) == len(wanted) and all(difference(*pair) is SAME for pair in pairs):
        return SAME
    key = _key_of(base, wanted)
    if key is None or name in _ORDERED or not base or not wanted:
        return wanted
    items = {item[key]: item for item in base}
    kept = {item[key] for item in wanted}
    patch = [{key: gone, "$patch": "delete"} for gone in items if gone not in kept]
    for item in wanted:
        change = difference(items.get(item[key], {}), item)
        if change is not SAME:
            patch.append({key: item[key], **change})
    return patch or SAME


def _key_of(*lists: list[Any]) -> str | None:
    """The key by which lists merge; as rendering's overlay, mount paths before names."""
    return next((key for key in _LIST_KEYS if all(_keyed(items, key) for items in lists)), None)


def _keyed(items: list[Any], key: str) -> bool:
    names = [item.get(key) for item in items if isinstance(item, dict)]
    return all(isinstance(n, str) for n in names) and len(items) == len(names) == len(set(names))
