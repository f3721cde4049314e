"""Lint of a job.yaml: the spec, the manifest that it renders, and the script that it names."""

from __future__ import annotations

import difflib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from k8sjob.document import Document, parse
from k8sjob.errors import SpecError
from k8sjob.lint.finding import Check, Finding, Hit, Rule, Severity, findings
from k8sjob.lint.manifest import CHECKS as MANIFEST_CHECKS
from k8sjob.lint.manifest import RULES, invalid, jobs_in
from k8sjob.lint.manifest_facts import Job, launcher_of
from k8sjob.lint.manifest_images import too_old, wrong_host
from k8sjob.lint.script import lint_script, read
from k8sjob.lint.script_facts import Setting

if TYPE_CHECKING:
    from k8sjob.spec import JobSpec

__all__ = ["CHECKS", "lint_job"]

_MISSING: Final = Check(
    "script-missing",
    Severity.ERROR,
    "manifest",
    "An image that is built from the context has what lies in the context, and no more.",
)
_ABSENT: Final = Check(
    "script-not-here",
    Severity.WARNING,
    "manifest",
    "An image that is used as it is may have the script; a folder of Python files without it has a "
    "misspelt name more often.",
)
_OLD: Final = Check(
    "image-too-old",
    Severity.ERROR,
    "manifest",
    "k8sjob's runtime, which starts the script, needs Python 3.11 and torch 2.6.",
)
CHECKS: Final = {check.id: check for check in (_MISSING, _ABSENT, _OLD)}

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


def lint_job(text: str, source: str, folder: Path) -> list[Finding]:
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
    job.rendered = True
    script = _script(spec, folder)
    rules = (*RULES, *_rules_of_specs(spec, document, folder, script))
    found = findings(rules, job, {source: text}, MANIFEST_CHECKS.keys() | CHECKS.keys())
    if script:
        found += _lint_of(script, spec, job, folder)
    return found


def _rules_of_specs(
    spec: JobSpec, document: Document, folder: Path, script: Path | None
) -> list[Rule[Job]]:
    """Checks of what the job.yaml says and its manifest does not."""
    run = document.place(("run",), key=True)
    base = getattr(spec.image, "base", None)
    image = document.place(("image", "base") if base else ("image",), key=True)
    missing, absent, old, host = list[Hit](), list[Hit](), list[Hit](), list[Hit]()
    if script is None and spec.uses_agent:
        if spec.builds_image and not (spec.run.script or "").startswith("/"):
            missing.append(Hit(*run, _missing(spec)))
        elif step := _looks_misspelt(spec, folder):
            absent.append(Hit(*run, step))
    if spec.uses_agent and (why := too_old(base or spec.image_reference)):
        old.append(Hit(*image, f"{base or spec.image_reference} has {why}; take a newer image"))
    if base and (why := wrong_host(base)):
        host.append(Hit(*image, f"image {base!r}: {why}"))
    return [
        Rule(_MISSING, lambda _: missing),
        Rule(_ABSENT, lambda _: absent),
        Rule(_OLD, lambda _: old),
        Rule(MANIFEST_CHECKS["image-host"], lambda _: host),
    ]


def _looks_misspelt(spec: JobSpec, folder: Path) -> str:
    """Why the script of an image that is used as it is may not be meant; else empty."""
    script = spec.run.script or ""
    context = folder / getattr(spec.image, "context", ".")
    parent = context / script
    if not script or script.startswith("/") or not parent.parent.is_dir():
        return ""
    here = [file.name for file in parent.parent.glob("*.py")]
    close = difflib.get_close_matches(parent.name, here, n=1)
    if not close:
        return ""
    meant = str(PurePosixPath(script).with_name(close[0]))
    return (
        f"{script} is not beside the job.yaml, where {meant} is: unless the image has a file of "
        f"that name, every replica ends at once; did you mean run.script: {meant}?"
    )


def _lint_of(script: Path, spec: JobSpec, job: Job, folder: Path) -> list[Finding]:
    """Lint of a job's script, with the modules that Python would find beside it."""
    context = folder / getattr(spec.image, "context", ".")
    name = spec.run.module or "__main__"
    if spec.run.module and script.name == "__main__.py":
        name += ".__main__"
    roots = [context] if spec.run.module else [script.parent, context]
    return lint_script(
        read(script),
        str(script),
        _setting(spec, job),
        roots=roots,
        name=name,
    )


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


def _script(spec: JobSpec, folder: Path) -> Path | None:
    """The script that a job starts, if it is in the context."""
    run = spec.run
    name = run.script or next((word for word in run.command or () if word.endswith(".py")), "")
    module = (run.module or "").replace(".", "/")
    context = folder / (spec.image.context if not isinstance(spec.image, str) else ".")
    name = module or name.removeprefix("/app/")
    names = [f"{module}.py" if module else name, f"{name}/__main__.py"] if name else []
    return next((context / name for name in names if (context / name).is_file()), None)


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
