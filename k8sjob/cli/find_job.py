"""The job that a command names: NAME, local/NAME, NAMESPACE/NAME; options for the place."""

from __future__ import annotations

import functools
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from k8sjob.backends.api import LOCAL, Backend, JobRef, Snapshot
from k8sjob.backends.cluster import Client, connect
from k8sjob.cli.options import selector
from k8sjob.cli.output import print_status, warn
from k8sjob.environment import state_folder
from k8sjob.errors import BackendError, JobNotFound, K8sJobError
from k8sjob.kube.client.kubeconfig import configured, contexts, namespaces
from k8sjob.targets.jobs import names_kind
from k8sjob.threads import start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8sjob.backends.cluster.backend import ClusterBackend
    from k8sjob.backends.local import LocalBackend
    from k8sjob.backends.record import RecordBackend

_Seen = TypeVar("_Seen")

_NAMESPACE: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAME: Final = r"[A-Za-z0-9]([-.A-Za-z0-9]*[A-Za-z0-9])?(@[0-9a-f]{8,})?"
_IN: Final = rf"(?:(?P<namespace>{_NAMESPACE})/)?"
_KIND_NAME: Final = rf"{_IN}(?P<word>[A-Za-z][-.\w]*)/(?P<name>[^/]+)"
_LABELS: Final = rf"{_IN}(?P<word>pods)/(?P<name>.*[=!,( ].*)"
"""The keys of labels may have a prefix, which ends with a slash."""
GLANCE_SECONDS: Final = 3.0
"""How long a cluster is asked for a job that may also be on this machine."""
_TOLERATED_SECONDS: Final = 5.0
COMPLETION_SECONDS: Final = 1.0
"""How long it is asked for the words that complete one."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place where a command looks for jobs, by its options; None: as the kubeconfig says.

    Attributes:
        namespace: of the cluster.
        context: of the kubeconfig.
        kubeconfig: the file.
        client: "python" or "kubectl".
        local: on this machine.
        all_namespaces: in all of the cluster's.
    """

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None
    client: Client | None = None
    local: bool = False
    all_namespaces: bool = False

    def __post_init__(self) -> None:
        if self.namespace is not None and not re.fullmatch(_NAMESPACE, self.namespace):
            raise click.UsageError(f"-n {self.namespace!r} is not a valid namespace")
        if self.is_cluster and self.is_local:
            raise click.UsageError("--local means this machine; omit the options for a cluster")
        if self.namespace and self.all_namespaces:
            raise click.UsageError("-n names one namespace and -A all of them; give only one")

    @property
    def is_local(self) -> bool:
        """Whether only this machine is meant."""
        return self.local or self.namespace == LOCAL

    @property
    def is_cluster(self) -> bool:
        """Whether only a cluster is meant."""
        named = self.context or self.kubeconfig or self.client
        return bool(named or (self.namespace and self.namespace != LOCAL))

    @property
    def asks_cluster(self) -> bool:
        """Whether a cluster is looked at, alone or too: where one is meant or configured."""
        return not self.is_local and (self.is_cluster or self.all_namespaces or configured())

    @property
    def options(self) -> str:
        """The options that select the same cluster, for a command that is shown."""
        options = (("--context", self.context), ("--kubeconfig", self.kubeconfig))
        return "".join(f" {option} {shlex.quote(value)}" for option, value in options if value)

    def connect(self, namespace: str | None = None, *, plugins: bool = True) -> ClusterBackend:
        """The cluster, in a namespace of it; see k8sjob.backends.cluster.connect."""
        return connect(
            context=self.context,
            kubeconfig=self.kubeconfig,
            namespace=namespace or self.namespace,
            client=self.client,
            plugins=plugins,
        )


def place_options(
    *, local: bool = True, everywhere: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that say where; the command gets them as one `place`."""
    options = [
        click.option(
            "-n",
            "--namespace",
            metavar="NS",
            help="Namespace in the cluster.",
            shell_complete=_namespaces,
        ),
        click.option(
            "--context",
            metavar="NAME",
            help="Context in the kubeconfig.",
            shell_complete=_contexts,
        ),
        click.option("--kubeconfig", metavar="FILE", help="Instead of $KUBECONFIG."),
        click.option(
            "--client",
            type=click.Choice(["python", "kubectl"]),
            help="Make the requests to the cluster directly (the default) or through kubectl.",
        ),
    ]
    if everywhere:
        text = "In all namespaces."
        options.insert(1, click.option("-A", "--all-namespaces", is_flag=True, help=text))
    if local:
        options.append(click.option("--local", is_flag=True, help="On this machine only."))

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def at_a_place(**arguments: Any) -> Any:
            values = {f.name: arguments.pop(f.name) for f in fields(Place) if f.name in arguments}
            return command(place=Place(**values), **arguments)

        decorated: Callable[..., Any] = at_a_place
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def _contexts(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    names = contexts(ctx.params.get("kubeconfig"))
    return [name for name in names if name.startswith(incomplete)]


def _namespaces(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    place = _place(ctx)
    # Those of the kubeconfig are there at once, and also for who may not list namespaces.
    names = set(namespaces(place.kubeconfig))
    with suppress(BackendError):
        names |= _within(COMPLETION_SECONDS, lambda: place.connect(plugins=False).namespaces())
    return sorted(name for name in names if name.startswith(incomplete))


def _place(ctx: click.Context) -> Place:
    """The place by the options that were parsed so far."""
    names = {field.name for field in fields(Place)}
    return Place(**{k: v for k, v in ctx.params.items() if k in names and v is not None})


def job_argument(
    name: str = "job", *, many: bool = False, required: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The argument NAME (or NAMES), completed from the existing jobs."""
    return click.argument(
        name,
        metavar="NAME..." if many else "NAME",
        nargs=-1 if many else 1,
        required=required,
        shell_complete=complete_job,
    )


def find(
    job: str, place: Place, *, recorded: bool = True, any_kind: bool = False
) -> tuple[Backend, JobRef]:
    """The back end that has the job, and the job there.

    A bare name is looked up on this machine and in the cluster, if one is configured. NAME@RUN
    distinguishes runs of one name on this machine. FILE.k8sjob is the record of a job, and so is
    s3://BUCKET/.../FILE.k8sjob. Of a job that is in neither place the newest record that was kept
    of it is shown, unless `recorded` is off. KIND/NAME and NAMESPACE/KIND/NAME are any object of a
    cluster that runs Pods, for a command that only reads (`any_kind`).

    Raises:
        JobNotFound: there is none of that name.
        K8sJobError: it is no job, and the command is for jobs alone.
        BackendError: the cluster cannot be asked.
        click.UsageError: the name is not one, is ambiguous, or the options say another place.
    """
    if is_record(job):
        record = open_record(job)
        return record, record.find("")
    if of_kind := _object_named(job):
        if not any_kind:
            raise K8sJobError(
                f"{job!r} names an object by its kind, and this command takes jobs alone: write"
                " NAME, -n NAMESPACE for another namespace; `why`, `status`, `logs`, `watch`,"
                " `report` and `usage` read any object that runs pods"
            )
        return _find_object(of_kind, place)
    try:
        return _find_job(job, place)
    except BackendError:
        namespace, _, name = job.rpartition("/")
        namespace = namespace or place.namespace or ""
        if not recorded or namespace == LOCAL or place.is_local:
            raise
        if (newest := _find_record(name, namespace)) is None:
            raise
        return newest


def is_record(job: str) -> bool:
    """Whether it is the file of a record or its URL, and not the name of a job."""
    return "://" in job or job.endswith(".k8sjob")


def open_record(job: str) -> RecordBackend:
    """The record of a job in a file, or at a URL.

    Raises:
        K8sJobError: there is none that can be read.
    """
    if "://" in job:
        from k8sjob.backends.record_storage import StoredRecord  # noqa: PLC0415 - only for records

        return StoredRecord(job)
    from k8sjob.backends.record import RecordBackend  # noqa: PLC0415 - as above

    return RecordBackend(Path(job))


def _find_record(name: str, namespace: str) -> tuple[Backend, JobRef] | None:
    from k8sjob.backends.record import RecordBackend, Records  # noqa: PLC0415 - as above

    path = Records().find(name, *([namespace] if namespace else []))
    if path is None:
        return None
    record = RecordBackend(path)
    ref = record.find("")
    warn(f"{ref} is not in the cluster, or cannot be read; this is its record: {path}")
    return record, ref


def _object_named(job: str) -> re.Match[str] | None:
    """The parts of KIND/NAME, where it is no NAMESPACE/NAME."""
    of_kind = re.fullmatch(_LABELS, job) or re.fullmatch(_KIND_NAME, job)
    # No namespace has a dot in its name, and none need be called like a kind that needs no group.
    certain = of_kind and (
        of_kind["namespace"] or "." in of_kind["word"] or names_kind(of_kind["word"])
    )
    return of_kind if certain else None


def _find_object(of_kind: re.Match[str], place: Place) -> tuple[Backend, JobRef]:
    """Any object of the cluster that runs Pods, or the job that it is part of."""
    namespace, name = of_kind["namespace"], f"{of_kind['word']}/{of_kind['name']}"
    elsewhere = namespace and place.namespace not in {None, namespace}
    if place.is_local or namespace == LOCAL or elsewhere:
        raise click.UsageError(_conflict(of_kind[0]))
    cluster = place.connect(namespace)
    ref = cluster.find(name)
    if "/" not in ref.name and ref.name != of_kind["name"]:
        print_status(f"{name}: its {ref.kind} is {ref}, which is shown")
    return cluster, ref


def _conflict(job: str) -> str:
    return (
        f"{job!r} conflicts with the options for the place; give only one (a kind that not every"
        " cluster has is written with its group, as rayjobs.ray.io/NAME)"
    )


def _find_job(job: str, place: Place) -> tuple[Backend, JobRef]:
    namespace, _, name = job.rpartition("/")
    if not re.fullmatch(_NAME, name) or ("/" in job and not re.fullmatch(_NAMESPACE, namespace)):
        raise click.UsageError(
            f"{job!r} is not a job's name; write NAME, local/NAME, local/NAME@RUN, NAMESPACE/NAME,"
            " or KIND/NAME of what runs pods in the cluster"
        )
    is_run = "@" in name
    if is_run and namespace not in {"", LOCAL}:
        raise click.UsageError(f"{job!r}: only jobs on this machine are named with @RUN")
    local_only = namespace == LOCAL or (not namespace and (place.is_local or is_run))
    asked = LOCAL if place.is_local else place.namespace
    if (namespace and asked and namespace != asked) or (local_only and place.is_cluster):
        raise click.UsageError(_conflict(job))
    if local_only:
        local = local_backend()
        return local, local.find(name)
    if namespace or place.is_cluster:
        cluster = place.connect(namespace)
        return cluster, cluster.find(name)
    return _find_anywhere(name, place)


def find_all(
    jobs: Sequence[str], place: Place, *, recorded: bool = False, any_kind: bool = False
) -> list[tuple[Backend, JobRef]]:
    """All of the jobs, before anything is done to one: a wrong name stops everything."""
    names = dict.fromkeys(jobs)
    return [find(job, place, recorded=recorded, any_kind=any_kind) for job in names]


def warn_of_clock(snapshot: Snapshot) -> None:
    """Say that this machine's clock and the cluster's differ by more than a few seconds."""
    if abs(snapshot.skew) > _TOLERATED_SECONDS:
        order = "behind" if snapshot.skew > 0 else "ahead of"
        warn(
            f"this machine's clock is {abs(snapshot.skew):.0f} s {order} the cluster's, by which"
            " ages are counted; correct it: certificates and tokens depend on it, too"
        )


def keep_record(backend: Backend, ref: JobRef) -> None:
    """Keep a record of a job in a cluster that has ended; jobs on this machine have a folder."""
    from k8sjob.observe.findings import keep_record_of  # noqa: PLC0415 - as above

    if why_not := keep_record_of(backend, ref):
        warn(why_not)


def _find_anywhere(name: str, place: Place) -> tuple[Backend, JobRef]:
    local = local_backend()
    if not configured():
        return local, local.find(name)
    ref = _or_none(local, name)

    def glance() -> tuple[ClusterBackend, JobRef | None]:
        cluster = place.connect()
        return cluster, _or_none(cluster, name)

    try:
        # A laptop without its VPN must not wait for a connection's timeout to see a job of its own.
        cluster, cluster_ref = _within(GLANCE_SECONDS, glance)
    except BackendError as error:
        if ref is None:
            message = f"no job {name!r} on this machine, and the cluster cannot be reached: {error}"
            raise BackendError(message) from error
        warn(f"this is {ref}; the cluster, which may have one too, cannot be reached: {error}")
        return local, ref
    # Never a guess: `delete` looks a job up in the same way.
    if ref and cluster_ref:
        raise click.UsageError(f"{name!r} is ambiguous: use {ref} or {cluster_ref}")
    if cluster_ref:
        return cluster, cluster_ref
    if ref:
        return local, ref
    try:
        return cluster, cluster.find(name)
    except JobNotFound as error:  # it may know an object of that name that is no training job
        raise JobNotFound(f"no job {name!r} on this machine; in the cluster: {error}") from error


def _within(seconds: float, look: Callable[[], _Seen]) -> _Seen:
    """The result of a call; BackendError where it takes too long, or what the call raises."""
    try:
        return start(look).result(seconds)
    except TimeoutError:
        raise BackendError(f"the cluster did not respond within {seconds:g} s") from None


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
    """The jobs on this machine with these labels, the newest first; of all labels for "".

    Raises:
        click.UsageError: it is not a selector.
    """
    fits = selector(labels)
    if not state_folder().is_dir():
        return []  # to load what reads them takes as long as a request
    return [s for s in local_backend().jobs() if fits(s.job.labels)]


def complete_job(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names with this beginning; a cluster that does not respond at once has none."""
    place = _place(ctx)
    namespace, slash, _ = incomplete.rpartition("/")
    local, namespaces = [], dict[str, str]()
    if not place.is_cluster and namespace in {"", LOCAL}:
        local = list(dict.fromkeys(s.job.name for s in local_backend().jobs()))
    if namespace != LOCAL and place.asks_cluster:
        with suppress(BackendError):
            jobs = _within(
                COMPLETION_SECONDS, lambda: place.connect(namespace or None, plugins=False).jobs()
            )
            namespaces = {s.job.name: s.job.namespace for s in jobs}
    names = [f"{LOCAL}/{name}" if slash or name in namespaces else name for name in local]
    names += [f"{ns}/{name}" if slash or name in local else name for name, ns in namespaces.items()]
    return [name for name in names if name.startswith(incomplete)]
