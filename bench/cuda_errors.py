"""Errors of CUDA, NCCL and gloo, made on purpose, and the cause that `why` names for each.

As a program (`python bench/cuda_errors.py CASE`) it is one rank that fails. Only one GPU is needed.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).resolve()
PATIENCE = timedelta(seconds=8)


@dataclass(frozen=True)
class Case:
    """An error: what raises it, the causes that are right, and how many ranks it takes."""

    fail: Callable[[], None]
    on_gpu: str
    on_cpu: str = "gpu-driver"
    world: int = 1


def wrong_device() -> None:
    """A GPU by a number that there is none of."""
    import torch

    torch.zeros(1, device=f"cuda:{torch.cuda.device_count()}")


def out_of_memory() -> None:
    """More memory than any GPU has."""
    import torch

    torch.empty(1 << 45, dtype=torch.uint8, device="cuda")


def wrong_token() -> None:
    """An embedding that the table does not have: an assertion on the GPU."""
    import torch

    table = torch.nn.Embedding(4, 4).to("cuda")
    print(table(torch.tensor([7], device="cuda")).sum().item())


def wrong_label() -> None:
    """A label beyond the classes."""
    import torch

    logits = torch.zeros(2, 3, device="cuda")
    print(torch.nn.functional.cross_entropy(logits, torch.tensor([0, 5], device="cuda")).item())


def in_fork() -> None:
    """A data set that makes its tensors on the GPU, in a worker that was forked."""
    import torch

    class OnGpu(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int):
            return torch.ones(1, device="cuda") * index

    torch.zeros(1, device="cuda")
    context = {"num_workers": 1, "multiprocessing_context": "fork"}
    print(sum(float(batch.sum()) for batch in torch.utils.data.DataLoader(OnGpu(), **context)))


def other_device() -> None:
    """A checkpoint for a GPU that this process does not have."""
    import torch

    with tempfile.NamedTemporaryFile() as file:
        torch.save(torch.zeros(1), file.name)
        torch.load(file.name, map_location="cuda:63", weights_only=True)


def join(backend: str, timeout: timedelta = PATIENCE) -> Any:
    """The process group; all ranks use the first GPU where there is one."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend, timeout=timeout)
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def same_gpu() -> None:
    """Two ranks of NCCL on one GPU."""
    import torch
    import torch.distributed as dist

    device = join("nccl", timedelta(seconds=60))
    dist.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize()


def one_is_missing() -> None:
    """The second of two ranks never joins."""
    os.environ["WORLD_SIZE"] = "2"
    join("gloo")


def one_does_not_call() -> None:
    """A collective of NCCL that rank 0 does not call: its identifier never comes."""
    import time

    import torch
    import torch.distributed as dist

    device = join("nccl")
    if os.environ["RANK"] == "0":
        time.sleep(3 * PATIENCE.seconds)
    else:
        dist.all_reduce(torch.zeros(1, device=device))


def one_is_killed() -> None:
    """A rank that dies in a step; the other one learns of it from gloo."""
    import torch
    import torch.distributed as dist

    device = join("gloo")
    for step in range(5):
        if step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1, device=device))


CASES = {
    "a GPU that there is not": Case(wrong_device, "crash"),
    "out of memory": Case(out_of_memory, "gpu-memory"),
    "two ranks on one GPU": Case(same_gpu, "same-gpu", world=2),
    "a rank that is killed": Case(one_is_killed, "killed", "killed", world=2),
    "a rank that never joins": Case(one_is_missing, "rendezvous", "rendezvous"),
    "a rank that does not call": Case(one_does_not_call, "collective-timeout", world=2),
    "a token beyond the table": Case(wrong_token, "crash"),
    "a label beyond the classes": Case(wrong_label, "crash"),
    "the GPU in a forked worker": Case(in_fork, "crash"),
    "a checkpoint of another GPU": Case(other_device, "crash", "crash"),
}


def explained(name: str, *, on_gpu: bool) -> tuple[bool, str, str]:
    """Whether `why` names the right cause of a case; what it says; and the ranks' whole output."""
    case = CASES[name]
    ends = ranks.ended(HERE, name, world=case.world, GLOO_SOCKET_IFNAME="lo")
    findings = list(diagnosed(ends))
    right = case.on_gpu if on_gpu else case.on_cpu
    first = findings[0] if findings else None
    specific = first is not None and "correct the script; its output" not in first.next_step
    told = f"{first.id}: {first.message}; {first.next_step}" if first else "nothing"
    output = "\n".join(f"--- exit code {code}\n{text}" for code, text in ends)
    return specific and first is not None and first.id == right, told, output


def diagnosed(ends: list[tuple[int, str]]) -> Iterator[Any]:
    """The findings of `why` for replicas that ended so; it needs no cluster."""
    from k8sjob.backends.api import Snapshot
    from k8sjob.observe.diagnose import diagnose
    from k8sjob.targets.jobs import job_of

    label, names = "training.kubeflow.org", ["master-0", *(f"worker-{n}" for n in range(9))]
    template = {"template": {"spec": {"containers": [{"name": "pytorch", "image": "none"}]}}}
    roles = {
        "Master": {"replicas": 1, **template},
        "Worker": {"replicas": len(ends) - 1, **template},
    }
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "job", "namespace": "gpu", "uid": "u"},
        "spec": {"pytorchReplicaSpecs": {role: roles[role] for role in [*roles][: len(ends)]}},
        "status": {
            "conditions": [{"type": "Failed", "status": "True", "reason": "PyTorchJobFailed"}]
        },
    }
    now, pods, logs = datetime.now(UTC), [], {}
    for name, (code, text) in zip(names, ends, strict=False):
        role, _, index = name.rpartition("-")
        logs[name] = text.splitlines()
        state = {"exitCode": code, "reason": "Error" if code else "Completed"}
        state["finishedAt"] = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        labels = {f"{label}/replica-type": role, f"{label}/replica-index": index}
        container = {"name": "pytorch", "restartCount": 0, "state": {"terminated": state}}
        phase = "Failed" if code else "Succeeded"
        pods.append(
            {
                "metadata": {"name": f"job-{name}", "labels": labels},
                "spec": {"nodeName": "node-1"},
                "status": {"phase": phase, "containerStatuses": [container]},
            }
        )
    return iter(diagnose(Snapshot(job_of(job), tuple(pods), ()), logs, now=now))


if __name__ == "__main__":
    CASES[sys.argv[1]].fail()
