"""Jobs in a cluster: the connection to it, as the kubeconfig names it, and the back end."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Literal

from k8sjob.errors import BackendError, install_step
from k8sjob.kube.client.kubeconfig import access

if TYPE_CHECKING:
    from pathlib import Path

    from k8sjob.backends.cluster.backend import ClusterBackend

Client = Literal["python", "kubectl"]
"""The client that makes the requests: the `kubernetes` package, or the program kubectl."""


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
        client: None: the `kubernetes` package where it is installed, else kubectl.
        plugins: False: run no program of the kubeconfig; a context that needs one is refused.

    Raises:
        BackendError: no cluster is configured, the kubeconfig cannot be used, or there is no
            client.
    """
    from k8sjob.backends.cluster.backend import ClusterBackend  # noqa: PLC0415 - commands start light

    cluster = access(context, kubeconfig, namespace, plugins=plugins)
    # The package first: it keeps connections open, and kubectl is a process of 0.1 s for each
    # request.
    if client == "python" or (client is None and importlib.util.find_spec("kubernetes")):
        from k8sjob.kube.client.python_client import PythonTransport  # noqa: PLC0415 - only one of them

        return ClusterBackend(PythonTransport(cluster))
    from shutil import which  # noqa: PLC0415 - it loads all formats of archives

    if client is None and not which("kubectl"):
        raise BackendError(
            "no Kubernetes client is installed",
            f"{install_step('cluster')}, or install kubectl",
        )
    from k8sjob.kube.client.kubectl import KubectlTransport  # noqa: PLC0415 - only one of them

    return ClusterBackend(KubectlTransport(cluster))
