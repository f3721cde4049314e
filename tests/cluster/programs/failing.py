"""A training in which one rank raises an exception, or hangs; the others wait for it."""

import os
import time

import torch

from k8sjob import runtime

with runtime.session() as job:
    for step in range(5):
        job.should_stop()
        if job.rank == 1 and step == 3:
            if os.environ["FAILS"] == "hangs":
                time.sleep(3600)
            raise ValueError(f"no sample 41 on rank {job.rank}")
        job.gather(torch.ones(1))
