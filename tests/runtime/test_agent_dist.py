"""The agent, the watchdog and torch together: ranks that die, fail or hang, over gloo."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from k8sjob.contract import Event, EventKind, ExitCode

pytestmark = pytest.mark.dist

MEET = """
    import ctypes, os, pathlib, signal, sys, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from k8sjob.runtime.base import config
    from k8sjob.runtime.base.env import dist_env
    from k8sjob.runtime.base.event_lines import Reporter
    from k8sjob.runtime.base.hangs import SYNC
    from k8sjob.runtime.comm.watchdog import Watchdog

    env = dist_env(os.environ)
    pathlib.Path(f"start-{env.restart}-{env.rank}").touch()
    limit = float(os.environ.get("LIMIT", "60"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit))

    def watch(timeout):
        store = dist.TCPStore(env.master_addr, env.master_port, is_master=False)
        dog = Watchdog(dist.PrefixStore("dog", store), env, timeout=timeout,
                       error_file=config.error_file(),
                       reporter=Reporter(active=True, events=True))
        dog.begin()
        return dog

    def together():
        dist.all_reduce(torch.ones(4))
"""


@pytest.fixture
def nodes(group):
    """nodes(script, nnodes, nproc=1, **settings) -> [(code, stderr, reason)], one for each node."""

    def run(script, nnodes, nproc=1, limit=60, meet=MEET, **settings):
        environ = {"LIMIT": str(limit), "GLOO_SOCKET_IFNAME": "lo"}
        how = {"environ": environ, "timeouts": {"kill_grace": 3.0}, **settings}
        parts = [script] if isinstance(script, str) else script
        ends = [node.finish(300) for node in group([meet, *parts], nnodes, nproc, **how)]
        return [(end.code, end.err, end.reason) for end in ends]

    return run


def test_a_finished_group_ends_well(nodes):
    """Its process group was there for a moment, and that is enough to have met."""
    results = nodes("together(); dist.destroy_process_group()", 2, nproc=2)
    assert [(code, reason) for code, _, reason in results] == [(0, None)] * 2


def test_a_host_of_the_store_that_dies_is_a_lost_peer(nodes):
    script = """
        together()
        if env.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        dist.distributed_c10d._get_default_store().get("never")
    """
    (killed, _, _), (lost, err, _) = nodes(script, 2)
    assert (killed, lost) == (137, ExitCode.PEER_LOST), err


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.essential)])
def test_a_group_meets_again_after_a_kill(nodes, tmp_path, victim):
    """Both agents start their rank anew, in place; rank 0 brings the store back."""
    script = f"""
        for step in range(60):
            if env.restart == 0 and env.rank == {victim} and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            together()
            time.sleep(0.02)
    """
    results = nodes(script, 2, max_restarts=3)
    assert [code for code, _, _ in results] == [0, 0], results
    assert {path.name for path in tmp_path.glob("start-*")} >= {"start-1-0", "start-1-1"}


def test_a_users_error_on_one_node_ends_all_in_bounded_time(nodes):
    script = """
        together()
        if env.rank == 1:
            raise ValueError("no such class: 11")
        together()
    """
    (lost, err, left), (failed, _, why) = nodes(script, 2, limit=3, max_restarts=1)
    assert (lost, failed) == (ExitCode.PEER_LOST, 1), err
    assert (left.type, left.message[:22]) == ("PeerLost", "another rank is gone: "), left
    assert "restart 1 of 1" in err
    assert (why.type, why.message) == ("ValueError", "no such class: 11")


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param("time.sleep(100)", marks=pytest.mark.essential),
        "ctypes.PyDLL(None).sleep(100)",
    ],
    ids=["asleep", "holds the lock"],
)
def test_a_rank_that_hangs_is_named_and_ended(nodes, tmp_path, hang):
    script = f"""
        dog = watch(3)
        for step in range(100000):
            dog.beat(step)
            time.sleep(0.01)
            if step == 20 and env.rank == 1:
                {hang}
            dog.beat(step, SYNC)
            together()
    """
    results = nodes(script, 3, hang_timeout=3.0)
    assert [code for code, _, _ in results] == [ExitCode.HUNG] * 3, results
    for rank, (_, err, reason) in enumerate(results):
        assert reason.culprits == (1,)
        assert f'File "{tmp_path}/main.py"' in err, f"the stacks of rank {rank}"
    assert results[0][2].message.startswith("no progress for ")
    assert "rank 1 " in results[0][2].message


def warnings(end):
    events = filter(None, map(Event.decode, end.out.splitlines()))
    return [event.data for event in events if event.kind == EventKind.WARNING]


@pytest.fixture
def warned(group):
    """warned(script, meet=MEET) -> the warnings of the wait in `evaluate`, which node 0 writes."""

    def run(script, meet=MEET):
        environ = {"GLOO_SOCKET_IFNAME": "lo"}
        ends = [node.finish() for node in group([meet, script], environ=environ, hang_timeout=20.0)]
        assert [end.code for end in ends] == [0, 0], ends
        assert warnings(ends[1]) == []
        found = warnings(ends[0])
        at = next(at for at, one in enumerate(found) if " in evaluate" in one["message"])
        return found[at : at + 2]

    return run


def test_a_wait_that_may_become_a_hang_is_a_warning(warned):
    script = """
        dog = watch(20)
        def evaluate():
            time.sleep(4)
        for step in range(12):
            dog.beat(step)
            if (env.rank, step) == (1, 9):
                evaluate()
            dog.beat(step, SYNC)
            together()
        dog.beat(step)
        time.sleep(2.5)  # it looks once a second
        together()
        dog.close()
    """
    begun, over = warned(script)
    assert (begun["reason"], begun["rank"], begun["over"]) == ("no-progress", 1, False)
    assert "s: rank 1 is at step 9 in compute, " in begun["message"]
    assert (over["reason"], over["over"]) == ("no-progress", True)


def test_so_is_the_wait_of_a_script_without_a_session(warned):
    script = """
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1)
        def evaluate():
            dist.barrier()
            time.sleep(4)
        for step in range(12):
            if step == 9:
                evaluate()
            optimizer.step()
        time.sleep(1)
    """
    begun, over = warned(script, RAW)
    assert begun["message"].startswith("no optimizer step for ")
    assert (begun["reason"], begun["over"]) == ("no-progress", False)
    assert over["message"].startswith("progress again after ")
    assert over["over"]


def test_a_hang_at_the_same_step_is_not_tried_a_third_time(nodes, tmp_path):
    script = """
        dog = watch(1)
        for step in range(30):
            dog.beat(step)
            if step == 20 and env.rank == 1:
                time.sleep(100)
            dog.beat(step, SYNC)
            together()
    """
    results = nodes(script, 2, hang_timeout=1.0, max_restarts=3)
    assert [code for code, _, _ in results] == [ExitCode.RESTARTS_SPENT] * 2, results
    assert len(list(tmp_path.glob("start-*-0"))) == 2
    for _, _, reason in results:
        assert (reason.exit_code, reason.culprits, reason.step) == (ExitCode.HUNG, (1,), 20)
        assert reason.where.startswith(f"{tmp_path}/main.py:")
        assert reason.message.endswith("twice at the same place, so there is no further restart")


def test_a_collective_of_another_size_is_tried_once_more(nodes, tmp_path):
    """Gloo aborts the rank that gets more than it expects, as it does each time."""
    script = """
        together()
        time.sleep(1)
        dist.all_reduce(torch.ones(4 if env.rank else 8))
    """
    _, (code, _, reason) = nodes(script, 2, max_restarts=3)
    assert (code, reason.exit_code) == (ExitCode.RESTARTS_SPENT, 128 + 6)
    assert reason.message.endswith("twice at the same place, so there is no further restart")
    assert len(list(tmp_path.glob("start-*-1"))) == 2


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_collective_that_one_rank_does_not_reach(nodes, tmp_path, nnodes):
    """Whoever waits for it fails once, and says at which step and for whom."""
    script = """
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5 + env.rank):
            together()
            optimizer.step()
        dist.destroy_process_group()
    """
    results = nodes(script, nnodes, nproc=2 // nnodes, max_restarts=3)
    assert {code for code, _, _ in results} == {ExitCode.RESTARTS_SPENT}, results
    for _, err, reason in results:
        assert (reason.type, reason.rank, reason.culprits, reason.step) == ("Left", 1, (0,), 4), err
        assert "it waited for rank 0, which had ended with exit code 0" in reason.message
    assert len(list(tmp_path.glob("start-*-1"))) == 1


RAW = """
    import os, signal, sys, time, torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def together():
        dist.all_reduce(torch.ones(4))

    together()
"""


class TestScriptWithoutSession:
    """Nobody beats there: the agents see where the main threads are blocked."""

    @pytest.fixture
    def raw(self, nodes):
        """raw(script, ...): as nodes(), for a script that imports nothing of k8sjob."""
        return partial(nodes, meet=RAW)

    @pytest.mark.parametrize(
        ("nnodes", "nproc", "wait"),
        [
            (1, 2, "model(torch.ones(2, 4)).sum().backward()"),
            (1, 2, "dist.all_reduce(torch.ones(4), async_op=True).wait()"),
            (2, 1, "dist.barrier()"),
        ],
    )
    def test_a_rank_that_does_not_come_is_named(self, raw, nnodes, nproc, wait):
        script = f"""
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            def prepare():
                time.sleep(600)  # here
            if rank == 1:
                prepare()
            {wait}
        """
        for code, err, why in raw(script, nnodes, nproc, hang_timeout=3.0):
            assert (code, why.type, why.culprits, why.rank) == (ExitCode.HUNG, "Hang", (1,), 1), err
            assert f"{why.where} in prepare; rank 0 has waited" in why.message
            file, _, line = why.where.rpartition(":")
            assert "# here" in Path(file).read_text().splitlines()[int(line) - 1]

    PREPARE = """
        import subprocess
        def compute(seconds):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                torch.ones(9).sum()
        def in_a_child(seconds):
            code = f"import time\\nwhile time.process_time() < {seconds / 2}: pass\\ntime.sleep(.2)"
            subprocess.run([sys.executable, "-c", code])
    """

    @pytest.mark.skipif(sys.platform != "linux", reason="reads CPU times in /proc")
    @pytest.mark.parametrize(
        ("work", "limits", "patience", "end"),
        [
            ("compute(5)", 2.0, 60, (0, None)),
            ("in_a_child(8)", 2.0, 60, (0, None)),
            ("compute(60)", 1.0, 4, (ExitCode.HUNG, "Late")),
            ("time.sleep(60)", None, 4, (ExitCode.HUNG, "Hang")),
            ("time.sleep(5)", None, 60, (0, None)),
        ],
    )
    def test_a_rank_that_prepares_data(self, raw, work, limits, patience, end):
        """While it works the others wait as long as under torchrun; so they do by default."""
        script = f"""
            if rank == 0:
                {work}
            dist.barrier()
        """
        timeouts = {"kill_grace": 3.0, "busy": 1.0, "patience": patience}
        for code, err, why in raw(
            [self.PREPARE, script], 2, hang_timeout=limits, timeouts=timeouts
        ):
            assert (code, why and why.type) == end, err
            assert why is None or why.culprits == (0,)

    @pytest.mark.skipif(sys.platform != "linux", reason="tells a stopped process by /proc")
    def test_a_rank_that_is_stopped_while_it_waits_is_named(self, raw):
        script = """
            import threading
            if rank == 1:
                threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
                dist.recv(torch.ones(4), 0)
            dist.barrier()
        """
        ((code, err, why),) = raw(script, 1, 2, hang_timeout=4.0)
        assert (code, why.type, why.culprits) == (ExitCode.HUNG, "Hang", (1,)), err

    def test_no_alarm_without_a_hang(self, raw, tmp_path):
        """Each case takes longer than hang_timeout, and rank 0 gets to the next one."""
        script = """
            import threading
            from datetime import timedelta

            def late():
                for _ in range(4):
                    time.sleep(rank * 0.8)
                    together()

            def asleep():
                time.sleep(2)

            def computing():
                end = time.monotonic() + 2
                while time.monotonic() < end:
                    torch.ones(9).sum()

            def waiting_for_a_thread():
                threading.Event().wait(2)

            def most_of_the_time_in_one_line():
                for _ in range(20):
                    time.sleep(rank * 0.1)
                    together()

            def training_alone():
                model = torch.nn.Linear(2, 2)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for _ in range(rank * 15):
                    optimizer.step()
                    time.sleep(0.2)
                dist.barrier()

            def with_a_longer_timeout_of_its_own():
                patient = dist.new_group(timeout=timedelta(hours=1))
                time.sleep(rank * 3)
                dist.barrier(patient)

            for case in [late, asleep, computing, waiting_for_a_thread,
                         most_of_the_time_in_one_line, training_alone,
                         with_a_longer_timeout_of_its_own]:
                together()
                open("cases", "a").write(f"{case.__name__}\\n")
                case()
        """
        [(code, err, why)] = raw(script, 1, 2, hang_timeout=1.5)
        assert (code, why) == (0, None), (err, (tmp_path / "cases").read_text())
