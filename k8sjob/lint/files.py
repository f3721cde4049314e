"""Lint of a file, whatever it is: a manifest, a script, or a job.yaml with all that it names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.document import Document, parse, parse_all
from k8sjob.document.source import MAX_BYTES, content
from k8sjob.errors import Problem, SpecError
from k8sjob.lint.finding import Check, Finding, Hit, Rule, Severity, findings
from k8sjob.lint.manifest import CHECKS as MANIFEST_CHECKS
from k8sjob.lint.manifest import RULES, invalid, jobs_in, lint_manifest
from k8sjob.lint.manifest_facts import Job, launcher_of
from k8sjob.lint.script import lint_script
from k8sjob.lint.script_facts import Setting

if TYPE_CHECKING:
    from k8sjob.spec import JobSpec

__all__ = ["CHECKS", "lint"]

_MISSING: Final = Check(
    "script-missing",
    Severity.ERROR,
    "manifest",
    "An image that is built from the context has what lies in the context, and no more.",
)
CHECKS: Final = {_MISSING.id: _MISSING}

_Path = tuple[str | int, ...]
_FIELDS: Final[dict[str, _Path]] = {
    "cleanPodPolicy": ("policy", "clean_pod_policy"),
    "backoffLimit": ("policy", "max_restarts"),
    "restartPolicy": ("policy", "restart_policy"),
    "minReplicas": ("replicas", "elastic"),
    "maxReplicas": ("replicas", "elastic"),
    "nprocPerNode": ("replicas", "nproc_per_node"),
    "name": ("name",),
    "image": ("image",),
    "imagePullPolicy": ("image", "pull_policy"),
    "command": ("run",),
    "args": ("run", "args"),
    "env": ("run", "env"),
    "resources": ("resources",),
    "volumeMounts": ("resources", "shm"),
    "annotations": ("annotations",),
}
"""Fields of the job spec that a field of the rendered manifest comes from."""


def lint(path: str | Path) -> list[Finding]:
    """What will hang, be rejected or go wrong silently.

    Args:
        path: a PyTorchJob manifest, a job.yaml (its script is read too), a Python script, a folder
            with a job.yaml, or "-" for any of these on standard input.

    Raises:
        SpecError: the file cannot be read.
    """
    if str(path) == "-":
        return _lint_text(_decoded(content("-"), "<stdin>"), "<stdin>", Path())
    file = Path(path)
    if file.is_dir():
        file /= "job.yaml"
    return _lint_text(_read(file), str(file), file.parent)


def _read(file: Path) -> str:
    try:
        return _decoded(content(file), str(file))
    except OSError as error:
        step = "name a PyTorchJob manifest, a job.yaml or a script"
        message = f"cannot be read: {error.strerror or error}; {step}"
        raise SpecError([Problem("", message)], str(file)) from None


def _decoded(data: bytes, source: str) -> str:
    if len(data) > MAX_BYTES:
        message = f"longer than {MAX_BYTES} bytes; name a manifest, a job.yaml or a script"
        raise SpecError([Problem("", message)], source)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise SpecError([Problem("", message)], source) from None


def _lint_text(text: str, source: str, folder: Path) -> list[Finding]:
    if source.endswith((".py", ".pyw")):
        return lint_script(text, source, roots=[folder])
    try:
        documents = parse_all(text, source)
    except SpecError as error:
        looks_like_python = not source.endswith((".yaml", ".yml", ".json"))
        return (
            lint_script(text, source, roots=[folder])
            if looks_like_python
            else invalid(error, source)
        )
    first: Any = documents[0].data if documents else None
    if isinstance(first, dict) and "kind" not in first and {"run", "image"} & first.keys():
        return _lint_job(text, source, folder)
    if not isinstance(first, dict) and not source.endswith((".yaml", ".yml", ".json")):
        return lint_script(text, source, roots=[folder])
    return lint_manifest(text, source)


def _lint_job(text: str, source: str, folder: Path) -> list[Finding]:
    """A job.yaml: the spec, the manifest that it renders, and the script that it names."""
    from k8sjob.rendering.manifest import render  # noqa: PLC0415 - with pydantic, only for specs
    from k8sjob.spec import JobSpec  # noqa: PLC0415 - see above

    document = parse(text, source)
    try:
        spec = JobSpec.from_yaml(text, source)
        rendered = render(spec)
    except SpecError as error:
        return invalid(error, source)
    job = next(iter(jobs_in([parse(rendered)])))
    job.place = lambda path: _place(document, path)
    script = _script(spec, folder)
    missing = [] if script else [Hit(*document.place(("run",), key=True), _missing(spec))]
    rules = (*RULES, Rule(_MISSING, lambda _: missing))
    found = findings(rules, job, {source: text}, MANIFEST_CHECKS.keys() | CHECKS.keys())
    if isinstance(script, Path):
        found += _lint_of(script, spec, job, folder)
    return found


def _lint_of(script: Path, spec: JobSpec, job: Job, folder: Path) -> list[Finding]:
    """Lint of a job's script, with the modules that Python would find beside it."""
    context = folder / getattr(spec.image, "context", ".")
    name = spec.run.module or "__main__"
    if script.name == "__main__.py":
        name += ".__main__"
    roots = [context] if spec.run.module else [script.parent, context]
    return lint_script(_read(script), str(script), _setting(spec, job), roots=roots, name=name)


def _place(document: Document, path: _Path) -> tuple[int, int]:
    """The place in the job.yaml that a field of the manifest comes from: its field, or overlay."""
    overlaid = _below(document.data.get("overlay"), path)
    if overlaid:
        return document.place(("overlay", *path[:overlaid]), key=True)
    for step in reversed(path):
        if step in _FIELDS:
            own = path[path.index("env") + 2 :] if step == "env" else ()
            return document.place((*_FIELDS[str(step)], *own), key=True)
    return document.place(("policy",), key=True)


def _below(overlay: Any, path: _Path) -> int:
    """How many steps of a path the overlay has, if it has all of the keys; lists end it."""
    for depth, step in enumerate(path):
        if isinstance(overlay, list) and isinstance(step, int):
            return depth
        if not isinstance(overlay, dict) or step not in overlay:
            return 0
        overlay = overlay[step]
    return len(path)


def _script(spec: JobSpec, folder: Path) -> Path | bool:
    """The script that a job starts; True if it is none of ours to look at, False if it is missing.

    Where the image is not built from the context, the script may be in the image alone.
    """
    run = spec.run
    name = run.script or next((word for word in run.command or () if word.endswith(".py")), "")
    module = (run.module or "").replace(".", "/")
    context = folder / (spec.image.context if not isinstance(spec.image, str) else ".")
    names = [f"{module}.py", f"{module}/__main__.py"] if module else [name.removeprefix("/app/")]
    here = [context / name for name in names if name and (context / name).is_file()]
    if here:
        return here[0]
    expected = spec.builds_image and spec.uses_agent and not names[0].startswith("/")
    return not expected


def _missing(spec: JobSpec) -> str:
    what = spec.run.script or spec.run.module
    return (
        f"{what} is not in the context {getattr(spec.image, 'context', '.')!r} that the image is "
        "built from: every replica ends at once; correct run, or image.context"
    )


def _setting(spec: JobSpec, job: Job) -> Setting:
    launcher = "k8sjob" if spec.uses_agent else launcher_of(next(job.trainers())[1])
    return Setting(
        nodes=spec.nnodes,
        processes=spec.world_size,
        gpus=spec.resources.gpus,
        launcher=launcher or None,
        local_rank_arg=spec.run.local_rank_arg,
    )
