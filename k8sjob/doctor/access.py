"""Checks of the server and of what the user may do there. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k8sjob.doctor.check import fine, problem, unknown, warning
from k8sjob.doctor.permissions import RULES, Grant, binding, role

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.backends.api import Json
    from k8sjob.backends.transport import ApiError
    from k8sjob.doctor.check import Check
    from k8sjob.doctor.facts import Facts
    from k8sjob.doctor.permissions import Rule

__all__ = ["asked_for", "permissions", "server"]

_SLOW: Final = 2.0
"""Seconds; from here on every command is felt to wait."""


def server(facts: Facts) -> Iterator[Check]:
    """Whether the apiserver answers, who it is, and how long it takes."""
    where = f"{facts.server} (context {facts.context})"
    error = facts.error("version")
    if error is not None:
        yield problem("server", f"{where}: {error.said}", _way_in(error))
        return
    version = (facts.one("version") or {}).get("gitVersion", "of unknown version")
    seen = f"Kubernetes {version} at {where}, answered in {facts.seconds * 1000:.0f} ms"
    if facts.seconds > _SLOW:
        yield warning("server", seen, "look at the network between here and the cluster")
    else:
        yield fine("server", seen)


def _way_in(error: ApiError) -> str:
    if error.reason == "Untrusted":
        return "correct the cluster's certificate-authority in the kubeconfig"
    if error.code == 401:
        return "log in again: the credentials have expired, were revoked or could not be got"
    if error.code:
        return "ask whoever keeps the cluster"
    return "see that the cluster and the network are up, or name another one by --context"


def permissions(facts: Facts) -> Iterator[Check]:
    """Whether the user may do all that k8sjob does in the namespace, and what is missing."""
    if not facts.allowed:
        yield unknown(
            "permissions",
            "the apiserver does not tell what you may do",
            "what is missing shows when a command is refused",
        )
        return
    lacking = [(rule, missing) for rule in RULES if (missing := _missing(rule, facts))]
    ours = [(rule, missing) for rule, missing in lacking if not rule.grant.cluster_wide]
    details = tuple(f"{missing}: for {rule.used_by}" for rule, missing in ours)
    who, where = facts.user or "you", facts.namespace
    if any(rule.vital for rule, _ in ours):
        seen = f"{who} may not submit and follow jobs in {where}"
        yield problem("permissions", seen, "ask for the roles that stand below", details=details)
    elif ours:
        seen = f"{who} may submit and follow jobs in {where}, and not all the rest"
        yield warning("permissions", seen, "ask for the roles that stand below", details=details)
    else:
        yield fine("permissions", f"{who} may do all that k8sjob does in {where}")
    if wide := [(rule, missing) for rule, missing in lacking if rule.grant.cluster_wide]:
        files = sorted({f"manifests/rbac/{rule.grant}.yaml" for rule, _ in wide})
        yield unknown(
            "cluster-wide",
            f"{who} may not {'; '.join(missing for _, missing in wide)}",
            f"no command depends on it; why and doctor tell more with {' and '.join(files)}",
        )


def asked_for(facts: Facts) -> list[Json]:
    """The Role and RoleBinding that the user lacks; empty where nothing is missing."""
    complete = all(not _missing(rule, facts) for rule in RULES if not rule.grant.cluster_wide)
    if complete or not facts.allowed:
        return []
    subject = _subject(facts.user)
    return [
        role(Grant.SUBMITTER, facts.namespace),
        binding(Grant.SUBMITTER, [subject], facts.namespace),
    ]


def _subject(user: str) -> Json:
    account = user.removeprefix("system:serviceaccount:").split(":")
    if user.startswith("system:serviceaccount:") and len(account) == 2:
        return {"kind": "ServiceAccount", "name": account[1], "namespace": account[0]}
    return {"kind": "User", "name": user or "YOUR-NAME"}


def _missing(rule: Rule, facts: Facts) -> str:
    """What the user lacks of a row, as "list, watch pods"; empty for nothing."""
    verbs = [one.verb for one in rule.permissions if facts.allowed.get(one) is False]
    return f"{', '.join(verbs)} {rule.name}" if verbs else ""
