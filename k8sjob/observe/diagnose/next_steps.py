"""Next steps that depend on the job: its volumes, and whether there is a job.yaml of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.contract import EventKind
from k8sjob.observe.diagnose.finding import load_data
from k8sjob.targets.jobs import pod_specs

if TYPE_CHECKING:
    from k8sjob.observe.diagnose.facts import Facts

_OF_ONE_POD: Final = frozenset(
    {"emptyDir", "hostPath", "configMap", "secret", "downwardAPI", "projected", "ephemeral", "name"}
)
"""Fields of a Pod's volumes that are not the same disk, and written to, on each node."""
_FIELDS: Final[dict[str, str]] = load_data("manifest_fields")


def equal_steps(facts: Facts) -> str:
    """What to do so that all ranks take as many steps."""
    restarted = facts.reported(EventKind.RESTARTING) or any(
        replica.restarts for replica in facts.status.replicas
    )
    volumes = (
        volume for _, _, spec in pod_specs(facts.job) for volume in spec.get("volumes") or ()
    )
    shared = any(not _OF_ONE_POD.issuperset(volume) for volume in volumes)
    own_disks = restarted and not shared and len(facts.ranks) > 1
    step: str = load_data("steps")["own_disks" if own_disks else "same_number"]
    return step


def in_manifest(next_step: str) -> str:
    """A next step with the fields of a manifest in place of those of a job.yaml."""
    for pattern, text in _FIELDS.items():
        next_step = re.sub(pattern, text, next_step)
    return next_step
