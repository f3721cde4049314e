"""Adopt: an existing job becomes a job.yaml whose rendering means the same.

What a job spec has a field for goes there. The rest is computed, not listed: the difference between
what the fields render and what the manifest says becomes `pod_template` and `overlay`, and the
result is rendered once more and compared, so nothing can be dropped.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from k8sjob.adopt.equivalence import (
    SAME,
    difference,
    normal,
    pods,
    same_meaning,
)
from k8sjob.adopt.fields import NO_COMMAND, fields, trainer
from k8sjob.contract import after_agent
from k8sjob.errors import SpecError
from k8sjob.findings import Finding, field_path, invalid
from k8sjob.kube.objects import Json, Object, at_path
from k8sjob.rendering.manifest import manifest
from k8sjob.rendering.merge import leaves, merge
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import config_of, is_job, job_of, keyed, near_job
from k8sjob.targets.readers import READERS, reader_of
from k8sjob.yamldoc import Document, objects, parse_all, refuse_template

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import FieldPath

__all__ = ["Adopted", "adopt", "same_meaning"]

_SERVERS: Final = (
    *("uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp"),
    *("deletionGracePeriodSeconds", "managedFields", "selfLink", "ownerReferences"),
)
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"
_Place = tuple[Document, "FieldPath", Json]
"""An object: its document, where it is in that, and what it says."""


def _read(text: str | bytes, source: str, name: str | None) -> tuple[Json, list[str]]:
    """The job as its author wrote it, in the layout that k8sjob renders, and notes.

    Raises:
        SpecError: not YAML, not exactly one job, or one that a cluster or k8sjob refuses.
    """
    refuse_template(text, source)
    place, beside = _only_job(parse_all(text, source), source, name)
    manifests = [manifest for _, _, manifest in beside]
    job, dropped = _without_generated_fields(place[2])
    reader = reader_of(job)
    authored, problems = None, list(reader.problems(job))
    try:
        authored = None if problems else reader.authored(copy.deepcopy(job), manifests)
    except SpecError as error:
        problems = error.findings
    if authored is None:
        raise SpecError([_placed(problem, place, beside) for problem in problems], source)
    notes = [f"left out, since the apiserver fills it in: {', '.join(dropped)}"] if dropped else []
    extras = [m for m in manifests if all(m is not part for part in authored.parts)]
    notes += [f"{_called(m)} is not part of the job; keep it in another file" for m in extras]
    return authored.job, [*notes, *authored.notes]


def _placed(problem: Finding, job: _Place, beside: list[_Place]) -> Finding:
    """The problem with its line, which may be in the object that the job has beside it."""
    (document, place, data), path = job, problem.path
    companion_of = keyed(reader_of(data).target)
    if companion_of and path[:1] == (companion_of.key,):
        path = path[1:]
        companions = (c for c in beside if at_path(c[2], *path[:2]) is not None)
        document, place, _ = next(companions, job)
    line, column = document.place((*place, *path))
    return problem._replace(line=line, column=column)


def _only_job(
    documents: list[Document], source: str, name: str | None
) -> tuple[_Place, list[_Place]]:
    jobs, beside = list[_Place](), list[_Place]()
    for document, place, raw in objects(documents):
        manifest = _without_nulls(raw)
        (jobs if is_job(manifest) else beside).append((document, place, manifest))
    chosen = [job for job in jobs if name in (None, Object(job[2]).name)]
    if len(chosen) == 1:
        return chosen[0], [*beside, *(job for job in jobs if job is not chosen[0])]
    manifests = [manifest for _, _, manifest in beside]
    if not jobs:
        # With the version: Volcano has Jobs, too, and there were PyTorchJobs of other groups.
        typed = ((manifest.get("kind"), manifest.get("apiVersion")) for manifest in manifests)
        of = (f" of {version}" if kind and version else "" for kind, version in typed)
        names = ", ".join(map("".join, zip(map(_called, manifests), of, strict=True))) or "nothing"
        kinds = [f"{reader.target.kind} of {reader.target.api_version}" for reader in READERS]
        step = near_job(manifests) or f"specify a file with one of {', '.join(kinds)}"
        raise SpecError([invalid((), f"found {names}", step)], source)
    names = ", ".join(_called(job) for _, _, job in jobs)
    step = "adopt each from its own file" if name and chosen else "choose one by --name NAME"
    message = f"{names} are several jobs, and a job.yaml describes one"
    if not chosen:
        message = f"there is no job {name!r} among {names}"
    raise SpecError([invalid((), message, step, line=jobs[-1][0].line, column=1)], source)


def _without_nulls(value: Any) -> Any:
    """A copy; an apiserver takes null for absent."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _called(manifest: Json) -> str:
    kind = manifest.get("kind", "a document without a kind")
    return " ".join(str(part) for part in (kind, Object(manifest).name) if part)


def _without_generated_fields(job: Json) -> tuple[Json, list[str]]:
    """The job without what others wrote into it, and the names of that."""
    metadata = dict(Object(job).metadata)
    dropped = [f"metadata.{key}" for key in _SERVERS if metadata.pop(key, None) is not None]
    annotations = metadata.get("annotations")
    if isinstance(annotations, dict) and _LAST_APPLIED in annotations:
        dropped.append(f'metadata.annotations["{_LAST_APPLIED}"]')
        metadata["annotations"] = {k: v for k, v in annotations.items() if k != _LAST_APPLIED}
    if "status" in job:
        dropped.append("status")
    return {**{k: v for k, v in job.items() if k != "status"}, "metadata": metadata}, dropped


_PASSES: Final = 3  # a default may follow from a field that the overlay has just changed
_LAUNCHERS: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True, slots=True)
class Adopted:
    """The job.yaml made from a manifest, and the notes about it.

    Attributes:
        spec: the job; `spec.to_yaml()` is the job.yaml.
        notes: what was left out because the apiserver fills it in, what went to the overlay, and
            what a job.yaml could express better.
    """

    spec: JobSpec
    notes: tuple[str, ...]


def adopt(text: str | bytes, source: str = "", name: str | None = None) -> Adopted:
    """The job spec that renders the same job as a manifest.

    Args:
        text: YAML or JSON with exactly one job of a kind that is a target, and what belongs to it;
            other documents are not part of the job.
        source: the file's name, for messages.
        name: of the job, where the text has several.

    Raises:
        SpecError: no job or several, one that its controller refuses, or one that no job spec can
            express, with each such field.
    """
    original, notes = _read(text, source, name)
    try:
        return _adopted(original, notes)
    except SpecError as error:
        raise SpecError([_of_manifest(problem) for problem in error.findings], source) from None


def _of_manifest(problem: Finding) -> Finding:
    """A problem of the overlay that was to be made, in terms of the manifest, which has none."""
    if problem.path[:1] != ("overlay",):
        return problem
    path = problem.path[1:]
    step = f"move or remove it (`k8sjob lint` says where {field_path(path)} belongs)"
    return problem._replace(path=path, next_step=step)


def _adopted(original: Json, notes: list[str]) -> Adopted:
    config = config_of(original) is not None
    job = normal(original, config=config)
    # What the manifest says of security is kept below, and a namespace must add nothing to it.
    spec = bare = _accepted({**fields(job), "security": "default"})
    notes += _leave_out_injected(job, spec)
    if spec.kueue_queue is not None and not job_of(original).suspended:
        notes.append("the job starts suspended, as Kueue's webhook would set it")
    changes: Json = {"overlay": {}, "pod_template": {}}
    for _ in range(_PASSES):
        rendered = _rendered(spec, config=config)
        change = difference(rendered, job)
        if change is SAME:
            break
        roles, paths = _template_paths(rendered), _template_paths(job)
        more = _split_change(change, paths if roles == paths else ())
        changes = merge(changes, more, deletes=False)
        overlays = {field: change for field, change in changes.items() if change}
        # From the first guess again, since `changes` has those of all passes.
        spec = _accepted({**bare.model_dump(exclude_defaults=True), **_plain(overlays)})
    remaining = difference(_rendered(spec, config=config), job)
    if remaining is not SAME:
        message, step = "a job.yaml cannot express this", "change it, or keep the manifest"
        raise SpecError([invalid(path, message, step) for path in leaves(remaining)])
    return Adopted(spec, (*notes, *_notes(spec, original)))


def _rendered(spec: JobSpec, *, config: bool) -> Json:
    *beside, job = manifest(spec).objects
    authored = reader_of(job).authored(job, beside)
    rendered = normal(authored.job, config=config)
    _leave_out_injected(rendered, spec)
    return rendered


def _leave_out_injected(job: Json, spec: JobSpec) -> list[str]:
    """Take out the variables that the manifests of the job's kind always have; notes on that."""
    values = reader_of(job).target.values(spec)
    injected = {**values["injected"], **values["fields"]}
    gone: dict[str, Json] = {}
    for _, pod in pods(job):
        container = trainer(pod)
        env = container.pop("env", [])
        gone |= {at_path(v, "name"): v for v in env if at_path(v, "name") in injected}
        if env := [v for v in env if at_path(v, "name") not in injected]:
            container["env"] = env
    notes = [f"left out, since k8sjob sets them in every replica: {', '.join(gone)}"] * bool(gone)
    for name, variable in gone.items():
        value, path = variable.get("value"), at_path(variable, "valueFrom", "fieldRef", "fieldPath")
        if injected[name] not in (value, path):
            notes.append(
                f"{name} is {injected[name]} in the rendered manifest, not {value or path}"
            )
    return notes


def _template_paths(job: Json) -> tuple[tuple[str | int, ...], ...]:
    return tuple(dict.fromkeys(role.path for role in job_of(job).replicas))


def _split_change(change: Json, paths: tuple[tuple[str | int, ...], ...]) -> Json:
    """A change of a job as overlay and pod_template: the latter has what all roles share."""
    of_roles = [at_path(change, *path) for path in paths]
    if not any(of_roles) or any(difference(of_roles[0], role) is not SAME for role in of_roles):
        return {"overlay": change}
    for path in paths:
        _cut(change, path)
    return {"overlay": change, "pod_template": of_roles[0]}


def _cut(change: Any, path: tuple[str | int, ...]) -> None:
    """Remove the value at a path, and what is then empty or has only a name."""
    inner = change[path[0]]
    if path[1:]:
        _cut(inner, path[1:])
    if not path[1:] or inner in ({}, []) or (isinstance(inner, dict) and inner.keys() == {"name"}):
        del change[path[0]]


def _accepted(data: Json) -> JobSpec:
    """The spec with these fields, without those that a job spec does not take.

    A value that only the overlay can hold (a restart policy with a typo, a variable that the
    operator overrides) is found by asking: what is refused is taken out, and the rest asked again.
    """
    data = _plain(data)
    for _ in range(1000):  # each round takes out one field; no guess has as many
        try:
            return JobSpec.model_validate(data)
        except SpecError as error:
            if not all(_take_out(data, problem.path) for problem in error.findings[:1]):
                needed = [hit for hit in error.findings if not _take_out(data, hit.path)]
                raise SpecError(needed) from None
    raise SpecError([invalid((), "no part of it is a job spec", "please report this bug")])


def _take_out(data: Any, path: FieldPath) -> bool:
    """Remove a field, or the nearest thing around it; False if that is needed."""
    while path:
        holder = at_path(data, *path[:-1])
        if len(path) == 1 and path[0] in ("name", "namespace", "image", "run", "overlay"):
            return False
        if at_path(holder, path[-1]) is not None:
            del holder[path[-1]]
            # A run needs one of them; the overlay that follows removes the placeholder.
            if path[0] == "run" and path[1] in ("command", "script", "module"):
                data["run"] |= {"command": NO_COMMAND, "args": []}
            return True
        path = path[:-1]
    return False


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _notes(spec: JobSpec, original: Json) -> Iterator[str]:
    for field in ("pod_template", "overlay"):
        if change := getattr(spec, field):
            paths = sorted({field_path(path) for path in leaves(change)})
            yield f"kept in {field}, unchanged: {', '.join(paths)}"
    command = list(spec.run.command or ())
    words = " ".join([*command, *spec.run.args])
    if command == NO_COMMAND:
        yield (
            "the manifest has no command that run.command can hold (an image's entrypoint, for "
            "example), so `k8sjob run` cannot know it: write it into run.command and remove"
            " `command` from pod_template or overlay"
        )
    elif any(launcher in words for launcher in _LAUNCHERS):
        yield (
            "the command is a launcher's; run.script with replicas.nproc_per_node starts the same "
            "processes and adds restarts in place, reasons and a watchdog"
        )
    elif spec.run.command is not None and after_agent(command) is None:
        yield (
            "the command runs as it is, without k8sjob's agent; run.script would start it with"
            " the agent, in an image with k8sjob's runtime"
        )
    if any("automountServiceAccountToken" not in pod for _, pod in pods(original)):
        yield (
            "service_account_token is true, Kubernetes' default; remove it if the training never"
            " calls the Kubernetes API"
        )
    for role, pod in pods(original):
        image = trainer(pod)["image"]
        if image != spec.image_reference:
            yield f"the {role} runs another image, {image}, which the overlay keeps"
