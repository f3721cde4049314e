"""A user at a terminal, before a real cluster."""

import functools
import json
import re

import yaml

from k8sjob.backends.cluster import connect
from k8sjob.observe.status import job_status

from .commands import Command

SLEEP = "echo hello; sleep 600 & wait"


def shortened(text):
    """An example's script with two epochs of few steps: in a step, pods mostly wait for pods."""
    text = re.sub(r"epochs([(=])\d+", r"epochs\g<1>2", text)
    return re.sub(r"batches\(train, \w+=\d+", "batches(train, global_batch=128", text)


class Desk:
    """A user's terminal: a folder, a namespace, and the command line.

    Attributes:
        by: the options that choose the client.
    """

    def __init__(self, cluster, namespace, folder, by=()):
        self.cluster, self.namespace, self.folder, self.by = cluster, namespace, folder, by
        self.started = []

    def start(self, *args, kubeconfig=None):
        """Start `k8sjob ...`; the running process."""
        env = self.cluster.env | {"K8SJOB_STATE": str(self.folder / "state")}
        child = Command(args, env | ({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {}))
        self.started.append(child)
        return child

    def call(self, *args, code=0, **options):
        """Run `k8sjob ...`, which must end with the code; stdout and stderr."""
        child = self.start(*args, *self.by, **options)
        out, err = child.communicate(timeout=180)
        assert child.returncode == code, f"k8sjob {args} ended with {child.returncode}:\n{out}{err}"
        return out, err

    def file(self, script=SLEEP, name="tiny", **fields):
        """The job.yaml of a shell script, 1 Master and 1 Worker."""
        spec = {
            "name": name,
            "namespace": self.namespace,
            "image": self.cluster.base_image,
            "run": {"command": ["sh", "-c", script]},
            "replicas": {"workers": 1},
            "resources": {"cpu": "50m", "memory": "32Mi"},
            "policy": {"termination_grace": "2s"},
            **fields,
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(spec))
        return file

    def code(self, main, name="tiny", **fields):
        """The job.yaml of a Python script, which is put upon the base image."""
        (self.folder / "main.py").write_text(main)
        base, repository = self.cluster.base_image, f"{self.cluster.registry}/pushed/{name}"
        small = {"cpu": "1", "memory": "1Gi", "requests": {"cpu": "50m", "memory": "200Mi"}}
        own = {"image": {"repository": repository, "base": base}, "run": {"script": "main.py"}}
        return self.file(name=name, **{**own, "resources": small, **fields})

    def objects(self, kind):
        """The objects of the namespace by name."""
        items = self.cluster.read(kind, namespace=self.namespace)
        return {item["metadata"]["name"]: item for item in items}

    def status(self, name="tiny"):
        """What `k8sjob status` would print of the job: to wait for it costs no processes."""
        return job_status(self.backend.snapshot(self.backend.find(name)))

    @functools.cached_property
    def backend(self):
        """The cluster's back end for the namespace."""
        return connect(kubeconfig=self.cluster.kubeconfig, namespace=self.namespace)

    def result(self, ref, *replicas):
        """What rank 0 of a job of train.py has printed, in one of these replicas."""
        names = replicas or ("master-0",)
        lines = [line.text for name in names for line in self.backend.logs(ref, name)]
        (found,) = [line for line in lines if line.startswith("RESULT ")] or [lines[-20:]]
        return json.loads(found.removeprefix("RESULT "))

    def uid(self, name="tiny"):
        """The uid of a job."""
        return self.objects("pytorchjobs")[name]["metadata"]["uid"]
