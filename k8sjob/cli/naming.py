"""How a job is named on the command line: NAME, local/NAME or NAMESPACE/NAME."""

from __future__ import annotations

import queue
import re
import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from k8sjob.backends.api import LOCAL
from k8sjob.backends.connect import configured
from k8sjob.cli.failure import warn
from k8sjob.cli.place import Place, is_namespace
from k8sjob.cli.selecting import selector
from k8sjob.errors import BackendError, JobNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8sjob.backends.api import Backend, JobRef, Snapshot
    from k8sjob.backends.cluster import ClusterBackend
    from k8sjob.backends.local import LocalBackend

__all__ = ["complete_job", "find", "find_all", "job_argument", "jobs_here", "local_backend"]

_Seen = TypeVar("_Seen")

_NAME: Final = re.compile(r"[A-Za-z0-9]([-.A-Za-z0-9]*[A-Za-z0-9])?(@[0-9a-f]{8,})?")
GLANCE_SECONDS: Final = 3.0
"""How long a cluster is asked for a job that may also be on this machine, or to complete a word."""


def job_argument(
    name: str = "job", *, many: bool = False, required: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The argument NAME (or NAMES), completed from the jobs that are there."""
    return click.argument(
        name,
        metavar="NAME..." if many else "NAME",
        nargs=-1 if many else 1,
        required=required,
        shell_complete=complete_job,
    )


def find(job: str, place: Place) -> tuple[Backend, JobRef]:
    """The back end that has the job, and the job there.

    A name alone is looked for on this machine and in the cluster, where one is configured. Runs of
    one name on this machine are told apart as NAME@RUN.

    Raises:
        JobNotFound: there is none of that name.
        BackendError: the cluster cannot be asked.
        click.UsageError: the name is not one, is ambiguous, or the options say another place.
    """
    namespace, _, name = job.rpartition("/")
    if not _NAME.fullmatch(name) or ("/" in job and not is_namespace(namespace)):
        raise click.UsageError(
            f"{job!r} is no job: it is NAME, local/NAME, local/NAME@RUN or NAMESPACE/NAME"
        )
    is_run = "@" in name
    if is_run and namespace not in {"", LOCAL}:
        raise click.UsageError(f"{job!r}: only jobs of this machine are named with @RUN")
    here = namespace == LOCAL or (not namespace and (place.is_local or is_run))
    asked = LOCAL if place.is_local else place.namespace
    if (namespace and asked and namespace != asked) or (here and place.is_cluster):
        raise click.UsageError(f"{job!r} is in another place than the options say; say one only")
    if here:
        local = local_backend()
        return local, local.find(name)
    if namespace or place.is_cluster:
        cluster = place.connect(namespace)
        return cluster, cluster.find(name)
    return _find_anywhere(name, place)


def find_all(jobs: Sequence[str], place: Place) -> list[tuple[Backend, JobRef]]:
    """All of the jobs, before anything is done to one: a name that is wrong stops the whole."""
    return [find(job, place) for job in dict.fromkeys(jobs)]


def _find_anywhere(name: str, place: Place) -> tuple[Backend, JobRef]:
    local = local_backend()
    if not configured():
        return local, local.find(name)
    here = _or_none(local, name)
    try:
        cluster, there = _within(GLANCE_SECONDS, lambda: _glance(name, place))
    except BackendError as error:
        if here is None:
            message = f"no job {name!r} on this machine, and the cluster cannot be asked: {error}"
            raise BackendError(message) from error
        warn(f"this is {here}; whether the cluster has one, too, is not known: {error}")
        return local, here
    if here and there:
        raise click.UsageError(f"{name!r} is ambiguous: say {here} or {there}")
    if there:
        return cluster, there
    if here:
        return local, here
    raise JobNotFound(
        f"no job {name!r} on this machine or in namespace {cluster.namespace!r} of the cluster;"
        " `k8sjob list` names those there are"
    )


def _glance(name: str, place: Place) -> tuple[ClusterBackend, JobRef | None]:
    cluster = place.connect()
    return cluster, _or_none(cluster, name)


def _within(seconds: float, look: Callable[[], _Seen]) -> _Seen:
    """What a look shows, if it does not take too long; its thread is left behind then.

    Raises:
        BackendError: it took too long, or what it raises.
    """
    done: queue.SimpleQueue[_Seen | BackendError] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(look())
        except BackendError as error:
            done.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        seen = done.get(timeout=seconds)
    except queue.Empty:
        raise BackendError(f"the cluster did not answer within {seconds:g} s") from None
    if isinstance(seen, BackendError):
        raise seen
    return seen


def _or_none(backend: Backend, name: str) -> JobRef | None:
    try:
        return backend.find(name)
    except JobNotFound:
        return None


def local_backend() -> LocalBackend:
    """This machine."""
    from k8sjob.backends.local import LocalBackend  # noqa: PLC0415 - of no use for a cluster's jobs

    return LocalBackend()


def jobs_here(labels: str) -> list[Snapshot]:
    """The jobs of this machine with these labels, the newest first; of all labels for "".

    Raises:
        click.UsageError: it is no selector.
    """
    fits = selector(labels)
    return [s for s in local_backend().jobs() if fits(s.job["metadata"].get("labels") or {})]


def complete_job(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names that begin so; a place that does not answer at once has none."""
    known = {field.name for field in fields(Place)}
    try:
        place = Place(**{k: v for k, v in ctx.params.items() if k in known and v is not None})
    except click.UsageError:
        return []
    namespace, slash, _ = incomplete.rpartition("/")
    here = [] if place.is_cluster or namespace not in {"", LOCAL} else _names_here()
    there = [] if place.is_local or namespace == LOCAL else _names_there(place, namespace)
    names = [f"{LOCAL}/{name}" if slash or name in dict(there) else name for name in here]
    names += [f"{ns}/{name}" if slash or name in here else name for name, ns in there]
    return [name for name in names if name.startswith(incomplete)]


def _names_here() -> list[str]:
    return list(dict.fromkeys(s.job["metadata"]["name"] for s in local_backend().jobs()))


def _names_there(place: Place, namespace: str) -> list[tuple[str, str]]:
    """Names and their namespaces, of the cluster's jobs."""
    if not (place.is_cluster or configured()):
        return []
    try:
        jobs = _within(GLANCE_SECONDS, lambda: place.connect(namespace or None).jobs())
    except BackendError:
        return []
    return [(s.job["metadata"]["name"], s.job["metadata"]["namespace"]) for s in jobs]
