"""A wall clock that is stepped, on one rank or on all: nothing ends, nothing is done twice."""

import json
import os
import re
import subprocess
import sys
import time

import pytest
from clocks import COMPILER, Clocks

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler (apt-get install gcc)"),
]
PROGRAM = """
import time
import torch
from k8sjob import runtime

data = torch.utils.data.TensorDataset(*torch.randn(2, 80, 1).unbind())
with runtime.session() as job:
    run = job.prepare(
        lambda: torch.nn.Linear(1, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.1}),
    )
    for epoch in run.epochs(4):
        for x, y in run.batches(data, batch_size=2):
            time.sleep(0.05)
            run.step(x, y)
            if job.is_main:
                print("STEP", run.steps, flush=True)
    print("CLOCK", job.rank, int(time.time()), flush=True)
"""
JOB = """
name: clock
image: {{repository: registry.example/clock, base: debian}}
replicas: {{workers: 1}}
run: {{script: main.py, hang_timeout: 10s, collective_timeout: 20s, env: {env}}}
checkpoint: {{dir: /checkpoints, every: 7}}
volumes: [{{name: checkpoints, mount: /checkpoints, host_path: /checkpoints, local: saves}}]
policy: {{max_restarts: 0}}
"""
HOUR = 3600


def test_a_step_of_the_clock_ends_no_job(tmp_path):
    (tmp_path / "saves").mkdir()
    clocks = Clocks(tmp_path / "clocks", ranks=2)
    (tmp_path / "main.py").write_text(PROGRAM)
    (tmp_path / "job.yaml").write_text(JOB.format(env=json.dumps(clocks.env)))
    steps = {2: (HOUR, 0), 20: (-HOUR, 1), 35: (24 * HOUR, None), 50: (0, 0), 65: (-HOUR, 0)}
    with subprocess.Popen(
        [sys.executable, "-m", "k8sjob", "run", str(tmp_path), "-o", "plain"],
        env={**os.environ, "K8SJOB_STATE": str(tmp_path / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if (found := re.search(r"STEP (\d+)$", line)) and int(found[1]) in steps:
                clocks.set(*steps.pop(int(found[1])))
    detail = "".join(lines)
    assert process.returncode == 0, detail
    assert not steps
    done = [int(step) for step in re.findall(r"STEP (\d+)$", detail, re.MULTILINE)]
    assert done == list(range(1, 81))
    ends = {int(rank): int(at) for rank, at in re.findall(r"CLOCK (\d) (\d+)", detail)}
    assert abs(ends[0] + HOUR - time.time()) < 120
    assert abs(ends[1] - 24 * HOUR - time.time()) < 120, "the clocks were really stepped"
