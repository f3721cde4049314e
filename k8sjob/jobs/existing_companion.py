"""Companions that are there before a job, and that it may share: look at them, and offer them."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from k8sjob.errors import BackendError, SpecError
from k8sjob.findings import invalid
from k8sjob.kube.api_resources import ResourcePath, path
from k8sjob.kube.client.errors import is_absent
from k8sjob.kube.client.listwatch import list_all
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import Object

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.backends.cluster.backend import ClusterBackend
    from k8sjob.targets.api import Job

_MOST_OFFERED: Final = 8


def check_companion(job: Job, backend: ClusterBackend) -> None:
    """Look at the companion that a job shares, unless it may not be read.

    Raises:
        SpecError: it is not there, or does not go with the job.
        BackendError: the cluster cannot be reached, or fails to answer.
    """
    if not job.shares_companion:
        return
    where = job.companion_path(job.namespace or backend.namespace)
    try:
        companion = backend.transport.request("GET", where)
    except ApiError as error:
        if is_absent(error):
            at, step = ResourcePath.of(where), offer(job, backend) or "name one that exists"
            absent = f"{at.resource}/{at.name} does not exist"
            raise SpecError([invalid(("runtime",), absent, step)]) from error
        if error.code == 403:
            return
        raise
    if problems := list(job.target.companion_problems(job, companion)):
        raise SpecError(problems)


def offer(job: Job, backend: ClusterBackend) -> str:
    """The companions that the job could share, in a sentence; empty: none is known."""
    companion, namespace = job.target.companion, job.namespace or backend.namespace
    if companion is None or not companion.shared:
        return ""
    wide = path(companion.shared, api_version=companion.api_version)
    names: list[str] = []
    for where in (wide, companion.path(namespace)):
        with suppress(ApiError):  # none of that kind is known to a user who may not list them
            for raw in list_all(backend.transport, where).items:
                if not any(job.target.companion_problems(job, raw)):
                    name, kind = Object(raw).name, raw.get("kind")
                    names.append(name if where == wide else f"{{kind: {kind}, name: {name}}}")
    offered = " or ".join(f"`{companion.key}: {name}`" for name in names[:_MOST_OFFERED])
    return f"namespace {namespace} may use {offered} in job.yaml" if names else ""


@contextmanager
def offering(job: Job, backend: ClusterBackend) -> Iterator[None]:
    """Add to the error about a companion that the user may not create those that are there."""
    try:
        yield
    except ApiError as error:
        companion = job.target.companion
        denied = f'cannot create resource "{companion.resource}"' if companion else ""
        offered = offer(job, backend) if denied and denied in error.detail else ""
        if not offered:
            raise
        raise BackendError(f"{error}; {offered}") from error
