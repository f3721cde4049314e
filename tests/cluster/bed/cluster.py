"""A cluster that tests may use: one that is there already, or a `Bed`."""

import os
import subprocess
from pathlib import Path

REPOSITORY = "k8sjob-tests"  # one for all images: what a repository has is not pushed again


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
    def base_image(self):
        """An image with Python and torch, in the registry."""
        return f"{self.registry}/{REPOSITORY}:base"

    @property
    def env(self):
        """The environment of a program that is to work with this cluster."""
        path = os.environ["PATH"]
        if (folder := Path(self.kubectl_path).parent) != Path():
            path = f"{folder}{os.pathsep}{path}"
        return os.environ | {"KUBECONFIG": str(self.kubeconfig), "PATH": path}

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
