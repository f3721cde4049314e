"""The table of all requests to an apiserver, and the checks that the user may make them.

The doctor asks for each row whether the user may, manifests/rbac grants the rows, and the pages of
the documentation show them; tests keep the three equal.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.checks.doctor.check import Permission, fine, problem, unknown, warning
from k8sjob.kube.objects import Object
from k8sjob.targets.jobs import DEFAULT, TARGETS, namesake

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.checks.doctor.check import ClusterFacts
    from k8sjob.findings import Finding
    from k8sjob.kube.client.transport import ApiError
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Companion, Level, Target

RBAC: Final = "rbac.authorization.k8s.io"


class Grant(StrEnum):
    """The roles in manifests/rbac."""

    VIEWER = "viewer"
    """Look at the jobs of a namespace; a Role."""
    SUBMITTER = "submitter"
    """The same, and make, change and remove them; a Role."""
    CLUSTER_VIEWER = "cluster-viewer"
    """Cluster-wide objects: nodes, classes of storage and priority; a ClusterRole."""
    CAPACITY = "capacity"
    """The Pods of all namespaces, which occupy the nodes, with those of others; a ClusterRole."""

    @property
    def cluster_wide(self) -> bool:
        """Whether it is a ClusterRole, bound for the whole cluster."""
        return self in {Grant.CLUSTER_VIEWER, Grant.CAPACITY}


class ResourceRule(NamedTuple):
    """One row of the table.

    Attributes:
        grant: the role that has it.
        group: the API group; empty for the core one.
        resource: as in Permission.
        verbs: what is done with it.
        used_by: what does not work, or says less, without it.
        vital: no job can be submitted without it.
        target: the kind of job that it is for; empty: all of them.
    """

    grant: Grant
    group: str
    resource: str
    verbs: tuple[str, ...]
    used_by: str
    vital: bool = False
    target: str = ""

    @property
    def name(self) -> str:
        """The resource as kubectl names it: "pods", "pytorchjobs.kubeflow.org"."""
        return f"{self.resource}.{self.group}" if self.group else self.resource

    @property
    def permissions(self) -> tuple[Permission, ...]:
        """A question for each verb."""
        wide = self.grant.cluster_wide
        return tuple(Permission(verb, self.resource, self.group, wide) for verb in self.verbs)


_READ: Final = ("get", "list", "watch")


def _rule(
    grant: Grant,
    kind: Target | Level | Companion,
    verbs: tuple[str, ...],
    used_by: str,
    target: Target,
    *,
    vital: bool = False,
) -> ResourceRule:
    """The rule for one kind of job's own objects."""
    of = "" if target is DEFAULT else f" (target {target.name})"
    group = kind.api_version.rpartition("/")[0]
    return ResourceRule(grant, group, kind.resource, verbs, used_by + of, vital, target.name)


def _submitting() -> Iterator[ResourceRule]:
    to = Grant.SUBMITTER
    for target in TARGETS:
        yield _rule(to, target, ("create",), "submit", target, vital=True)
        yield _rule(to, target, ("patch",), "suspend, resume", target)
        yield _rule(to, target, ("delete",), "delete, submit --replace", target)
        if beside := target.companion:
            verbs = ("create", "get", "patch", "delete")
            yield _rule(to, beside, verbs, "submit, delete", target, vital=True)
        if child := namesake(target):
            yield _rule(to, child, ("get",), "submit", target)


def _viewer_rules() -> Iterator[ResourceRule]:
    to = Grant.VIEWER
    for target in TARGETS:
        yield _rule(to, target, _READ, "every command about jobs", target, vital=True)
        for child in target.levels:
            yield _rule(to, child, _READ, "list, status, watch, why", target)
        if beside := target.companion:
            yield _rule(to, beside, ("get",), "status, why", target)


def _rows() -> Iterator[ResourceRule]:
    """The rows of permissions.tsv."""
    text = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8")
    for line in text.splitlines()[2:]:
        grant, group, resource, verbs, used_by = line.split("\t")
        yield ResourceRule(Grant(grant), group, resource, tuple(verbs.split()), used_by)


_ROWS: Final = tuple(_rows())
RULES: Final = (*_submitting(), _ROWS[0], *_viewer_rules(), *_ROWS[1:])
"""Everything, the most important first."""


def rules(grant: Grant) -> list[ResourceRule]:
    """The rows that a role has; a submitter's are a viewer's and more."""
    grants = {grant, Grant.VIEWER} if grant is Grant.SUBMITTER else {grant}
    return [rule for rule in RULES if rule.grant in grants]


def rules_of(target: Target) -> list[ResourceRule]:
    """The rows that matter for one kind of job."""
    return [rule for rule in RULES if rule.target in {"", target.name}]


def makes_companion(rule: ResourceRule, target: Target) -> bool:
    """Whether a row is about a kind's companions, which a job needs not that shares one."""
    companion = target.companion
    return companion is not None and rule.resource == companion.resource and rule.vital


def all_permissions(target: Target = DEFAULT) -> list[Permission]:
    """Every question about one kind of job, once."""
    return list(dict.fromkeys(right for rule in rules_of(target) for right in rule.permissions))


def role(grant: Grant, namespace: str = "") -> Json:
    """The Role or ClusterRole that grants the rows, as in manifests/rbac."""
    granted: dict[tuple[str, str], list[str]] = {}
    for rule in rules(grant):
        granted.setdefault((rule.group, rule.resource), []).extend(rule.verbs)
    return {
        **_header(grant, "", namespace),
        "rules": [
            {"apiGroups": [group], "resources": [resource], "verbs": list(dict.fromkeys(verbs))}
            for (group, resource), verbs in granted.items()
        ],
    }


def binding(grant: Grant, subjects: Iterable[Json], namespace: str = "") -> Json:
    """The RoleBinding for users, who are named as in RBAC: `{"kind": "User", "name": "eve"}`."""
    header = _header(grant, "Binding", namespace)
    name, kind = Object(header).name, header["kind"].removesuffix("Binding")
    return {
        **header,
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": name},
        "subjects": [
            subject if subject["kind"] == "ServiceAccount" else {"apiGroup": RBAC, **subject}
            for subject in subjects
        ],
    }


def _header(grant: Grant, suffix: str, namespace: str) -> Json:
    kind = "ClusterRole" if grant.cluster_wide else "Role"
    where = {"namespace": namespace} if namespace else {}
    metadata = {"name": f"k8sjob-{grant}", **where}
    return {"apiVersion": f"{RBAC}/v1", "kind": kind + suffix, "metadata": metadata}


def server(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether the apiserver answers, who it is, and how long it takes."""
    where = f"{facts.server} (context {facts.context})"
    error = facts.error("version")
    if error is not None:
        yield problem("server", f"{where}: {error.detail}", _login_step(error))
        return
    version = (facts.object("version") or {}).get("gitVersion", "of unknown version")
    message = f"Kubernetes {version} at {where}, answered in {facts.seconds * 1000:.0f} ms"
    yield fine("server", message)


def _login_step(error: ApiError) -> str:
    if error.reason == "Untrusted":
        return "correct the cluster's certificate-authority in the kubeconfig"
    if error.code == 401:
        return "log in again: the credentials have expired, were revoked or could not be obtained"
    if error.code:
        return "ask the cluster's administrator"
    return "check that the cluster and the network are up, or specify another one with --context"


def permissions(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether the user may do all that k8sjob does in the namespace, and what is missing."""
    if not facts.allowed:
        yield unknown(
            "permissions",
            "the apiserver does not report your permissions",
            "a command that is refused shows what is missing",
        )
        return
    lacking = _missing(facts)
    ours = [(rule, missing) for rule, missing in lacking if not rule.grant.cluster_wide]
    details = tuple(f"{missing}: for {rule.used_by}" for rule, missing in ours)
    who, where = facts.user or "you", facts.namespace
    if any(rule.vital for rule, _ in ours):
        message = f"{who} cannot submit and follow jobs in {where}"
        yield problem("permissions", message, "ask for the roles shown below", details=details)
    elif ours:
        message = f"{who} can submit and follow jobs in {where}, but lacks other permissions"
        yield warning("permissions", message, "ask for the roles shown below", details=details)
    else:
        yield fine("permissions", f"{who} can do all that k8sjob does in {where}")
    if wide := [(rule, missing) for rule, missing in lacking if rule.grant.cluster_wide]:
        files = sorted({f"manifests/rbac/{rule.grant}.yaml" for rule, _ in wide})
        yield unknown(
            "cluster-wide",
            f"{who} cannot {'; '.join(missing for _, missing in wide)}",
            f"no command depends on it; why and doctor show more with {' and '.join(files)}",
        )


def asked_for(facts: ClusterFacts) -> list[Json]:
    """The Role and RoleBinding that the user lacks; empty if nothing is missing."""
    if all(rule.grant.cluster_wide for rule, _ in _missing(facts)):
        return []
    subject, grant = _subject(facts.user), Grant.SUBMITTER
    return [role(grant, facts.namespace), binding(grant, [subject], facts.namespace)]


def _subject(user: str) -> Json:
    # An apiserver calls it system:serviceaccount:NAMESPACE:NAME.
    account = user.removeprefix("system:serviceaccount:").split(":")
    if user.startswith("system:serviceaccount:") and len(account) == 2:
        return {"kind": "ServiceAccount", "name": account[1], "namespace": account[0]}
    return {"kind": "User", "name": user or "YOUR-NAME"}


def _missing(facts: ClusterFacts) -> list[tuple[ResourceRule, str]]:
    """The rows of which the user lacks something, with that: "list, watch pods"."""
    lacking = []
    shares = facts.job is not None and facts.job.shares_companion
    for rule in rules_of(facts.target):
        verbs = [right.verb for right in rule.permissions if facts.allowed.get(right) is False]
        if verbs and not (shares and makes_companion(rule, facts.target)):
            lacking.append((rule, f"{', '.join(verbs)} {rule.name}"))
    return lacking
