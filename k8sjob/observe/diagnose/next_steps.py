"""Next steps that depend on the job: its volumes, and whether there is a job.yaml of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.contract import EventKind
from k8sjob.targets.jobs import pod_specs

if TYPE_CHECKING:
    from k8sjob.observe.diagnose.facts import Facts

_SAME_STEPS: Final = (
    "make all ranks take the same number of steps, in the same order: run.batches() and a"
    " DistributedSampler give each as many batches; torch's Join handles ranks that have finished;"
    " k8sjob lint finds collectives that only some ranks reach, as an evaluation on rank 0 alone"
)
_OWN_DISKS: Final = (
    "after a restart each rank must load the same checkpoint: the job mounts no volume that its"
    " replicas share, so what one rank writes is on that replica's own disk, and the others start"
    " from scratch. Keep it on a ReadWriteMany claim, or let rank 0 load it and broadcast it"
)
_OF_ONE_POD: Final = frozenset(
    {"emptyDir", "hostPath", "configMap", "secret", "downwardAPI", "projected", "ephemeral", "name"}
)
"""Fields of a Pod's volumes that are not the same disk, and written to, on each node."""
_FIELDS: Final[dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("rules").joinpath("manifest_fields.toml").read_text(encoding="utf-8")
)


def equal_steps(facts: Facts) -> str:
    """What to do so that all ranks take as many steps."""
    restarted = facts.reported(EventKind.RESTARTING) or any(
        replica.restarts for replica in facts.status.replicas
    )
    volumes = (
        volume for _, _, spec in pod_specs(facts.job.raw) for volume in spec.get("volumes") or ()
    )
    shared = any(not _OF_ONE_POD.issuperset(volume) for volume in volumes)
    return _OWN_DISKS if restarted and not shared and len(facts.ranks) > 1 else _SAME_STEPS


def in_manifest(next_step: str) -> str:
    """A next step with the fields of a manifest in place of those of a job.yaml."""
    for pattern, text in _FIELDS.items():
        next_step = re.sub(pattern, text, next_step)
    return next_step
