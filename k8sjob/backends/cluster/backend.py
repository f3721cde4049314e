"""Jobs in a cluster: objects that a controller there works on."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from k8sjob.backends.api import JobRef, Snapshot
from k8sjob.backends.cluster.informer import snapshot, snapshots
from k8sjob.errors import BackendError, JobExists, JobNotFound
from k8sjob.kube.client.errors import ExplainedErrors, is_absent
from k8sjob.kube.client.listwatch import list_all, merged, reflect, slim
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.labels import MANAGED_BY, same_manifest
from k8sjob.kube.objects import Object, Pod
from k8sjob.kube.resources import path
from k8sjob.targets.jobs import (
    CONTROLLERS,
    DEFAULT,
    TARGETS,
    child_path,
    companion_path,
    has_ended,
    is_suspended,
    job_path,
    of_kind,
    own_pods,
    owned,
    seconds_to_end,
    sent,
    target_of,
    with_child,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime
    from threading import Event

    from k8sjob.backends.api import Json, LogLine, Plan
    from k8sjob.backends.cluster.instances import JobPods
    from k8sjob.kube.client.listwatch import Change
    from k8sjob.kube.client.transport import Transport
    from k8sjob.targets.api import Target

__all__ = ["ClusterBackend"]

_ARCH: Final = "kubernetes.io/arch"
"""The label of every node that names its kind of processor."""
_NOT_SERVED: Final = frozenset({403, 404})
"""Codes of a kind of job that the cluster does not have, or the user may not read."""
STRICT: Final = {"fieldValidation": "Strict"}
_CUT_OFF_SECONDS: Final = 5.0
"""After so long no other client is between an object beside a job and the job."""
_LOOK_SECONDS: Final = 0.2
SUBMIT_SECONDS: Final = 60.0
"""How long a submission outlives an apiserver that goes away in the middle of it."""


class ClusterBackend:
    """The jobs of one cluster, as one user.

    Args:
        transport: carries the requests.

    Attributes:
        transport: the same, with explained errors.
        context: the kubeconfig's context.
        namespace: of jobs that name none.
    """

    name = "kubernetes"

    def __init__(self, transport: Transport) -> None:
        self.transport: Transport = ExplainedErrors(transport, CONTROLLERS)
        self.context, self.namespace = transport.context, transport.namespace
        self._pods: WeakValueDictionary[str, JobPods] = WeakValueDictionary()
        """By the job's uid, while its output is read."""

    # --- creating ---------------------------------------------------------------------------------

    def create(self, plan: Plan) -> JobRef:
        """Start a job, after a strict dry run; see create_manifest.

        What it needs beside it is created first, and belongs to the job from then on; where the
        server refuses the job, it is removed again.
        """
        self.dry_run(plan.manifest)
        ref = self._of(plan.manifest)
        self.wait_for_remains(ref)
        made = [self._companion(one, ref, plan.manifest) for one in self._companions(plan)]
        try:
            created = self.create_manifest(plan.manifest)
        except ApiError as error:  # JobExists is none: the job of that name may be using them
            # So may one that was created though its answer was lost.
            for path, there in made if 400 <= error.code < 500 else ():
                with suppress(ApiError):
                    self._delete(path, there)
            raise
        for path, there in made:
            owner = {
                "apiVersion": plan.manifest["apiVersion"],
                "kind": plan.manifest["kind"],
                "name": created.name,
                "uid": created.uid,
            }
            meta = {"uid": there["metadata"]["uid"], "ownerReferences": [owner]}
            with suppress(ApiError):  # without it `delete` removes them all the same
                self.transport.request("PATCH", path, body={"metadata": meta})
        return created

    def _companions(self, plan: Plan) -> Iterator[tuple[str, Json]]:
        """The path of each collection, and the object."""
        namespace = self._of(plan.manifest).namespace
        resources = (resource for resource, _ in target_of(plan.manifest).companions)
        for resource, companion in zip(resources, plan.companions, strict=True):
            yield companion_path(target_of(plan.manifest), resource, namespace), companion

    def wait_for_remains(self, ref: JobRef) -> None:
        """Return when what a controller made of an earlier job of the name is gone.

        Raises:
            BackendError: it is not gone after a minute, or it is of another kind of job.
        """
        deadline = time.monotonic() + SUBMIT_SECONDS
        for resource, version in (target.makes,) if (target := of_kind(ref.kind)).makes else ():
            where = path(resource, *_at(ref), api_version=version)
            with suppress(ApiError):  # it is not there, or may not be read
                while there := self.transport.request("GET", where):
                    owners = there["metadata"].get("ownerReferences") or ()
                    earlier = target.kind in {owner.get("kind") for owner in owners}
                    if not earlier or time.monotonic() > deadline:
                        raise BackendError(
                            f"{resource}/{ref.name} in namespace {ref.namespace} is"
                            f" {'left of an earlier job' if earlier else 'of another job'}, and"
                            f" the {ref.kind} needs the name; delete it, or choose another name"
                        )
                    time.sleep(_LOOK_SECONDS)

    def _companion(self, wanted: tuple[str, Json], ref: JobRef, manifest: Json) -> tuple[str, Json]:
        """The path of an object beside a job, created unless it is there, and the object.

        Raises:
            JobExists: another client has created the job by now.
            BackendError: the server refuses it, or another object has its name.
        """
        where, body = wanted
        its_own = f"{where}/{ref.name}"
        begun = time.monotonic()
        deadline = begun + SUBMIT_SECONDS
        while True:
            try:
                return its_own, self.transport.request("POST", where, query=STRICT, body=body)
            except ApiError as error:
                if error.reason != "AlreadyExists" and not _is_away(error):
                    raise
                if time.monotonic() > deadline:
                    raise
                with suppress(ApiError):
                    there = self.transport.request("GET", its_own)
                    late = time.monotonic() > begun + _CUT_OFF_SECONDS
                    going = Object(there).deleting or there["metadata"].get("ownerReferences")
                    if not _is_ours(there) and (late or not going):
                        kind = body["kind"]
                        raise BackendError(
                            f"the {kind} {ref} is not k8sjob's, and the job needs one of that name;"
                            " choose another name for the job"
                        ) from error
                    alike = not Object(body).part("metadata", "annotations") or (
                        same_manifest(there, body)
                    )
                    if not going:
                        if alike:
                            return its_own, there  # of a submission that was cut off
                        if late:
                            self._delete(its_own, there)
                            continue
                    self.dry_run(manifest)
                time.sleep(1)  # it goes with the job that it belonged to

    def _delete(self, path: str, there: Json) -> None:
        """Delete an object as it was read."""
        seen = {key: there["metadata"].get(key) for key in ("uid", "resourceVersion")}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": seen}
        self.transport.request("DELETE", path, body=options)

    def create_manifest(self, manifest: Json) -> JobRef:
        """Create a job by one request; nothing is overwritten.

        Tries again for a minute where the connection breaks, without creating the job twice; so
        call dry_run first, which fails at once where the apiserver cannot be reached.

        Args:
            manifest: one without a namespace gets the back end's.

        Raises:
            JobExists: one of that name is there, finished or not.
            BackendError: the cluster refuses it; nothing was created.
        """
        ref = self._of(manifest)
        with _taken(ref):
            return JobRef.of(self._post(ref, manifest))

    def dry_run(self, manifest: Json, *, name_free: bool = False) -> Json:
        """What the server would store, with its defaults; nothing is stored.

        Args:
            manifest: the job.
            name_free: as if no job of its name were there.

        Raises:
            JobExists: one of that name is there, finished or not.
            BackendError: the server would refuse it; with the fields, where it names them.
        """
        ref, target = self._of(manifest), target_of(manifest)
        where, body = job_path(target, ref.namespace), sent(manifest)
        stored = {}
        if key := target.companion_key:
            beside = companion_path(target, target.companions[0][0], ref.namespace)
            stored = {key: self._as_stored(beside, manifest[key])}
        try:
            if name_free:
                return {**self._as_stored(where, body), **stored}
            with _taken(ref):
                query = {**STRICT, "dryRun": "All"}
                answer = slim(self.transport.request("POST", where, query=query, body=body))
                return {**answer, **stored}
        except ApiError as error:
            if not any(said in error.said for said in target.awaited):
                raise
            return {**body, **stored}  # webhooks are asked last

    def _as_stored(self, where: str, body: Json) -> Json:
        """What the server would store of an object, whether one of its name is there or not."""
        name = body["metadata"]["name"]
        meta = {key: value for key, value in body["metadata"].items() if key != "name"}
        # No longer than the name: what is made of it has names that must fit, too.
        meta["generateName"] = f"{name[:-6] or name[:1]}-"
        query, body = {**STRICT, "dryRun": "All"}, {**body, "metadata": meta}
        answer = slim(self.transport.request("POST", where, query=query, body=body))
        answer["metadata"].pop("generateName", None)
        answer["metadata"]["name"] = name
        return answer

    def _post(self, ref: JobRef, manifest: Json) -> Json:
        """Create the job. A POST without an answer may have created it: then it is found again."""
        target, body = target_of(manifest), sent(manifest)
        where = job_path(target, ref.namespace)
        begun = time.monotonic()
        deadline = begun + SUBMIT_SECONDS
        lost = False
        while True:
            try:
                return self.transport.request("POST", where, query=STRICT, body=body)
            except ApiError as error:
                # The webhook's controller may not know the object beside the job yet.
                if any(said in error.said for said in target.awaited):
                    if time.monotonic() > begun + _CUT_OFF_SECONDS:
                        raise
                    time.sleep(_LOOK_SECONDS)
                    continue
                if error.reason == "AlreadyExists" and lost:
                    there = self._get(ref)
                    if same_manifest(there, manifest):
                        return there
                if not _is_away(error) or time.monotonic() > deadline:
                    raise
                lost = True
                time.sleep(1)

    # --- reading ----------------------------------------------------------------------------------

    def find(self, name: str, namespace: str | None = None) -> JobRef:
        """The job of that name, in the back end's namespace or another; JobNotFound without one."""
        return JobRef.of(self._get(JobRef(name, namespace or self.namespace)))

    def of_another_kind(self, manifest: Json) -> Json | None:
        """A job of another kind that has the name of this one; None as far as can be read."""
        ref = self._of(manifest)
        for target in TARGETS:
            if target is not target_of(manifest):
                with suppress(JobNotFound, ApiError):
                    there = self._get(JobRef(ref.name, ref.namespace, kind=target.kind))
                    if not target.shared_kind or _is_ours(there):
                        return there
        return None

    def jobs(
        self,
        *,
        namespace: str | None = None,
        all_namespaces: bool = False,
        selector: str = "",
        pods: bool = False,
    ) -> list[Snapshot]:
        """The jobs without their events, the newest first.

        Args:
            namespace: None: the back end's.
            all_namespaces: those of all namespaces instead.
            selector: a label selector, as kubectl takes it.
            pods: with their pods, where a job has not ended yet and pods may be read.
        """
        where = "" if all_namespaces else namespace or self.namespace
        found = self._jobs(where, selector)
        found.sort(key=lambda job: Object(job).created, reverse=True)
        children = self._children(where, found)
        theirs: dict[tuple[str, str, str], list[Json]] = {}
        if pods and not all(map(has_ended, found)):
            theirs = self._pods_by_job(where, {target_of(job).job_label for job in found})
        snapshots = []
        for job in found:
            of, label = JobRef.of(job), target_of(job).job_label
            its_own = theirs.get((label, of.namespace, of.name), ())
            child = children.get((of.namespace, target_of(job).child(of.name)))
            snapshots.append(Snapshot(with_child(job, child), own_pods(job, its_own)))
        return snapshots

    def _jobs(self, namespace: str, selector: str) -> list[Json]:
        """The jobs of all kinds that can be read; ApiError where none of them can."""
        found: list[Json] = []
        errors: dict[str, ApiError] = {}
        for target in TARGETS:
            try:
                where, query = job_path(target, namespace), _query(selector)
                every = list_all(self.transport, where, query).items
                found += [job for job in every if target.is_training(job)]
            except ApiError as error:
                if error.code not in _NOT_SERVED:
                    raise
                errors[target.name] = error
        refused = errors.get(DEFAULT.name)
        # Without the operator there are none of its kind; those that are forbidden may be there.
        if refused and not found and (len(errors) == len(TARGETS) or refused.code == 403):
            raise refused
        return found

    def _children(self, namespace: str, jobs: list[Json]) -> dict[tuple[str, str], Json]:
        """The `child` of these jobs by namespace and name; see Target.child."""
        found = []
        for label in {one.job_label for one in map(target_of, jobs) if one.child("any")}:
            with suppress(ApiError):  # a list without them says less
                query = {"labelSelector": label}
                found += list_all(self.transport, child_path(namespace), query).items
        return {(child.namespace, child.name): child.raw for child in map(Object, found)}

    def _pods_by_job(
        self, namespace: str, labels: set[str]
    ) -> dict[tuple[str, str, str], list[Json]]:
        """The pods of jobs by the label of their kind, namespace and name of their job.

        None if they may not be read.
        """
        found: dict[tuple[str, str, str], list[Json]] = {}
        for label in labels:
            try:
                pods = list_all(self.transport, path("pods", namespace), {"labelSelector": label})
            except ApiError as error:
                if error.code != 403:
                    raise
                return found
            for pod in map(Object, pods.items):
                at = label, pod.namespace, pod.labels.get(label, "")
                found.setdefault(at, []).append(pod.raw)
        return found

    def look_for_namespace(self) -> None:
        """Raise BackendError where the back end's namespace does not exist.

        Without it a list of jobs is merely empty. Nothing is raised where it may not be read.
        """
        try:
            self.transport.request("GET", path("namespaces", name=self.namespace))
        except ApiError as error:
            if is_absent(error):
                raise

    def architectures(self, node_selector: Mapping[str, str], device: str = "") -> set[str]:
        """The processor architectures, as "amd64", of the nodes with these labels.

        Empty where there are none, or nodes may not be read.

        Args:
            node_selector: the labels.
            device: a resource that the nodes offer, as "nvidia.com/gpu"; empty for any node.
        """
        query = {"labelSelector": ",".join(f"{k}={v}" for k, v in node_selector.items())}
        try:
            nodes = list_all(self.transport, path("nodes"), query if node_selector else None).items
        except ApiError:
            return set()
        found = {
            node.labels.get(_ARCH, "")
            for node in map(Object, nodes)
            if not device or device in node.part("status", "allocatable")
        }
        return set() if "" in found else found

    def snapshot(self, ref: JobRef) -> Snapshot:
        """The job now, with its pods and all of their events; JobNotFound if it is gone."""
        found = snapshot(self.transport, self._get(ref))
        target, job = target_of(found.job), found.job
        if not (key := target.companion_key):
            return found
        beside = companion_path(target, target.companions[0][0], *_at(JobRef.of(job)))
        with suppress(ApiError):  # what is not there, or may not be read, is left out
            job = {**job, key: slim(self.transport.request("GET", beside))}
        return replace(found, job=job)

    def watch(self, ref: JobRef, *, stop: Event | None = None) -> Iterator[Snapshot]:
        """The job now, and again after each change, ten times a second at most; see Backend.watch.

        Of the pods' events only warnings are followed. The loss of the connection and its return
        are warnings of the job, with the reasons ConnectionLost and ConnectionRestored.
        """
        yield from snapshots(self.transport, JobRef.of(self._get(ref)), stop)

    def watch_jobs(
        self,
        *,
        stop: Event,
        namespace: str | None = None,
        all_namespaces: bool = False,
        selector: str = "",
    ) -> Iterator[Change]:
        """All jobs and each change of them, until `stop` is set; see reflect.

        Args:
            stop: ends the iteration within a second.
            namespace: None: the back end's.
            all_namespaces: those of all namespaces instead.
            selector: a label selector, as kubectl takes it.
        """
        where = "" if all_namespaces else namespace or self.namespace
        reflections = [
            reflect(
                self.transport,
                job_path(one, where),
                _query(selector),
                stop=stop,
                keep=one.is_training,
            )
            for one in TARGETS
        ]
        return merged(reflections, stop=stop)

    def logs(
        self,
        ref: JobRef,
        replica: str,
        *,
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
        since: datetime | None = None,
        stop: Event | None = None,
    ) -> Iterator[LogLine]:
        """A replica's output; see Backend.logs."""
        from k8sjob.backends.cluster.instances import JobPods  # noqa: PLC0415 - the same
        from k8sjob.backends.cluster.logs import replica_logs  # noqa: PLC0415 - few commands do

        ref = ref if ref.uid else JobRef.of(self._get(ref))

        def ended() -> bool:
            try:
                return has_ended(self._get(ref))
            except JobNotFound:
                return True

        pods = self._pods.setdefault(ref.uid, JobPods(self.transport, ref, ended))
        return replica_logs(
            pods, replica, follow=follow, previous=previous, tail=tail, since=since, stop=stop
        )

    def related(self, snapshot: Snapshot) -> tuple[Json, ...]:
        """Objects beside a job's own; see Backend.related."""
        from k8sjob.backends.cluster.related import related  # noqa: PLC0415 - `why` alone does

        return related(self.transport, snapshot)

    # --- changing ---------------------------------------------------------------------------------

    def suspend(
        self, ref: JobRef, *, value: bool, waiting: Callable[[float], object] | None = None
    ) -> None:
        """Suspend the job (its pods are deleted, the job stays) or resume it.

        Resuming waits until the last of the old pods is gone: the training operator would take its
        end for one of the new pods', and with restartPolicy Never fail the job.

        Args:
            ref: the job.
            value: whether it is to be suspended.
            waiting: called with the seconds that old pods may take, if there are any.

        Raises:
            JobNotFound: it is gone.
            BackendError: it has ended or is being deleted, or its pods do not end within their
                grace period.
        """
        job = self._get(ref)
        target = target_of(job)
        verb = "suspended" if value else "resumed"
        if Object(job).deleting:
            raise BackendError(
                f"{ref} is being deleted and cannot be {verb}; `k8sjob why {ref}` says what it"
                " waits for; submit it again when it is gone"
            )
        if has_ended(job):
            raise BackendError(f"{ref} has ended and cannot be {verb}; submit it again instead")
        if not value and is_suspended(job):
            ended = not target.keeps_ended_pods
            whole = self.snapshot(ref).job if target.companion_key else job
            self.wait_for_pods(JobRef.of(job), seconds_to_end(whole), waiting, ended=ended)
        # The uid protects a job of the same name that was created in the meantime.
        uid = job["metadata"]["uid"]
        body = {**target.suspension(value=value), "metadata": {"uid": uid}}
        self.transport.request("PATCH", job_path(target, *_at(ref)), body=body)

    def delete(self, ref: JobRef) -> None:
        """Remove the job; its pods are stopped and removed in the background.

        Raises:
            JobNotFound: it is gone.
        """
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            # In the foreground the deletion needs an update of the job, which the webhook of its
            # controller refuses while that is away.
            "propagationPolicy": "Background",
        }
        if ref.uid:
            options["preconditions"] = {"uid": ref.uid}
        try:
            target = self._kind(ref)
            self.transport.request("DELETE", job_path(target, *_at(ref)), body=options)
        except ApiError as error:
            if is_absent(error) or (error.code == 409 and ref.uid):
                raise self._not_found(ref) from error
            raise
        for resource, _ in target.companions:
            its_own = companion_path(target, resource, *_at(ref))
            with suppress(ApiError):  # those that belong to the job go with it
                there = self.transport.request("GET", its_own)
                if _is_ours(there) and not there["metadata"].get("ownerReferences"):
                    self._delete(its_own, there)

    def wait_for_pods(
        self,
        ref: JobRef,
        seconds: float,
        waiting: Callable[[float], object] | None = None,
        *,
        ended: bool = True,
    ) -> None:
        """Return when a job has no pod any more.

        Args:
            ref: the job, with its kind and its uid: pods of one before it are not its own.
            seconds: how long to wait; the pods may take their whole grace period.
            ended: pods that have ended count, too; the job was deleted.
            waiting: called with `seconds` if there is one.

        Raises:
            BackendError: there are still pods after so long.
        """
        deadline = time.monotonic() + seconds
        target = of_kind(ref.kind)
        where, selector = path("pods", ref.namespace), target.selector(ref.name)
        of_job = {"labelSelector": selector}
        while pods := [
            pod
            for pod in list_all(self.transport, where, of_job).items
            if owned(target, pod, ref.uid) and (ended or Pod(pod).live)
        ]:
            if waiting:
                waiting(seconds)
                waiting = None
            if time.monotonic() > deadline:
                names = ", ".join(pod["metadata"]["name"] for pod in pods)
                raise BackendError(
                    f"the pods of {ref} have not ended after {seconds:.0f} s: {names}; see what"
                    f" they wait for: kubectl -n {ref.namespace} describe pods -l {selector}"
                )
            time.sleep(0.2)

    # --- small things -----------------------------------------------------------------------------

    def _of(self, manifest: Json) -> JobRef:
        meta = manifest["metadata"]
        namespace = meta.get("namespace") or self.namespace
        return JobRef(meta["name"], namespace, kind=manifest.get("kind") or "")

    def _get(self, ref: JobRef) -> Json:
        """The job; where its kind is not known, the first one of its name."""
        unserved = None
        for target in (of_kind(ref.kind),) if ref.kind else TARGETS:
            try:
                job = slim(self.transport.request("GET", job_path(target, *_at(ref))))
            except ApiError as error:
                if not is_absent(error):
                    if ref.kind or error.code not in _NOT_SERVED:
                        raise
                    if target is DEFAULT:  # who has only its kind may not read the others
                        unserved = error
                continue
            if not ref.kind and not target.is_training(job):
                continue
            if not ref.uid or job["metadata"]["uid"] == ref.uid:
                return {"apiVersion": target.api_version, "kind": target.kind, **job}
        if unserved:
            raise unserved
        raise self._not_found(ref)

    def _kind(self, ref: JobRef) -> Target:
        return of_kind(ref.kind) if ref.kind else target_of(self._get(ref))

    def _not_found(self, ref: JobRef) -> JobNotFound:
        return JobNotFound(
            f"no job {ref.name!r} in namespace {ref.namespace} (context {self.context});"
            " `k8sjob list` names those there are, -n chooses another namespace"
        )


@contextmanager
def _taken(ref: JobRef) -> Iterator[None]:
    """The server's refusal of a name that is taken, as JobExists."""
    try:
        yield
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise
        raise JobExists(
            f"{ref} already exists; see `k8sjob status {ref}`, delete it by `k8sjob delete"
            f" {ref}`, or choose another name"
        ) from error


def _is_ours(there: Json) -> bool:
    return Object(there).labels.get(MANAGED_BY) == "k8sjob"


def _query(selector: str) -> dict[str, str] | None:
    """Only objects with these labels."""
    return {"labelSelector": selector} if selector else None


def _is_away(error: ApiError) -> bool:
    """Whether the apiserver may come back; not one whose certificate is not trusted."""
    return error.code == 503 or (error.code == 0 and error.reason == "Unreachable")


def _at(ref: JobRef) -> tuple[str, str]:
    return ref.namespace, ref.name
