"""A job.yaml becomes a job in a cluster: planned, checked by the server, made by one request.

A job is made by a single POST, so a client that dies leaves a whole job or none, and of two that
submit at once one sees the other. What becomes of a name that is taken is decided by the hash that
every rendered manifest carries: the same job that has not ended is attached to, all else is the
user's to decide.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from k8sjob import document
from k8sjob.backends.api import JobRef, Plan, Snapshot
from k8sjob.backends.connect import connect
from k8sjob.backends.transport import ApiError
from k8sjob.errors import BackendError, JobExists, JobNotFound, Problem, SpecError
from k8sjob.lifecycle.status import job_ref, job_status
from k8sjob.rendering import DIGEST_ANNOTATION, MANAGED_BY, render
from k8sjob.rendering.difference import Difference, difference
from k8sjob.spec import JobSpec, load

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.api import Json
    from k8sjob.backends.cluster import ClusterBackend

__all__ = [
    "Outcome",
    "Submitted",
    "compare",
    "plan",
    "plan_submission",
    "remarks",
    "send",
    "submit",
]

LOCAL: Final = "local"
"""The namespace that stands for this machine."""
_ROUNDS: Final = 5
"""How often a job of the same name may come or go in the middle of a submission."""
_SUFFIX: Final = "bcdfghjklmnpqrstvwxz2456789"
"""What Kubernetes makes generated names of: letters and digits that form no words."""
_GRACE_SECONDS: Final = 30
"""terminationGracePeriodSeconds of a pod that names none (Kubernetes' default)."""
_SPARE_SECONDS: Final = 60.0
"""How long pods may take to go beyond their grace: a kubelet that was away for a moment."""


class Outcome(StrEnum):
    """What became of a submission."""

    CREATED = "created"
    ATTACHED = "attached"
    """The same job was there and has not ended; nothing was changed."""
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submission that is done.

    Attributes:
        ref: the job; without a uid after a dry run.
        outcome: what became of it, or would have.
    """

    ref: JobRef
    outcome: Outcome


def plan(spec: JobSpec, folder: str | Path = ".", *, image: str | None = None) -> Plan:
    """All that is about to happen, before anything does.

    Args:
        spec: the job.
        folder: what relative paths of the spec (context, volumes[].local) start from.
        image: what the replicas run, with its digest; None: as the spec names it.

    Raises:
        SpecError: the overlay does not fit the manifest.
    """
    reference = spec.image_reference if image is None else image
    return Plan(spec, render(spec, reference), reference, Path(folder).absolute())


def submit(
    spec: JobSpec | str | Path,
    *,
    image: str | None = None,
    namespace: str | None = None,
    context: str | None = None,
    replace: bool = False,
    generate_name: bool = False,
    dry_run: Literal["server"] | None = None,
    backend: ClusterBackend | None = None,
) -> JobRef:
    """Make a job in a cluster, or attach to the same one that is there and has not ended.

        >>> ref = submit("job.yaml", image="registry/x@sha256:...")  # doctest: +SKIP

    Args:
        spec: a JobSpec, or the path of a job.yaml or of the folder that it lies in.
        image: what the replicas run, best with its digest; None: as the spec names it.
        namespace: where to; None: the spec's, else the context's.
        context: of the kubeconfig; None: the current one.
        replace: delete a job of that name that is there and make it anew.
        generate_name: add five random characters to the name.
        dry_run: "server": ask the cluster whether it would take the job, and make none.
        backend: the cluster, where it is connected already; then `namespace` and `context` are its.

    Returns:
        The job.

    Raises:
        SpecError: the spec is not valid, or its image must be built first.
        JobExists: another job, or the same one that has ended, has the name.
        BackendError: the cluster refuses the job, or cannot be reached.
    """
    folder: Path | str = "."
    if not isinstance(spec, JobSpec):
        path = Path(spec)
        folder, spec = (path if path.is_dir() else path.parent), load(path)
    if backend is not None:
        namespace = backend.namespace
    made = plan_submission(
        spec, folder, image=image, namespace=namespace, generate_name=generate_name
    )
    cluster = backend or connect(context=context, namespace=made.spec.namespace or namespace)
    return send(made, cluster, replace=replace, dry_run=dry_run == "server").ref


def plan_submission(
    spec: JobSpec,
    folder: str | Path = ".",
    *,
    image: str | None = None,
    namespace: str | None = None,
    generate_name: bool = False,
) -> Plan:
    """What would be submitted; see submit.

    Raises:
        SpecError: the image must be built first, or two namespaces are asked for.
    """
    problems = []
    if namespace and spec.namespace and namespace != spec.namespace:
        message = f"the job is of {spec.namespace!r}, and {namespace!r} is asked for; name one only"
        problems.append(Problem("namespace", message))
    if LOCAL in (namespace, spec.namespace):
        message = f"{LOCAL!r} stands for this machine, where `k8sjob run` runs jobs; name another"
        problems.append(Problem("namespace", message))
    if spec.builds_image and image is None:
        problems.append(Problem("image", _must_be_built(spec)))
    if problems:
        raise SpecError(problems)
    if generate_name:
        suffix = "".join(secrets.choice(_SUFFIX) for _ in range(5))
        spec = spec.with_(name=f"{spec.name}-{suffix}")
    return plan(spec, folder, image=image)


def remarks(made: Plan) -> list[str]:
    """What may not be meant, though the cluster takes it."""
    said = list(made.spec.remarks)
    if "@sha256:" not in made.image:
        said.append(
            f"the image {made.image} has no digest, so a pod that is made later may run another one"
            " of that name; best name it as REPOSITORY@sha256:..."
        )
    return said


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
            if there["metadata"].get("deletionTimestamp") and not self._dry:
                self._delete(there)  # it goes anyway: this only waits for it
            elif not replace:
                self._refuse_another(there)
                return Submitted(job_ref(there), Outcome.ATTACHED)
            else:
                self._backend.dry_run(self._manifest, name_free=True)
                if self._dry:
                    return Submitted(job_ref(there), Outcome.REPLACED)
                # Only once: a job that comes in its place is somebody else's decision.
                replace, outcome = False, Outcome.REPLACED
                self._delete(there)
        raise BackendError(
            f"jobs named {self._made.spec.name} come and go too fast in namespace"
            f" {self._backend.namespace}; see who else submits it, or use --generate-name"
        )

    def _make(self) -> JobRef:
        if not self._dry:
            return self._backend.create(self._made)
        try:
            self._backend.dry_run(self._manifest)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                raise JobExists(str(error)) from error
            raise
        return JobRef(self._made.spec.name, self._backend.namespace)

    def _refuse_another(self, there: Json) -> None:
        """Return if the job that is there is the one that is wanted, and has not ended."""
        state = job_status(Snapshot(there)).state
        same = _digest(there) == _digest(self._manifest) is not None
        if same and not state.finished:
            return
        wanted = _as_it_would_be(self._backend, self._manifest)
        found = Difference() if same else difference(there, wanted)
        if not found and not state.finished:
            return
        what = "another job than this one" if found else "this job"
        maker = "" if _is_ours(there) else ", not made by k8sjob"
        ended = f"ended ({state})" if state.finished else str(state)
        error = JobExists(
            f"{job_ref(there)} is there already: {what}{maker}, {ended}; delete it and make it anew"
            " with --replace, or submit under a name of its own with --generate-name"
        )
        error.difference = found.lines
        raise error

    def _delete(self, there: Json) -> None:
        """Delete the job, and this one only, and wait until its pods are gone."""
        ref, seconds = job_ref(there), _grace(there) + _SPARE_SECONDS
        self._tell(f"waiting until {ref} and its pods are gone, {seconds:.0f} s at most")
        try:
            self._backend.delete_and_wait(ref, timeout=seconds)
        except JobNotFound:
            return
        except KeyboardInterrupt:
            self._tell(f"{ref} is being deleted and is not made anew; submit it again")
            raise


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


def _digest(job: Json) -> str | None:
    annotations = job["metadata"].get("annotations") or {}
    return annotations.get(DIGEST_ANNOTATION)


def _is_ours(job: Json) -> bool:
    return (job["metadata"].get("labels") or {}).get(MANAGED_BY) == "k8sjob"


def _grace(job: Json) -> float:
    """The longest time, in seconds, that a pod of the job has to end."""
    replicas = (job["spec"].get("pytorchReplicaSpecs") or {}).values()
    specs = [(replica.get("template") or {}).get("spec") or {} for replica in replicas]
    asked = [spec.get("terminationGracePeriodSeconds") for spec in specs]
    return float(max((_GRACE_SECONDS if s is None else s for s in asked), default=_GRACE_SECONDS))


def _must_be_built(spec: JobSpec) -> str:
    repository = spec.image_reference
    return (
        f"image.base says that {repository} is made of the job's own code, so it must be in the"
        " registry first, and be named by its digest: `k8sjob submit --image $(k8sjob push)` puts"
        " the code there; with requirements, apt or pip a builder makes it before, from what"
        " `k8sjob render -d build` writes"
    )
