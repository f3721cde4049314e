"""Jobs in a cluster: objects that a controller there works on."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, Unpack
from weakref import WeakValueDictionary

from k8sjob.backends.api import JobRef, Snapshot
from k8sjob.backends.cluster.creation import Creation, delete_as_read
from k8sjob.backends.cluster.informer import refuse_excess, snapshot, snapshots, with_groups
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.kube.api_resources import ResourcePath, path
from k8sjob.kube.client.answers import CheckedAnswers
from k8sjob.kube.client.errors import ExplainedErrors, is_absent
from k8sjob.kube.client.listwatch import list_all, merged, reflect
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import Object, Pod, is_ours, without_managed_fields
from k8sjob.targets.jobs import (
    DEFAULT,
    TARGETS,
    has_ended,
    job_path,
    keyed,
    namesake,
    of_kind,
    own_pods,
    perhaps_owned,
    seconds_to_end,
    with_child,
)
from k8sjob.targets.object_types import typed_object
from k8sjob.threads import Ahead, start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from threading import Event

    from k8sjob.backends.api import LogLine, LogOptions
    from k8sjob.backends.cluster.instances import JobPods
    from k8sjob.backends.cluster.workloads import Workloads
    from k8sjob.kube.client.listwatch import CollectionChange
    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json, Trim
    from k8sjob.targets.api import Job, Target

    ObjectsByPair = dict[tuple[str, str], list[Json]]

_ARCH: Final = "kubernetes.io/arch"
"""The label of every node that names its kind of processor."""
_MOST_SELECTED: Final = 50
"""Jobs whose names a selector has, so that its URL stays within 4 KiB."""
_NOT_SERVED: Final = frozenset({403, 404})
"""Codes of a kind of job that the cluster does not have, or the user may not read."""


class ClusterBackend(Creation):
    """The jobs of one cluster, as one user.

    Attributes:
        transport: carries the requests; its errors are explained.
        context: the kubeconfig's context.
        namespace: of jobs that name none.
    """

    recorded = False

    def __init__(self, transport: Transport) -> None:
        controllers = {ResourcePath.of(job_path(t)).plural: t.controller for t in TARGETS}
        self._unexplained = CheckedAnswers(transport, typed_object)
        self.transport = ExplainedErrors(self._unexplained, controllers)
        self.context, self.namespace = transport.context, transport.namespace
        self._own_namespace: Json | ApiError | None = None
        self._ahead = Ahead()
        self._pods: WeakValueDictionary[str, JobPods] = WeakValueDictionary()
        """The instances by the job's uid, while its output is read."""

    @cached_property
    def workloads(self) -> Workloads:
        """What reads whatever else runs Pods."""
        from k8sjob.backends.cluster.workloads import Workloads  # noqa: PLC0415 - jobs need none

        return Workloads(self.transport)

    # --- reading ----------------------------------------------------------------------------------

    def find(self, name: str, namespace: str | None = None) -> JobRef:
        """The job of that name, in the back end's namespace or another; JobNotFound without one.

        KIND/NAME is any object that runs Pods, or the job that it is part of.
        """
        namespace = namespace or self.namespace
        if "/" in name:
            return JobRef.of(self.workloads.find(name, namespace))
        job = self._get(JobRef(name, namespace))
        return replace(JobRef.of(job), job=job)

    def look_ahead(self, job: Job) -> None:
        """Begin to ask what is asked before a job is created, which follows at once."""
        # By its identity: the entry keeps the job alive, so no other one can have that.
        self._ahead.begin(("name", id(job)), partial(self._of_another_kind, job))
        self._ahead.begin(("dry run", id(job)), partial(self.dry_run, job))

    def look_at_namespace_ahead(self) -> None:
        """Begin to read the back end's namespace; see own_namespace."""
        self._ahead.begin("namespace", self._namespace)

    def of_another_kind(self, job: Job) -> Job | None:
        """A job of another kind that has the name of this one; None as far as can be read."""
        return self._ahead.result(("name", id(job)), partial(self._of_another_kind, job))

    def _of_another_kind(self, job: Job) -> Job | None:
        ref = self.ref_of(job)
        kinds = [target.kind for target in TARGETS if target is not job.target]
        answers = [start(partial(self._get, replace(ref, kind=kind))) for kind in kinds]
        for answer in answers:
            # The kind may not be served, or the user may not read it: then no job of it is known.
            with suppress(JobNotFound, ApiError):
                existing = answer.result()
                if is_ours(existing.raw) or existing.is_training:
                    return existing
        return None

    def jobs(
        self,
        *,
        all_namespaces: bool = False,
        selector: str = "",
        pods: bool = False,
        trim: Trim = without_managed_fields,
    ) -> list[Snapshot]:
        """The jobs without their events, the newest first.

        Args:
            all_namespaces: those of all namespaces, not of the back end's.
            selector: a label selector, as kubectl takes it.
            pods: with their pods, where a job has not ended yet and pods may be read.
            trim: makes of a job's object what is kept of it.
        """
        where = "" if all_namespaces else self.namespace
        jobs, lists = self._jobs(where, selector, trim)
        jobs.sort(key=lambda job: job.created, reverse=True)
        below = self._below(where, jobs, lists)
        pods_by_job: dict[tuple[str, str, str], list[Json]] = {}
        # A list of Pods is the largest answer of all, and of no use for jobs that have ended.
        if pods and (live := [job for job in jobs if not has_ended(job)]):
            pods_by_job = self._pods_by_job(where, live)
        snapshots = []
        for job in jobs:
            pods_of_job = pods_by_job.get((job.target.pods.job_label, job.namespace, job.name), ())
            # Objects made by controllers have the job's name, with a fixed suffix: a look-up costs
            # no request.
            names = {f"{job.name}{child.suffix}" for child in job.target.levels}
            children = [child for name in names for child in below.get((job.namespace, name), ())]
            pods_now = own_pods(job, pods_of_job, children)
            snapshot = Snapshot(with_child(job, children), pods_now, skew=self.transport.skew)
            snapshots.append(snapshot)
        return with_groups(self.transport, where, snapshots) if pods else snapshots

    def _jobs(self, namespace: str, selector: str, trim: Trim) -> tuple[list[Job], ObjectsByPair]:
        """The jobs of all kinds that can be read, and the lists of these, by path and selector.

        Raises:
            ApiError: none of them can be read.
        """
        jobs: list[Job] = []
        lists: ObjectsByPair = {}
        errors: dict[str, ApiError] = {}
        # Most clusters lack a kind or two, and nobody reads why: an explanation takes 10 ms.
        ask = partial(list_all, self._unexplained, query=_query(selector), trim=trim)
        places = [job_path(target, namespace) for target in TARGETS]
        answers = [start(partial(ask, where)) for where in places]
        for target, where, answer in zip(TARGETS, places, answers, strict=True):
            try:
                listed = answer.result().items
                lists[where, selector] = listed
                jobs += (job for job in map(target.job, listed) if job.is_training)
            except ApiError as error:
                # One kind alone may be refused or not served: roles of a team often have only the
                # kind that it uses.
                if error.code not in _NOT_SERVED:
                    raise self.transport.explained(error, "GET", where) from error
                errors[target.name] = error
        refused = errors.get(DEFAULT.name)
        # In a stock Kubeflow its users have the rights of one kind alone, and perhaps no job yet.
        if refused and len(errors) == len(TARGETS):
            raise self.transport.explained(refused, "GET", job_path(DEFAULT, namespace))
        return jobs, lists

    def _below(self, namespace: str, jobs: list[Job], lists: ObjectsByPair) -> ObjectsByPair:
        """The objects made by controllers for these jobs, by namespace and name (Target.levels)."""
        objects: ObjectsByPair = {}
        targets = {job.target for job in jobs}
        pairs = {(child, target.pods.job_label) for target in targets for child in target.levels}
        for child, label in pairs:
            with suppress(ApiError):  # a list without them says less
                at = child.path(namespace), label if child.suffix else ""
                # The JobSets of TrainJobs are among those that are jobs by themselves.
                if at not in lists:
                    lists[at] = list_all(self.transport, at[0], _query(at[1])).items
                for raw in lists[at]:
                    objects.setdefault((Object(raw).namespace, Object(raw).name), []).append(raw)
        return objects

    def _pods_by_job(
        self, namespace: str, jobs: list[Job]
    ) -> dict[tuple[str, str, str], list[Json]]:
        """The readable pods of jobs by the label of their kind, and their job's namespace, name."""
        by_job: dict[tuple[str, str, str], list[Json]] = {}
        for label in {job.target.pods.job_label for job in jobs}:
            names = sorted({job.name for job in jobs if job.target.pods.job_label == label})
            few = len(names) <= _MOST_SELECTED
            query = {"labelSelector": f"{label} in ({','.join(names)})" if few else label}
            try:
                pods = list_all(self.transport, path("pods", namespace), query)
            except ApiError as error:
                if error.code != 403:
                    raise
                return by_job
            for pod in map(Object, pods.items):
                at = label, pod.namespace, pod.labels.get(label, "")
                by_job.setdefault(at, []).append(pod.raw)
        return by_job

    def own_namespace(self, timeout: float = 30.0) -> Json | ApiError:
        """The object of the back end's namespace, or why it cannot be read; asked for once."""
        if self._own_namespace is None:
            try:
                ask = partial(self._namespace, timeout)
                self._own_namespace = self._ahead.result("namespace", ask)
            except ApiError as error:
                if error.code not in _NOT_SERVED:  # it may pass, so the next call asks again
                    return error
                self._own_namespace = error
        return self._own_namespace

    def _namespace(self, timeout: float = 30.0) -> Json:
        where = path("namespaces", name=self.namespace)
        return self.transport.request("GET", where, timeout=timeout)

    def look_for_namespace(self) -> None:
        """Raise BackendError where the back end's namespace does not exist.

        Without it a list of jobs is merely empty. Nothing is raised where it may not be read.
        """
        namespace = self.own_namespace()
        if isinstance(namespace, ApiError) and is_absent(namespace):
            raise namespace

    def namespaces(self) -> set[str]:
        """The names of all namespaces.

        Raises:
            ApiError: they may not be listed.
        """
        return {Object(raw).name for raw in list_all(self.transport, path("namespaces")).items}

    def architectures(self, node_selector: Mapping[str, str], device: str = "") -> set[str]:
        """The processor architectures, as "amd64", of the nodes with these labels.

        Empty if there are none, or nodes may not be read.

        Args:
            node_selector: the labels.
            device: a resource that the nodes offer, as "nvidia.com/gpu"; empty for any node.
        """
        query = {"labelSelector": ",".join(f"{k}={v}" for k, v in node_selector.items())}
        try:
            nodes = list_all(self.transport, path("nodes"), query if node_selector else None).items
        # Nodes are of no namespace, so most users may not list them.
        except ApiError:
            return set()
        architectures = {
            node.labels.get(_ARCH, "")
            for node in map(Object, nodes)
            if not device or device in node.part("status", "allocatable")
        }
        # A node without the label may have any processor.
        return set() if "" in architectures else architectures

    def snapshot(self, ref: JobRef) -> Snapshot:
        """The job now, with its pods and all of their events; JobNotFound, or JobTooLarge."""
        if "/" in ref.name:
            return self.workloads.snapshot(ref)
        return self.snapshot_of(self._get(ref))

    def snapshot_of(self, job: Job) -> Snapshot:
        """A job as it was read, with the pods and events that are there now; it may be gone."""
        refuse_excess(job)
        read_at = snapshot(self.transport, job)
        if keyed(job.target) and (where := job.companion_path(job.namespace)):
            with suppress(ApiError):  # what is not there, or may not be read, is left out
                beside = without_managed_fields(self.transport.request("GET", where))
                read_at = read_at._replace(job=replace(read_at.job, companion=beside))
            refuse_excess(read_at.job)
        return read_at

    def watch(self, ref: JobRef, *, stop: Event | None = None) -> Iterator[Snapshot]:
        """The job now, and again after each change, ten times a second at most; see Backend.watch.

        Of the pods' events only warnings are followed. The loss of the connection and its return
        are warnings of the job, with the reasons ConnectionLost and ConnectionRestored.
        """
        if "/" in ref.name:
            yield from self.workloads.watch(ref, stop)
        else:
            whole_ref = ref if ref.uid and ref.kind else JobRef.of(self._get(ref))
            yield from snapshots(self.transport, whole_ref, stop)

    def watch_jobs(
        self, *, stop: Event, all_namespaces: bool = False, selector: str = ""
    ) -> Iterator[CollectionChange]:
        """All jobs and each change of them, until `stop` is set; see `jobs` and reflect."""
        where = "" if all_namespaces else self.namespace
        query = _query(selector)

        def changes(target: Target) -> Iterator[CollectionChange]:
            def keep(raw: Json) -> bool:
                return target.job(raw).is_training

            return reflect(self.transport, job_path(target, where), query, stop=stop, keep=keep)

        return merged([changes(target) for target in TARGETS], stop=stop)

    def logs(self, ref: JobRef, replica: str, **how: Unpack[LogOptions]) -> Iterator[LogLine]:
        """A replica's output; see Backend.logs."""
        from k8sjob.backends.cluster.instances import JobPods  # noqa: PLC0415 - the same
        from k8sjob.backends.cluster.logs import replica_logs  # noqa: PLC0415 - few commands do

        # By its uid the output of an earlier job of the same name is left out.
        workload = (lambda: self.workloads.workload(ref)) if "/" in ref.name else None
        ref = ref if ref.uid or workload else JobRef.of(self._get(ref))

        def ended() -> bool:
            try:
                return has_ended(workload() if workload else self._get(ref))
            except JobNotFound:
                return True

        newest = (lambda: {Object(pod).name: pod for pod in workload().pods}) if workload else None
        pods = how.get("pods")
        if pods is None:
            # Shared by the readers of all replicas, and gone with the last of them.
            latest = self._pods.setdefault(
                ref.uid or ref.name, JobPods(self.transport, ref, ended, newest=newest)
            )
        else:
            latest = JobPods(self.transport, ref, newest=lambda: pods)
        return replica_logs(latest, replica, **how)

    def related(self, snapshot: Snapshot) -> tuple[Json, ...]:
        """Other objects than the job's own; see Backend.related."""
        from k8sjob.backends.cluster.related import related  # noqa: PLC0415 - `why` alone does

        return related(self.transport, snapshot)

    # --- changing ---------------------------------------------------------------------------------

    def suspend(
        self, ref: JobRef, *, value: bool, waiting: Callable[[float], object] | None = None
    ) -> None:
        """Suspend the job (its pods are deleted, the job stays) or resume it; see Backend.suspend.

        Resuming waits until the last of the old pods is gone: the training operator would take its
        end for one of the new pods', and with restartPolicy Never fail the job.

        Raises:
            JobNotFound: it is gone.
            BackendError: it has ended or is being deleted, or its pods do not end within their
                grace period.
        """
        job = self._get(ref)
        target = job.target
        verb = "suspended" if value else "resumed"
        if job.deleting:
            raise BackendError(
                f"{ref} is being deleted and cannot be {verb}; `k8sjob why {ref}` shows what it"
                " is waiting for; submit it again when it is gone"
            )
        if has_ended(job):
            raise BackendError(f"{ref} has ended and cannot be {verb}; submit it again instead")
        if not value and job.suspended:
            ended = not target.pods.ended_stay
            # The grace period of a TrainJob's Pods is in its TrainingRuntime, which the snapshot
            # reads.
            whole = self.snapshot(ref).job if keyed(target) else job
            self.wait_for_pods(JobRef.of(job), seconds_to_end(whole), waiting, ended=ended)
        # The uid protects a job of the same name that was created in the meantime.
        uid = job.uid
        body = {**target.suspension(value=value), "metadata": {"uid": uid}}
        self.transport.request("PATCH", job_path(target, ref.namespace, ref.name), body=body)

    def delete(self, ref: JobRef) -> None:
        """Remove the job; its pods are stopped and removed in the background.

        Raises:
            JobNotFound: it is gone.
        """
        try:
            target = of_kind(ref.kind) if ref.kind else self._get(ref).target
            self.delete_job(target, ref)
        except ApiError as error:
            # A conflict: the job of that name has another uid than the precondition of the request.
            if is_absent(error) or (error.code == 409 and ref.uid):
                raise self._not_found(ref) from error
            raise
        if target.companion:
            where = target.companion.path(ref.namespace, ref.name)
            with suppress(ApiError):  # those that belong to the job go with it
                companion = self.transport.request("GET", where)
                # The one of a submission that was cut off before the owner was set; others are
                # removed by the garbage collector.
                if is_ours(companion) and not Object(companion).owners:
                    delete_as_read(self.transport, where, companion)

    def wait_for_pods(
        self,
        ref: JobRef,
        seconds: float,
        waiting: Callable[[float], object] | None = None,
        *,
        ended: bool = True,
    ) -> None:
        """Return when no pod of a job is left.

        Args:
            ref: the job, with its kind and its uid: pods of one before it are not its own.
            seconds: how long to wait; the pods may take their whole grace period.
            waiting: called with `seconds` if there is a pod.
            ended: pods that have ended count, too; the job was deleted.

        Raises:
            BackendError: there are still pods after so long.
        """
        deadline, target = time.monotonic() + seconds, of_kind(ref.kind)
        where, of_job = path("pods", ref.namespace), _query(target.pods.selector(ref.name))
        while pods := [
            pod
            for pod in list_all(self.transport, where, of_job).items
            # A Pod of an earlier job of the same name has another owner, and would be waited for in
            # vain.
            if perhaps_owned(target, pod, ref.uid) and (ended or Pod(pod).live)
        ]:
            if waiting:
                waiting(seconds)
                waiting = None
            with suppress(JobNotFound):
                # Pods of a TrainJob have the uid of its JobSet, so those of the job that has taken
                # the name meanwhile look like those of the deleted one.
                if namesake(target) and self._get(replace(ref, uid="")).uid != ref.uid:
                    return  # the pods may be the other job's
            if time.monotonic() > deadline:
                names = ", ".join(Object(pod).name for pod in pods)
                raise BackendError(
                    f"the pods of {ref} have not ended after {seconds:.0f} s: {names}; see what"
                    f" they are waiting for: kubectl -n {ref.namespace} describe pods -l"
                    f" {target.pods.selector(ref.name)}"
                )
            time.sleep(0.2)

    # --- small things -----------------------------------------------------------------------------

    def _get(self, ref: JobRef) -> Job:
        """The job; where its kind is not known, the first one of its name, k8sjob's own first."""
        by_others, ignored = None, ""
        errors: dict[Target, ApiError] = {}
        for target in (of_kind(ref.kind),) if ref.kind else TARGETS:
            try:
                where = job_path(target, ref.namespace, ref.name)
                answer = without_managed_fields(self._unexplained.request("GET", where))
            except ApiError as error:
                if not is_absent(error) and (ref.kind or error.code not in _NOT_SERVED):
                    raise self.transport.explained(error, "GET", where) from error
                errors[target] = error
                continue
            about = {"apiVersion": target.api_version, "kind": target.kind}
            job = target.job({**about, **answer})
            # A bare name may be a Job that backs up a database.
            if not ref.kind and not job.is_training:
                ignored = ignored or target.kind
            elif job.name == ref.name and ref.uid in {"", job.uid}:
                # Job and JobSet have many users; a job of k8sjob's of a later kind goes before one
                # of theirs.
                if ref.kind or not target.shared_kind or is_ours(job.raw):
                    return job
                by_others = by_others or job
        if by_others:
            return by_others
        if ignored:
            raise JobNotFound(
                f"{ref} is a {ignored}, but no training job: its pods have no indexes"
                " (completionMode: Indexed) and so no ranks, or another object has made it;"
                f" `k8sjob why {ref.namespace}/{ignored.lower()}/{ref.name}` explains it"
            )
        raise self._why_none(ref, errors)

    def _why_none(self, ref: JobRef, errors: Mapping[Target, ApiError]) -> BackendError:
        """The error about a job that was not found, by what was answered of each kind."""
        refused = errors.get(DEFAULT)  # who has only its kind may not read others
        if refused is None or is_absent(refused):
            return self._not_found(ref)
        # In a stock Kubeflow its users have the rights of one other kind alone.
        if refused.code == 403 and any(map(is_absent, errors.values())):
            return self._not_found(ref, f"; you cannot read {DEFAULT.kind}s there")
        where = job_path(DEFAULT, ref.namespace, ref.name)
        return self.transport.explained(refused, "GET", where)

    def _not_found(self, ref: JobRef, more: str = "") -> JobNotFound:
        return JobNotFound(
            f"no job {ref.name!r} in namespace {ref.namespace} (context {self.context});"
            f" `k8sjob list` shows the existing ones, -n chooses another namespace; `k8sjob why`"
            f" takes deploy/NAME, rayjobs.ray.io/NAME or the like of what is no job{more}"
        )


def _query(selector: str) -> dict[str, str] | None:
    """Only objects with these labels."""
    return {"labelSelector": selector} if selector else None
