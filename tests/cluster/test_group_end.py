"""How a group of raw scripts ends: no last line is lost, and nobody is waited for in vain."""

import json

import pytest

from k8sjob.contract import Event

MEET = """
import os, time
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
print("started", flush=True)
"""


@pytest.fixture
def end(desk, eventually):
    """end(name, script, workers) -> (status, logs by replica), once the job has ended."""

    def run(name, script, workers):
        run = {"script": "main.py", "env": {"OMP_NUM_THREADS": "1"}}
        fields = {"run": run, "replicas": {"workers": workers}, "policy": {}}
        desk.call("submit", desk.code(MEET + script, name, **fields))
        eventually(lambda: desk.status(name).state.finished, "its end", deadline=420)
        logs = {
            pod: "".join(desk.cluster.logs(pod, desk.namespace)) for pod in desk.objects("pods")
        }
        told = desk.call("status", name, "-n", desk.namespace, "-o", "json")[0]
        return json.loads(told), logs

    return run


def test_every_rank_has_its_last_line(end):
    script = """
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
time.sleep(rank)
for line in range(5):
    print(f"rank {rank}, line {line}", flush=True)
"""
    status, logs = end("last-lines", script, 3)
    assert status["state"] == "Succeeded"
    assert len(logs) == 4
    for text in logs.values():
        assert text.count(", line ") == 5, logs


def test_a_rank_that_has_ended_is_not_waited_for(end):
    script = """
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if rank == 0:
    dist.all_reduce(torch.ones(1))
"""
    status, logs = end("left", script, 1)
    assert status["state"] == "Failed"
    assert "which had ended with exit code 0" in json.dumps(status) + json.dumps(logs)
    for text in logs.values():
        assert text.count("started\n") <= 2, "no more than one start after the first"


def test_replicas_that_never_met_say_so(end):
    status, logs = end("alone", "model = torch.nn.Linear(2, 2)", 1)
    assert status["state"] == "Succeeded"
    events = [Event.decode(line) for line in logs["alone-master-0"].splitlines()]
    (unmet,) = [event for event in events if event and event.kind == "unmet"]
    assert (unmet.data["world_size"], unmet.data["replicas"]) == (2, 2)


def test_the_deadline_ends_a_job_in_which_nothing_else_changes(desk, eventually):
    script = "trap 'echo saved; exit 143' TERM; sleep 600 & wait"
    policy = {"active_deadline": "10s", "termination_grace": "20s"}
    for name, restarts, clean in (("once", 0, "Running"), ("again", 3, "None")):
        how = {**policy, "max_restarts": restarts, "clean_pod_policy": clean}
        desk.call("submit", desk.file(script, name=name, policy=how))
    for name in ("once", "again"):
        eventually(lambda name=name: desk.status(name).state.finished, "its deadline")
        assert desk.status(name).state == "Failed"
        findings = json.loads(desk.call("why", name, "-n", desk.namespace, "-o", "json")[0])
        assert [finding["cause"] for finding in findings] == ["deadline"]

    def running():
        return [p for p in desk.objects("pods").values() if p["status"]["phase"] == "Running"]

    eventually(lambda: not running(), "the end of its pods")
    kept = [pod for pod in desk.objects("pods") if pod.startswith("again-")]
    assert ["".join(desk.cluster.logs(pod, desk.namespace)) for pod in kept] == ["saved\n"] * 2
