"""What the programs have in common that train several cases in one group.

The one argument of such a program is a JSON object {name: case}; a case changes some of the
program's OPTIONS. Every case starts anew with the same seed. Rank 0 tells {name: result}.
"""

import json
import sys
import zlib
from threading import Lock

import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import TensorDataset

from k8sjob import runtime
from k8sjob.runtime.base.errors import peer_loss

LENGTH = 16  # letters of a window


def text():
    """(data set of windows and the letters after each of theirs, size of the alphabet)"""
    prose = load_digits().DESCR  # 2,000 letters of English
    letters = sorted(set(prose))
    codes = torch.tensor([letters.index(letter) for letter in prose])
    windows = codes.unfold(0, LENGTH + 1, 1)
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous()), len(letters)


def guarded():
    """A loss that nothing can pickle."""
    lock = Lock()

    def loss(output, target):
        with lock:
            return functional.cross_entropy(output, target)

    return loss


def mark(tensors):
    """A number that differs where a bit does."""
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    return zlib.crc32(flat.numpy().tobytes())


def curve(job, run, data, case, given=lambda inputs: inputs):
    """Train; the loss of each step over all ranks."""
    losses = []
    for _ in run.epochs(case["epochs"]):
        for inputs, targets in run.batches(data, global_batch=case["batch"], tail=case["tail"]):
            count = run._shard.count * run._strategy.counts  # 0 where a sample stands in
            weight = len(targets) if case.get("weighted") else None
            loss = float(run.step(given(inputs), targets, weight=weight))
            losses.append(job.reduce(loss=(loss * count, count))["loss"])
            if run.steps == case["steps"]:
                return losses
    return losses


def tell(train, options, after=lambda: None):
    """Train all cases, those with "twice" a second time, and tell what became of each."""
    results = {}
    with runtime.session(seed=3) as job:
        for name, case in json.loads(sys.argv[1]).items():
            for run in (name, f"{name} again") if case.get("twice") else (name,):
                results[run] = _attempt(train, job, {**options, **case})
                after()
        if job.is_main:
            sys.stdout.write(f"RESULT {json.dumps(results)}\n")
            sys.stdout.flush()


def _attempt(train, job, case):
    """The result, or what was refused."""
    try:
        return train(job, case)
    except (ValueError, TypeError, RuntimeError) as error:
        if peer_loss(error):
            raise
        return {"error": f"{type(error).__name__}: {error}"}
