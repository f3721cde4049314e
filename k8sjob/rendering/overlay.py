"""`pod_template` and `overlay`: fields beyond the job spec's, merged into the manifest last.

Mappings merge as RFC 7386 says (null deletes, everything else replaces). Lists whose items all
have a name merge by it, as Kubernetes' strategic merge does for containers, env, volumes and ports;
`$patch: delete` in an item removes the item of that name. All other lists are replaced whole.

What the result must not break is checked here too: the rules of the target, and the Pod Security
Standard "restricted".
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONTAINER_NAMES
from k8sjob.errors import SpecError, field_path
from k8sjob.findings import first_findings, invalid
from k8sjob.kube.objects import Json, at_path, training
from k8sjob.kube.pod_security import FieldPath, restricted_violations
from k8sjob.targets.jobs import TARGETS, keyed, target_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding
    from k8sjob.targets.api import RoleReplicas, Target

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
    manifest: Json,
    overlay: Json,
    pod_template: Json,
    *,
    image_is_built: bool,
    restricted: bool = False,
) -> Json:
    """The manifest with both merged in, the overlay last; no argument is changed.

    Args:
        manifest: a rendered job.
        overlay: the spec's overlay.
        pod_template: the spec's, for the Pod template of each role.
        image_is_built: the image comes out of a build; then the digest of that build is what the
            training containers run, and an overlay must not put another in its place.
        restricted: the Pods must pass the Pod Security Standard of that name.

    Raises:
        SpecError: the overlay names what has its own field, or the result would be refused by the
            training operator, or by the standard.
    """
    problems = list(_forbidden_fields(overlay))
    changes = {"overlay": overlay, "pod_template": pod_template}
    if companion := keyed(target_of(manifest)):
        problems += _forbidden_fields(overlay.get(companion.key), f"overlay.{companion.key}")
    if image_is_built:
        problems += _images(manifest, changes)
    problems += _twice(changes)
    if not problems:
        merged, target = manifest, target_of(manifest)
        for one in target.replicas(manifest) if pod_template else ():
            container = training(one.pod.get("containers"))
            process, of_pod = _split_template(target, container, pod_template)
            merged = _replaced_at(merged, one.path, merge(at_path(merged, *one.path), of_pod))
            if process:
                apart = merge(at_path(merged, *target.process_at), process)
                merged = _replaced_at(merged, target.process_at, apart)
        merged = merge(merged, overlay)
        templates = [one.path for one in target.replicas(manifest)]
        problems = first_findings(
            target.problems(merged), lambda one: _at_source(one, merged, changes, templates)
        )
        if image_is_built and not problems and _image(merged) != _image(manifest):
            problems.append(invalid("overlay", _REPLACED.format(_image(merged))))
        if restricted and not problems:
            problems += _violations(merged, changes)
    if problems:
        raise SpecError(problems)
    return merged


def of_another_kind(overlay: Json, target: Target) -> Iterator[Finding]:
    """The fields of an overlay that another kind of job has, and not this one."""
    spec = at_path(overlay, "spec")
    given: list[tuple[str, ...]] = [(key,) for key in overlay if key != "spec"]
    given += [("spec", key) for key in spec] if isinstance(spec, dict) else []
    for field in given:
        owners = [one.kind for one in TARGETS if _has(one, field)]
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
            rest = {key: value for key, value in item.items() if key not in ("name", "mountPath")}
            yield from leaves(rest or None, (*path, name))
    else:
        yield path


def _split_template(target: Target, container: Json, pod_template: Json) -> tuple[Json, Json]:
    """The fields of pod_template for a process at process_at, and the rest, with this container."""
    spec = at_path(pod_template, "spec") or {}
    given = at_path(spec, "containers")
    if not (isinstance(given, list) and all(isinstance(one, dict) for one in given)):
        return {}, pod_template
    # An only container with another name is a sidecar, which must not replace the training.
    trains = training(one for one in given if one.get("name") in (None, *CONTAINER_NAMES))
    apart = _PROCESS if target.process_at else {}
    process = {apart[key]: value for key, value in trains.items() if key in apart}
    rest = {key: value for key, value in trains.items() if key not in apart}
    named = [{**rest, "name": container["name"]} if one is trains else one for one in given]
    return process, {**pod_template, "spec": {**spec, "containers": named}}


def _replaced_at(value: Any, path: FieldPath, new: Any) -> Any:
    """A copy of a value with another one at a path that it has."""
    if not path:
        return new
    made: Any = list(value) if isinstance(value, list) else dict(value)
    made[path[0]] = _replaced_at(made[path[0]], path[1:], new)
    return made


def merge(base: Any, patch: Any, *, deletes: bool = True) -> Any:
    """The JSON value `base` changed by `patch`; neither is changed, parts may be shared.

    Without `deletes` the base is a patch too, and the result does what one does after the other.
    """
    if isinstance(patch, dict):
        merged = dict(base) if isinstance(base, dict) else {}
        for key, value in patch.items():
            if value is None and deletes:
                merged.pop(key, None)
            else:
                merged[key] = merge(merged.get(key), value, deletes=deletes)
        return merged
    if isinstance(patch, list) and patch:
        items = base if isinstance(base, list) else []
        if key := list_key(items, patch):
            named = {item[key]: item for item in items}
            for change in patch:
                if deletes and change.get("$patch") == "delete":
                    named.pop(change[key], None)
                else:
                    old = named.get(change[key])
                    named[change[key]] = merge(old, change, deletes=deletes)
            return list(named.values())
    return patch


def list_key(*lists: list[Any]) -> str | None:
    """The key by which lists merge; None: they are replaced."""
    return next((key for key in _LIST_KEYS if all(_keyed(items, key) for items in lists)), None)


def _keyed(items: list[Any], key: str) -> bool:
    names = _names(items, key)
    return names is not None and len(names) == len(set(names))


def _names(items: list[Any], key: str) -> list[str] | None:
    """The names of a list's items; None: one has none."""
    named = (item.get(key) for item in items if isinstance(item, dict))
    names = [name for name in named if isinstance(name, str)]
    return names if len(names) == len(items) else None


def _forbidden_fields(overlay: Any, at: str = "overlay") -> Iterator[Finding]:
    metadata = at_path(overlay, "metadata")
    for key in ("apiVersion", "kind", "status"):
        if isinstance(overlay, dict) and key in overlay:
            yield invalid(f"{at}.{key}", f"{overlay[key]!r} cannot be set by an overlay; remove it")
    for key in ("name", "namespace"):
        if isinstance(metadata, dict) and key in metadata:
            yield invalid(
                f"{at}.metadata.{key}",
                f"{metadata[key]!r} has its own field; set `{key}` in the job spec",
            )


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


def _violations(merged: Json, changes: dict[str, Json]) -> list[Finding]:
    """The violations of the standard, at their paths in the overlay or in pod_template."""
    from k8sjob.spec.base import seen  # noqa: PLC0415 - as in _at_source

    def explain(found: tuple[RoleReplicas, tuple[FieldPath, Any, str]]) -> Finding:
        replicas, (path, value, wanted) = found
        of_pod = ("overlay", *replicas.path, "spec")
        if at_path(changes, *of_pod, str(path[0])) is None and changes["pod_template"]:
            of_pod = ("pod_template", "spec")
        at = field_path(_as_given(at_path(changes, *of_pod), replicas.pod, path))
        return invalid(
            f"{field_path(of_pod)}.{at}",
            f"{'absent' if value is None else seen(value)}, and security: restricted"
            f" requires {wanted}; change it, or set security: default",
        )

    all_replicas = target_of(merged).replicas(merged)
    found = [(one, each) for one in all_replicas for each in restricted_violations(one.pod)]
    return first_findings(found, explain)


def _at_source(
    problem: Finding, merged: Json, changes: dict[str, Json], templates: list[FieldPath]
) -> Finding:
    """A problem of the merged job, whose Pod templates are at those paths, at the user's field."""
    from k8sjob.spec.changes import steps  # noqa: PLC0415 - it loads pydantic, which a spec has

    path, message = steps(problem.field), f"{problem.field}: {problem.message}"
    for template in templates:
        of_pod = changes["pod_template"] and path[: len(template)] == template
        if of_pod and at_path(changes["overlay"], *template) is None:
            merged = at_path(merged, *template)
            at = _as_given(changes["pod_template"], merged, path[len(template) :])
            return replace(problem, field=field_path(("pod_template", *at)))
    if not changes["overlay"]:
        return replace(problem, field="pod_template", message=message)
    at = _as_given(changes["overlay"], merged, path)
    if at == path:
        return replace(problem, field=f"overlay.{problem.field}")
    whole = len(at) == len(path)
    return replace(
        problem, field=field_path(("overlay", *at)), message=problem.message if whole else message
    )


def _as_given(change: Any, merged: Any, path: FieldPath) -> FieldPath:
    """The path in a change: named items of lists have another index there, and null is the end."""
    found: list[str | int] = []
    for step in path:
        at = step
        if isinstance(merged, list) and isinstance(step, str):
            at = next((i for i, one in enumerate(merged) if at_path(one, "name") == step), step)
        merged = at_path(merged, at)
        name = at_path(merged, "name") if isinstance(at, int) else None
        if name is not None and isinstance(change, list):
            alike = CONTAINER_NAMES if name in CONTAINER_NAMES else (name,)
            at = next((i for i, one in enumerate(change) if at_path(one, "name") in alike), at)
        found.append(at)
        if isinstance(change, dict) and change.get(at, change) is None:
            break
        change = at_path(change, at)
    return tuple(found)


def _images(manifest: Json, changes: dict[str, Json]) -> Iterator[Finding]:
    roles = target_of(manifest).replicas(manifest)
    of_roles = [("overlay", *one.path) for one in roles]
    for template in dict.fromkeys([*of_roles, ("pod_template",)]):
        path = (*template, "spec", "containers")
        containers = at_path(changes, *path)
        for index, container in enumerate(containers if isinstance(containers, list) else ()):
            if at_path(container, "name") in CONTAINER_NAMES and "image" in container:
                message = _REPLACED.format(container["image"])
                yield invalid(field_path((*path, index, "image")), message)


def _image(manifest: Json) -> Any:
    for one in target_of(manifest).replicas(manifest):
        given = at_path(one.template, "spec", "containers")
        named = given if isinstance(given, list) else []
        return training(item for item in named if isinstance(item, dict)).get("image")
    return None
