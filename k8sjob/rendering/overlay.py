"""`pod_template` and `overlay`: fields beyond the job spec's, merged into the manifest last.

How they merge: see k8sjob.rendering.merge.

What the result must not break is checked here too: the rules of the target, and the Pod Security
Standard "restricted".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONTAINER_NAMES
from k8sjob.errors import SpecError
from k8sjob.findings import FieldPath, first_findings, invalid
from k8sjob.kube.objects import Json, at_path, training
from k8sjob.kube.pod_security import restricted_violations
from k8sjob.rendering.merge import Traced, repeated_names
from k8sjob.targets.api import CHILD
from k8sjob.targets.jobs import TARGETS, keyed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.findings import Finding
    from k8sjob.targets.api import Job, Target

_PROCESS: Final = {
    **{key: key for key in ("image", "command", "args", "env")},
    "resources": "resourcesPerNode",
}
"""The fields of the training container that are at Target.process_at, by their names there."""


def apply_overlay(
    job: Job,
    overlay: Json,
    pod_template: Json,
    *,
    image_is_built: bool,
    security: str | None = None,
) -> Job:
    """The job with both merged in, the overlay last; no part is shared with an argument.

    Args:
        job: as it was rendered.
        overlay: the spec's overlay.
        pod_template: the spec's, for the Pod template of each role.
        image_is_built: the image comes out of a build; then the digest of that build is what the
            training containers run, and an overlay must not put another in its place.
        security: the spec's, where it requires the Pod Security Standard "restricted"; else None.

    Raises:
        SpecError: the overlay names what has its own field, or the result would be refused by the
            training operator, or by the standard.
    """
    target = job.target
    problems = list(_forbidden_fields(overlay))
    if companion := keyed(target):
        problems += _forbidden_fields(overlay.get(companion.key), companion.key)
    templates = {replicas.path: replicas.pod for replicas in job.replicas}
    # The overlay comes last, so it can take back for one role what pod_template gives to all.
    merged = Traced.of(job.document)
    for path, pod in templates.items() if pod_template else ():
        template = Traced.of(pod_template, "pod_template")  # the roles share no part of it
        process = _for_container(target, training(pod.get("containers")), template)
        merged.at(path).merge(template)
        if process.value:
            merged.at(target.process_at).merge(process)
    if overlay:
        merged.merge(Traced.of(overlay, "overlay"))
    if image_is_built:
        problems += _replaced_images(merged, target, templates)
    problems += [
        invalid(path, f"{name!r} is duplicated", "rename one, or merge them")
        for path, name in repeated_names({"overlay": overlay, "pod_template": pod_template})
    ]
    document: Json = merged.plain()
    # Each check expects what the checks before it have accepted.
    if not problems:
        problems = first_findings(
            target.problems(document),
            lambda problem: _at_source(merged, problem),
        )
    if security and not problems:
        problems = _violations(merged, job.with_document(document), security)
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
                ("overlay", *field),
                f"a {target.kind} has no {'.'.join(field)}, which is a {' or '.join(owners)}'s",
                f"use the fields of a {target.kind}, in pod_template if it applies to the Pods of"
                " all replicas, or remove it",
            )


def _has(target: Target, field: tuple[str, ...]) -> bool:
    companion = keyed(target)
    in_spec = field[0] == "spec" and field[1] in target.shapes["spec"]
    return in_spec or bool(companion and field == (companion.key,))


def _for_container(target: Target, container: Json, template: Traced) -> Traced:
    """Name the training container in pod_template, and take the fields out that are elsewhere.

    Returns:
        Those fields, for the process at Target.process_at.
    """
    # An only container with another name is a sidecar, which must not replace the training.
    named = (None, *CONTAINER_NAMES)
    containers = template.at(("spec", "containers")).mappings
    trains = _training([item for item in containers if item.fields.get("name") in named])
    trains.value["name"] = Traced(container["name"])
    apart = _PROCESS if target.process_at else {}
    process = {apart[key]: trains.value.pop(key) for key in apart if key in trains.value}
    return Traced(process, trains.origin)


def _training(containers: list[Traced]) -> Traced:
    """The training container among them; else an empty one."""
    fields = [container.fields for container in containers]
    trains = training(fields)
    pairs = zip(containers, fields, strict=True)
    return next((container for container, plain in pairs if plain is trains), Traced({}))


def _forbidden_fields(overlay: Any, *below: str) -> Iterator[Finding]:
    at = ("overlay", *below)
    metadata = at_path(overlay, "metadata")
    for key in ("apiVersion", "kind", "status", CHILD):
        if isinstance(overlay, dict) and key in overlay:
            yield invalid((*at, key), f"{overlay[key]!r} cannot be set by an overlay", "remove it")
    for key in ("name", "namespace"):
        if isinstance(metadata, dict) and key in metadata:
            message, step = f"{metadata[key]!r} has its own field", f"set `{key}` in the job spec"
            yield invalid((*at, "metadata", key), message, step)


# --- errors, at the fields of the job spec --------------------------------------------------------


def _violations(merged: Traced, job: Job, security: str) -> list[Finding]:
    """The violations of the standard."""
    from k8sjob.spec.base import seen  # noqa: PLC0415 - it loads pydantic, which a spec has

    def explain(violation: tuple[FieldPath, Any, str]) -> Finding:
        path, value, requirement = violation
        shown = "absent" if value is None else seen(value)
        message = f"{shown}, and security: {security} requires {requirement}"
        return _at_source(merged, invalid(path, message, "change it, or set security: default"))

    violations = [
        ((*replicas.path, "spec", *path), value, requirement)
        for replicas in job.replicas
        for path, value, requirement in restricted_violations(replicas.pod)
    ]
    return first_findings(violations, explain)


def _at_source(merged: Traced, problem: Finding) -> Finding:
    """A problem of a field of the merged job, at the change that it comes from."""
    path = problem.path
    around = [(merged.at(path[:depth]), path[depth:]) for depth in range(len(path) + 1)]
    nearest, below = next((pair for pair in reversed(around) if pair[0].origin), around[0])
    # A field that pod_template lacks may no longer fit to it. One that null has removed has nothing
    # below it, and the items of a list that is merged have other indexes in the change.
    apart = nearest.deleted or isinstance(nearest.value, list)
    if not nearest.origin or (below and apart):
        origin = nearest.origin or ("pod_template",)
        return problem._replace(path=origin, message=f"{problem.field}: {problem.message}")
    return problem._replace(path=(*nearest.origin, *below))


def _replaced_images(
    merged: Traced, target: Target, templates: Iterable[FieldPath]
) -> Iterator[Finding]:
    """Changes of the image that training containers run."""
    containers = [merged.at((*path, "spec", "containers")) for path in templates]
    processes = [_training(part.mappings) for part in containers]
    processes += [merged.at(target.process_at)] if target.process_at else []
    images = [process.at(("image",)) for process in processes]
    for origin, image in {image.origin: image.plain() for image in images if image.origin}.items():
        message = f"{image!r} would replace the image that is built"
        step = "change `image` in the job spec, or give it as a reference instead of a build"
        yield invalid(origin, message, step)
