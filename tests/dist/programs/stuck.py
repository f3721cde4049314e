"""A rank that does not come: argv[1] is {"where": place, "how": what it does there}."""

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from k8sjob import runtime
from k8sjob.runtime.comm.watchdog import Watchdog

asked = json.loads(sys.argv[1])
LAST = int(os.environ["WORLD_SIZE"]) - 1


def arrive(where, rank):
    if (where, rank) == (asked["where"], LAST):
        stay_away()


def stay_away():
    if asked["how"] == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[asked["how"]])


def dying(*_args, **_options):
    time.sleep(0.5)  # the others connect by now, and wait for this one
    stay_away()


def slow_to_say(watchdog, store, answer=Watchdog._answer_alarm):
    time.sleep(0.5)
    answer(watchdog, store)


first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if asked["where"] == "connect" and os.environ["RANK"] == str(LAST) and first_start:
    dist.init_process_group = dying

ME = int(os.environ["RANK"])  # under a parameter server it is not job.rank
with runtime.session() as job:
    arrive("before", ME)
    if asked["where"] == "work":  # rank 1 comes late, and waits in C++ then
        if job.rank == 1:
            time.sleep(2)
        arrive("work", job.rank)
        dist.all_reduce(torch.ones(1), async_op=True).wait()
    if asked["where"] == "barrier":  # rank 1 has waited enough before rank 0
        if job.rank == 0:
            time.sleep(0.5)
        if job.rank == 1:
            Watchdog._answer_alarm = slow_to_say
        arrive("barrier", job.rank)
        job.barrier()
    if asked["where"] == "caught":
        try:
            job.barrier() if job.rank < LAST else time.sleep(8)
        except RuntimeError:
            sys.exit(7)
    if asked["where"] == "failed":
        try:
            job.all_reduce(torch.ones(1, dtype=torch.complex64), "max")
        except ValueError:
            time.sleep(6)  # longer than a collective may take
    if asked["where"] == "own":  # a loop of one's own, without should_stop()
        for step in range(100):
            if step == 5:
                arrive("own", ME)
            dist.all_reduce(torch.ones(1))
    if asked["where"] == "another":  # the last one comes first, and has waited enough before others
        if job.rank == LAST:
            Watchdog._answer_alarm = slow_to_say
            dist.recv(torch.ones(1), src=0)
        time.sleep(0.5)
        dist.all_reduce(torch.ones(1))
    run = job.prepare(
        lambda: torch.nn.Linear(1, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.1}),
    )
    for _ in run.epochs(1):
        for batch in run.batches([(torch.ones(1), torch.ones(1))] * 3, batch_size=1):
            run.step(*batch)
    arrive("after", job.rank)
    if asked["where"] == "after":
        job.barrier()
    arrive("leaving", job.rank)
