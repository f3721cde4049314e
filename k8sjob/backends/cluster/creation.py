"""The creation of a job and its companion objects; nothing is left if that is refused.

A request whose answer is lost may have been carried out, and a client may be gone between two of
them: what is there is looked at before it is used, replaced or refused.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import JobRef
from k8sjob.errors import BackendError, JobExists
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import Object, is_ours, same_manifest, without_managed_fields
from k8sjob.targets.jobs import TARGETS, job_path, keyed, namesake, of_kind
from k8sjob.threads import Ahead, start

if TYPE_CHECKING:
    from k8sjob.backends.api import Plan
    from k8sjob.kube.client.errors import ExplainedErrors
    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Companion, Job, Target

_STRICT: Final = {"fieldValidation": "Strict"}
_DRY_RUN: Final = {**_STRICT, "dryRun": "All"}
_CUT_OFF_SECONDS: Final = 5.0
"""Seconds after which no other client is between creating a companion object and its job."""
_LOOK_SECONDS: Final = 0.2
SUBMIT_SECONDS: Final = 60.0
"""How long a submission outlives an apiserver that goes away in the middle of it."""


class Creation:
    """The part of ClusterBackend that creates jobs."""

    transport: ExplainedErrors
    _unexplained: Transport
    namespace: str
    _ahead: Ahead

    def create(self, plan: Plan) -> JobRef:
        """Start a job, after a strict dry run; see create_manifest.

        What it needs beside it is created first, and then belongs to the job; where the server
        refuses the job, it is removed again.
        """
        job, companion = plan.job, plan.job.target.companion
        ref, stored, where = self.ref_of(job), None, ""
        # Before the companion object is created: a job that the server refuses leaves nothing
        # behind.
        self.first_dry_run(job)
        self.wait_for_leftovers(ref)
        if companion and job.companion:
            where = companion.path(ref.namespace, ref.name)
            stored = self._companion(companion, job.companion, job)
        try:
            created = self.create_manifest(job)
        except ApiError as error:  # JobExists is none: the job of that name may be using it
            # So may an object that was created although the answer was lost.
            # Not after a 5xx or a lost answer: the job may exist all the same, and need the object.
            if stored and 400 <= error.code < 500:
                with suppress(ApiError):
                    delete_as_read(self.transport, where, stored)
            raise
        if stored:
            # The garbage collector then removes the object with the job. It could not be set
            # before: the job has a uid only now.
            owner = {key: job.raw[key] for key in ("apiVersion", "kind")}
            owner |= {"name": ref.name, "uid": created.uid}
            meta = {"uid": Object(stored).uid, "ownerReferences": [owner]}
            with suppress(ApiError):  # without it `delete` removes it all the same
                self.transport.request("PATCH", where, body={"metadata": meta})
        self._give_way(ref, created)
        return JobRef.of(created)

    def _give_way(self, ref: JobRef, created: Job) -> None:
        """Remove a job again if, when it was created, a job of another kind had its name.

        Two clients may see a free name at the same time, and no server refuses the same name of
        another kind. Each of them looks at the cluster as it was at its own creation, so that of
        any number exactly the first one stays.

        Raises:
            JobExists: it was removed.
        """
        then = {
            "fieldSelector": f"metadata.name={ref.name}",
            "resourceVersion": str(created.metadata.get("resourceVersion")),
            "resourceVersionMatch": "Exact",
        }
        targets = [target for target in TARGETS if target is not created.target]
        ask = partial(self._unexplained.request, "GET", query=then)
        answers = [start(partial(ask, job_path(target, ref.namespace))) for target in targets]
        for target, answer in zip(targets, answers, strict=True):
            namesakes: list[Json] = []
            with suppress(ApiError):  # the kind is not served, or may not be read
                namesakes = answer.result().get("items") or []
            if any(is_ours(raw) or target.job_type(raw, target).is_training for raw in namesakes):
                with suppress(ApiError):
                    self.delete_job(created.target, JobRef.of(created))
                raise JobExists(
                    f"{ref} already exists: another client created a {target.kind} of that name a"
                    f" moment earlier, so the new {ref.kind} was removed again; replace the other"
                    " one, or submit under a generated name"
                )

    def delete_job(self, target: Target, ref: JobRef) -> None:
        """Delete a job of a kind, if the ref has a uid only that one, in the background.

        In the foreground the deletion needs an update of the job, which the webhook of its
        controller refuses while that is away.
        """
        options: Json = {"propagationPolicy": "Background"}
        # Another client may have replaced the job since it was read.
        if ref.uid:
            options["preconditions"] = {"uid": ref.uid}
        _delete(self.transport, job_path(target, ref.namespace, ref.name), options)

    def wait_for_leftovers(self, ref: JobRef) -> None:
        """Wait until the objects that a controller made for an earlier job of the name are gone.

        Raises:
            BackendError: it is not gone after a minute, or it is of another kind of job.
        """
        deadline = time.monotonic() + SUBMIT_SECONDS
        if (child := namesake(of_kind(ref.kind))) is None:
            return
        where = child.path(ref.namespace, ref.name)
        # Trainer 2.3 takes the end of an earlier TrainJob's JobSet for that of the new job of the
        # same name.
        with suppress(ApiError):  # it is not there, or may not be read
            first = leftover = self.transport.request("GET", where)
            while Object(leftover).uid == Object(first).uid:  # else of another client's new job
                owners = Object(leftover).owners
                # Owned by a job of this kind that is gone by now: the garbage collector is on its
                # way.
                earlier = ref.kind in {owner.get("kind") for owner in owners}
                if not earlier or time.monotonic() > deadline:
                    raise BackendError(
                        f"{child.resource}/{ref.name} in namespace {ref.namespace} is"
                        f" {'left over from an earlier job' if earlier else 'of another job'}, and"
                        f" the {ref.kind} needs the name; delete it, or choose another name"
                    )
                time.sleep(_LOOK_SECONDS)
                leftover = self.transport.request("GET", where)

    def _companion(self, companion: Companion, body: Json, job: Job) -> Json:
        """Create a job's companion object unless it exists; JobExists if the job does."""
        ref = self.ref_of(job)
        where, its_own = companion.path(ref.namespace), companion.path(ref.namespace, ref.name)
        # The object may exist already. It is an earlier job's that is being deleted (wait), that of
        # a submission which was cut off (use it, or replace it if it differs), another client's
        # between its two requests (wait for 5 s), or somebody else's (refuse).
        begun = time.monotonic()
        while True:
            try:
                return self.transport.request("POST", where, query=_STRICT, body=body)
            except ApiError as error:
                if error.reason != "AlreadyExists" and not _is_unavailable(error):
                    raise
                if time.monotonic() > begun + SUBMIT_SECONDS:
                    raise
                with suppress(ApiError):
                    stored = self.transport.request("GET", its_own)
                    late = time.monotonic() > begun + _CUT_OFF_SECONDS
                    going = Object(stored).deleting or Object(stored).owners
                    if not is_ours(stored) and (late or not going):
                        raise BackendError(
                            f"the {body['kind']} {ref} was not created by k8sjob, and the job needs"
                            " one of that name; choose another name for the job"
                        ) from error
                    alike = not Object(body).annotations or same_manifest(stored, body)
                    if not going:
                        if alike:
                            return stored  # of a submission that was cut off
                        if late:
                            delete_as_read(self.transport, its_own, stored)
                            continue
                    self.dry_run(job)
                time.sleep(1)  # it goes with the job that it belonged to

    def create_manifest(self, job: Job) -> Job:
        """Create a job by one request, and return it; nothing is overwritten.

        Tries again for a minute where the connection breaks, without creating the job twice; so
        call dry_run first, which fails at once where the apiserver cannot be reached. A job
        without a namespace gets the back end's.

        Raises:
            JobExists: one of that name is there, finished or not.
            BackendError: the cluster refuses it; nothing was created.
        """
        ref = self.ref_of(job)
        where = job_path(job.target, ref.namespace)
        begun, lost = time.monotonic(), False
        while True:
            try:
                answer = self.transport.request("POST", where, query=_STRICT, body=job.raw)
                return replace(job, raw=answer)
            except ApiError as error:
                if error.reason == "AlreadyExists":
                    # Our own, if the answer to an earlier attempt was lost.
                    stored = self.transport.request("GET", f"{where}/{ref.name}") if lost else {}
                    if not same_manifest(stored, job.raw):
                        raise _exists(ref) from error
                    return replace(job, raw=without_managed_fields(stored))
                # The webhook's controller may not know the companion object yet.
                missed = _is_missed(job, error)
                longest = _CUT_OFF_SECONDS if missed else SUBMIT_SECONDS
                waits = missed or _is_unavailable(error)
                if not waits or time.monotonic() - begun > longest:
                    raise
                lost = lost or not missed
                time.sleep(_LOOK_SECONDS if missed else 1)

    def first_dry_run(self, job: Job) -> Job:
        """The result of dry_run for a job, which may have been begun; see look_ahead."""
        return self._ahead.result(("dry run", id(job)), partial(self.dry_run, job))

    def dry_run(self, job: Job, *, name_free: bool = False) -> Job:
        """The job that the server would store, with its defaults; nothing is stored.

        With `name_free` it is as if no job of its name were there.

        Raises:
            JobExists: one of that name is there, finished or not.
            BackendError: the server would refuse it; with the fields, where it names them.
        """
        ref = self.ref_of(job)
        where = job_path(job.target, ref.namespace)
        companion = keyed(job.target)
        if companion and job.companion:
            stored = self._as_stored(companion.path(ref.namespace), job.companion)
            job = replace(job, companion=stored)
        try:
            if name_free:
                return replace(job, raw=self._as_stored(where, job.raw))
            answer = self.transport.request("POST", where, query=_DRY_RUN, body=job.raw)
            return replace(job, raw=without_managed_fields(answer))
        except ApiError as error:
            if error.reason == "AlreadyExists" and not name_free:
                raise _exists(ref) from error
            if not _is_missed(job, error):
                raise
        if not name_free:  # the webhook was asked before anyone looked whether the name is taken
            with suppress(ApiError):
                self.transport.request("GET", f"{where}/{ref.name}")
                raise _exists(ref)
        return job

    def _as_stored(self, where: str, body: Json) -> Json:
        """The object as the server would store it, whether or not one of its name exists."""
        name = Object(body).name
        meta = {key: value for key, value in Object(body).metadata.items() if key != "name"}
        # No longer than the name: what is made of it has names that must fit, too.
        meta["generateName"] = f"{name[:-6] or name[:1]}-"
        body = {**body, "metadata": meta}
        answer = self.transport.request("POST", where, query=_DRY_RUN, body=body)
        answer = without_managed_fields(answer)
        Object(answer).metadata.pop("generateName", None)
        Object(answer).metadata["name"] = name
        return answer

    def ref_of(self, job: Job) -> JobRef:
        """The reference to a job that is to be created."""
        return replace(JobRef.of(job), namespace=job.namespace or self.namespace, uid="")


def delete_as_read(transport: Transport, path: str, raw: Json) -> None:
    """Delete an object as it was read."""
    # The version, too: an object that has got an owner since it was read is in use again.
    preconditions = {key: Object(raw).metadata.get(key) for key in ("uid", "resourceVersion")}
    _delete(transport, path, {"preconditions": preconditions})


def _delete(transport: Transport, path: str, options: Json) -> None:
    body = {"apiVersion": "v1", "kind": "DeleteOptions", **options}
    transport.request("DELETE", path, body=body)


def _exists(ref: JobRef) -> JobExists:
    return JobExists(
        f"{ref} already exists; see `k8sjob status {ref}`, delete it with `k8sjob delete"
        f" {ref}`, or choose another name"
    )


def _is_missed(job: Job, error: ApiError) -> bool:
    """Whether a webhook refuses a job because its companion is not there, or not known yet."""
    companion = job.target.companion if job.companion else None
    return companion is not None and companion.is_missed(error.detail)


def _is_unavailable(error: ApiError) -> bool:
    """Whether the apiserver may come back; not one whose certificate is not trusted."""
    return error.code == 503 or (error.code == 0 and error.reason == "Unreachable")
