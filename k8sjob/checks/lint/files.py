"""Lint of files: a manifest, a script, or a job.yaml with the script that it names."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from k8sjob.checks.lint import (
    manifest_job,
    manifest_pods,
    script_collectives,
    script_data,
    script_group,
)
from k8sjob.checks.lint.finding import UNKNOWN_IGNORE, Check, Finding, Hit, Severity, findings
from k8sjob.checks.lint.manifest_facts import Job, launcher_of
from k8sjob.checks.lint.script_facts import Script, Setting
from k8sjob.checks.lint.script_modules import encoding, parse_module, program
from k8sjob.contract import closest
from k8sjob.errors import Problem, SpecError
from k8sjob.targets.pytorchjob.operator import KIND
from k8sjob.yamldoc import content, job_file, objects, parse, parse_all
from k8sjob.yamldoc.reading import MAX_BYTES, Document

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.spec import JobSpec
    from k8sjob.yamldoc import FieldPath

__all__ = ["CHECKS", "lint", "lint_manifest", "lint_script"]

_SHEBANG: Final = re.compile(r"#!.*python")
_DOCKERFILE: Final = re.compile(r"^\s*FROM\s+\S+", re.MULTILINE | re.IGNORECASE)

_INVALID: Final = Check(
    "invalid-document",
    Severity.ERROR,
    "manifest",
    "A file that is not YAML, has no PyTorchJob, or is a job.yaml with errors cannot be submitted.",
)
_MISSING: Final = Check(
    "script-missing",
    Severity.ERROR,
    "manifest",
    "An image that is built from the context has what lies in the context, and no more.",
)
_MISSPELT: Final = Check(
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
_SYNTAX: Final = Check(
    "script-syntax",
    Severity.ERROR,
    "script",
    "A file that Python cannot parse ends every replica at its first line.",
)
_MANIFEST_RULES: Final = (manifest_job.RULES, manifest_pods.RULES)
_SCRIPT_RULES: Final = (script_group.RULES, script_collectives.RULES, script_data.RULES)
_MANIFEST_CHECKS: Final = {
    _INVALID.id: _INVALID,
    **{name: check for rules in _MANIFEST_RULES for name, check in rules.checks.items()},
}
_JOB_CHECKS: Final = {**_MANIFEST_CHECKS, **{c.id: c for c in (_MISSING, _MISSPELT, _OLD)}}
_SCRIPT_CHECKS: Final = {
    _SYNTAX.id: _SYNTAX,
    **{name: check for rules in _SCRIPT_RULES for name, check in rules.checks.items()},
}
CHECKS: Final = {**_JOB_CHECKS, **_SCRIPT_CHECKS, UNKNOWN_IGNORE.id: UNKNOWN_IGNORE}
"""Every check by its id."""


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
    file = job_file(Path(path))
    return _lint_text(_read(file), str(file), file.parent)


def _lint_text(text: str, source: str, folder: Path) -> list[Finding]:
    if source.endswith((".py", ".pyw")) or _SHEBANG.match(text):
        return lint_script(text, source, roots=[folder])
    is_yaml = source.endswith((".yaml", ".yml", ".json"))
    try:
        documents = parse_all(text, source)
    except SpecError as error:
        return _invalid(error, source) if is_yaml else _lint_unnamed(text, source, folder)
    first: Any = documents[0].data if documents else None
    if isinstance(first, dict) and "kind" not in first and {"run", "image"} & first.keys():
        return _lint_job(text, source, folder)
    if not isinstance(first, dict) and not is_yaml:
        return _lint_unnamed(text, source, folder)
    return lint_manifest(text, source)


def _lint_unnamed(text: str, source: str, folder: Path) -> list[Finding]:
    """A file that is no YAML and has no telling name: a script, if Python can parse it."""
    found = lint_script(text, source, roots=[folder])
    if [one.id for one in found] != [_SYNTAX.id]:
        return found
    what = "is a Dockerfile" if _DOCKERFILE.search(text) else "is neither YAML nor Python"
    step = "name a PyTorchJob manifest, a job.yaml or a script"
    raise SpecError([Problem("", f"{what}, and lint does not read that; {step}")], source)


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
        is_python = source.endswith((".py", ".pyw"))
        return data.decode(encoding(data) if is_python else "utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise SpecError([Problem("", message)], source) from None


# --- manifests ------------------------------------------------------------------------------------


def lint_manifest(text: str, source: str = "") -> list[Finding]:
    """What will hang, be rejected or go wrong silently with the PyTorchJobs in a text.

    Args:
        text: YAML or JSON; documents of other kinds are passed over.
        source: its file name, for the findings.

    Returns:
        The findings in the order of the file; those on a line with `# k8sjob: ignore[id]` left out.
    """
    try:
        jobs = list(_jobs_in(parse_all(text, source)))
    except SpecError as error:
        return _invalid(error, source)
    if not jobs:
        message = f"there is no {KIND} in it; name a file with one, a job.yaml or a script"
        return [_INVALID.finding(message, source)]
    hits = (hit for job in jobs for rules in _MANIFEST_RULES for hit in rules.hits(job))
    return findings(hits, {source: text}, _MANIFEST_CHECKS)


def _invalid(error: SpecError, source: str) -> list[Finding]:
    """The problems of a document as findings."""
    return [
        _INVALID.finding(
            f"{problem.field}: {problem.message}" if problem.field else problem.message,
            source,
            problem.line or 1,
            problem.column or 1,
        )
        for problem in error.problems
    ]


def _jobs_in(documents: list[Document]) -> Iterator[Job]:
    for document, base, item in objects(documents):
        if item.get("kind") == KIND:
            yield Job(item, partial(_place_below, document, base))


def _place_below(document: Document, base: FieldPath, path: FieldPath) -> tuple[int, int]:
    return document.place((*base, *path), key=True)


# --- job.yaml -------------------------------------------------------------------------------------

_FIELDS: Final[dict[str, FieldPath]] = {
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


def _lint_job(text: str, source: str, folder: Path) -> list[Finding]:
    """A job.yaml: the spec, the manifest that it renders, and the script that it names."""
    from k8sjob.rendering.manifest import render  # noqa: PLC0415 - with pydantic, only for specs
    from k8sjob.spec import JobSpec  # noqa: PLC0415 - see above

    document = parse(text, source)
    try:
        spec = JobSpec.from_yaml(text, source)
        rendered = render(spec)
    except SpecError as error:
        return _invalid(error, source)
    job = next(_jobs_in([parse(rendered)]))
    job.place = lambda path: _place(document, path)
    job.rendered = True
    hits = [hit for rules in _MANIFEST_RULES for hit in rules.hits(job)]
    hits += _hits_of_spec(spec, document, folder)
    found = findings(hits, {source: text}, _JOB_CHECKS)
    if script := _script(spec, folder):
        found += _lint_script_of(spec, job, script, folder)
    return found


def _hits_of_spec(spec: JobSpec, document: Document, folder: Path) -> Iterator[tuple[Check, Hit]]:
    """Checks of what the job.yaml says and its manifest does not."""
    run = document.place(("run",), key=True)
    base = getattr(spec.image, "base", None)
    image = document.place(("image", "base") if base else ("image",), key=True)
    if spec.builds_image and (why := _missing(spec, folder)):
        yield _MISSING, Hit(*run, why)
    elif not spec.builds_image and (why := _misspelt(spec, folder)):
        yield _MISSPELT, Hit(*run, why)
    if spec.uses_agent and (why := manifest_pods.too_old(base or spec.image_reference)):
        message = f"{base or spec.image_reference} has {why}; take a newer image"
        yield _OLD, Hit(*image, message)
    if base and (why := manifest_pods.wrong_host(base)):
        yield _MANIFEST_CHECKS["image-host"], Hit(*image, f"image {base!r}: {why}")


def _missing(spec: JobSpec, folder: Path) -> str:
    """Why an image that is built from the context lacks the script; else empty."""
    from k8sjob.rendering import check_script  # noqa: PLC0415 - see _lint_job

    try:
        check_script(spec, folder)
    except SpecError as error:
        return error.problems[0].message
    module = spec.run.module or ""
    context = _context(spec, folder)
    # A module of another package may be installed in the image.
    if (context / module.partition(".")[0]).is_dir() and module and not _script(spec, folder):
        return (
            f"{module!r} is not in the context {getattr(spec.image, 'context', '.')!r}, of which "
            "the image is made, though its package is; correct run.module"
        )
    return ""


def _misspelt(spec: JobSpec, folder: Path) -> str:
    """Why the script of an image that is used as it is may not be meant; else empty."""
    script = spec.run.script or ""
    path = folder / script
    if not script or script.startswith("/") or _script(spec, folder) or not path.parent.is_dir():
        return ""
    close = closest(path.name, (file.name for file in path.parent.glob("*.py")))
    if not close:
        return ""
    meant = str(PurePosixPath(script).with_name(close))
    return (
        f"{script} is not beside the job.yaml, where {meant} is: unless the image has a file of "
        f"that name, every replica ends at once; did you mean run.script: {meant}?"
    )


def _context(spec: JobSpec, folder: Path) -> Path:
    return folder / getattr(spec.image, "context", ".")


def _script(spec: JobSpec, folder: Path) -> Path | None:
    """The script that a job starts, if it is in the context."""
    run, context = spec.run, _context(spec, folder)
    name = run.script or next((word for word in run.command or () if word.endswith(".py")), "")
    module = (run.module or "").replace(".", "/")
    name = module or name.removeprefix("/app/")
    names = [f"{module}.py" if module else name, f"{name}/__main__.py"] if name else []
    return next((context / name for name in names if (context / name).is_file()), None)


def _lint_script_of(spec: JobSpec, job: Job, script: Path, folder: Path) -> list[Finding]:
    """Lint of a job's script, with the modules that Python would find beside it."""
    context, run = _context(spec, folder), spec.run
    name = run.module or "__main__"
    if run.module and script.name == "__main__.py":
        name += ".__main__"
    launcher = "k8sjob" if spec.uses_agent else launcher_of(next(job.trainers())[1])
    setting = Setting(
        nodes=spec.nnodes,
        processes=spec.world_size,
        gpus=spec.resources.gpus,
        launcher=launcher or None,
        local_rank_arg=run.local_rank_arg,
    )
    roots = [context] if run.module else [script.parent, context]
    return lint_script(_read(script), str(script), setting, roots=roots, name=name)


def _place(document: Document, path: FieldPath) -> tuple[int, int]:
    """The place in the job.yaml that a field of the manifest comes from: its field, or overlay."""
    overlaid = _below(document.data.get("overlay"), path)
    if overlaid:
        return document.place(("overlay", *path[:overlaid]), key=True)
    for step in reversed(path):
        if step in _FIELDS:
            own = path[path.index("env") + 2 :] if step == "env" else ()
            return document.place((*_FIELDS[str(step)], *own), key=True)
    return document.place(("policy",), key=True)


def _below(overlay: Any, path: FieldPath) -> int:
    """How many steps of a path the overlay has, if it has all of the keys; lists end it."""
    for depth, step in enumerate(path):
        if isinstance(overlay, list) and isinstance(step, int):
            return depth
        if not isinstance(overlay, dict) or step not in overlay:
            return 0
        overlay = overlay[step]
    return len(path)


# --- scripts --------------------------------------------------------------------------------------


def lint_script(
    text: str,
    source: str = "",
    setting: Setting | None = None,
    *,
    roots: Sequence[Path] = (),
    name: str = "__main__",
) -> list[Finding]:
    """What will hang, crash or go wrong silently when a script trains in a PyTorchJob.

    The script is parsed, never executed.

    Args:
        text: the script.
        source: its file name, for the findings.
        setting: how it is started; what is not known there is not held against the script.
        roots: folders in which its local modules are looked for, and read as parts of it.
        name: its own dotted name if it is started as a module.

    Returns:
        The findings in the order of the file; those on a line with `# k8sjob: ignore[id]` left out.
    """
    try:
        entry = parse_module(text, source, name, name.rpartition(".")[0])
        files = program(entry, roots)
        script = Script(files, setting or Setting())
        hits = (hit for rules in _SCRIPT_RULES for hit in rules.hits(script))
        return findings(hits, {module.source: module.text for module in files}, _SCRIPT_CHECKS)
    except (SyntaxError, ValueError, RecursionError) as error:
        line, column = getattr(error, "lineno", 1) or 1, getattr(error, "offset", 1) or 1
        version = ".".join(str(part) for part in sys.version_info[:2])
        message = (
            f"Python {version} cannot parse this: {getattr(error, 'msg', error)}; every replica "
            "ends at once; correct it"
        )
        return [_SYNTAX.finding(message, source, line, max(column, 1))]
