"""Verdicts of checks, and the facts that the checks look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from k8sjob.findings import Finding, Severity
from k8sjob.kube.capacity import Amounts
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import Json
from k8sjob.targets.jobs import DEFAULT

if TYPE_CHECKING:
    from k8sjob.targets.api import Job, Target


class Permission(NamedTuple):
    """One question to the apiserver: may I do this?

    Attributes:
        verb: "create", "get", ...
        resource: as "pods", or "pods/log" with its subresource.
        group: the API group; empty for the core one.
        cluster_wide: in all namespaces, instead of the job's.
    """

    verb: str
    resource: str
    group: str = ""
    cluster_wide: bool = False

    def review(self, namespace: str) -> Json:
        """The SelfSubjectAccessReview that asks it."""
        resource, _, subresource = self.resource.partition("/")
        attributes = {"verb": self.verb, "group": self.group, "resource": resource}
        if subresource:
            attributes["subresource"] = subresource
        if not self.cluster_wide:
            attributes["namespace"] = namespace
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }


fine = partial(Finding, severity=Severity.OK)
unknown = partial(Finding, severity=Severity.UNKNOWN)
warning = partial(Finding, severity=Severity.WARNING)
problem = partial(Finding, severity=Severity.ERROR)
"""Findings about a topic, which is their id: as `server`, `webhook`, `devices`."""


def verdict(severity: Severity) -> str:
    """The word of the report: a problem is what no job can be submitted or run with."""
    return "problem" if severity is Severity.ERROR else str(severity)


Answer = Json | ApiError
"""An object, or why there is none."""
Usage = Mapping[str, Amounts]
"""The requests on each node, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """One look at a cluster.

    Attributes:
        context: the kubeconfig's context.
        namespace: where a job would go.
        user: who asks, as the apiserver knows them; empty if it does not tell.
        seconds: how long its first answer took.
        answers: by the question's name, see gather.py.
        allowed: what the user may do; without what could not be asked.
        usage: what Pods take of the nodes; None where not all of them may be read.
        target: the kind of the jobs that are to be submitted.
        job: the one that is to be submitted; None if none was given.
    """

    context: str = ""
    server: str = ""
    namespace: str = "default"
    user: str = ""
    seconds: float = 0.0
    answers: Mapping[str, Answer] = field(default_factory=dict)
    allowed: Mapping[Permission, bool] = field(default_factory=dict)
    usage: Usage | None = None
    target: Target = DEFAULT
    job: Job | None = None

    def object(self, question: str) -> Json | None:
        """The object; None if there is none, or it may not be read."""
        answer = self.answers.get(question)
        return None if isinstance(answer, ApiError) else answer

    def items(self, question: str) -> list[Json] | None:
        """The objects of a list; None if they may not be read."""
        answer = self.object(question)
        return None if answer is None else list(answer.get("items") or ())

    def error(self, question: str) -> ApiError | None:
        """Why there is no answer; None if there is one, or it was not asked."""
        answer = self.answers.get(question)
        return answer if isinstance(answer, ApiError) else None

    @property
    def kueue_manages(self) -> bool | None:
        """Whether Kueue manages jobs of the kind, by a dry run; None: that is not known."""
        if answer := self.object("queue dry run"):
            return self.target.job(answer).suspended
        error, companion = self.error("queue dry run"), self.target.companion
        if error is None or not self.target.kueue_patch:
            return None
        # Kueue's webhook adds a patch to a TrainJob, beside the one that is sent, and an apiserver
        # refuses two patches of one manager before it asks the other webhooks.
        if "Duplicate value" in error.detail:
            return True
        return False if companion and companion.is_missed(error.detail) else None

    def missing(self, question: str) -> bool:
        """Whether the apiserver reports that it does not exist."""
        error = self.error(question)
        return error is not None and error.code == 404
