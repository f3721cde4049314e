"""From one line of code changed to the first step in the pods: k8sjob, and the official SDK.

    python bench/sdk.py [--rounds 5]

The SDK's way is a function whose source is the container's command, after `pip install` of what it
needs, at each start; k8sjob's is a layer, on an image in which that is installed already. Both run
the same function in a cluster of its own (see tests/cluster/bed; root on Linux), by the operator's
own init container. pip finds its packages in a folder of the node: no index is faster.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

import first_step
import peers
from cluster.bed import Bed
from cluster.desk import Desk

PACKAGES: Final = ("einops", "tqdm")
TRAIN: Final = """\
def train():
    import time

    import einops, tqdm, torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.zeros(8, 2)).sum().backward()
    optimizer.step()
    print("the first step was at", time.time(), flush=True)
    dist.destroy_process_group()

"""
CLIENT: Final = """
import sys
from kubernetes import client
from kubeflow.training import TrainingClient

own = {{"cpu": "2", "memory": "800Mi"}}, {{"cpu": "100m", "memory": "300Mi"}}
TrainingClient().create_job(
    name=sys.argv[1],
    job_kind="PyTorchJob",
    base_image={base!r},
    train_func=train,
    num_workers=2,
    num_procs_per_worker=1,
    packages_to_install={packages!r},
    resources_per_worker=client.V1ResourceRequirements(limits=own[0], requests=own[1]),
    env_vars={{
        "OMP_NUM_THREADS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "/wheels",
        "PIP_BREAK_SYSTEM_PACKAGES": "1",
        "PATH": "/wheels:/usr/local/bin:/usr/bin:/bin",
    }},
    volumes=[
        client.V1Volume(name="wheels", host_path=client.V1HostPathVolumeSource(path="/tmp/wheels"))
    ],
    volume_mounts=[client.V1VolumeMount(name="wheels", mount_path="/wheels")],
)
"""


def stepped(desk: Desk, name: str, submit: Callable[[], object]) -> dict[str, float]:
    """Seconds until a submission is done, and until the first step."""
    began = time.time()
    submit()
    submitted = time.time()
    where = ["-n", desk.namespace]
    done = ["--for=condition=Succeeded", f"pytorchjob/{name}", "--timeout=120s"]
    desk.cluster.kubectl("wait", *done, *where)
    detail = desk.cluster.kubectl("logs", f"{name}-master-0", *where).stdout
    desk.cluster.kubectl("delete", "pytorchjob", name, "--wait=true", *where)
    at = float(re.search(r"the first step was at (\S+)", detail)[1])
    return {"submitted": submitted - began, "first step": at - began}


def measure(rounds: int = 5) -> dict[str, dict[str, float]]:
    """Medians; the two ways alternate."""
    found: dict[str, list[dict[str, float]]] = {"k8sjob": [], "kubeflow-training": []}
    with tempfile.TemporaryDirectory() as name, Bed() as bed:
        wheels = bed.folder / "tmp/wheels"  # the /tmp of its node
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
        subprocess.run([*download, *PACKAGES], check=True)
        wheels.chmod(0o755)
        # By which the SDK starts the function. Debian's fails, since its torch has no libuv; one
        # process in a pod needs no more than what the operator sets, and starts sooner without.
        torchrun = wheels / "torchrun"
        torchrun.write_text('#!/bin/sh\nexec python "$@"\n')
        torchrun.chmod(0o755)
        desk = Desk(bed, "default", Path(name))
        client = desk.folder / "client.py"
        file = first_step.job(desk, pip=PACKAGES)
        desk.call("build", file, "--builder", "uv")
        sdk = [str(peers.environment() / "python"), str(client)]
        for number in range(rounds + 1):
            code = f"{TRAIN}# edit {number}\n"
            (desk.folder / "main.py").write_text(f"{code}train()\n")
            client.write_text(code + CLIENT.format(base=bed.base_image, packages=[*PACKAGES]))
            ways = {
                "k8sjob": lambda: stepped(desk, "tiny", lambda: desk.call("submit", file)),
                "kubeflow-training": lambda: stepped(
                    desk, "sdk", lambda: subprocess.run([*sdk, "sdk"], env=bed.env, check=True)
                ),
            }
            for way in sorted(ways, reverse=bool(number % 2)):
                seconds = ways[way]()
                if number:  # the first round pulls, and warms the page cache
                    found[way].append(seconds)
    return {
        way: {what: statistics.median(one[what] for one in times) for what in times[0]}
        for way, times in found.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    print(json.dumps(measure(parser.parse_args().rounds), indent=1))
