"""The creation of a job and of what it needs beside it; nothing is left where that is refused.

A request whose answer is lost may have been carried out, and a client may be gone between two of
them: what is there is looked at before it is used, replaced or refused.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import JobRef
from k8sjob.errors import BackendError, JobExists
from k8sjob.kube.client.listwatch import slim
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.labels import MANAGED_BY, same_manifest
from k8sjob.kube.objects import Object
from k8sjob.kube.resources import path
from k8sjob.targets.jobs import companion_path, job_path, of_kind, sent, target_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.backends.api import Json, Plan
    from k8sjob.kube.client.transport import Transport

__all__ = ["Creation", "delete_as_read", "is_ours"]

STRICT: Final = {"fieldValidation": "Strict"}
_CUT_OFF_SECONDS: Final = 5.0
"""After so long no other client is between an object beside a job and the job."""
_LOOK_SECONDS: Final = 0.2
SUBMIT_SECONDS: Final = 60.0
"""How long a submission outlives an apiserver that goes away in the middle of it."""


class Creation:
    """Creates jobs in a cluster.

    Args:
        transport: carries the requests.
        namespace: of jobs that name none.
    """

    def __init__(self, transport: Transport, namespace: str) -> None:
        self._transport, self._namespace = transport, namespace

    def create(self, plan: Plan) -> JobRef:
        """Start a job, after a strict dry run; see create_manifest.

        What it needs beside it is created first, and belongs to the job from then on; where the
        server refuses the job, it is removed again.
        """
        self.dry_run(plan.manifest)
        ref = self.ref_of(plan.manifest)
        self.wait_for_remains(ref)
        made = [self._companion(one, ref, plan.manifest) for one in self._companions(plan)]
        try:
            created = self.create_manifest(plan.manifest)
        except ApiError as error:  # JobExists is none: the job of that name may be using them
            # So may one that was created though its answer was lost.
            for path, there in made if 400 <= error.code < 500 else ():
                with suppress(ApiError):
                    delete_as_read(self._transport, path, there)
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
                self._transport.request("PATCH", path, body={"metadata": meta})
        return created

    def _companions(self, plan: Plan) -> Iterator[tuple[str, Json]]:
        """The path of each collection, and the object."""
        namespace = self.ref_of(plan.manifest).namespace
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
            where = path(resource, ref.namespace, ref.name, api_version=version)
            with suppress(ApiError):  # it is not there, or may not be read
                while there := self._transport.request("GET", where):
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
                return its_own, self._transport.request("POST", where, query=STRICT, body=body)
            except ApiError as error:
                if error.reason != "AlreadyExists" and not _is_away(error):
                    raise
                if time.monotonic() > deadline:
                    raise
                with suppress(ApiError):
                    there = self._transport.request("GET", its_own)
                    late = time.monotonic() > begun + _CUT_OFF_SECONDS
                    going = Object(there).deleting or there["metadata"].get("ownerReferences")
                    if not is_ours(there) and (late or not going):
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
                            delete_as_read(self._transport, its_own, there)
                            continue
                    self.dry_run(manifest)
                time.sleep(1)  # it goes with the job that it belonged to

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
        ref = self.ref_of(manifest)
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
        ref, target = self.ref_of(manifest), target_of(manifest)
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
                answer = slim(self._transport.request("POST", where, query=query, body=body))
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
        answer = slim(self._transport.request("POST", where, query=query, body=body))
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
                return self._transport.request("POST", where, query=STRICT, body=body)
            except ApiError as error:
                # The webhook's controller may not know the object beside the job yet.
                if any(said in error.said for said in target.awaited):
                    if time.monotonic() > begun + _CUT_OFF_SECONDS:
                        raise
                    time.sleep(_LOOK_SECONDS)
                    continue
                if error.reason == "AlreadyExists" and lost:
                    there = slim(self._transport.request("GET", f"{where}/{ref.name}"))
                    if same_manifest(there, manifest):
                        return there
                if not _is_away(error) or time.monotonic() > deadline:
                    raise
                lost = True
                time.sleep(1)

    def ref_of(self, manifest: Json) -> JobRef:
        """The job that a manifest is of."""
        meta = manifest["metadata"]
        namespace = meta.get("namespace") or self._namespace
        return JobRef(meta["name"], namespace, kind=manifest.get("kind") or "")


def delete_as_read(transport: Transport, path: str, there: Json) -> None:
    """Delete an object as it was read."""
    seen = {key: there["metadata"].get(key) for key in ("uid", "resourceVersion")}
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": seen}
    transport.request("DELETE", path, body=options)


def is_ours(there: Json) -> bool:
    """Whether k8sjob has made an object."""
    return Object(there).labels.get(MANAGED_BY) == "k8sjob"


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


def _is_away(error: ApiError) -> bool:
    """Whether the apiserver may come back; not one whose certificate is not trusted."""
    return error.code == 503 or (error.code == 0 and error.reason == "Unreachable")
