"""A job again: the same spec and the same code, from the job or from a record of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from k8sjob.adopt import adopt
from k8sjob.errors import BackendError
from k8sjob.jobs.plan import plan_run, plan_submission
from k8sjob.spec import JobSpec
from k8sjob.yamldoc import dump

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from k8sjob.backends.api import Launched, Plan
    from k8sjob.targets.api import Job

_NAMED: Final = 3
"""Maximum number of differing files that a message names."""


def spec_of(job: Job) -> JobSpec:
    """The spec of a job in a cluster; its image is the one that ran.

    Raises:
        SpecError: no job spec can express the job.
    """
    return adopt("---\n".join(map(dump, job.objects))).spec


def plan_there(job: Job, avoid_nodes: Sequence[str] = ()) -> Plan:
    """The plan of a job in a cluster once more, under a new name, from the beginning.

    None of its Pods gets on a node of these names. Its checkpoints go to a folder of that name in
    the old folder: the old ones are of a training that may be complete, and none of them is
    resumed.

    Raises:
        SpecError: no job spec can express the job, or its name is too long for a new one.
    """
    old = spec_of(job)
    avoided = list(dict.fromkeys([*old.policy.avoid_nodes, *avoid_nodes]))
    plan = plan_submission(old.with_(policy={"avoid_nodes": avoided}), generate_name=True)
    spec = plan.spec
    if spec.checkpoint is None:
        return plan
    return plan_submission(spec.with_(checkpoint={"dir": f"{spec.checkpoint.dir}/{spec.name}"}))


def plan_here(launched: Launched, folder: Path | None = None) -> tuple[Plan, list[str]]:
    """The plan of a job on this machine once more, and the files of its code that have changed.

    Where a file has changed, the new run's code is the copy that the old run had.

    Args:
        launched: what the old run was started from.
        folder: where the folder of its job.yaml is now; None: where it was.

    Raises:
        SpecError: the spec is not valid any more, or the script is not there.
        BackendError: a file has changed or is gone, and the old run's copy is gone, too.
    """
    source = folder or launched.folder
    if not source.is_dir():
        raise BackendError(
            f"{source}, where the job.yaml and the code were, is not a folder on this machine;"
            " specify the one with the same code: --folder DIR"
        )
    spec = JobSpec.from_yaml(launched.spec)
    plan = plan_run(spec, source)
    changed = [
        name for name, digest in launched.code.items() if _digest(plan.context / name) != digest
    ]
    if not changed:
        return plan, []
    if launched.copy is None:
        more = f" and {len(changed) - _NAMED} more" if changed[_NAMED:] else ""
        raise BackendError(
            f"{', '.join(changed[:_NAMED])}{more} in {plan.context} is not what the job ran with;"
            " specify a folder with the same code with --folder DIR, or run the current code:"
            " k8sjob run"
        )
    return replace(plan, code=launched.copy), changed


def _digest(path: Path) -> str | None:
    """The SHA-256 of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
