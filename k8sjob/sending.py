"""A planned job meets the cluster: made, attached to, or refused by what is there already.

A job is made by a single POST, so a client that dies leaves a whole job or none, and of two that
submit at once one sees the other. What becomes of a name that is taken is decided by the hash that
every rendered manifest carries: the same job that has not ended is attached to, all else is the
user's to decide.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from k8sjob import document
from k8sjob.backends.api import JobRef, Plan, Snapshot
from k8sjob.backends.cluster.belongings import seconds_to_end
from k8sjob.errors import BackendError, JobExists, JobNotFound
from k8sjob.labels import MANAGED_BY, same_manifest
from k8sjob.lifecycle.status import job_status
from k8sjob.rendering.difference import Difference, difference

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.api import Json
    from k8sjob.backends.cluster import ClusterBackend

__all__ = ["Outcome", "Submitted", "compare", "send"]

_ROUNDS: Final = 5
"""How often a job of the same name may come or go in the middle of a submission."""
_POLL_SECONDS: Final = 0.2


class Outcome(StrEnum):
    """What became of a submission."""

    CREATED = "created"
    ATTACHED = "attached"
    """The same job was there and has not ended; nothing was changed."""
    REPLACED = "replaced"
    """The one that was there is deleted. The new one may be somebody else's, if it is the same."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submission that is done.

    Attributes:
        ref: the job; without a uid after a dry run.
        outcome: what became of it, or would have.
    """

    ref: JobRef
    outcome: Outcome


def send(
    made: Plan,
    backend: ClusterBackend,
    *,
    replace: bool = False,
    dry_run: bool = False,
    tell: Callable[[str], object] = lambda _: None,
) -> Submitted:
    """Make the planned job; where its name is taken, decide by what is there.

    Args:
        made: see plan_submission.
        backend: the cluster, in the job's namespace.
        replace: a job that is there is deleted first, when the cluster has said that it would take
            the new one. One that somebody else makes meanwhile is never deleted.
        dry_run: say what would happen, and change nothing.
        tell: is called with what is waited for.

    Raises:
        JobExists: another job, or the same one that has ended, has the name.
        BackendError: the cluster refuses the job, or cannot be reached.
    """
    return _Sending(made, backend, tell, dry=dry_run).run(replace=replace)


def compare(made: Plan, backend: ClusterBackend) -> Difference:
    """What would be different if the planned job replaced the one of its name."""
    wanted = _manifest(made)
    there = _there(backend, made.spec.name)
    return difference(there, _as_it_would_be(backend, wanted))


class _Sending:
    """One submission, over the rounds that it takes while others come and go."""

    def __init__(
        self, made: Plan, backend: ClusterBackend, tell: Callable[[str], object], *, dry: bool
    ) -> None:
        self._made, self._backend, self._dry, self._tell = made, backend, dry, tell
        self._manifest = _manifest(made)

    def run(self, *, replace: bool) -> Submitted:
        outcome = Outcome.CREATED
        for _ in range(_ROUNDS):
            try:
                return Submitted(self._make(), outcome)
            except JobExists:
                there = _there(self._backend, self._made.spec.name)
            if there is None:
                continue
            if there["metadata"].get("deletionTimestamp"):
                if self._dry:
                    return self._would_wait(there)
                self._delete(there)  # it goes anyway: this only waits for it
            elif not replace:
                self._refuse_another(there)
                attached = Outcome.ATTACHED if outcome is Outcome.CREATED else outcome
                return Submitted(JobRef.of(there), attached)
            else:
                self._backend.dry_run(self._manifest, name_free=True)
                if self._dry:
                    return Submitted(JobRef.of(there), Outcome.REPLACED)
                # Only once: a job that comes in its place is somebody else's decision.
                replace = False
                if self._delete(there):
                    outcome = Outcome.REPLACED
        raise BackendError(
            f"jobs named {self._made.spec.name} come and go too fast in namespace"
            f" {self._backend.namespace}; see who else submits it, or take a generated name"
        )

    def _make(self) -> JobRef:
        if not self._dry:
            return self._backend.create(self._made)
        self._backend.dry_run(self._manifest)
        return JobRef(self._made.spec.name, self._backend.namespace)

    def _would_wait(self, there: Json) -> Submitted:
        """What a dry run says beside a job that is being deleted."""
        self._backend.dry_run(self._manifest, name_free=True)
        self._tell(f"{JobRef.of(there)} is being deleted, and would be waited for until it is gone")
        return Submitted(JobRef(self._made.spec.name, self._backend.namespace), Outcome.CREATED)

    def _refuse_another(self, there: Json) -> None:
        """Return if the job that is there is the one that is wanted, and has not ended."""
        ref, state = JobRef.of(there), job_status(Snapshot(there)).state
        same = same_manifest(there, self._manifest)
        if same and not state.finished:
            self._tell_changes(there)
            return
        found = difference(there, _as_it_would_be(self._backend, self._manifest))
        if not found and not state.finished:
            return
        what = "this job" if same or not found else "another job than this one"
        maker = "" if _is_ours(there) else ", not made by k8sjob"
        ended = f"ended ({state})" if state.finished else str(state)
        error = JobExists(
            f"{ref} is there already: {what}{maker}, {ended}; replace it, or submit under a"
            " generated name"
        )
        error.difference = found.lines
        raise error

    def _tell_changes(self, there: Json) -> None:
        """Say what somebody has changed in the job since it was made, if that can be found out."""
        with suppress(BackendError):
            found = difference(there, _as_it_would_be(self._backend, self._manifest))
            if changed := [*found.at_once, *found.anew]:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                told = f"was changed since it was made, in {changed[0]}{more}"
                self._tell(f"{JobRef.of(there)} {told}")

    def _delete(self, there: Json) -> bool:
        """Delete the job, and this one only, and wait until it and its pods are gone.

        Returns:
            Whether it was there to be deleted.
        """
        ref, seconds = JobRef.of(there), seconds_to_end(there)
        going = bool(there["metadata"].get("deletionTimestamp"))
        fate = "was being deleted already" if going else "may be deleted by now"
        deadline = time.monotonic() + seconds
        try:
            try:
                self._backend.delete(ref)
            except JobNotFound:
                return False
            fate = fate if going else "is being deleted"
            self._tell(f"waiting until {ref} and its pods are gone, {seconds:.0f} s at most")
            with suppress(JobNotFound):
                self._backend.wait_for_pods(ref, seconds)
                self._wait_until_gone(ref, deadline)
        except KeyboardInterrupt:
            self._tell(f"{ref} {fate}, and the new one is not made; submit it again")
            raise
        return True

    def _wait_until_gone(self, ref: JobRef, deadline: float) -> None:
        """A job without pods stays as long as it has finalizers."""
        while True:
            self._backend.snapshot(ref)  # JobNotFound once it is gone
            if time.monotonic() > deadline:
                raise BackendError(
                    f"{ref} is being deleted, but not gone; see its finalizers: kubectl get"
                    f" pytorchjob {ref.name} -n {ref.namespace} -o yaml"
                )
            time.sleep(_POLL_SECONDS)


def _manifest(made: Plan) -> Json:
    parsed: Json = document.parse(made.manifest).data
    return parsed


def _there(backend: ClusterBackend, name: str) -> Json | None:
    try:
        return backend.snapshot(JobRef(name, backend.namespace)).job
    except JobNotFound:
        return None


def _as_it_would_be(backend: ClusterBackend, manifest: Json) -> Json:
    """The job with the server's defaults, whether its name is taken or not."""
    made = backend.dry_run(manifest, name_free=True)
    identity = {"name": manifest["metadata"]["name"], "namespace": backend.namespace}
    return {**made, "metadata": {**made["metadata"], **identity}}


def _is_ours(job: Json) -> bool:
    return (job["metadata"].get("labels") or {}).get(MANAGED_BY) == "k8sjob"
