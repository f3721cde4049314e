"""Lint of files: a manifest, a script, or a job.yaml with the script that it names."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.checks import scripts
from k8sjob.checks.finding import UNKNOWN_IGNORE, findings, table
from k8sjob.checks.lint import job_files, manifest_pods
from k8sjob.checks.scripts import Setting, lint_script, read_text, refusal
from k8sjob.contract import CONTAINER_NAMES
from k8sjob.errors import SpecError
from k8sjob.findings import INVALID, Severity
from k8sjob.kube.objects import at_path
from k8sjob.rules import Check, Rules
from k8sjob.targets.jobs import DEFAULT, TARGETS, keyed, near_job
from k8sjob.targets.manifest_facts import ManifestJob, launcher_of
from k8sjob.yamldoc import job_file, objects, parse, parse_all, refuse_template

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k8sjob.findings import FieldPath, Finding
    from k8sjob.spec.changes import Change
    from k8sjob.targets.api import Target
    from k8sjob.yamldoc.reading import Document

_SHEBANG: Final = re.compile(r"#!.*python")

_INVALID: Final = Check(
    INVALID,
    Severity.ERROR,
    "manifest",
    "A file that is not YAML, has no job, or is a job.yaml with errors cannot be submitted.",
)
_MANIFEST_RULES: Final = (manifest_pods.RULES, *filter(None, (kind.rules for kind in TARGETS)))


def lint(path: str | Path, changes: Sequence[Change] = ()) -> list[Finding]:
    """Find what will hang, be rejected or go wrong silently.

    Args:
        path: a manifest of a job, a job.yaml (its script is read too), a Python script, a folder
            with a job.yaml, or "-" for any of these on standard input.
        changes: of the fields of a job.yaml.

    Raises:
        SpecError: the file cannot be read.
    """
    file = Path(path) if str(path) == "-" else job_file(Path(path))
    source = "<stdin>" if str(path) == "-" else str(file)
    if changes and source.endswith(".py"):
        from k8sjob.spec import load  # noqa: PLC0415 - see _lint_job

        spec = load(file, changes, local=True)
        setting = Setting(spec.nnodes, spec.world_size, spec.resources.gpus, "k8sjob")
        return lint_script(read_text(file, source), source, setting, roots=[file.parent])
    return _lint_text(read_text(file, source), source, file.parent, changes)


def _lint_text(
    text: str, source: str, folder: Path, changes: Sequence[Change] = ()
) -> list[Finding]:
    if source.endswith((".py", ".pyw")) or _SHEBANG.match(text):
        return lint_script(text, source, roots=[folder])
    is_yaml = source.endswith((".yaml", ".yml", ".json"))
    try:
        if is_yaml:
            refuse_template(text, source)
        documents = parse_all(text, source)
    except SpecError as error:
        return _invalid(error, source) if is_yaml else _lint_unnamed(text, source, folder)
    first: Any = documents[0].data if documents else None
    if isinstance(first, dict) and "kind" not in first and {"run", "image"} & first.keys():
        return _lint_job(text, source, folder, changes)
    if not isinstance(first, dict) and not is_yaml:
        return _lint_unnamed(text, source, folder)
    return lint_manifest(text, source)


def _lint_unnamed(text: str, source: str, folder: Path) -> list[Finding]:
    """A file that is no YAML and has no telling name: a script, if Python can parse it."""
    findings = lint_script(text, source, roots=[folder])
    if [finding.id for finding in findings] != [scripts.SYNTAX.id]:
        return findings
    raise refusal("is neither YAML nor Python, so lint does not read it", source)


# --- manifests ------------------------------------------------------------------------------------


def lint_manifest(text: str, source: str = "") -> list[Finding]:
    """Find what will hang, be rejected or go wrong silently with the jobs in a text.

    Args:
        text: YAML or JSON; other objects are passed over.
        source: its file name, for the findings.

    Returns:
        The findings in the order of the file; those on a line with `# k8sjob: ignore[id]` left out.
    """
    try:
        refuse_template(text, source)
        documents = parse_all(text, source)
        jobs = list(_jobs_in(documents))
    except SpecError as error:
        return _invalid(error, source)
    if not jobs:
        manifests = [manifest for _, _, manifest in objects(documents)]
        kinds = ", ".join(target.kind for target in TARGETS)
        step = f"specify a file with one ({kinds}), a job.yaml or a script"
        kinds_in_it = [str(manifest["kind"]) for manifest in manifests if manifest.get("kind")]
        names = ", ".join(dict.fromkeys(kinds_in_it))
        message = f"there is no job in it{names and f', but {names}'}"
        return [_INVALID.finding(message, near_job(manifests) or step, source=source)]
    hits = (hit for job in jobs for hit in _manifest_hits(job))
    return findings(hits, {source: text}, {_INVALID.id, *_ids(_MANIFEST_RULES)})


def _manifest_hits(job: ManifestJob) -> Iterator[Finding]:
    yield from manifest_pods.RULES.hits(job)
    if rules := job.target.rules:
        yield from rules.hits(job)


def _ids(several: Iterable[Rules[Any]]) -> Iterator[str]:
    return (check.id for rules in several for check in rules.checks)


def _invalid(error: SpecError, source: str, document: Document | None = None) -> list[Finding]:
    """The problems as findings; one of rendering has its place in the document by its field."""
    findings = []
    for problem in error.findings:
        message = f"{problem.field}: {problem.message}" if problem.field else problem.message
        finding = problem._replace(message=message, source=source)
        if document and problem.path and not problem.line:
            finding = document.placed(finding)
        findings.append(finding._replace(line=finding.line or 1, column=finding.column or 1))
    return findings


def _jobs_in(documents: list[Document]) -> Iterator[ManifestJob]:
    for document, base, item in objects(documents):
        if target := _kind_of(item):
            yield ManifestJob(target, item, partial(_place_below, document, base))


def _kind_of(item: dict[str, Any]) -> Target | None:
    """The kind of a job, or of the job that takes its Pods from an object of this API."""
    group, kind = str(item.get("apiVersion")).partition("/")[0], item.get("kind")
    if kind == DEFAULT.kind:  # also of another group, which its checks find
        return DEFAULT
    for target in TARGETS:
        ours = target.api_version.partition("/")[0] == group
        if ours and (kind == target.kind or keyed(target)):
            return target
    return None


def _place_below(document: Document, base: FieldPath, path: FieldPath) -> tuple[int, int]:
    return document.place((*base, *path), key=True)


# --- job.yaml -------------------------------------------------------------------------------------

_FIELDS: Final[dict[str, FieldPath]] = {
    **DEFAULT.sources,
    **{name: tuple(field.split(".")) for name, field in table("fields").items()},
}
"""Fields of the job spec that a field of the rendered manifest comes from."""


def _lint_job(text: str, source: str, folder: Path, changes: Sequence[Change]) -> list[Finding]:
    """A job.yaml: the spec, the manifest that it renders, and the script that it names."""
    from k8sjob.rendering.manifest import render  # noqa: PLC0415 - with pydantic, only for specs
    from k8sjob.spec.changes import changed, job_document  # noqa: PLC0415 - see above
    from k8sjob.spec.load import validated  # noqa: PLC0415 - see above

    document = None
    try:
        document = changed(job_document(text, source), changes)
        spec = validated(document, changes, folder)
        rendered = manifest_text = render(spec)
        if spec.target != DEFAULT.name:  # for the checks of restarts and launchers
            alike: dict[str, Any] = {"target": DEFAULT.name, "overlay": {}}
            rendered = render(spec.without_runtime.model_copy(update=alike))
    except SpecError as error:
        return _invalid(error, source, document)
    manifest = next(_jobs_in([parse(rendered)]))
    manifest.place = lambda path: _place(document, path)
    manifest.rendered, manifest.base = True, getattr(spec.image, "base", None) or ""
    job = job_files.JobFile(spec, document, folder)
    hits = [*_manifest_hits(manifest), *job_files.RULES.hits(job)]
    if spec.overlay and spec.target != DEFAULT.name:
        # The overlay fits the job's own kind alone, so what it changes is looked at there.
        places = {(hit.id, hit.line, hit.column) for hit in hits}
        merged = parse_all(manifest_text)
        for job_of_kind in _jobs_in(merged):
            job_of_kind.place = manifest.place
            more = manifest_pods.RULES.hits(job_of_kind)
            hits += [hit for hit in more if (hit.id, hit.line, hit.column) not in places]
        if "/dev/shm" in _mounted(document.data for document in merged):  # noqa: S108 - a mount
            hits = [hit for hit in hits if hit.id != "no-shared-memory"]
    checks = {_INVALID.id, *_ids((*_MANIFEST_RULES, job_files.RULES))}
    script_findings = _lint_script_of(job, manifest, job.script) if job.script else []
    return findings(hits, {source: text}, checks) + script_findings


def _mounted(objects: Iterable[Any]) -> Iterator[str]:
    """The paths of what the training container mounts, wherever it is, as in runtimePatches."""
    for item in objects:
        if isinstance(item, dict):
            trains = item.get("name") in CONTAINER_NAMES
            mounts = item.get("volumeMounts") if trains else ()
            yield from (str(at_path(mount, "mountPath")).rstrip("/") for mount in mounts or ())
            yield from _mounted(item.values())
        elif isinstance(item, list):
            yield from _mounted(item)


def _lint_script_of(job: job_files.JobFile, manifest: ManifestJob, script: Path) -> list[Finding]:
    """Lint of a job's script, with the modules that Python would find beside it."""
    spec, run = job.spec, job.spec.run
    name = run.module or "__main__"
    if run.module and script.name == "__main__.py":
        name += ".__main__"
    launcher = "k8sjob" if spec.uses_agent else launcher_of(next(manifest.trainers())[1])
    setting = Setting(
        nodes=spec.nnodes,
        processes=spec.world_size,
        gpus=spec.resources.gpus,
        launcher=launcher or None,
        local_rank_arg=run.local_rank_arg,
    )
    roots = [job.context] if run.module else [script.parent, job.context]
    return lint_script(read_text(script, str(script)), str(script), setting, roots=roots, name=name)


def _place(document: Document, path: FieldPath) -> tuple[int, int]:
    """The place in the job.yaml that a field of the manifest comes from: its field, or overlay."""
    of_pod = path[path.index("template") + 1 :] if "template" in path else ()
    # The overlay is merged last, so it wins over pod_template.
    for field, inside in (("overlay", path), ("pod_template", of_pod)):
        if overlaid := _below(document.data.get(field), inside):
            return document.place((field, *inside[:overlaid]), key=True)
    for step in reversed(path):
        if step in _FIELDS:
            variable = path[path.index("env") + 2 :] if step == "env" else ()
            return document.place((*_FIELDS[str(step)], *variable), key=True)
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


_ALL: Final = (
    _INVALID,
    *(check for rules in (*_MANIFEST_RULES, job_files.RULES) for check in rules.checks),
    *scripts.CHECKS,
    UNKNOWN_IGNORE,
)
CHECKS: Final = {check.id: check for check in _ALL}
"""Every check by its id."""
