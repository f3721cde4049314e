"""Ranks that call different things: argv[1] is {"case": name}; rank 0 is the odd one out."""

import json
import sys

import torch

from k8sjob import runtime

case = json.loads(sys.argv[1])["case"]
DATA = [(torch.ones(1), torch.ones(1))] * 12

with runtime.session() as job:
    data = DATA[:6] if case == "length" and job.is_main else DATA
    if case == "barrier" and job.is_main:
        job.barrier()
    if case == "shape":
        for size in [*range(1, 40), 41 if job.is_main else 40]:
            job.all_reduce(torch.ones(size))
    run = job.prepare(
        lambda: torch.nn.Linear(1, 2 if case == "model" and job.is_main else 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.1}),
    )
    for _ in run.epochs(2):
        for batch in run.batches(data, batch_size=1):
            run.step(*batch, weight=1.0 if case == "weight" and job.is_main else None)
            if case == "evaluate" and job.is_main:
                job.log(**run.evaluate(DATA))
            if case == "return" and job.is_main:
                sys.exit(0)
            if case == "raise" and job.is_main:
                raise KeyError("of rank 0")
        if case == "reduce" and job.is_main:
            job.reduce(loss=(1.0, 1))
