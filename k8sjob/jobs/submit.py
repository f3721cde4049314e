"""A job's submission to a cluster: its code pushed, then the job created, attached to or refused.

A job is created by a single POST, so a client that dies leaves a whole job or none, and of two that
submit at once one sees the other's job. Where the name is taken, the hash that every rendered
manifest carries decides: the same job is attached to while it has not ended; anything else is left
to the user.
"""

from __future__ import annotations

import time
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.backends.api import JobRef, Plan, Snapshot
from k8sjob.errors import BackendError, JobExists, JobNotFound
from k8sjob.jobs.existing_companion import check_companion, offering
from k8sjob.jobs.plan import plan_job
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import MANIFEST_DIGEST, is_ours, same_manifest
from k8sjob.kube.openshift import AllowedIds
from k8sjob.observe.status import job_status
from k8sjob.rendering.diff import ManifestDiff, difference
from k8sjob.rendering.dockerfile import check_script
from k8sjob.targets.jobs import has_ended, seconds_to_end

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from k8sjob.backends.cluster.backend import ClusterBackend
    from k8sjob.image.push import Pushed
    from k8sjob.spec import JobSpec
    from k8sjob.targets.api import Job

_ROUNDS: Final = 5
"""How often a job of the same name may appear or disappear during a submission."""
_POLL_SECONDS: Final = 0.2


class Outcome(StrEnum):
    """The outcome of a submission."""

    CREATED = "created"
    ATTACHED = "attached"
    """The same job exists and has not ended; nothing was changed."""
    REPLACED = "replaced"
    """The existing job is deleted. The new one may be another client's, if it is the same."""


class Submitted(NamedTuple):
    """A finished submission.

    Attributes:
        ref: the job; without a uid after a dry run.
        outcome: what was done, or would have been.
    """

    ref: JobRef
    outcome: Outcome


def for_namespace(plan: Plan, backend: ClusterBackend) -> Plan:
    """The plan as its namespace requires it, where the job says nothing of its security.

    A companion that the job shares must be there and fit to it, as far as it may be read.
    In OpenShift each namespace chooses the user and the group of its Pods, and refuses the ids
    that a job has by default. A namespace that cannot be read changes nothing.

    Raises:
        SpecError: the job has fields that no such namespace allows, or no such companion.
        BackendError: the cluster cannot be reached, or fails to answer.
    """
    check_companion(plan.job, backend)
    if plan.spec.security is not None:
        return plan
    namespace = backend.own_namespace()
    # After a failure that may pass, the job would have ids that the namespace refuses.
    if isinstance(namespace, ApiError) and namespace.code not in {403, 404}:
        raise namespace
    if isinstance(namespace, ApiError) or not AllowedIds.of(namespace):
        return plan
    return plan_job(plan.spec.with_(security="openshift"), plan.folder, image=plan.image)


def push_code(
    spec: JobSpec,
    plan: Plan,
    backend: ClusterBackend,
    *,
    dry_run: bool = False,
    build: Callable[[JobSpec, Path], object] | None = None,
    **options: Any,
) -> tuple[Plan, Pushed]:
    """Push the job's code to the registry; the plan with that image, and what was pushed.

    Nothing is pushed before a dry run has shown that the cluster would accept the job.

    Args:
        spec: the job, under the name in its file: a plan's name may be generated.
        plan: see plan_submission.
        backend: the cluster.
        dry_run: push nothing; the digest is known all the same.
        build: builds the image that the code is added to, before the code is packed.
        options: see k8sjob.image.push.push.

    Raises:
        SpecError: the script is not in the context.
        BackendError: the cluster refuses the job or cannot be reached, or no node runs the image.
        ImageError: the image needs more than the code, or a registry refuses.
    """
    from k8sjob.image.push import push  # noqa: PLC0415 - a tenth of a second that few need

    # The cheapest checks first: a build takes minutes, a push seconds.
    check_script(spec, plan.folder)
    with offering(plan.job, backend):
        backend.dry_run(plan.job, name_free=True)
    if build is not None and not dry_run:
        build(spec, plan.folder)
    pushed = push(spec, plan.folder, dry_run=dry_run, **options)
    _check_architecture(spec, pushed.platform, backend)
    with_image = plan_job(plan.spec, plan.folder, image=pushed.reference, provenance=pushed.origin)
    return with_image, pushed


def _check_architecture(spec: JobSpec, platform: str, backend: ClusterBackend) -> None:
    """Refuse an image that no node can run: its pods would end with "exec format error".

    With image.platform set, pods wait for nodes of that kind, which an autoscaler may add.
    """
    if not isinstance(spec.image, str) and spec.image.platform:
        return
    device = spec.resources.gpu_resource if spec.resources.gpus else ""
    nodes = backend.architectures(spec.node_selector, device)
    if nodes and platform.split("/")[1] not in nodes:
        raise BackendError(
            f"image.base: it is for {platform}, and the nodes of the job are for"
            f" {', '.join(sorted(nodes))}; set image.platform to linux/{min(nodes)} and a base for"
            " that, or select other nodes by node_selector"
        )


def submit_plan(
    plan: Plan,
    backend: ClusterBackend,
    *,
    replace: bool = False,
    dry_run: bool = False,
    report: Callable[[str], object] = lambda _: None,
) -> Submitted:
    """Create the planned job; where its name is taken, decide by the job that has it.

    Args:
        plan: see plan_submission.
        backend: the cluster, in the job's namespace.
        replace: delete an existing job first, once a dry run accepts the new one. A job that
            another client creates meanwhile is never deleted.
        dry_run: find out what would happen, and change nothing.
        report: called with a line about each wait.

    Raises:
        JobExists: another job, or the same one that has ended, has the name.
        BackendError: the cluster refuses the job, or cannot be reached.
    """
    with offering(plan.job, backend):
        return _Submission(plan, backend, report, dry_run=dry_run).run(replace=replace)


def compare(plan: Plan, backend: ClusterBackend) -> ManifestDiff:
    """The differences if the planned job replaced the existing one of its name."""
    existing = _existing(backend, plan.job) or backend.of_another_kind(plan.job)
    with offering(plan.job, backend):
        planned = _with_defaults(backend, plan.job)
    if existing is not None and MANIFEST_DIGEST not in existing.annotations:
        from k8sjob.adopt.equivalence import aligned, normal_pair  # noqa: PLC0415 - of few jobs

        # Written by others: an apiserver fills no defaults into the pods of a custom resource, and
        # keeps a quantity as it was written.
        old, new = normal_pair(existing.own.document, planned.document)
        existing, planned = existing.with_document(aligned(old, new)), planned.with_document(new)
    return difference(existing, planned)


class _Submission:
    """One submission, over the rounds that it takes while other clients create or delete jobs."""

    def __init__(
        self, plan: Plan, backend: ClusterBackend, report: Callable[[str], object], *, dry_run: bool
    ) -> None:
        self._plan, self._backend, self._dry_run, self._report = plan, backend, dry_run, report
        self._planned = JobRef(plan.spec.name, backend.namespace)

    def run(self, *, replace: bool) -> Submitted:
        self._backend.look_ahead(self._plan.job)
        # No server refuses the same name of another kind, so it is looked for before the first
        # round.
        outcome = self._of_another_kind(replace=replace)
        for _ in range(_ROUNDS):
            try:
                return Submitted(self._create(), outcome)
            except JobExists:
                existing = _existing(self._backend, self._plan.job)
                if existing is None and self._backend.of_another_kind(self._plan.job):
                    raise
            # It has gone since: the next round creates the job.
            if existing is None:
                continue
            ref = JobRef.of(existing)
            _refuse_others(existing)
            if existing.deleting:
                if self._dry_run:
                    self._backend.dry_run(self._plan.job, name_free=True)
                    self._report(f"{ref} is being deleted; submit would wait until it is gone")
                    return Submitted(self._planned, Outcome.CREATED)
                self._delete(existing)  # it is going anyway: this only waits for it
            elif not replace:
                self._refuse_another(existing)
                attached = Outcome.ATTACHED if outcome is Outcome.CREATED else outcome
                return Submitted(ref, attached)
            else:
                self._backend.dry_run(self._plan.job, name_free=True)
                if self._dry_run:
                    return Submitted(ref, Outcome.REPLACED)
                # Only once: a job that takes its place is somebody else's decision.
                replace = False
                if self._delete(existing):
                    outcome = Outcome.REPLACED
        raise BackendError(
            f"jobs named {self._planned.name} appear and disappear too fast in namespace"
            f" {self._planned.namespace}; another client seems to submit them; use a generated name"
        )

    def _of_another_kind(self, *, replace: bool) -> Outcome:
        """Refuse the name of a job of another kind, or delete that job."""
        existing = self._backend.of_another_kind(self._plan.job)
        if existing is None:
            return Outcome.CREATED
        ref = JobRef.of(existing)
        _refuse_others(existing)
        if not replace:
            raise JobExists(
                f"{ref} already exists, and it is a {ref.kind}; replace it, or submit under a"
                " generated name"
            )
        self._backend.dry_run(self._plan.job, name_free=True)
        if not self._dry_run:
            self._delete(existing)
            self._backend.wait_for_leftovers(ref)
        return Outcome.REPLACED

    def _create(self) -> JobRef:
        if not self._dry_run:
            return self._backend.create(self._plan)
        self._backend.first_dry_run(self._plan.job)
        return self._planned

    def _refuse_another(self, existing: Job) -> None:
        """Return if the existing job is the planned one and has not ended.

        Where somebody has changed it since it was created, that is reported.
        """
        ref, state = JobRef.of(existing), job_status(Snapshot(existing)).state
        if same_manifest(existing.raw, self._plan.job.raw) and not state.finished:
            with suppress(BackendError):  # it is attached to, whether it can be compared or not
                changes = self._compare(existing)
                if changed := [*changes.at_once, *changes.recreated]:
                    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                    self._report(f"{ref} has changed since it was created, in {changed[0]}{more}")
            return
        changes = self._compare(existing)
        # A job without the hash, as others write it, may still differ in nothing.
        same = not changes or same_manifest(existing.raw, self._plan.job.raw)
        if same and not state.finished:
            return
        which = "this job" if same else "a different job"
        creator = "" if is_ours(existing.raw) else ", not created by k8sjob"
        ended = f"ended ({state})" if state.finished else str(state)
        error = JobExists(
            f"{ref} already exists: {which}{creator}, {ended}; replace it, or submit under a"
            " generated name"
        )
        error.difference = changes.lines
        raise error

    def _compare(self, existing: Job) -> ManifestDiff:
        return difference(existing, _with_defaults(self._backend, self._plan.job))

    def _delete(self, existing: Job) -> bool:
        """Delete this very job and wait until its pods are gone; returns whether it existed."""
        ref, seconds = JobRef.of(existing), seconds_to_end(existing)
        deleting = existing.deleting
        state = "was already being deleted" if deleting else "may be deleted by now"
        # It loads all of `why`, for the few that replace a job.
        from k8sjob.observe.findings import keep_record_of  # noqa: PLC0415 - see above

        # Its output is gone with its Pods; `why` and `logs` read the record.
        if has_ended(existing) and not deleting and (why_not := keep_record_of(self._backend, ref)):
            self._report(why_not)
        deadline = time.monotonic() + seconds
        try:
            try:
                self._backend.delete(ref)
            except JobNotFound:
                return False
            state = state if deleting else "is being deleted"
            self._report(f"waiting until {ref} and its pods are gone, at most {seconds:.0f} s")
            with suppress(JobNotFound):
                # Old Pods hold the names and the GPUs that the new ones need, and the operator
                # would report FailedCreatePod.
                self._backend.wait_for_pods(ref, seconds)
                self._wait_until_gone(ref, deadline)
        except KeyboardInterrupt:
            self._report(f"{ref} {state}, and the new one was not created; submit it again")
            raise
        return True

    def _wait_until_gone(self, ref: JobRef, deadline: float) -> None:
        """A job without pods stays as long as it has finalizers."""
        while True:
            self._backend.snapshot(ref)  # JobNotFound once it is gone
            if time.monotonic() > deadline:
                raise BackendError(
                    f"{ref} is being deleted, but not gone; see its finalizers: kubectl get"
                    f" {ref.kind.lower()} {ref.name} -n {ref.namespace} -o yaml"
                )
            time.sleep(_POLL_SECONDS)


def _refuse_others(existing: Job) -> None:
    """Refuse the name of an object that may be anything but a training job."""
    if existing.target.shared_kind and not is_ours(existing.raw):
        ref = JobRef.of(existing)
        error = JobExists(
            f"{ref} already exists, and it is a {ref.kind} that k8sjob has not created;"
            " choose another name, or submit under a generated name"
        )
        error.replaceable = False
        raise error


def _existing(backend: ClusterBackend, job: Job) -> Job | None:
    """The job of that kind and name, whoever created it."""
    with suppress(JobNotFound):
        return backend.snapshot(JobRef(job.name, backend.namespace, kind=job.target.kind)).job
    return None


def _with_defaults(backend: ClusterBackend, job: Job) -> Job:
    """The job with the server's defaults, whether its name is taken or not."""
    stored = backend.dry_run(job, name_free=True)
    identity = {"name": job.name, "namespace": backend.namespace}
    metadata = {**stored.metadata, **identity}
    return stored.with_document({**stored.document, "metadata": metadata})
