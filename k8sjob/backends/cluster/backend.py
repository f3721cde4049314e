"""Jobs in a cluster: PyTorchJobs, kept by the training operator."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from k8sjob.backends.api import JobRef, Snapshot
from k8sjob.backends.cluster.belongings import own_pods, owned, seconds_to_end
from k8sjob.backends.cluster.listing import listing, slim
from k8sjob.backends.cluster.reflect import reflect
from k8sjob.backends.cluster.snapshots import snapshot, snapshots
from k8sjob.backends.cluster.words import InWords, is_absent
from k8sjob.backends.conditions import finished, is_suspended
from k8sjob.backends.paths import JOBS, path
from k8sjob.backends.transport import ApiError
from k8sjob.errors import BackendError, JobExists, JobNotFound
from k8sjob.labels import JOB_NAME, same_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import datetime
    from threading import Event

    from k8sjob.backends.api import Json, LogLine, Plan
    from k8sjob.backends.cluster.pods import JobPods
    from k8sjob.backends.cluster.reflect import Change
    from k8sjob.backends.transport import Transport

__all__ = ["ClusterBackend"]

_ARCH: Final = "kubernetes.io/arch"
"""The label of every node that names its kind of processor."""
STRICT: Final = {"fieldValidation": "Strict"}
MERGE: Final = "application/merge-patch+json"
SUBMIT_SECONDS: Final = 60.0
"""How long a submission outlives an apiserver that goes away in the middle of it."""


class ClusterBackend:
    """The jobs of one cluster, as one user.

    Args:
        transport: carries the requests.

    Attributes:
        transport: the same, whose errors say in plain words what is wrong.
        context: the kubeconfig's context.
        namespace: where jobs are made and looked for where nothing else is said.
    """

    name = "kubernetes"

    def __init__(self, transport: Transport) -> None:
        self.transport: Transport = InWords(transport)
        self.context, self.namespace = transport.context, transport.namespace
        self._pods: WeakValueDictionary[str, JobPods] = WeakValueDictionary()
        """By the job's uid, as long as somebody reads its output."""

    # --- making -----------------------------------------------------------------------------------

    def create(self, plan: Plan) -> JobRef:
        """Start a job, after the server has looked at it strictly; see create_manifest."""
        self.dry_run(plan.manifest)
        return self.create_manifest(plan.manifest)

    def create_manifest(self, manifest: Json) -> JobRef:
        """Make a PyTorchJob by one request; nothing is overwritten.

        Goes on trying for a minute where the apiserver goes away in the middle, without making the
        job twice; so dry_run first, which tells at once that it cannot be reached.

        Args:
            manifest: without a namespace it goes into the back end's.

        Raises:
            JobExists: one of that name is there, finished or not.
            BackendError: the cluster refuses it; no half-made object stays.
        """
        ref = self._of(manifest)
        with _taken(ref):
            return JobRef.of(self._post(ref, manifest))

    def dry_run(self, manifest: Json, *, name_free: bool = False) -> Json:
        """What the server would store, with its defaults; nothing is stored.

        Args:
            manifest: a PyTorchJob.
            name_free: as if no job of its name were there.

        Raises:
            JobExists: one of that name is there, finished or not.
            BackendError: the server would refuse it; with the fields, where it names them.
        """
        ref = self._of(manifest)
        query = {**STRICT, "dryRun": "All"}
        if not name_free:
            with _taken(ref):
                made = self.transport.request(
                    "POST", path(JOBS, ref.namespace), query=query, body=manifest
                )
            return slim(made)
        meta = {key: value for key, value in manifest["metadata"].items() if key != "name"}
        meta["generateName"] = ref.name[: 63 - 6] + "-"
        body = {**manifest, "metadata": meta}
        answer = slim(
            self.transport.request("POST", path(JOBS, ref.namespace), query=query, body=body)
        )
        answer["metadata"].pop("generateName", None)
        answer["metadata"]["name"] = ref.name
        return answer

    def _post(self, ref: JobRef, manifest: Json) -> Json:
        """Make the job. A POST whose answer was lost may have made it: its own copy is told."""
        deadline = time.monotonic() + SUBMIT_SECONDS
        lost = False
        while True:
            try:
                return self.transport.request(
                    "POST", path(JOBS, ref.namespace), query=STRICT, body=manifest
                )
            except ApiError as error:
                if error.reason == "AlreadyExists" and lost:
                    there = self._get(ref)
                    if same_manifest(there, manifest):
                        return there
                if not _may_pass(error) or time.monotonic() > deadline:
                    raise
                lost = True
                time.sleep(1)

    # --- reading ----------------------------------------------------------------------------------

    def find(self, name: str, namespace: str | None = None) -> JobRef:
        """The job of that name.

        Args:
            name: the job's name.
            namespace: None: the back end's.

        Raises:
            JobNotFound: there is none.
        """
        return JobRef.of(self._get(JobRef(name, namespace or self.namespace)))

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
        query = {"labelSelector": selector} if selector else None
        found = listing(self.transport, path(JOBS, where), query).items
        found.sort(key=_age, reverse=True)
        theirs: dict[tuple[str, str], list[Json]] = {}
        if pods and not all(finished(job.get("status") or {}) for job in found):
            theirs = self._pods_by_job(where)
        return [Snapshot(job, own_pods(job, theirs.get(_at(JobRef.of(job)), ()))) for job in found]

    def _pods_by_job(self, namespace: str) -> dict[tuple[str, str], list[Json]]:
        """The pods of all jobs by the namespace and the name of theirs; none that are forbidden."""
        found: dict[tuple[str, str], list[Json]] = {}
        try:
            pods = listing(self.transport, path("pods", namespace), {"labelSelector": JOB_NAME})
        except ApiError as error:
            if error.code != 403:
                raise
            return found
        for pod in pods.items:
            meta = pod["metadata"]
            name = (meta.get("labels") or {}).get(JOB_NAME, "")
            found.setdefault((meta.get("namespace", ""), name), []).append(pod)
        return found

    def look_for_namespace(self) -> None:
        """Raise where the back end's namespace is not there: a list of its jobs is merely empty.

        Raises:
            BackendError: there is none of that name; not where that may not be asked.
        """
        try:
            self.transport.request("GET", path("namespaces", name=self.namespace))
        except ApiError as error:
            if is_absent(error):
                raise

    def architectures(self, node_selector: Mapping[str, str], device: str = "") -> set[str]:
        """The kinds of processor, as "amd64", of the nodes that carry these labels.

        Empty where there are none, or nodes may not be read.

        Args:
            node_selector: the labels.
            device: a resource that the nodes offer, as "nvidia.com/gpu"; empty for any node.
        """
        query = {"labelSelector": ",".join(f"{k}={v}" for k, v in node_selector.items())}
        try:
            nodes = listing(self.transport, path("nodes"), query if node_selector else None).items
        except ApiError:
            return set()
        found = {
            str(node["metadata"].get("labels", {}).get(_ARCH) or "")
            for node in nodes
            if not device or device in (node.get("status") or {}).get("allocatable", {})
        }
        return set() if "" in found else found

    def snapshot(self, ref: JobRef) -> Snapshot:
        """The job now, with its pods and all of their events; JobNotFound if it is gone."""
        return snapshot(self.transport, self._get(ref))

    def watch(self, ref: JobRef, *, stop: Event | None = None) -> Iterator[Snapshot]:
        """The job now, and again after each change, ten times a second at most; see Backend.watch.

        Of the pods' events only warnings are followed. A connection that is lost, and is back, is
        told as one of the job's warnings, with the reason ConnectionLost or ConnectionRestored.
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
        """All jobs and whatever happens to them, until `stop` is set; see reflect.

        Args:
            stop: ends the iteration within a second.
            namespace: None: the back end's.
            all_namespaces: those of all namespaces instead.
            selector: a label selector, as kubectl takes it.
        """
        where = "" if all_namespaces else namespace or self.namespace
        query = {"labelSelector": selector} if selector else None
        return reflect(self.transport, path(JOBS, where), query, stop=stop)

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
        from k8sjob.backends.cluster.logs import replica_logs  # noqa: PLC0415 - few commands do
        from k8sjob.backends.cluster.pods import JobPods  # noqa: PLC0415 - the same

        ref = ref if ref.uid else JobRef.of(self._get(ref))

        def ended() -> bool:
            try:
                return finished(self._get(ref).get("status") or {})
            except JobNotFound:
                return True

        new = JobPods(self.transport, ref.namespace, ref.name, ref.uid)
        return replica_logs(
            self.transport,
            ref.namespace,
            replica,
            pods=self._pods.setdefault(ref.uid, new),
            follow=follow,
            previous=previous,
            tail=tail,
            since=since,
            stop=stop,
            ended=ended,
        )

    def related(self, snapshot: Snapshot) -> tuple[Json, ...]:
        """Objects beside a job's own; see Backend.related."""
        from k8sjob.backends.cluster.related import related  # noqa: PLC0415 - `why` alone does

        return related(self.transport, snapshot)

    # --- changing ---------------------------------------------------------------------------------

    def suspend(
        self, ref: JobRef, *, value: bool, waiting: Callable[[float], object] | None = None
    ) -> None:
        """Suspend the job (its pods are deleted, the job stays) or let it go on.

        To go on waits until the last of the old pods is gone: the operator would take its end for
        one of the new pods', and with restartPolicy Never give the job up as failed.

        Args:
            ref: the job.
            value: whether it is to be suspended.
            waiting: called with the seconds that old pods may take, if there are any.

        Raises:
            JobNotFound: it is gone.
            BackendError: it has ended or is being deleted, or its pods do not end within their
                grace.
        """
        job = self._get(ref)
        verb = "suspended" if value else "resumed"
        if job["metadata"].get("deletionTimestamp"):
            raise BackendError(
                f"{ref} is being deleted and cannot be {verb}; `k8sjob why {ref}` says what it"
                " waits for; submit it again when it is gone"
            )
        if finished(job.get("status") or {}):
            raise BackendError(f"{ref} has ended and cannot be {verb}; submit it again instead")
        if not value and is_suspended(job):
            self.wait_for_pods(JobRef.of(job), seconds_to_end(job), waiting)
        # With its uid a job of the same name that was made meanwhile refuses the change.
        uid = job["metadata"]["uid"]
        body = {"metadata": {"uid": uid}, "spec": {"runPolicy": {"suspend": value}}}
        self.transport.request("PATCH", path(JOBS, *_at(ref)), body=body, content_type=MERGE)

    def delete(self, ref: JobRef) -> None:
        """Remove the job; its pods are stopped and removed in the background.

        Raises:
            JobNotFound: it is gone.
        """
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            # In the foreground the end needs an update of the job, which the operator's webhook
            # refuses while the operator is away.
            "propagationPolicy": "Background",
        }
        if ref.uid:
            options["preconditions"] = {"uid": ref.uid}
        try:
            self.transport.request("DELETE", path(JOBS, *_at(ref)), body=options)
        except ApiError as error:
            if is_absent(error) or (error.code == 409 and ref.uid):
                raise self._not_found(ref) from error
            raise

    def delete_and_wait(self, ref: JobRef, timeout: float = 180.0) -> None:
        """Remove the job and wait until its pods are gone too, so that its name is free.

        Args:
            ref: the job.
            timeout: seconds; the pods may take their whole grace period.

        Raises:
            JobNotFound: it was gone before.
            BackendError: there are still pods after the timeout.
        """
        there = ref if ref.uid else JobRef.of(self._get(ref))
        self.delete(there)
        self.wait_for_pods(there, timeout)

    def wait_for_pods(
        self, ref: JobRef, seconds: float, waiting: Callable[[float], object] | None = None
    ) -> None:
        """Return when a job has no pod any more.

        Args:
            ref: the job, with its uid: pods of one before it are not its own.
            seconds: the pods may take their whole grace period.
            waiting: called with `seconds` if there is one.

        Raises:
            BackendError: there are still pods after so long.
        """
        deadline = time.monotonic() + seconds
        where, of_job = path("pods", ref.namespace), {"labelSelector": f"{JOB_NAME}={ref.name}"}
        while pods := [
            p for p in listing(self.transport, where, of_job).items if owned(p, ref.uid)
        ]:
            if waiting:
                waiting(seconds)
                waiting = None
            if time.monotonic() > deadline:
                names = ", ".join(pod["metadata"]["name"] for pod in pods)
                raise BackendError(
                    f"the pods of {ref} have not ended after {seconds:.0f} s: {names}; see what"
                    f" they wait for: kubectl -n {ref.namespace} describe pods -l"
                    f" {JOB_NAME}={ref.name}"
                )
            time.sleep(0.2)

    # --- small things -----------------------------------------------------------------------------

    def _of(self, manifest: Json) -> JobRef:
        meta = manifest["metadata"]
        return JobRef(meta["name"], meta.get("namespace") or self.namespace)

    def _get(self, ref: JobRef) -> Json:
        try:
            job = slim(self.transport.request("GET", path(JOBS, *_at(ref))))
        except ApiError as error:
            if is_absent(error):
                raise self._not_found(ref) from error
            raise
        if ref.uid and job["metadata"]["uid"] != ref.uid:
            raise self._not_found(ref)
        return job

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
            f"{ref} is there already; see `k8sjob status {ref}`, delete it by `k8sjob delete"
            f" {ref}`, or choose another name"
        ) from error


def _may_pass(error: ApiError) -> bool:
    """Whether waiting may help: an apiserver that is away, not one that is not trusted."""
    return error.code == 503 or (error.code == 0 and error.reason == "Unreachable")


def _at(ref: JobRef) -> tuple[str, str]:
    return ref.namespace, ref.name


def _age(snapshot: Json) -> str:
    return str(snapshot["metadata"].get("creationTimestamp", ""))
