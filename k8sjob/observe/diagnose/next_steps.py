"""Next steps that depend on the job: its volumes, and whether there is a job.yaml of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.contract import EventKind
from k8sjob.findings import field_path
from k8sjob.observe.diagnose.finding import load_data
from k8sjob.targets.jobs import pod_specs

if TYPE_CHECKING:
    from k8sjob.findings import Finding
    from k8sjob.observe.diagnose.facts import Facts

_OF_ONE_POD: Final = frozenset(
    {"emptyDir", "hostPath", "configMap", "secret", "downwardAPI", "projected", "ephemeral", "name"}
)
"""Fields of a Pod's volumes that are not the same disk, and written to, on each node."""


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


def in_manifest(facts: Facts, finding: Finding) -> Finding:
    """The finding with the fields of the job's own object in place of those of a job.yaml."""
    step, roles = finding.next_step, facts.job.replicas
    for pattern, text in load_data("manifest_fields").items():
        step = re.sub(pattern, text, step)
    of_replica = (role for name in finding.replicas for role in roles if name in role)
    role = next(of_replica, roles[0] if roles else None)
    every = (role.pod.get("containers") if role else None) or ()
    main = role.main if role else None
    index = next((n for n, container in enumerate(every) if container is main), "")
    step = step.replace("{container}", f"{{pod}}containers[{index}].")
    # What is no job of our kinds has its policy beside its Pod template.
    beside = (role.path[:-1] if role else ()) or ("spec",)
    policy = facts.target.policy_at if facts.job.is_training else beside
    places = {"policy": f"{field_path(policy)}."}
    # The template of a TrainJob is in another object, its runtime; a Pod has none.
    if role and (role.path[:1] == ("spec",) or "containers" in facts.job.spec):
        places["pod"] = f"{field_path((*role.path, 'spec'))}."
    # A sentence has the whole path once.
    spelled = re.sub(r"\{(pod|policy)\}", lambda place: places.pop(place[1], ""), step)
    # A CronJob makes the next Job, an AppWrapper its job anew, as they are told themselves.
    for owner in facts.job.owners[:1] if spelled != step else ():
        spelled += f"; change it in {owner.get('kind')} {owner.get('name')}, which made this one"
    return finding._replace(next_step=spelled)
