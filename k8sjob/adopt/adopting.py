"""Adopt: from the text of a manifest to a spec, and the proof that it means the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from k8sjob.adopt.equivalence import (
    SAME,
    Json,
    combined,
    config_of,
    difference,
    normal,
    pods,
    same_meaning,
)
from k8sjob.adopt.fields import NO_COMMAND, fields, trainer
from k8sjob.contract import after_agent
from k8sjob.errors import Problem, SpecError, field_path
from k8sjob.rendering.manifest import manifest
from k8sjob.rendering.overlay import leaves
from k8sjob.spec import JobSpec
from k8sjob.targets.pytorchjob.operator import API_VERSION, KIND, webhook_problems
from k8sjob.targets.pytorchjob.schema import typed
from k8sjob.yamldoc import Document, objects, parse_all

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Adopted",
    "adopt",
]

_SERVER_FIELDS: Final = (
    "uid resourceVersion generation creationTimestamp deletionTimestamp "
    "deletionGracePeriodSeconds managedFields selfLink ownerReferences"
)
_SERVERS: Final = tuple(_SERVER_FIELDS.split())
_MAX_SHOWN: Final = 80
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def _read(text: str | bytes, source: str) -> tuple[Json, list[str]]:
    """The job as its author wrote it, and notes on what was left out.

    Raises:
        SpecError: not YAML, not exactly one PyTorchJob, or one that the operator refuses.
    """
    document, job, others = _only_job(parse_all(text, source), source)
    notes = [f"{other} is not part of the job; keep it in another file" for other in others]
    job, dropped = _authors_part(job)
    if dropped:
        notes.insert(0, f"left out, since the apiserver fills it in: {', '.join(dropped)}")
    problems = webhook_problems(job) or list(_type_problems(job))
    if problems:
        line = document.line
        raise SpecError([Problem(p.field, p.message, line, 1) for p in problems], source)
    return job, notes


def _type_problems(job: Json) -> Iterator[Problem]:
    """Fields of a type for which a cluster would refuse the manifest."""
    if not job["spec"]["pytorchReplicaSpecs"]:  # which the webhook lets through
        yield Problem("spec.pytorchReplicaSpecs", "no replicas; add Master, Worker or both")
    for path, value, expected in typed(job)[1]:
        seen = ascii(value)
        seen = seen if len(seen) <= _MAX_SHOWN else f"{seen[:_MAX_SHOWN]}..."
        message = f"{seen} is not {expected}; correct it, a cluster would refuse the manifest"
        yield Problem(field_path(path), message)


def _only_job(documents: list[Document], source: str) -> tuple[Document, Json, list[str]]:
    jobs, others = [], []
    for document, _, item in objects(documents):
        if item.get("kind") == KIND and str(item.get("apiVersion")).startswith("kubeflow.org/"):
            jobs.append((document, item))
        else:
            others.append(_called(item))
    if len(jobs) == 1:
        document, job = jobs[0]
        return document, job, others
    if not jobs:
        seen = ", ".join(others) or "nothing"
        message = f"{seen} is no {KIND} of {API_VERSION}; name a file with one"
        raise SpecError([Problem("", message)], source)
    names = ", ".join(_called(job) for _, job in jobs)
    message = f"{names} are several jobs; a job.yaml is one, so adopt them from files of their own"
    raise SpecError([Problem("", message, jobs[1][0].line, 1)], source)


def _called(item: Json) -> str:
    metadata = item.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return " ".join(
        str(part) for part in (item.get("kind", "a document without a kind"), name) if part
    )


def _authors_part(job: Json) -> tuple[Json, list[str]]:
    """The job without what others wrote into it, and the names of that."""
    metadata = dict(job["metadata"]) if isinstance(job.get("metadata"), dict) else {}
    dropped = [f"metadata.{key}" for key in _SERVERS if key in metadata]
    for key in _SERVERS:
        metadata.pop(key, None)
    annotations = metadata.get("annotations")
    if isinstance(annotations, dict) and _LAST_APPLIED in annotations:
        dropped.append(f'metadata.annotations["{_LAST_APPLIED}"]')
        metadata["annotations"] = {k: v for k, v in annotations.items() if k != _LAST_APPLIED}
    if "status" in job:
        dropped.append("status")
    return {**{k: v for k, v in job.items() if k != "status"}, "metadata": metadata}, dropped


_STEP: Final = re.compile(r'\.?([\w-]+)|\[(\d+)\]|\["([^"]*)"\]')
_PASSES: Final = 3  # a default may follow from a field that the overlay has just changed
_LAUNCHERS: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


@dataclass(frozen=True, slots=True)
class Adopted:
    """What became of a manifest.

    Attributes:
        spec: the job; `spec.to_yaml()` is the job.yaml.
        notes: what was left out because the apiserver fills it in, what went to the overlay, and
            what a job.yaml could express better.
    """

    spec: JobSpec
    notes: tuple[str, ...]


def adopt(text: str | bytes, source: str = "") -> Adopted:
    """The job spec that renders what a PyTorchJob manifest says.

    Args:
        text: YAML or JSON with exactly one PyTorchJob; other documents are not part of the job.
        source: the file's name, for messages.

    Raises:
        SpecError: no PyTorchJob or several, one that the training operator refuses, or (said field
            by field) one that no job spec can say.
    """
    original, notes = _read(text, source)
    config = config_of(original) is not None
    wanted = normal(original, config=config)
    spec = bare = _accepted(fields(wanted), source)
    overlay: Json = {}
    for _ in range(_PASSES):
        change = difference(normal(manifest(spec), config=config), wanted)
        if change is SAME:
            break
        overlay = combined(overlay, change)
        fields_alone = bare.model_dump(exclude_defaults=True)
        spec = _accepted({**fields_alone, "overlay": _plain(overlay)}, source)
    _prove(spec, original, source)
    return Adopted(spec, (*notes, *_notes(spec, original)))


def _accepted(data: Json, source: str) -> JobSpec:
    """The spec with these fields, without those that a job spec does not take.

    A value that only the overlay can hold (a restart policy with a typo, a variable that the
    operator overrides) is found by asking: what is refused is taken out, and the rest asked again.
    """
    data = _plain(data)
    for _ in range(1000):
        try:
            return JobSpec.model_validate(data)
        except SpecError as error:
            if not all(_take_out(data, problem.field) for problem in error.problems[:1]):
                raise SpecError(error.problems, source) from None
    raise SpecError([Problem("", "no part of it is a job spec; please report this")], source)


def _take_out(data: Any, field: str) -> bool:
    """Remove a field, or the nearest thing around it; False where that is needed."""
    path = [name or key or int(index) for name, index, key in _STEP.findall(field)]
    while path:
        holder = data
        for step in path[:-1]:
            holder = _item(holder, step)
        if len(path) == 1 and path[0] in ("name", "namespace", "image", "run", "overlay"):
            return False
        if _item(holder, path[-1]) is not None:
            del holder[path[-1]]
            if path[0] == "run" and path[1] in ("command", "script", "module"):
                data["run"] |= {"command": NO_COMMAND, "args": []}
            return True
        path.pop()
    return False


def _item(holder: Any, step: str | int) -> Any:
    if isinstance(holder, dict):
        return holder.get(step)
    if isinstance(holder, list) and isinstance(step, int) and step < len(holder):
        return holder[step]
    return None


def _plain(value: Any) -> Any:
    """A copy of plain strings, lists and dicts."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def _prove(spec: JobSpec, original: Json, source: str) -> None:
    """Render the spec and compare."""
    rendered = manifest(spec)
    if same_meaning(rendered, original):
        return
    config = config_of(original) is not None
    left = difference(normal(rendered, config=config), normal(original, config=config))
    problems = [
        Problem(field_path(path), "no job spec can say this; change it, or keep the manifest")
        for path in leaves(left)
    ]
    raise SpecError(problems, source)


def _notes(spec: JobSpec, original: Json) -> Iterator[str]:
    kept = sorted({field_path(path) for path in leaves(spec.overlay)} if spec.overlay else ())
    if kept:
        yield f"kept in overlay, unchanged: {', '.join(kept)}"
    command = list(spec.run.command or ())
    words = " ".join([*command, *spec.run.args])
    if command == NO_COMMAND:
        yield (
            "the manifest has no command that run.command can hold (an image's entrypoint, for "
            "example), so `k8sjob run` cannot know it: write it into run.command and take "
            "`command` out of the overlay"
        )
    elif any(launcher in words for launcher in _LAUNCHERS):
        yield (
            "the command is a launcher's; run.script with replicas.nproc_per_node starts the same "
            "processes and adds restarts in place, reasons and a watchdog"
        )
    elif spec.run.command is not None and after_agent(command) is None:
        yield (
            "the command runs as it is, without k8sjob's agent; run.script would start it by that,"
            " in an image with k8sjob's runtime"
        )
    if any("automountServiceAccountToken" not in pod for _, pod in pods(original)):
        yield (
            "service_account_token is true, as Kubernetes has it by default; leave it out if the "
            "training never calls the cluster"
        )
    for role, pod in pods(original):
        image = trainer(pod)["image"]
        if image != spec.image_reference:
            yield f"the {role} runs another image, {image}, which the overlay keeps"
