"""`pod_template` and `overlay`: fields beyond the job spec's, merged into the manifest last.

Mappings merge as RFC 7386 says (null deletes, everything else replaces). Lists whose items all
have a name merge by it, as Kubernetes' strategic merge does for containers, env, volumes and ports;
`$patch: delete` in an item removes the item of that name. All other lists are replaced whole.

What the result must not break is checked here too: the rules of the target, and the Pod Security
Standard "restricted".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONTAINER_NAMES
from k8sjob.errors import SpecError, field_path, steps
from k8sjob.findings import first_findings, invalid
from k8sjob.kube.objects import Json, at_path, training
from k8sjob.kube.pod_security import FieldPath, restricted_violations
from k8sjob.targets.api import CHILD
from k8sjob.targets.jobs import TARGETS, keyed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.findings import Finding
    from k8sjob.targets.api import Job, Target

# Two mounts of one volume share its name, so where a mount path is given it distinguishes them.
_LIST_KEYS: Final = ("mountPath", "name")
_PROCESS: Final = {
    **{key: key for key in ("image", "command", "args", "env")},
    "resources": "resourcesPerNode",
}
"""The fields of the training container that are at Target.process_at, by their names there."""
_REPLACED: Final = (
    "{!r} would replace the image that is built; change `image` in the job spec, or give it as a"
    " reference instead of a build"
)


def apply_overlay(
    job: Job,
    overlay: Json,
    pod_template: Json,
    *,
    image_is_built: bool,
    restricted: bool = False,
) -> Job:
    """The job with both merged in, the overlay last; no part is shared with an argument.

    Args:
        job: as it was rendered.
        overlay: the spec's overlay.
        pod_template: the spec's, for the Pod template of each role.
        image_is_built: the image comes out of a build; then the digest of that build is what the
            training containers run, and an overlay must not put another in its place.
        restricted: the Pods must pass the Pod Security Standard of that name.

    Raises:
        SpecError: the overlay names what has its own field, or the result would be refused by the
            training operator, or by the standard.
    """
    target = job.target
    problems = list(_forbidden_fields(overlay))
    if companion := keyed(target):
        problems += _forbidden_fields(overlay.get(companion.key), f"overlay.{companion.key}")
    templates = {replicas.path: replicas.pod for replicas in target.replicas(job)}
    merged = _traced(job.document)
    for path, pod in templates.items() if pod_template else ():
        template = _traced(pod_template, "pod_template")  # the roles share no part of it
        process = _for_container(target, training(pod.get("containers")), template)
        _merge(_at(merged, path), template)
        if process.value:
            _merge(_at(merged, target.process_at), process)
    if overlay:
        _merge(merged, _traced(overlay, "overlay"))
    if image_is_built:
        problems += _replaced_images(merged, target, templates)
    problems += _twice({"overlay": overlay, "pod_template": pod_template})
    document: Json = _plain(merged)
    if not problems:
        problems = first_findings(
            target.problems(document),
            lambda problem: _at_source(merged, steps(problem.field), problem),
        )
    if restricted and not problems:
        problems = _violations(merged, job.with_document(document))
    if problems:
        raise SpecError(problems)
    return job.with_document(document)


def of_another_kind(overlay: Json, target: Target) -> Iterator[Finding]:
    """The fields of an overlay that another kind of job has, and not this one."""
    spec = at_path(overlay, "spec")
    fields: list[tuple[str, ...]] = [(key,) for key in overlay if key != "spec"]
    fields += [("spec", key) for key in spec] if isinstance(spec, dict) else []
    for field in fields:
        owners = [owner.kind for owner in TARGETS if _has(owner, field)]
        if owners and not _has(target, field):
            yield invalid(
                field_path(("overlay", *field)),
                f"a {target.kind} has no {'.'.join(field)}, which is a {' or '.join(owners)}'s;"
                f" use the fields of a {target.kind}, in pod_template if it applies to the Pods of"
                " all replicas, or remove it",
            )


def _has(target: Target, field: tuple[str, ...]) -> bool:
    companion = keyed(target)
    in_spec = field[0] == "spec" and field[1] in target.spec_fields
    return in_spec or bool(companion and field == (companion.key,))


def leaves(patch: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """The paths at which a patch changes something; items of a list are called by their name."""
    if isinstance(patch, dict) and patch:
        for key, value in patch.items():
            yield from leaves(value, (*path, key))
    elif isinstance(patch, list) and patch and all(isinstance(item, dict) for item in patch):
        for index, item in enumerate(patch):
            names = [item.get(key) for key in ("name", "mountPath")]
            name = next((name for name in names if name and isinstance(name, str)), index)
            changes = {key: value for key, value in item.items() if key not in _LIST_KEYS}
            yield from leaves(changes or None, (*path, name))
    else:
        yield path


def _for_container(target: Target, container: Json, template: _Traced) -> _Traced:
    """Name the training container in pod_template, and take the fields out that are elsewhere.

    Returns:
        Those fields, for the process at Target.process_at.
    """
    # An only container with another name is a sidecar, which must not replace the training.
    named = (None, *CONTAINER_NAMES)
    containers = _mappings(_at(template, ("spec", "containers")))
    trains = _training([item for item in containers if _fields(item).get("name") in named])
    trains.value["name"] = _Traced(container["name"])
    apart = _PROCESS if target.process_at else {}
    process = {apart[key]: trains.value.pop(key) for key in apart if key in trains.value}
    return _Traced(process, trains.origin)


# --- the merge ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Traced:
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


def _traced(value: Any, *origin: str | int) -> _Traced:
    """A copy of a JSON value, whose parts have the paths below an origin."""

    def part(step: str | int, inner: Any) -> _Traced:
        return _traced(inner, *origin, step) if origin else _traced(inner)

    if isinstance(value, dict):
        value = {key: part(key, inner) for key, inner in value.items()}
    elif isinstance(value, list):
        value = [part(index, inner) for index, inner in enumerate(value)]
    return _Traced(value, origin)


def _plain(traced: _Traced) -> Any:
    value = traced.value
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items() if not part.deleted}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def merge(base: Any, patch: Any, *, deletes: bool = True) -> Any:
    """The JSON value `base` changed by `patch`, which shares no mapping or list with either.

    Without `deletes` the base is a patch too, and the result does what one does after the other.
    """
    return _plain(_merge(_traced(base), _traced(patch), deletes=deletes))


def _merge(base: _Traced, patch: _Traced, *, deletes: bool = True) -> _Traced:
    """The base, changed in place; it and the patch may share parts then."""
    value = patch.value
    if isinstance(patch.value, dict):
        value = base.value if isinstance(base.value, dict) else {}
        for key, change in patch.value.items():
            if deletes and change.value is None:
                value[key] = _Traced(None, change.origin, deleted=True)
            else:
                value[key] = _merge(value.get(key) or _Traced(), change, deletes=deletes)
    elif isinstance(patch.value, list) and patch.value:
        items = base.value if isinstance(base.value, list) else []
        if key := list_key([*map(_fields, items)], [*map(_fields, patch.value)]):
            named = {_fields(item)[key]: item for item in items}
            for change in patch.value:
                name = _fields(change)[key]
                if deletes and _fields(change).get("$patch") == "delete":
                    named.pop(name, None)
                else:
                    named[name] = _merge(named.get(name) or _Traced(), change, deletes=deletes)
            value = list(named.values())
    base.value, base.origin, base.deleted = value, patch.origin, False
    return base


def _at(traced: _Traced, path: FieldPath) -> _Traced:
    """The part at a path, where items of lists may be called by their name; else an empty one."""
    for step in path:
        parts = traced.value
        if isinstance(parts, list):
            names = {str(_fields(item).get("name")): item for item in _mappings(traced)}
            parts = {**names, **dict(enumerate(parts))}
        traced = (parts.get(step) if isinstance(parts, dict) else None) or _Traced()
    return traced


def _fields(traced: _Traced) -> Any:
    """The scalars in a mapping, and the types of its other fields; other values as they are."""
    if not isinstance(traced.value, dict):
        return traced.value
    values = ((key, part.value) for key, part in traced.value.items())
    return {key: type(v) if isinstance(v, dict | list) else v for key, v in values}


def _mappings(traced: _Traced) -> list[_Traced]:
    """The mappings in a list; none where there is no list."""
    items = traced.value if isinstance(traced.value, list) else []
    return [item for item in items if isinstance(item.value, dict)]


def _training(containers: list[_Traced]) -> _Traced:
    """The training container among them; else an empty one."""
    fields = [_fields(container) for container in containers]
    trains = training(fields)
    pairs = zip(containers, fields, strict=True)
    return next((container for container, plain in pairs if plain is trains), _Traced({}))


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


def _forbidden_fields(overlay: Any, at: str = "overlay") -> Iterator[Finding]:
    metadata = at_path(overlay, "metadata")
    for key in ("apiVersion", "kind", "status", CHILD):
        if isinstance(overlay, dict) and key in overlay:
            yield invalid(f"{at}.{key}", f"{overlay[key]!r} cannot be set by an overlay; remove it")
    for key in ("name", "namespace"):
        if isinstance(metadata, dict) and key in metadata:
            message = f"{metadata[key]!r} has its own field; set `{key}` in the job spec"
            yield invalid(f"{at}.metadata.{key}", message)


def _twice(change: Any, path: FieldPath = ()) -> Iterator[Finding]:
    """Items of a list with the same name, which would be merged into one."""
    every = change.items() if isinstance(change, dict) else enumerate(change)
    for step, value in every:
        if isinstance(value, dict | list):
            yield from _twice(value, (*path, step))
    items = change if isinstance(change, list) else []
    key = next((key for key in _LIST_KEYS if items and _names(items, key)), "")
    names = ["" if "$patch" in item else item[key] for item in items] if key else []
    for index, name in enumerate(names):
        if name and name in names[:index]:
            at = field_path((*path, index, key))
            yield invalid(at, f"{name!r} is duplicated; rename one, or merge them")


# --- errors, at the fields of the job spec --------------------------------------------------------


def _violations(merged: _Traced, job: Job) -> list[Finding]:
    """The violations of the standard."""
    from k8sjob.spec.base import seen  # noqa: PLC0415 - it loads pydantic, which a spec has

    def explain(violation: tuple[FieldPath, Any, str]) -> Finding:
        path, value, requirement = violation
        shown = "absent" if value is None else seen(value)
        message = f"{shown}, and security: restricted requires {requirement}; change it, or set"
        return _at_source(merged, path, invalid("", f"{message} security: default"))

    violations = [
        ((*replicas.path, "spec", *path), value, requirement)
        for replicas in job.target.replicas(job)
        for path, value, requirement in restricted_violations(replicas.pod)
    ]
    return first_findings(violations, explain)


def _at_source(merged: _Traced, path: FieldPath, problem: Finding) -> Finding:
    """A problem of a field of the merged job, at the change that it comes from."""
    around = [(_at(merged, path[:depth]), path[depth:]) for depth in range(len(path) + 1)]
    nearest, below = next((pair for pair in reversed(around) if pair[0].origin), around[0])
    # A field that pod_template lacks may no longer fit to it. One that null has removed has nothing
    # below it, and the items of a list that is merged have other indexes in the change.
    apart = nearest.deleted or isinstance(nearest.value, list)
    if not nearest.origin or (below and apart):
        field = field_path(nearest.origin or ("pod_template",))
        return replace(problem, field=field, message=f"{field_path(path)}: {problem.message}")
    return replace(problem, field=field_path((*nearest.origin, *below)))


def _replaced_images(
    merged: _Traced, target: Target, templates: Iterable[FieldPath]
) -> Iterator[Finding]:
    """Changes of the image that training containers run."""
    containers = [_at(merged, (*path, "spec", "containers")) for path in templates]
    processes = [_training(_mappings(part)) for part in containers]
    processes += [_at(merged, target.process_at)] if target.process_at else []
    images = [_at(process, ("image",)) for process in processes]
    for origin, image in {image.origin: image.value for image in images if image.origin}.items():
        yield invalid(field_path(origin), _REPLACED.format(image))
