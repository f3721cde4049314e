"""Jobs in a cluster: the connection to it, as the kubeconfig names it, and the back end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from k8sjob.kube.client.kubeconfig import access

if TYPE_CHECKING:
    from pathlib import Path

    from k8sjob.backends.cluster.backend import ClusterBackend

Client = Literal["python", "kubectl"]
"""What makes the requests: this process, or the program kubectl."""


def connect(
    *,
    context: str | None = None,
    kubeconfig: str | Path | None = None,
    namespace: str | None = None,
    client: Client | None = None,
    plugins: bool = True,
) -> ClusterBackend:
    """A cluster, as the kubeconfig names it, or that of the pod that this runs in.

    No request is made yet; a plugin of the kubeconfig that gets credentials is run.

    Args:
        context: None: the kubeconfig's current context.
        kubeconfig: a file, or a list of them as in $KUBECONFIG; None: $KUBECONFIG, or
            ~/.kube/config, or a pod's own service account.
        namespace: where jobs are made and looked for; None: the context's.
        client: None: "python", which keeps connections open; kubectl is a process of 0.1 s for
            each request.
        plugins: False: run no program of the kubeconfig; a context that needs one is refused.

    Raises:
        BackendError: no cluster is configured, or the kubeconfig cannot be used.
    """
    from k8sjob.backends.cluster.backend import ClusterBackend  # noqa: PLC0415 - commands start light

    cluster = access(context, kubeconfig, namespace, plugins=plugins)
    if client == "kubectl":
        from k8sjob.kube.client.kubectl import KubectlTransport  # noqa: PLC0415 - only one of them

        return ClusterBackend(KubectlTransport(cluster))
    from k8sjob.kube.client.python_client import PythonTransport  # noqa: PLC0415 - only one of them

    return ClusterBackend(PythonTransport(cluster))
