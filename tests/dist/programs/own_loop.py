"""A loop of one's own: the session alone, with a common stop."""

import json
import sys
import time

import torch

from k8sjob import runtime

OPTIONS = {"steps": 10, "slow_save": 0.0, **json.loads(sys.argv[1])}


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


with runtime.session() as job:
    state = job.load() or {"step": 0}
    say(f"from {state['step']}")
    for step in range(state["step"], OPTIONS["steps"]):
        if job.should_stop():
            say(f"stopped at {step} ")
            job.save(step, {"step": step})
            if job.is_main:
                time.sleep(OPTIONS["slow_save"])
            raise SystemExit(143)
        job.all_reduce(torch.ones(1))
        time.sleep(0.002)
        if step == 100:
            say("going")
