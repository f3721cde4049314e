"""`python -m cluster.bed up`: a cluster to work with; `down`: end it, and clear up after others.

`add jobset trainer kueue` starts these controllers in it (`Bed.add`). `build` makes what every
cluster needs: its programs, its images and the template of its node; `controllers` the programs of
`add`, and the base image of a newer Debian.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from baseimage import NEWER, Buildah, cache_home

from . import build as programs
from .bed import Bed
from .controllers import MANAGED
from .keeper import sweep


def up():
    """Start a cluster that outlives this process, and say how to use it."""
    with Bed(owner=0) as bed:
        print(f"export KUBECONFIG={bed.kubeconfig}")
        print(f"export K8SJOB_TEST_REGISTRY={bed.registry}")
        print(f"export PATH={bed.bin}:$PATH")


def add(*names):
    """Start controllers in the cluster of KUBECONFIG, which `up` started."""
    Bed.attach(Path(os.environ["KUBECONFIG"]).parents[1]).add(*names)
    label = ",".join(f"{key}={value}" for key, value in MANAGED.items())
    print(f"Kueue, where it runs, manages namespaces with the label {label}")


def down():
    """End the clusters that `up` started; those of running tests stay."""
    beds = cache_home() / "beds"
    for folder in beds.glob("k8sjob-bed-*"):
        with contextlib.suppress(OSError, ValueError):
            bed = json.loads((folder / "bed.json").read_text())
            if bed["owner"] == 0 and folder.name not in sweep(beds):
                os.kill(bed["keeper"], signal.SIGTERM)
                while folder.exists():
                    time.sleep(0.05)
                print(f"ended {folder.name}")
    for name in sweep(beds):
        print(f"cleared up after {name}")


def build():
    """Make what lies in the cache, so that no test has to wait for it."""
    with Bed():
        print("the test cluster is built", file=sys.stderr)


def controllers():
    """Make what only some tests need: controllers, and the base image that has a newer torch."""
    programs.controllers()
    with contextlib.suppress(subprocess.CalledProcessError):  # the test that needs it is skipped
        Buildah().base_image(NEWER)


COMMANDS = {"up": up, "add": add, "down": down, "build": build, "controllers": controllers}
if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
