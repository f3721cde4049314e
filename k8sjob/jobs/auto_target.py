"""The kind of job that `--target auto` chooses: the first that the cluster supports for the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k8sjob.errors import BackendError, JobNotFound, SpecError
from k8sjob.jobs.existing_companion import offer
from k8sjob.kube.client.transport import ApiError
from k8sjob.rendering.manifest import manifest
from k8sjob.targets.jobs import PREFERRED, namesake, of_kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.backends.cluster.backend import ClusterBackend
    from k8sjob.spec import JobSpec
    from k8sjob.targets.api import Target


def choose_target(spec: JobSpec, backend: ClusterBackend) -> tuple[JobSpec, str]:
    """The spec with the first target that the cluster can take it as, and why that is.

    A job of that name stays of the kind that it is.

    Raises:
        BackendError: none fits, with the reason for each; or the cluster cannot be reached.
    """
    # Else a second submission of the same job could become a second job of another kind.
    if kind := _kind_of_that_name(spec, backend):
        return spec.with_(target=of_kind(kind).name), f"{spec.name} exists, and it is a {kind}"
    skipped = list[str]()
    for target in PREFERRED:
        candidate = spec.with_(target=target.name)
        against = next(_obstacles(candidate, target, backend), "")
        if not against:
            return candidate, "; ".join(skipped) or "the first in the order, and it fits"
        skipped.append(f"not {target.name}: {against}")
    raise BackendError(f"no target fits {spec.name}: {'; '.join(skipped)}; see k8sjob doctor")


def _kind_of_that_name(spec: JobSpec, backend: ClusterBackend) -> str:
    """The kind of the job of that name; empty if there is none that may be read."""
    try:
        return backend.find(spec.name).kind
    except JobNotFound:
        return ""
    except ApiError as error:
        if error.code in {403, 404}:  # the first kind is not served
            return ""
        raise


def _obstacles(spec: JobSpec, target: Target, backend: ClusterBackend) -> Iterator[str]:
    """Why a job cannot be of this kind."""
    from k8sjob.checks.doctor.gather import gather_needs, review  # noqa: PLC0415 - few ask for it
    from k8sjob.checks.doctor.permissions import (  # noqa: PLC0415 - the same
        RULES,
        makes_companion,
    )

    try:
        # Some fields of a spec have no place in some kinds (overlays, roles), which shows when it
        # is rendered.
        job = manifest(spec)
    except SpecError as error:
        fields = ", ".join(dict.fromkeys(problem.field for problem in error.findings))
        yield f"a {target.kind} cannot have {fields}"
        return
    child = namesake(target)
    # A TrainJob needs JobSets to be served, too.
    below = [(child.resource, child.api_version)] if child else []
    for resource, api in ((target.resource, target.api_version), *below):
        if not _is_served(resource, api, backend):
            yield f"the cluster does not serve {resource} of {api}"
            return
    for rule in RULES:
        of_companion = makes_companion(rule, target)
        if of_companion and job.shares_companion:
            continue
        if rule.target == target.name and "create" in rule.verbs:
            create = next(access for access in rule.permissions if access.verb == "create")
            # None: the cluster does not tell, so the submission itself will.
            if review(backend.transport, create, backend.namespace) is False:
                why = f"you cannot create {rule.name} in namespace {backend.namespace}"
                offered = offer(job, backend) if of_companion else ""
                yield f"{why} ({offered})" if offered else why
    if spec.kueue_queue is not None:
        facts = gather_needs(backend.transport, backend.namespace, job, backend.own_namespace)
        if facts.kueue_manages is False:
            yield f"Kueue does not manage {target.kind}s, and kueue_queue is {spec.kueue_queue}"


def _is_served(resource: str, api_version: str, backend: ClusterBackend) -> bool:
    try:
        listing = backend.transport.request("GET", f"/apis/{api_version}")
    except ApiError as error:
        if error.code == 404:
            return False
        raise
    return resource in [served.get("name") for served in listing.get("resources") or ()]
