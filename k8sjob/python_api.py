"""The public `k8sjob.run`, `plan` and `submit`: a job on this machine, and one in a cluster."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from k8sjob.backends.api import JobRef
from k8sjob.backends.cluster import connect
from k8sjob.backends.local import LocalBackend
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.html_card import card, draw_cards_with
from k8sjob.jobs.plan import load_spec, plan_run, plan_submission
from k8sjob.jobs.result import RunResult, deleted, read_reached, result
from k8sjob.jobs.run import run_plan
from k8sjob.jobs.submit import for_namespace, push_code, submit_plan
from k8sjob.observe.findings import findings
from k8sjob.observe.status import JobStatus, job_status
from k8sjob.view.cards import card_of
from k8sjob.view.follow import follow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path, PurePath

    from k8sjob.backends.api import Backend, Plan
    from k8sjob.backends.cluster.backend import ClusterBackend
    from k8sjob.contract import Event
    from k8sjob.findings import Finding
    from k8sjob.spec import JobSpec
    from k8sjob.targets.api import JobState

draw_cards_with(card_of)


def run(
    spec: JobSpec | str | Path,
    *,
    view: Callable[[Event], object] | None = None,
    logs: bool = True,
    fresh: bool = False,
    resume: str = "",
    check: bool = True,
    folder: str | Path | None = None,
    backend: LocalBackend | None = None,
) -> RunResult:
    """Run a job on this machine and follow it to its end.

    Ctrl-C (in a notebook: interrupt) stops the job: its ranks write a checkpoint and end; a second
    one kills them. When this process dies the job is stopped too.

        >>> result = run("manifests/digits-ddp/job.yaml")  # doctest: +SKIP
        >>> result.state  # doctest: +SKIP
        <JobState.SUCCEEDED: 'Succeeded'>
        >>> pandas.DataFrame(result.history).plot(x="time", y="loss")  # doctest: +SKIP

    Args:
        spec: a JobSpec, or the path of a job.yaml, of its folder, or of a script.
        view: called with each event, in this thread; None: a live screen in a terminal, a card
            in a notebook, plain lines elsewhere, a summary at the end.
        logs: follow the output; without it there are no progress, metrics and history.
        fresh: start from scratch, ignoring the checkpoints of earlier runs.
        resume: the id of the run whose checkpoints are resumed; empty: the last run of this name
            and folder, unless that succeeded.
        check: raise JobFailed unless the job succeeds.
        folder: what relative paths start from; None: the folder of the job.yaml, or this one.
        backend: this machine's, with another state folder for instance; `fresh` and `resume` are
            its own arguments then.

    Returns:
        How it ended: `state`, `metrics`, `history`, `checkpoint`, `logs`, `why`, and the status.

    Raises:
        SpecError: the spec is not valid.
        BackendError: the job cannot be started here; JobExists: one of its name is running.
        JobFailed: it failed, was stopped or deleted (unless `check` is off); `result` of the error
            is what would have been returned.
        KeyboardInterrupt: after the job was stopped by Ctrl-C.
        ValueError: arguments contradict each other.
    """
    if fresh and resume:
        raise ValueError("fresh ignores checkpoints and resume uses some; give only one")
    if backend and (fresh or resume):
        raise ValueError("fresh and resume belong to the backend: pass them to it, not to run()")
    backend = backend or LocalBackend(fresh=fresh, resume=resume)
    plan = plan_run(*load_spec(spec, folder, local=True))
    done = run_plan(plan, backend, partial(follow, output=view or "auto", logs=logs))
    if done.code > 128:
        again = "; another run resumes from its checkpoint" if backend.checkpoints(done.ref) else ""
        raise KeyboardInterrupt(f"{done.ref} was stopped{again}")
    return done.result(check=check)


class SubmittedJob(JobRef):
    """A job in a cluster: its reference, and what can be asked of it.

    Each attribute is read from the cluster when it is used; `result()` reads all of them once.
    Reading raises JobNotFound once the job is deleted, and BackendError where the cluster cannot
    be reached.
    """

    __slots__ = ("_backend",)
    _backend: Backend

    def __init__(self, ref: JobRef, backend: Backend) -> None:
        super().__init__(ref.name, ref.namespace, ref.uid, ref.kind)
        object.__setattr__(self, "_backend", backend)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, JobRef):
            return NotImplemented
        mine, theirs = ((ref.name, ref.namespace, ref.uid) for ref in (self, other))
        return mine == theirs

    __hash__ = JobRef.__hash__

    def status(self) -> JobStatus:
        """Its status now."""
        return job_status(self._backend.snapshot(self))

    def result(self, *, check: bool = False) -> RunResult:
        """The result so far: its status, and what it has reached.

        Args:
            check: raise JobFailed unless it has succeeded.
        """
        snapshot = self._backend.snapshot(self)
        return result(self._backend, snapshot, read_reached(self._backend, snapshot), check=check)

    def wait(
        self,
        *,
        view: Callable[[Event], object] | None = None,
        logs: bool = True,
        check: bool = True,
    ) -> RunResult:
        """Follow the job to its end.

        Args:
            view: called with each event; None: as `run` shows a job.
            logs: follow the replicas' output; without it there is no progress.
            check: raise JobFailed unless the job succeeds.

        Returns:
            How it ended, as `run` returns it.

        Raises:
            JobFailed: it failed, was suspended or deleted (unless `check` is off).
            BackendError: the cluster cannot be read any more.
            KeyboardInterrupt: by Ctrl-C; the job continues, and another `wait` follows it again.
        """
        try:
            code = follow(self._backend, self, output=view or "auto", logs=logs)
            if code > 128:
                raise KeyboardInterrupt(f"{self} continues; wait() follows it again")
            return self.result(check=check)
        except JobNotFound:
            raise deleted(self) from None

    def why(self) -> list[Finding]:
        """The causes of its state, the first one first; empty if nothing is wrong."""
        return findings(self._backend, self._backend.snapshot(self))

    def delete(self) -> None:
        """Delete it with its pods."""
        self._backend.delete(self)

    @property
    def state(self) -> JobState:
        """Its state now."""
        return self.status().state

    @property
    def metrics(self) -> Mapping[str, str | float]:
        """See RunResult."""
        return self.result().metrics

    @property
    def history(self) -> Sequence[dict[str, str | float]]:
        """See RunResult."""
        return self.result().history

    @property
    def checkpoint(self) -> PurePath | None:
        """See RunResult."""
        return self.result().checkpoint

    @property
    def logs(self) -> Mapping[str, str]:
        """See RunResult."""
        return self.result().logs

    def _repr_html_(self) -> str | None:
        """Its HTML for notebooks: its present status."""
        try:
            return self.status()._repr_html_()
        except BackendError as error:
            return card(str(self), {"kind": self.kind, "now": error})


def plan(
    spec: JobSpec | str | Path,
    *,
    image: str | None = None,
    namespace: str | None = None,
    folder: str | Path | None = None,
) -> Plan:
    """The plan of what `submit` would create in a cluster; nothing is sent, and nothing is built.

        >>> plan("job.yaml").manifest["kind"]  # doctest: +SKIP
        'PyTorchJob'

    Args:
        spec: a JobSpec, or the path of a job.yaml or of its folder.
        image: what the replicas run; None: as the spec names it.
        namespace: of the job; None: the spec's.
        folder: what relative paths start from; None: the folder of the job.yaml, or this one.

    Raises:
        SpecError: the spec is not valid.
    """
    spec, folder = load_spec(spec, folder)
    return plan_submission(spec, folder, image=image, namespace=namespace)


def submit(
    spec: JobSpec | str | Path,
    *,
    image: str | None = None,
    namespace: str | None = None,
    context: str | None = None,
    replace: bool = False,
    generate_name: bool = False,
    build: bool = False,
    dry_run: Literal["server"] | None = None,
    backend: ClusterBackend | None = None,
) -> SubmittedJob:
    """Create a job in a cluster, or attach to the same job if it exists and has not ended.

        >>> job = submit("job.yaml", image="registry/x@sha256:...")  # doctest: +SKIP
        >>> result = job.wait()  # doctest: +SKIP

    Args:
        spec: a JobSpec, or the path of a job.yaml or of its folder.
        image: what the replicas run, best with its digest; None: as the spec names it, and where
            it has a base, the job's code is added to that in the registry.
        namespace: of the job; None: the spec's, else the context's.
        context: of the kubeconfig; None: the current one.
        replace: delete an existing job of that name first.
        generate_name: add five random characters to the name.
        build: first build the image with what the job installs, unless it exists.
        dry_run: "server": ask the cluster whether it would accept the job, and create none.
        backend: a connected cluster, instead of `namespace` and `context`.

    Returns:
        The job, without waiting for it: `wait()` follows it to its end.

    Raises:
        SpecError: the spec is not valid.
        ImageError: the image needs more than the code, or a registry refuses.
        JobExists: another job, or the same one that has ended, has the name; see `replace` and
            `generate_name`.
        BackendError: the cluster refuses the job, or cannot be reached.
        ValueError: `dry_run` is something else, or arguments contradict each other.
    """
    if dry_run not in {None, "server"}:
        raise ValueError(f"dry_run={dry_run!r}: it can only be 'server'; plan() needs no cluster")
    if backend is not None:
        if namespace or context:
            raise ValueError("give either backend, or namespace and context")
        namespace = backend.namespace
    spec, folder = load_spec(spec)
    planned = plan_submission(
        spec, folder, image=image, namespace=namespace, generate_name=generate_name
    )
    cluster = backend or connect(context=context, namespace=planned.spec.namespace or namespace)
    planned = for_namespace(planned, cluster)
    dry = dry_run == "server"
    if spec.builds_image and image is None:
        planned, _ = push_code(spec, planned, cluster, dry_run=dry, build=_build if build else None)
    return SubmittedJob(submit_plan(planned, cluster, replace=replace, dry_run=dry).ref, cluster)


def _build(spec: JobSpec, folder: Path) -> object:
    from k8sjob.image import build  # noqa: PLC0415 - few need it

    return build.build(spec, folder)
