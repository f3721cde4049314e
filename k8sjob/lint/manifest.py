"""Lint of PyTorchJob manifests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from k8sjob.document import Document, parse_all
from k8sjob.errors import SpecError
from k8sjob.lint import manifest_images, manifest_launch, manifest_pods, manifest_policy
from k8sjob.lint.finding import Check, Finding, Severity, findings
from k8sjob.lint.manifest_facts import Job, Path
from k8sjob.rendering.webhook import KIND

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CHECKS", "INVALID", "RULES", "invalid", "jobs_in", "lint_manifest"]

INVALID: Final = Check(
    "invalid-document",
    Severity.ERROR,
    "manifest",
    "A file that is not YAML, has no PyTorchJob, or is a job.yaml with errors cannot be submitted.",
)
RULES: Final = (
    *manifest_policy.RULES,
    *manifest_launch.RULES,
    *manifest_pods.RULES,
    *manifest_images.RULES,
)

CHECKS: Final = {check.id: check for check in (INVALID, *(rule.check for rule in RULES))}


def lint_manifest(text: str, source: str = "") -> list[Finding]:
    """What will hang, be rejected or go wrong silently with the PyTorchJobs in a text.

    Args:
        text: YAML or JSON; documents of other kinds are passed over.
        source: its file name, for the findings.

    Returns:
        The findings in the order of the file; those on a line with `# k8sjob: ignore[id]` left out.
    """
    try:
        jobs = list(jobs_in(parse_all(text, source)))
    except SpecError as error:
        return invalid(error, source)
    if not jobs:
        message = f"there is no {KIND} in it; name a file with one, a job.yaml or a script"
        return [Finding(INVALID.id, INVALID.severity, message, source)]
    found = [finding for job in jobs for finding in findings(RULES, job, {source: text}, CHECKS)]
    return sorted(dict.fromkeys(found), key=lambda finding: (finding.line, finding.column))


def invalid(error: SpecError, source: str) -> list[Finding]:
    """The problems of a document as findings."""
    return [
        Finding(
            INVALID.id,
            INVALID.severity,
            f"{problem.field}: {problem.message}" if problem.field else problem.message,
            source,
            problem.line or 1,
            problem.column or 1,
        )
        for problem in error.problems
    ]


def jobs_in(documents: list[Document]) -> Iterator[Job]:
    """The PyTorchJobs in documents, those inside a List too."""
    for document in documents:
        data = document.data
        if not isinstance(data, dict):
            continue
        items = data.get("items")
        if str(data.get("kind")).endswith("List") and isinstance(items, list):
            inside: list[tuple[Path, Any]] = [(("items", i), item) for i, item in enumerate(items)]
        else:
            inside = [((), data)]
        for base, item in inside:
            if isinstance(item, dict) and item.get("kind") == KIND:
                yield Job(item, _place(document, base))


def _place(document: Document, base: Path) -> Callable[[Path], tuple[int, int]]:
    return lambda path: document.place((*base, *path), key=True)
