"""A Kubernetes cluster on this machine, with the training operator: up, down, and its faults."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from baseimage import cache_home
from gomodules import CRDS, source

from . import build, components, controllers, images, pki
from .access import Access
from .build import binaries
from .cluster import GROUPS, Cluster, ClusterError, path
from .keeper import sweep

KEEPER = Path(__file__).with_name("keeper.py")
STOP = 15.0  # seconds that a component has to end by itself
NODE = "/api/v1/nodes/node"
GPU = "nvidia.com/gpu"
# What a controller's webhook, and nothing else, refuses: resource, kind and spec.
PROBES = {
    "operator": (
        "pytorchjobs",
        "PyTorchJob",
        {"pytorchReplicaSpecs": {"Worker": {"template": {"spec": {"containers": []}}}}},
    ),
    "jobset": ("jobsets", "JobSet", {"replicatedJobs": [], "network": {"subdomain": "1"}}),
    "trainer": ("trainjobs", "TrainJob", {"runtimeRef": {"name": "1", "kind": "TrainingRuntime"}}),
    "kueue": ("resourceflavors", "ResourceFlavor", {"nodeLabels": {"-": ""}}),
}


class Bed(Cluster):
    """One cluster in namespaces of its own, for as long as the `with` block lasts.

    Args:
        owner: the process with which the bed ends; 0: none, it stays up until `make cluster-down`.
        parts: the components to start, in this order.

    Attributes:
        folder: everything of this bed; gone when the bed is.
        logs: folder of the components' logs, one file for each.
    """

    def __init__(self, *, owner=None, parts=components.ORDER):
        self.owner = os.getpid() if owner is None else owner
        self.parts = parts
        self.bin = binaries()
        self.keeper = None
        self.altered = set()  # controllers with other settings than those of all tests

    def __enter__(self):
        beds = cache_home() / "beds"
        beds.mkdir(exist_ok=True)
        sweep(beds)
        self.folder = Path(tempfile.mkdtemp(prefix="k8sjob-bed-", dir=beds))
        self.folder.chmod(0o755)
        try:
            self._make()
            self._start_all()
        except BaseException as error:
            if (self.folder / "logs").exists():
                error.add_note(f"the components' logs are kept in {self.keep_logs()}")
            self.down()
            raise
        return self

    def __exit__(self, *_):
        if self.owner == os.getpid():
            self.down()

    def _make(self):
        """The namespaces and all files, before any component runs."""
        if "kubelet" in self.parts:
            images.clone(images.template(self.bin / "pause", _fill), self.folder / "lib")
        pki.make(self.folder / "pki")
        with (self.folder / "keeper.log").open("w") as log:
            # Nothing of ours may stay open in it: it can outlive us, and whoever reads us waits.
            self.keeper = subprocess.Popen(
                [sys.executable, str(KEEPER), str(self.folder), str(self.bin), str(self.owner)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        if not (line := self.keeper.stdout.readline()):
            raise ClusterError("the bed's keeper ended before it was ready")
        self._connect(json.loads(line))
        components.write_config(self.folder, self.access)
        self._until((self.folder / "control").exists, "the namespaces")

    def _connect(self, detail):
        """Know the ports of the bed's keeper, and its process."""
        super().__init__(self.folder / "conf/admin.kubeconfig", f"127.0.0.1:{detail['registry']}")
        self.log_folder = self.folder / "logs"
        self.kubectl_path = self.bin / "kubectl"
        self.keeper_pid = detail["keeper"]
        self.access = Access(detail["apiserver"], detail["registry"], self.folder / "pki")
        self.commands = components.commands(self.access.apiserver, self.base_image)

    @classmethod
    def attach(cls, folder):
        """The bed that another process has made, and that ends when that one says so."""
        bed = cls()
        bed.folder = Path(folder)
        bed._connect(json.loads((bed.folder / "bed.json").read_text()))
        return bed

    def _start_all(self):
        for name in self.parts:
            if name == "controller-manager":
                self.wait_ready("apiserver")
            if name == "operator":
                self._give_objects()
            self.start(name, wait=False)
        for name in self.parts:
            self.wait_ready(name)

    def _give_objects(self):
        module, file = CRDS["PyTorchJob"]
        crd = source(module) / file
        self.kubectl("apply", "--server-side", "-f", str(crd))
        self.apply(components.objects(self.folder))

    def apply(self, objects):
        """Server-side apply of several objects."""
        text = "\n".join(json.dumps(part) for part in objects)
        self.kubectl("apply", "--server-side", "-f", "-", stdin=text)

    def down(self):
        """End everything; nothing is left on the machine but logs that were kept."""
        if self.keeper is None:
            shutil.rmtree(self.folder)
            return
        self.keeper.send_signal(signal.SIGTERM)
        self.keeper.wait(180)
        self.keeper.stdout.close()

    def keep_logs(self):
        """Copy the logs to where they outlive the bed; return that folder."""
        kept = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}-logs-"))
        for log in (*self.log_folder.glob("*.log"), *self.folder.glob("*.log")):
            shutil.copy2(log, kept)
        return kept

    # --- components and their faults -----------------------------------------------------------

    def add(self, *names, **settings):
        """Start the controllers of these names and those they need, where they do not run yet.

        Tests use the fixtures `jobset`, `trainer` and `kueue` instead, which do this. Kueue manages
        what is in namespaces with the label `controllers.MANAGED`, and nothing else.

        Args:
            names: of `controllers.ALL`: jobset, trainer, kueue.
            settings: what the last one's configuration has instead of `controllers.ALL`'s, with
                which it starts anew, until `restore`; only in a bed that no other test uses.
        """
        with (self.folder / "add.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            built, server = build.controllers(), f"https://127.0.0.1:{self.access.apiserver}"
            if settings:
                self.altered.add(names[-1])
                self.kill(names[-1])
            added = [name for name in controllers.order(names) if name not in self.running()]
            for name in added:
                own = settings if name == names[-1] else {}
                first = not (self.folder / f"conf/{name}.yaml").exists()
                argv = controllers.prepare(name, self.folder, built, server, **own)
                self.commands[name] = argv
                if first:
                    parts = controllers.objects(name, self.folder, built)
                    text = "\n".join(map(json.dumps, parts))
                    self.kubectl("create", "--validate=false", "-f", "-", stdin=text)
                    # One that looks for its resources too early tries again after ten seconds.
                    self.kubectl("wait", "--for=condition=Established", "crd", "--all")
                self.start(name, wait=False)
            for name in added:
                self.wait_ready(name)
        self.parts = (*self.parts, *(name for name in added if name not in self.parts))

    def start(self, name, *, wait=True):
        """Start a component; returns when it serves."""
        env = components.EVERY_ENVIRONMENT | components.ENVIRONMENT.get(name, {})
        self._ask(op="start", name=name, argv=self.commands[name], env=env)
        if wait:
            self.wait_ready(name)

    def stop(self, name):
        """Ask a component to end, and insist after a while."""
        if self._ask(op="signal", name=name, number=signal.SIGTERM, timeout=STOP) is None:
            self.kill(name)

    def kill(self, name):
        """End a component at once."""
        self._ask(op="signal", name=name, number=signal.SIGKILL)

    def running(self):
        """The components that run now, and their process ids in the bed."""
        return self._ask(op="status")["running"]

    def restore(self, before):
        """Be as at a moment before: every component serves, and knows an apiserver made anew."""
        again = self.running().get("apiserver") != before["apiserver"]
        for name in self.parts:
            if again and name in components.WATCHING:
                self.kill(name)
            if name not in self.running():
                self.start(name)
        for name in self.altered:
            self.kill(name)
            self.add(name)
        self.altered.clear()

    def wait_ready(self, name):
        """Returns when the component does its work."""
        self._until(lambda: self._ready(name), f"{name} (see {self.log_folder / name}.log)", name)

    def _ready(self, name):
        match name:
            case "registry":
                return self.access.registry_answers()
            case "containerd":
                return self.inside("ctr", "--connect-timeout=1s", "version").returncode == 0
            case "apiserver":
                return self.access.request("GET", "/readyz")[0] == 200
            case "kubelet":
                healthy = self.access.request("GET", f"{NODE}/proxy/healthz")[0] == 200
                conditions = self._node_status().get("conditions", ())
                ready = any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)
                return healthy and ready
            case _ if name in PROBES:
                resource, kind, spec = PROBES[name]
                where = path(resource, namespace="" if kind == "ResourceFlavor" else "default")
                probe = {"kind": kind, "metadata": {"name": "probe"}, "spec": spec}
                probe["apiVersion"] = GROUPS[resource].removeprefix("apis/")
                told = self.access.request("POST", f"{where}?dryRun=All", probe)[1]
                return b"denied the request" in told
            case _:
                return True

    def _until(self, done, what, name=None, *, deadline=120.0):
        end = time.monotonic() + deadline
        while not done():
            if self._ended():
                raise ClusterError(f"the bed ended while waiting for {what}")
            if name is not None and name not in self.running():
                raise ClusterError(f"{name} ended; see {self.log_folder / name}.log")
            if time.monotonic() > end:
                raise ClusterError(f"waited {deadline:.0f} s in vain for {what}")
            time.sleep(0.2)

    def _ended(self):
        if self.keeper is not None:  # a process of ours is there until we have waited for it
            return self.keeper.poll() is not None
        return not Path(f"/proc/{self.keeper_pid}").exists()

    # --- what a test may want to be there ------------------------------------------------------

    def fake_gpus(self, count):
        """Let the node say that it has so many GPUs; returns when pods can ask for them."""
        # The kubelet keeps what it does not know of.
        change = {"status": {"capacity": {GPU: str(count)}, "allocatable": {GPU: str(count)}}}
        kind = "application/strategic-merge-patch+json"
        self.access.request("PATCH", f"{NODE}/status", change, kind)
        there = lambda: self._node_status().get("allocatable", {}).get(GPU) == str(count)  # noqa: E731
        self._until(there, f"{count} GPUs on the node")

    def _node_status(self):
        return json.loads(self.access.request("GET", NODE)[1]).get("status", {})

    # --- reaching in ---------------------------------------------------------------------------

    def inside(self, *argv):
        """Run a program in the bed's namespaces; the completed process, with text."""
        unshare = _only_child(self.keeper_pid)
        enter = ["nsenter", f"--target={_only_child(unshare)}", "--net", "--mount", "--pid", "--"]
        return subprocess.run(
            [*enter, *argv], capture_output=True, text=True, timeout=300, check=False
        )

    def _ask(self, *, timeout=30.0, **request):
        """One request to the supervisor; None when no answer came in time."""
        # A socket's path is at most 108 bytes; one below /proc is always short.
        folder = os.open(self.folder, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX) as control:
                control.settimeout(timeout)
                control.connect(f"/proc/self/fd/{folder}/control")
                control.sendall(json.dumps(request).encode() + b"\n")
                answer = json.loads(control.makefile().readline())
        except TimeoutError:
            return None
        finally:
            os.close(folder)
        if "error" in answer:
            raise ClusterError(answer["error"])
        return answer


def _only_child(pid):
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return child


def _fill(buildah, base, folder):
    """Make the template: push the base image, and let containerd pull it and the pause image."""
    with Bed(parts=("registry", "containerd")) as bed:
        print("preparing the test cluster's node", file=sys.stderr)
        pause = images.pause_image(buildah, bed.bin / "pause", components.PAUSE)
        buildah.push(base, bed.base_image)
        archive = bed.folder / "tmp/pause.tar"
        buildah("push", pause, f"docker-archive:{archive}:{pause}")
        for argv in (["import", "/tmp/pause.tar"], ["pull", "--plain-http", bed.base_image]):
            done = bed.inside("ctr", "--namespace", "k8s.io", "images", *argv)
            if done.returncode != 0:
                raise ClusterError(f"ctr images {' '.join(argv)}: {done.stderr.strip()}")
        bed.stop("containerd")
        bed.stop("registry")
        subprocess.run(["cp", "-al", bed.folder / "lib", folder], check=True)
