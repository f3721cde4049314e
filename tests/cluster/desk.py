"""A user at a terminal, before a real cluster."""

import json
import subprocess
import sys

import yaml

SLEEP = "echo hello; sleep 600 & wait"


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
        child = subprocess.Popen(
            [sys.executable, "-m", "k8sjob", *map(str, args)],
            env=env | ({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
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

    def objects(self, kind):
        """The objects of the namespace by name."""
        argv = ("get", kind, "-n", self.namespace, "-o", "json")
        items = json.loads(self.cluster.kubectl(*argv).stdout)["items"]
        return {item["metadata"]["name"]: item for item in items}

    def uid(self, name="tiny"):
        """The uid of a job."""
        return self.objects("pytorchjobs")[name]["metadata"]["uid"]
