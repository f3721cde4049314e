"""Meeting, leaving, and what a session is outside k8sjob."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k8sjob.contract import ExitCode

pytestmark = pytest.mark.dist
PROGRAMS = Path(__file__).parent / "programs"


def test_the_store_and_the_ranks_listen_on_loopback_only(start_ranks):
    ranks = start_ranks({"epochs": 1, "linger": 60}, world=2)
    ranks.await_text(0, "RESULT")
    for process in ranks.processes.values():
        listening = list(listeners(process.pid))
        assert listening
        assert {address for address, _ in listening} == {"127.0.0.1"}
    assert ranks.port in {port for _, port in listeners(ranks.processes[0].pid)}


def listeners(pid):
    """(address, port) of the sockets on which a process listens."""
    mine = set()
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        target = str(handle.readlink())
        if target.startswith("socket:["):
            mine.add(target[8:-1])
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in mine:
                address, _, port = local.partition(":")
                numbers = bytes.fromhex(address)[::-1]
                yield ".".join(map(str, numbers)), int(port, 16)


def test_ranks_that_do_not_come_are_named(start_ranks):
    ranks = start_ranks(world=4, missing=(1, 3), rendezvous_timeout=2)
    outcome = ranks.finish(timeout=30)
    assert outcome.codes == [ExitCode.PEER_LOST] * 2
    for reason in outcome.reasons:
        assert reason["culprits"] == [1, 3]
        assert "ranks 1, 3 of 4 did not join" in reason["message"]


def test_without_rank_0_the_others_say_so(start_ranks):
    outcome = start_ranks(world=2, missing=(0,), rendezvous_timeout=2).finish(timeout=30)
    assert outcome.codes == [ExitCode.PEER_LOST]
    assert outcome.reasons[0]["culprits"] == [0]
    assert "rank 0 does not respond at 127.0.0.1" in outcome.reasons[0]["message"]


def test_ranks_that_count_differently_are_reported(start_ranks):
    ranks = start_ranks(world=2, missing=(1,), rendezvous_timeout=30)
    ranks._world = 3
    ranks.processes[1] = ranks.start(1)
    outcome = ranks.finish(timeout=30)
    assert outcome.codes == [ExitCode.CONFIG] * 2
    assert "rank 1" in outcome.reasons[0]["message"]
    assert "expects 3 ranks" in outcome.reasons[1]["message"]


def test_the_host_of_the_store_waits_for_the_others_at_the_end(run_ranks):
    # Rank 1 leaves the session late; rank 0 must not take the store away before.
    outcome = run_ranks({"epochs": 1, "slow_leave": [1, 1.5]}, world=2)
    assert outcome.told("finished")[0]["seconds"] > 1.4


def test_accumulation_sends_gradients_once_a_step(run_ranks):
    options = {"samples": 96, "epochs": 2, "batch": {"batch_size": 4}, "count": True}
    # 96 samples in global batches of 8 are 12, in windows of 5 batches: 3 steps an epoch
    result = run_ranks(options, world=2, options={"accumulate": 5}).result
    assert result["steps"] == 6
    assert result["reductions"] == 6


def plain(*argv, **env):
    """A program as one would start it by hand, without k8sjob."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("K8SJOB_", "MASTER_", "PET_"))
    }
    return subprocess.run(
        [sys.executable, *argv],
        env={**clean, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


def test_a_plain_python_process_is_a_group_of_one():
    seen = plain(PROGRAMS / "train.py", '{"epochs": 2}')
    assert "started: 1 process, gloo on cpu, strategy ddp" in seen
    assert "epoch 2/2  step 12/12" in seen
    assert "k8sjob/1" not in seen  # lines for people, not events


def test_under_torchrun_its_own_store_is_used():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    seen = plain(*torchrun, PROGRAMS / "train.py", '{"epochs": 1}', USE_LIBUV="1")
    assert "started: 2 processes, gloo on cpu, strategy ddp" in seen
    assert '"equal": true' in seen
