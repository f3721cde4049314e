"""Where a command looks for jobs: the options that say it, and the connection they lead to."""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import click

from k8sjob.backends.api import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.cluster import ClusterBackend
    from k8sjob.backends.connect import Client

__all__ = ["Place", "is_namespace", "place_options"]

_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command looks for jobs, as its options say; None: as the kubeconfig says.

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
        if self.namespace is not None and not is_namespace(self.namespace):
            raise click.UsageError(f"-n {self.namespace!r} is no namespace's name")
        if self.is_cluster and self.is_local:
            raise click.UsageError(
                "--local means this machine; name no place in a cluster beside it"
            )
        if self.namespace and self.all_namespaces:
            raise click.UsageError("-n names one namespace and -A all of them; say one only")

    @property
    def is_local(self) -> bool:
        """Whether this machine is meant, and it alone."""
        return self.local or self.namespace == LOCAL

    @property
    def is_cluster(self) -> bool:
        """Whether a cluster is meant, and it alone."""
        named = self.context or self.kubeconfig or self.client
        return bool(named or (self.namespace and self.namespace != LOCAL))

    @property
    def words(self) -> str:
        """The options that lead to the same cluster, for a command that is shown."""
        given = (("--context", self.context), ("--kubeconfig", self.kubeconfig))
        return "".join(f" {option} {shlex.quote(value)}" for option, value in given if value)

    def connect(self, namespace: str | None = None) -> ClusterBackend:
        """The cluster, in a namespace of it."""
        from k8sjob.backends.connect import connect  # noqa: PLC0415 - of no use for local jobs

        return connect(
            context=self.context,
            kubeconfig=self.kubeconfig,
            namespace=namespace or self.namespace,
            client=self.client,
        )


def is_namespace(text: str) -> bool:
    """Whether it can name a namespace: what cannot must not reach the path of a request."""
    return _NAMESPACE.fullmatch(text) is not None


def place_options(
    *, local: bool = True, everywhere: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that say where; the command gets them as one `place`.

    Args:
        local: the command can look on this machine.
        everywhere: the command can look in all namespaces at once.
    """
    options = [
        click.option("-n", "--namespace", metavar="NS", help="Namespace of the cluster."),
        click.option(
            "--context",
            metavar="NAME",
            help="Context of the kubeconfig.",
            shell_complete=_contexts,
        ),
        click.option("--kubeconfig", metavar="FILE", help="In place of $KUBECONFIG."),
        click.option(
            "--client",
            type=click.Choice(["python", "kubectl"]),
            help="How to speak to the cluster: the kubernetes package, or kubectl.",
        ),
    ]
    if everywhere:
        options.insert(1, _ALL)
    if local:
        options.append(click.option("--local", is_flag=True, help="On this machine alone."))

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def at_a_place(**given: Any) -> Any:
            said = {f.name: given.pop(f.name) for f in fields(Place) if f.name in given}
            return command(place=Place(**said), **given)

        decorated: Callable[..., Any] = at_a_place
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


_ALL: Final = click.option("-A", "--all-namespaces", is_flag=True, help="In all namespaces.")


def _contexts(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from k8sjob.backends.connect import contexts  # noqa: PLC0415 - for completion alone

    names = contexts(ctx.params.get("kubeconfig"))
    return [name for name in names if name.startswith(incomplete)]
