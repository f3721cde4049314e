"""The checks of `k8sjob doctor`: can jobs be submitted? Pure, over facts gathered once.

Nothing in the cluster is changed: what would be made is asked for as a dry run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.checks.doctor import cluster, controller, needs, permissions
from k8sjob.checks.doctor.check import ClusterFacts, verdict
from k8sjob.checks.doctor.gather import gather, gather_needs
from k8sjob.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from k8sjob.findings import Finding
    from k8sjob.kube.objects import Json

__all__ = ["Report", "examine", "examine_needs", "gather", "gather_needs"]

_OF_AN_OPERATOR: Final = frozenset({controller.crd, controller.webhook, controller.operator})
"""Checks that say nothing if the controller is a part of every cluster."""
_NEEDS: Final = (needs.named_objects, needs.queue, needs.gang, cluster.user_ids)
_CHECKS: Final[tuple[Callable[[ClusterFacts], Iterator[Finding]], ...]] = (
    permissions.permissions,
    controller.crd,
    controller.webhook,
    controller.operator,
    controller.dry_run,
    controller.init_image,
    controller.init_wait,
    cluster.namespace,
    cluster.pod_security,
    cluster.quotas,
    cluster.limits,
    *_NEEDS,
    needs.fit,
    cluster.nodes,
    cluster.free_devices,
    cluster.preflights,
    cluster.storage,
)


class Report(NamedTuple):
    """The result of all checks, in the order in which they were made.

    Attributes:
        context: the cluster's context; empty if there was no cluster, as `namespace`.
        rbac: the Role and RoleBinding to ask for; empty if nothing is missing.
    """

    checks: Sequence[Finding]
    context: str = ""
    namespace: str = ""
    rbac: Sequence[Json] = ()

    @property
    def is_blocked(self) -> bool:
        """Whether something stands in the way of a submission."""
        return any(check.severity is Severity.ERROR for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON; docs/reference/json.md describes the fields."""
        return {
            "context": self.context,
            "namespace": self.namespace,
            "can_submit": bool(self.context) and not self.is_blocked,
            "checks": [
                {
                    "topic": check.id,
                    "verdict": verdict(check.severity),
                    "seen": check.message,
                    "next_step": check.next_step,
                    "details": list(check.details),
                }
                for check in self.checks
            ],
            "rbac": list(self.rbac),
        }


def examine(facts: ClusterFacts) -> Report:
    """Every check over what was gathered; where the apiserver does not respond, only that."""
    checks = list(permissions.server(facts))
    rbac: list[Json] = []
    if facts.error("version") is None:
        left_out = frozenset() if facts.target.controller.deployment else _OF_AN_OPERATOR
        checks += [
            finding for check in _CHECKS if check not in left_out for finding in check(facts)
        ]
        rbac = permissions.asked_for(facts)
    return Report(checks, facts.context, facts.namespace, rbac)


def examine_needs(facts: ClusterFacts) -> list[Finding]:
    """Check for objects that a job names and the cluster lacks: the job would wait for them."""
    findings = [finding for look in _NEEDS for finding in look(facts)]
    needed = [
        finding for finding in findings if finding.severity in {Severity.ERROR, Severity.WARNING}
    ]
    # The operator's init container is left to doctor, which reads the operator's settings.
    security = cluster.pod_security(facts)
    return needed + [finding for finding in security if finding.severity is Severity.ERROR]
