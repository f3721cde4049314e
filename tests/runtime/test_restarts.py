"""Several nodes without torch: restarts counted once, and nodes that have ended with 0."""

from __future__ import annotations

import signal
import time

import pytest

from k8sjob.contract import Event, EventKind, ExitCode, Reason
from k8sjob.runtime.agent.restarts import repeats

LOST = '"[/gloo/transport/tcp/pair.cc:545] Read error [::1]:1: Connection reset by peer"'
COUNT = """
    import os, pathlib, sys, time
    rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with open(f"starts-{rank}", "a") as file:
        file.write("x")
"""


@pytest.fixture
def counted(group):
    """group(), for a script that notes its starts."""
    return lambda script, **options: group([COUNT, script], **options)


def starts(folder, rank):
    return len((folder / f"starts-{rank}").read_text())


class TestDone:
    """A rank that has ended with 0 is not waited for."""

    def test_one_pod(self, run, tmp_path):
        script = f"""
            if rank == 0:
                time.sleep(0.5)
                raise RuntimeError({LOST})
        """
        result = run([COUNT, script], nproc=2, max_restarts=3, restart_policy="OnFailure")
        assert (result.code, result.reason.exit_code) == (ExitCode.RESTARTS_SPENT, 138)
        assert (result.reason.type, result.reason.culprits) == ("Left", (1,))
        assert "rank 1, which had ended with exit code 0" in result.reason.message
        assert starts(tmp_path, 0) == 1
        again = run([COUNT, script], nproc=2, max_restarts=3, restart_policy="OnFailure")
        assert (again.code, again.reason) == (ExitCode.RESTARTS_SPENT, result.reason)
        assert starts(tmp_path, 0) == 1, "the next container of the pod does not start it either"

    @pytest.mark.parametrize("left", [0, 1])
    def test_another_pod(self, counted, tmp_path, left):
        """Which is known only after the other one was started anew."""
        script = f"""
            if rank != {left}:
                if restart == 0:
                    raise RuntimeError({LOST})
                time.sleep(60)
            other = pathlib.Path("starts-{1 - left}")
            while not other.exists() or len(other.read_text()) < 2:
                time.sleep(0.02)
            time.sleep(0.5)
        """
        ends = [node.finish() for node in counted(script, max_restarts=3)]
        assert ends[1 - left].code == ExitCode.RESTARTS_SPENT
        reason = ends[1 - left].reason
        assert (reason.type, reason.culprits) == ("Left", (left,))
        assert starts(tmp_path, 1 - left) == 2
        if left == 0:
            assert ends[0].code == ExitCode.RESTARTS_SPENT, "a job with a failed rank has failed"
            note = ends[0].reason.message
            assert note.startswith("after rank 0 had ended with exit code 0: it waited for rank 0")

    def test_another_pod_without_a_start_left(self, counted):
        """It fails before it hears that the other one has ended."""
        script = f"""
            if rank:
                raise RuntimeError({LOST})
            time.sleep(1)
        """
        nodes = counted(script, restart_policy="ExitCode", timeouts={"reported": 60})
        for end in [node.finish() for node in nodes]:
            assert (end.reason.type, end.reason.culprits) == ("Left", (0,))

    def test_replicas_without_a_group_do_not_need_the_others(self, counted, tmp_path):
        """Replicas that each do work of their own: what one lacks is not what another has ended."""
        script = """
            if rank and restart == 0:
                time.sleep(2)
                os.kill(os.getpid(), 9)
        """
        nodes = counted(script, max_restarts=3)
        assert [node.finish().code for node in nodes] == [0, 0]
        assert [starts(tmp_path, rank) for rank in range(2)] == [1, 2]

    @pytest.mark.parametrize("number", [9, signal.SIGUSR1])  # 128 + SIGUSR1 is PEER_LOST
    def test_a_killed_rank_did_not_wait_for_another(self, counted, tmp_path, number):
        """It is not tried again, since the others are gone, but they are not to blame."""
        script = f"""
            import types
            met = types.SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 2)
            sys.modules["torch.distributed.distributed_c10d"] = met
            time.sleep(1)
            if rank:
                time.sleep(2)
                os.kill(os.getpid(), {number})
        """
        _, end = [node.finish() for node in counted(script, max_restarts=3)]
        assert end.code == ExitCode.RESTARTS_SPENT
        reason = end.reason
        assert (reason.type, reason.culprits) == ("Signal", ())
        assert "rank 0 had ended with exit code 0, so there is no restart" in reason.message
        assert starts(tmp_path, 1) == 1

    def test_a_rank_that_is_stopped_has_not_left(self, run, tmp_path):
        script = f"""
            import signal
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            if rank == 0 and restart == 0:
                raise RuntimeError({LOST})
            time.sleep(60 if restart == 0 else 0)
        """
        assert run([COUNT, script], nproc=2, max_restarts=1).code == 0
        assert starts(tmp_path, 1) == 2


class TestCount:
    KILLED = "import signal; os.kill(os.getpid(), 9)"

    def test_the_containers_of_a_pod_share_a_count(self, run, tmp_path):
        settings = {"max_restarts": 1, "restart_policy": "OnFailure"}
        first = run([COUNT, self.KILLED], **settings)
        assert (first.code, starts(tmp_path, 0)) == (137, 2)
        second = run([COUNT, self.KILLED], **settings)
        assert (second.code, starts(tmp_path, 0)) == (ExitCode.RESTARTS_SPENT, 2)
        assert second.reason == first.reason

    def test_an_error_of_the_script_counts_too(self, run, tmp_path):
        settings = {"max_restarts": 2, "restart_policy": "OnFailure"}
        codes = [run([COUNT, "1 / 0"], **settings).code for _ in range(4)]
        assert codes == [1, 1, 1, ExitCode.RESTARTS_SPENT]
        assert starts(tmp_path, 0) == 3

    def test_a_container_that_was_killed_is_started_again(self, start, tmp_path):
        """Its agent could not say why; the kubelet knows, and the operator counts."""
        for number in range(3):
            node = start([COUNT, "time.sleep(60)"], max_restarts=1, restart_policy="OnFailure")
            while not (tmp_path / "starts-0").exists() or starts(tmp_path, 0) <= number:
                time.sleep(0.02)
            node.process.kill()
            node.process.wait()

    def test_a_success_resets_the_count(self, run, tmp_path):
        assert run([COUNT, f"if restart == 0: {self.KILLED}"], max_restarts=1).code == 0
        assert run([COUNT, f"if restart == 0: {self.KILLED}"], max_restarts=1).code == 0
        assert starts(tmp_path, 0) == 4


class TestEnd:
    def test_node_0_leaves_last(self, counted, tmp_path):
        script = """
            if rank == 1:
                time.sleep(2)
                pathlib.Path("ending").write_text("x")
                print("the last line")
        """
        master, worker = counted(script)
        worker.until("ending")
        assert master.process.poll() is None
        assert worker.finish().out == "the last line\n"
        assert master.finish().code == 0

    def test_a_failure_after_its_end_is_the_groups(self, counted, tmp_path):
        script = f"""
            if rank == 1:
                time.sleep(1)
                raise RuntimeError({LOST})
        """
        ends = [node.finish() for node in counted(script, max_restarts=3)]
        assert [end.code for end in ends] == [ExitCode.RESTARTS_SPENT] * 2
        reason = ends[0].reason
        assert (reason.rank, reason.type) == (1, "Left")
        assert reason.where.endswith("main.py:9")
        assert starts(tmp_path, 1) == 1

    def test_a_stop_ends_the_wait(self, counted):
        master, worker = counted("time.sleep(60 if rank else 0)")
        while "waiting up to 30 s for node 1" not in master.process.stderr.readline():
            assert master.process.poll() is None
        master.process.terminate()
        assert master.finish(5).code == 0
        worker.process.kill()


class TestUnmet:
    """Replicas that never met; a module called torch stands in for an import of seconds."""

    @pytest.fixture
    def outcome(self, counted, tmp_path):
        def run(script, **how):
            (tmp_path / "torch.py").touch()
            results = [node.finish() for node in counted(script, **how)]
            assert {result.code for result in results} == {0}
            found = [Event.decode(line) for line in results[0].out.splitlines()]
            return [event for event in found if event], results[0].reason

        return run

    @pytest.mark.parametrize(("nnodes", "nproc"), [(2, 1), (1, 2)])
    def test_it_is_reported_at_the_end(self, outcome, nnodes, nproc):
        (event,), reason = outcome("import torch", nnodes=nnodes, nproc=nproc)
        assert event.kind == EventKind.UNMET
        assert (event.data["world_size"], event.data["replicas"]) == (2, nnodes)
        assert (reason.exit_code, reason.type) == (0, "Unmet")
        assert "each trained separately" in reason.message

    SPAWNED = """
        import multiprocessing, torch
        if __name__ == "__main__":
            child = multiprocessing.get_context({!r}).Process(target=print)
            child.start()
            child.join()
    """
    RPC = """
        import sys, types, torch
        names = types.SimpleNamespace(_ALL_WORKER_NAMES={"coordinator", "server0"})
        sys.modules["torch.distributed.rpc.api"] = names
    """
    LOADER = """
        import os, torch
        loader = compile("child = os.fork()", f"/x/torch/utils/data/dataloader.py", "exec")
        exec(loader)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    """

    def test_workers_of_a_data_loader_form_no_group(self, outcome):
        (event,), _ = outcome(self.LOADER)
        assert event.kind == EventKind.UNMET

    @pytest.mark.parametrize(
        ("script", "nnodes"),
        [
            ("pass", 2),
            ("import torch", 1),
            (RPC, 2),
            (SPAWNED.format("spawn"), 2),
            (SPAWNED.format("fork"), 2),
            (SPAWNED.format("forkserver"), 2),
        ],
        ids=["a program without torch", "one process alone", "RPC", "spawn", "fork", "forkserver"],
    )
    def test_not_where_it_would_be_noise_or_false(self, outcome, script, nnodes, tmp_path):
        (tmp_path / "node-0").mkdir()
        (tmp_path / "node-0" / "words").touch()
        assert outcome(script, nnodes=nnodes) == ([], None)


KILLED = Reason(137, rank=1, type="Signal", step=40)
CRASHED = Reason(139, rank=1, type="Signal", where="main.py:3")
ABORTED = Reason(134, rank=0, type="Signal", where="main.py:3")
HUNG = Reason(ExitCode.HUNG, rank=0, where="main.py:3", culprits=(1,), step=7)


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        (None, KILLED, False),
        (KILLED, KILLED._replace(time=9.0, message="another"), True),
        (KILLED, KILLED._replace(step=41), False),
        (KILLED, KILLED._replace(rank=0), False),
        (KILLED, KILLED._replace(exit_code=139), False),
        (KILLED._replace(step=-1), KILLED._replace(step=-1), False),
        (CRASHED, CRASHED, True),
        (CRASHED, CRASHED._replace(where=""), False),
        (ABORTED, ABORTED._replace(rank=1), True),
        (ABORTED, ABORTED._replace(rank=1, where="main.py:4"), False),
        (KILLED._replace(step=-1, where="main.py:3"),) * 2 + (False,),
        (Reason(255, type="Exit", where="main.py:3"),) * 2 + (True,),
        (KILLED._replace(exit_code=138), KILLED._replace(exit_code=138), True),
        (Reason(140, type="Exit"), Reason(140, type="Exit"), False),
        (HUNG, HUNG._replace(rank=3), True),
        (HUNG, HUNG._replace(culprits=(2,)), False),
        (HUNG, HUNG._replace(where="main.py:4"), False),
        (HUNG._replace(step=-1), HUNG._replace(step=-1), True),
        *(
            (
                Reason(code, step=3, where="main.py:3"),
                Reason(code, step=3, where="main.py:3"),
                False,
            )
            for code in (ExitCode.PEER_LOST, ExitCode.STOPPED)
        ),
    ],
)
def test_same_ranks_same_place_same_step(before, now, same):
    assert repeats(before, now) is same
