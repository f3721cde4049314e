"""The bed itself: nothing is left of it, however it ends, and two do not meet."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from baseimage import Buildah, missing_tools
from cluster.bed.components import ORDER
from cluster.bed.keeper import sweep

pytestmark = pytest.mark.chaos
TESTS = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys, time
from cluster.bed import Bed
with Bed(parts=("registry", "containerd")) as bed:
    print(bed.folder, flush=True)
    time.sleep(600)
"""


def processes(name):
    """Every process whose command line, or where something is mounted for it, tells of a bed."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            about = (process / "cmdline").read_bytes() + (process / "mountinfo").read_bytes()
            found += [int(process.name)] if name.encode() in about else []
    return found


def traces(folder):
    """All that may be left of a bed, by where it was found."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if folder.name in line]
    cgroups = [str(p) for p in Path("/sys/fs/cgroup").rglob(folder.name)]
    return {
        "folder": [str(folder)] if folder.exists() else [],
        "processes": processes(folder.name),
        "mounts": mounts,
        "cgroups": cgroups,
    }


NOTHING = {"folder": [], "processes": [], "mounts": [], "cgroups": []}


def interfaces():
    return sorted(entry.name for entry in Path("/sys/class/net").iterdir())


def run_a_pod(bed, eventually):
    """A pod that ended well: the kubelet, the node's network and the scheduler have worked."""
    eventually(lambda: bed.read("serviceaccounts", "default", "default"), "the account")
    command = ["--restart=Never", f"--image={bed.base_image}", "--"]
    lookup = "until getent hosts kubernetes; do sleep 1; done"  # on a busy machine DNS comes late
    bed.kubectl("run", "lookup", *command, "sh", "-c", lookup)
    ended = lambda: bed.read("pods", "lookup", "default")["status"]["phase"] == "Succeeded"  # noqa: E731
    eventually(ended, "the pod's end")
    assert "10.96.0.1" in bed.kubectl("logs", "lookup").stdout


def test_two_beds_side_by_side_leave_nothing(a_bed, eventually):
    before = interfaces()
    with a_bed() as one, a_bed() as other:
        folders = [one.folder, other.folder]
        for bed in (one, other):
            run_a_pod(bed, eventually)
        assert all(len(processes(folder.name)) > len(ORDER) for folder in folders)
        assert one.kubectl("get", "pods", "-o", "name").stdout == "pod/lookup\n"
    eventually(lambda: [traces(folder) for folder in folders] == [NOTHING, NOTHING], "their end")
    assert interfaces() == before


@pytest.mark.parametrize("victim", ["owner", "keeper"])
def test_a_bed_ends_with_whoever_held_it(a_bed, eventually, victim):
    owner = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        folder = Path(owner.stdout.readline().strip())
        keeper = json.loads((folder / "bed.json").read_text())["keeper"]
        assert len(processes(folder.name)) > 2
        os.kill(owner.pid if victim == "owner" else keeper, signal.SIGKILL)
        eventually(lambda: not processes(folder.name), "the end of its processes")
        if victim == "keeper":  # nobody was left to clear up; the next bed does
            assert folder.exists()
            sweep(folder.parent)
        eventually(lambda: not folder.exists(), "the end of its folder")
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    eventually(lambda: traces(folder) == NOTHING, "its last process's end")


def test_a_developers_cluster_outlives_the_program_that_made_it(a_bed, eventually):
    made = subprocess.run(
        [sys.executable, "-m", "cluster.bed", "up"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    exports = dict(line.removeprefix("export ").split("=", 1) for line in made.stdout.splitlines())
    folder = Path(exports["KUBECONFIG"]).parents[1]
    try:
        nodes = subprocess.run(
            ["sh", "-c", f"{made.stdout}kubectl get nodes -o name"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert nodes.stdout == "node/node\n"
        assert exports["K8SJOB_TEST_REGISTRY"].startswith("127.0.0.1:")
        assert folder.name not in sweep(folder.parent)
    finally:
        os.kill(json.loads((folder / "bed.json").read_text())["keeper"], signal.SIGTERM)
    eventually(lambda: not folder.exists(), "the cluster's end")
    eventually(lambda: traces(folder) == NOTHING, "its last process's end")


def layers(reference):
    """The digests of an image's layers, as its registry has them."""
    argv = ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{reference}"]
    found = subprocess.run(argv, capture_output=True, text=True, check=True)
    return [layer["digest"] for layer in json.loads(found.stdout)["layers"]]


def test_what_is_built_travels_by_its_own_layers(cluster, tmp_path):
    """An image upon the base has the base's layer as it is, so that no node unpacks it again."""
    if reason := missing_tools():
        pytest.skip(reason)
    buildah = Buildah()
    (tmp_path / "Dockerfile").write_text(f"FROM {buildah.base_image()}\nRUN date +%N > /made\n")
    reference = cluster.push(buildah, buildah.build(tmp_path, "localhost/k8sjob-test-small"))
    base = layers(cluster.base_image)
    assert layers(reference)[: len(base)] == base
