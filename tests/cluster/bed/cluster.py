"""A cluster that tests may use: one that is there already, or a `Bed`."""

import functools
import os
import subprocess
from pathlib import Path

from k8sjob.kube.client.kubeconfig import access
from k8sjob.kube.client.python_client import PythonTransport
from k8sjob.kube.client.transport import ApiError

REPOSITORY = "k8sjob-tests"  # one for all images: what a repository has is not pushed again
KUEUE = "apis/kueue.x-k8s.io/v1beta2"
TRAINER = "apis/trainer.kubeflow.org/v1alpha1"
GROUPS = {
    "admissionchecks": KUEUE,
    "clusterqueues": KUEUE,
    "jobs": "apis/batch/v1",
    "jobsets": "apis/jobset.x-k8s.io/v1alpha2",
    "localqueues": KUEUE,
    "pytorchjobs": "apis/kubeflow.org/v1",
    "resourceflavors": KUEUE,
    "storageclasses": "apis/storage.k8s.io/v1",
    "topologies": KUEUE,
    "trainingruntimes": TRAINER,
    "trainjobs": TRAINER,
    "workloadpriorityclasses": KUEUE,
    "workloads": KUEUE,
}


def plural(kind):
    """The resource of a kind."""
    name = kind.lower()
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith("s") else f"{name}s"


def path(resource, *, namespace="", name="", part=""):
    """Where the apiserver has a resource, one of its objects, or a part of that."""
    place = f"namespaces/{namespace}" if namespace else ""
    parts = (GROUPS.get(resource, "api/v1"), place, resource, name, part)
    return "/" + "/".join(filter(None, parts))


class ClusterError(Exception):
    """A cluster did not do what it was told."""


class Cluster:
    """A Kubernetes with the training operator, and a registry that its nodes pull from.

    Attributes:
        kubeconfig: path of a kubeconfig, or several as in KUBECONFIG.
        registry: host and port of the registry, the same for this machine and for the nodes.
    """

    def __init__(self, kubeconfig, registry):
        self.kubeconfig = kubeconfig
        self.registry = registry
        self.kubectl_path = "kubectl"

    @property
    def node_folder(self):
        """Where the /tmp of the node of a bed lies on this machine; None for other clusters."""
        bed = Path(self.kubeconfig).parents[1]
        return bed / "tmp" if (bed / "bed.json").exists() else None

    @property
    def base_image(self):
        """An image with Python and torch, in the registry."""
        return f"{self.registry}/{REPOSITORY}:base"

    @property
    def env(self):
        """The environment of a program that is to work with this cluster."""
        search = os.environ["PATH"]
        if (folder := Path(self.kubectl_path).parent) != Path():
            search = f"{folder}{os.pathsep}{search}"
        return os.environ | {"KUBECONFIG": str(self.kubeconfig), "PATH": search}

    @functools.cached_property
    def api(self):
        """Requests from this process: what is polled by kubectl keeps a core busy."""
        return PythonTransport(access(None, self.kubeconfig, None))

    def read(self, resource, name="", namespace=""):
        """The objects of a resource; or the one of that name, None where there is none."""
        try:
            found = self.api.request("GET", path(resource, namespace=namespace, name=name))
        except ApiError as error:
            if error.code != 404:
                raise
            return None
        return found if name else found["items"]

    def create(self, document, namespace="", **query):
        """An object as the apiserver has made it from a document."""
        where = path(plural(document["kind"]), namespace=namespace)
        return self.api.request("POST", where, body=document, query=query)

    def delete(self, resource, name="", namespace=""):
        """Delete an object, or all of a resource; it may be there for a while."""
        self.api.request("DELETE", path(resource, namespace=namespace, name=name))

    def logs(self, pod, namespace, *, stop=None, **query):
        """The lines that a pod's container has written; none where it has none, or none yet."""
        where = path("pods", namespace=namespace, name=pod, part="log")
        try:
            for line in self.api.stream(where, query=query, idle=900, stop=stop):
                yield line.decode()
        except ApiError as error:
            if error.code not in (400, 404):  # it has not started, or it is gone
                raise

    def kubectl(self, *args, stdin=None, check=True, timeout=120):
        """Run kubectl; the completed process, with text."""
        argv = [self.kubectl_path, *args]
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=self.env,
        )
        if check and done.returncode != 0:
            raise ClusterError(f"kubectl {' '.join(map(str, args))}: {done.stderr.strip()}")
        return done

    def push(self, buildah, image):
        """Push an image of buildah's; returns a reference by digest, for a manifest."""
        name = f"{self.registry}/{REPOSITORY}"
        tag = image.rsplit("/", 1)[-1].replace(":", "-")
        return f"{name}@{buildah.push(image, f'{name}:{tag}')}"
