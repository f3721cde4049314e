"""A training whose every step is told: what the tests of the runtime start as ranks.

The one argument is a JSON object, see OPTIONS.
"""

import functools
import json
import os
import signal
import sys
import time

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional

from k8sjob import runtime
from k8sjob.runtime.comm.mesh import Mesh

OPTIONS = {
    "samples": 96,
    "epochs": 3,
    "batch": {"batch_size": 8},
    "tail": "pad",
    "dropout": 0.0,
    "norm": False,
    "pause": 0.0,  # seconds in each step
    "kill": None,  # [rank, step]: that rank kills itself before that step, unless it resumed
    "hold": None,  # the step before which it waits for its stop, unless it resumed
    "wait": 0.0,  # seconds in the session before training
    "slow_leave": None,  # [rank, seconds]: that rank stays in the session after training
    "count": False,  # count the reductions of gradients
    "linger": 0.0,  # seconds that rank 0 stays in the session after training
    "model": "dense",  # or "bags"
    "busy": None,  # [rank, seconds]: what that rank's loss takes to compute
}


def samples(count):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 6, generator=generator)
    targets = (inputs @ torch.randn(6, 3, generator=generator)).argmax(dim=1)
    return torch.utils.data.TensorDataset(inputs, targets)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.dense = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.dense(self.bags((inputs * 4).long().clamp(-10, 9) + 10))


def build(options):
    if options["model"] != "dense":
        return {"bags": Bags}[options["model"]]().double()
    norm = nn.BatchNorm1d(16) if options["norm"] else nn.Identity()
    dropout = nn.Dropout(options["dropout"])
    return nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), dropout, nn.Linear(16, 3)).double()


def counted(reductions, bucket):
    reductions.append(bucket.index())
    return allreduce_hook(None, bucket)


def averaged(mesh, reductions, average, tensors):
    reductions.append(len(tensors))
    return average(mesh, tensors)


def loss_for(rank, busy):
    def loss(output, targets):
        until = time.thread_time() + (busy[1] if busy and busy[0] == rank else 0)
        while time.thread_time() < until:
            pass
        return functional.cross_entropy(output, targets)

    return loss


def await_saves(job):
    """Wait until no checkpoint is being written, here or by another rank."""
    while job.checkpoint_dir and list(job.checkpoint_dir.glob(".step-*")):
        time.sleep(0.01)


def main():
    options = {**OPTIONS, **json.loads(sys.argv[1])}
    torch.set_default_dtype(torch.float64)
    with runtime.session(seed=3) as job:
        # In slices: a signal that comes just before a sleep begins is handled after it.
        for _ in range(int(options["wait"] * 20)):
            time.sleep(0.05)
        run = job.prepare(
            lambda: build(options),
            loss=loss_for(job.rank, options["busy"]),
            optimizer=(torch.optim.SGD, {"lr": 0.2, "momentum": 0.9}),
        )
        reductions = []
        if options["count"]:
            run._strategy.wrapped.register_comm_hook(reductions, counted)
            Mesh.average = functools.partialmethod(averaged, reductions, Mesh.average)
        data, begun = samples(options["samples"]), None
        for _ in run.epochs(options["epochs"]):
            losses = run.state.setdefault("losses", [])
            begun = run.steps if begun is None else begun
            resumed = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
            for inputs, targets in run.batches(data, tail=options["tail"], **options["batch"]):
                if options["kill"] == [job.rank, run.steps] and not resumed:
                    await_saves(job)
                    os.kill(os.getpid(), signal.SIGKILL)
                while options["hold"] == run.steps and not begun and not job.should_stop():
                    time.sleep(0.05)
                time.sleep(options["pause"])
                run.step(inputs, targets)
            losses.append(run.loss)
        found = run.evaluate(data, batch_size=7)
        state = run._strategy.capture(run.optimizer).get("model", {})  # rank 0's
        weights = torch.cat([torch.zeros(0), *(value.flatten() for value in state.values())])
        everywhere = job.gather(
            weights.sum() if job._context.config.strategy == "ddp" else torch.zeros(())
        )
        if job.is_main:
            result = {
                "losses": losses,
                "steps": run.steps,
                "weights": weights.tolist(),
                "evaluation": found,
                "reductions": len(reductions),
                "equal": all(bool(other == everywhere[0]) for other in everywhere),
            }
            sys.stdout.write(f"RESULT {json.dumps(result)}\n")
            sys.stdout.flush()
            time.sleep(options["linger"])
        if options["slow_leave"] and options["slow_leave"][0] == job.rank:
            time.sleep(options["slow_leave"][1])


main()
