"""Where the time to the first step went, of a job that trains in a real cluster."""

import json

MAIN = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from k8sjob import runtime
data = TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.long))
with runtime.session() as job:
    optimizer = (torch.optim.SGD, {"lr": 0.1})
    run = job.prepare(lambda: nn.Linear(2, 2), loss=F.cross_entropy, optimizer=optimizer)
    for epoch in run.epochs(1):
        for x, y in run.batches(data, batch_size=4):
            run.step(x, y)
"""


def test_a_job_that_trains_says_where_the_time_went(desk):
    job = desk.code(
        MAIN,
        run={"script": "main.py", "env": {"OMP_NUM_THREADS": "1"}},
        # A worker that ends a moment after the master would go, with its output, between two looks.
        policy={"clean_pod_policy": "None"},
    )
    desk.call("submit", job, "--watch")
    why = ("why", "--timing", "tiny", "-n", desk.namespace, "-o", "json", "--client")
    told, again = (json.loads(desk.call(*why, client)[0]) for client in ("python", "kubectl"))
    assert told == again
    phases = [phase["phase"] for phase in told["phases"]]
    whole = {part for phase in phases for part in phase.split("+")}
    assert whole >= {"pod", "scheduling", "image", "container", "meeting", "step"}, told
    assert phases[-1] == "step"
    assert all(phase["seconds"] >= 0 for phase in told["phases"])
    assert told["seconds"] == told["phases"][-1]["at"] > 0
    rows = {row["name"]: row for row in told["replicas"]}
    assert rows["worker-0"]["init"] is not None
    master = rows["master-0"]
    assert master["pod"] <= master["first_line"] <= master["imported"] <= master["met"]

    status = json.loads(desk.call("status", "tiny", "-n", desk.namespace, "-o", "json")[0])
    assert status["origin"]["image"] == status["image"]
    assert [layer["kind"] for layer in status["origin"]["layers"]] == ["code"]
    assert status["replicas"][0]["digest"] == status["image"].partition("@")[2]

    shown, err = desk.call("why", "--timing", "tiny", "-n", desk.namespace)
    assert err == ""
    assert shown.startswith(f"{desk.namespace}/tiny: about ")
    assert "init container" in shown


MEETING = """
import os, socket, time
at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(("", at[1])) as server:
        server.accept()
    raise SystemExit
while True:
    try:
        socket.create_connection(at).close()
        break
    except ConnectionError:  # the name is there, the Master may not listen yet
        time.sleep(0.1)
"""


def test_without_an_init_container_workers_wait_by_themselves(desk, with_template):
    """The operator may be given a template of nothing where all jobs are k8sjob's."""
    with_template("[]\n")
    policy = {"termination_grace": "2s", "clean_pod_policy": "None"}
    desk.call("submit", desk.code(MEETING, policy=policy), "--watch")
    pods = desk.objects("pods")
    assert set(pods) == {"tiny-master-0", "tiny-worker-0"}
    assert not any("initContainers" in pod["spec"] for pod in pods.values())
