"""What NCCL, gloo, CUDA and torch wrote on other people's machines."""

from pathlib import Path

import pytest

from k8sjob.contract import Reason
from k8sjob.lifecycle.diagnose import diagnose

WATCHDOG = (
    "[rank{0}]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught"
    " collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523,"
    " NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out."
)


def ended(code, message="", reason="Error", at="2026-01-01T00:05:00Z"):
    return {"exitCode": code, "reason": reason, "message": message, "finishedAt": at}


def recorded():
    """(cause, what is said, lines) of each piece of output in recorded/output.txt."""
    text = Path(__file__).with_name("recorded").joinpath("output.txt").read_text()
    for piece in text.split("=== ")[1:]:
        title, *lines = piece.splitlines()
        cause, _, said = title.partition(": ")
        yield pytest.param(cause, said, lines, id=f"{cause}-{said[:20]}")


@pytest.mark.parametrize(("cause", "said", "lines"), list(recorded()))
def test_what_the_output_tells(snapshot, make_pod, lines, cause, said):
    end = ended(1)
    pods = [make_pod("master-0", "Succeeded"), make_pod("worker-0", "Failed", terminated=end)]
    noise = ["epoch 1", "pod:88:88 [0] NCCL INFO NET/IB : No device found."]
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), {"worker-0": [*noise, *lines]})
    assert (finding.cause, finding.replica) == (cause, "worker-0")
    assert said in finding.message
    assert finding.next_step


def test_ranks_that_did_not_come_to_a_collective_are_named(snapshot, make_pod):
    names = ["master-0", "worker-0", "worker-1"]
    pods = [make_pod(name, "Failed", terminated=ended(134)) for name in names]
    logs = {"master-0": [WATCHDOG.format(0)], "worker-0": [WATCHDOG.format(1)], "worker-1": []}
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), logs)
    assert finding.cause == "collective-timeout"
    assert finding.message.endswith("rank 2 did not wait for it; 2 more ended with the same exit"
                                    " code")  # fmt: skip
    del logs["worker-1"]  # whether it waited is not known then
    assert "did not wait" not in diagnose(snapshot("Failed:x:y", pods=pods), logs)[0].message


def test_a_rank_that_lost_its_peer_is_not_the_cause(snapshot, make_pod):
    first = ended(1, at="2026-01-01T00:05:00Z")
    pods = [
        make_pod("master-0", "Failed", terminated=first),
        make_pod("worker-0", "Failed", terminated=ended(1, at="2026-01-01T00:05:01Z")),
    ]
    logs = {
        "master-0": ["Traceback", "RuntimeError: Connection closed by peer [10.0.0.1]:9"],
        "worker-0": ["Traceback", "[rank1]: ValueError: the loss is no number"],
    }
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), logs)
    assert finding.message == "worker-0: exit code 1: ValueError: the loss is no number"


def test_of_torchruns_output_the_ranks_own_error_counts(snapshot, make_pod):
    lines = [
        "Traceback (most recent call last):",
        "KeyError: 'lr'",
        "E1121 failed (exitcode: 1) local_rank: 0 (pid: 12) of binary: /usr/bin/python",
        "Traceback (most recent call last):",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "train.py FAILED",
        "Root Cause (first observed failure):",
    ]
    pods = [make_pod("worker-0", "Failed", terminated=ended(1))]
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), {"worker-0": lines})
    assert finding.message == "worker-0: exit code 1: KeyError: 'lr'"


def test_trouble_of_ranks_that_run_on_is_told(snapshot, make_pod):
    names = ["master-0", "worker-0", "worker-1"]
    pods = [make_pod(name, running={}) for name in names]
    logs = {name: [WATCHDOG.format(0)] for name in names}
    (finding,) = diagnose(snapshot("Running", pods=pods), logs)
    assert finding.message.startswith("master-0, worker-0 and worker-1: it waited 600 s")
    logs = {name: ["RuntimeError: Connection closed by peer"] for name in names}
    assert diagnose(snapshot("Running", pods=pods), logs) == []


def test_a_gpu_hook_that_fails_is_the_drivers(snapshot, make_pod):
    said = (
        "failed to create containerd task: failed to create shim task: OCI runtime create failed:"
        " runc create failed: unable to start container process: error during container init: error"
        " running prestart hook #0: exit status 1, stdout: , stderr: Auto-detected mode as 'legacy'"
        " nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4: unknown"
    )
    pods = [make_pod("worker-0", terminated=ended(128, said, "StartError"))]
    (finding,) = diagnose(snapshot("Running", pods=pods, replicas={"Worker": 1}), {})
    assert finding.cause == "gpu-driver"
    assert "cuda>=12.4" in finding.message


def test_a_runtimes_reason_is_searched_too(snapshot, make_pod):
    reason = Reason(1, 3, "RuntimeError", "uncorrectable NVLink error detected", "").encode()
    pods = [make_pod("worker-0", "Failed", terminated=ended(1, reason))]
    (finding,) = diagnose(snapshot("Failed:x:y", pods=pods), {})
    assert (finding.cause, finding.replica) == ("gpu-fault", "worker-0")
    assert finding.message.startswith("worker-0, rank 3: a GPU of its node fails")
