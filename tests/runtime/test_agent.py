"""The agent with real processes: their environment, their end, their restart, and the reason."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import contextmanager

import pytest

from k8sjob.contract import LIFELINE_ENV, Event, ExitCode
from k8sjob.runtime.base.termination import describe

LOST = '"[/gloo/transport/tcp/pair.cc:545] Read error [::1]:1: Connection reset by peer"'


class TestExitCodes:
    @pytest.mark.parametrize(
        ("script", "code"),
        [
            ("", 0),
            ("import os; os._exit(7)", 7),
            ("import os; os.kill(os.getpid(), 9)", 137),
            (f"raise RuntimeError({LOST})", ExitCode.PEER_LOST),
        ],
    )
    def test_the_container_ends_as_its_process(self, run, script, code):
        result = run(script)
        assert result.code == code
        assert (result.reason.exit_code if result.reason else 0) == code

    def test_the_reason_names_error_and_place(self, run, tmp_path):
        result = run("def f():\n    raise ValueError('no such class: 11')\n\nf()\n")
        assert result.reason.type == "ValueError"
        assert result.reason.message == "no such class: 11"
        assert result.reason.where == f"{tmp_path}/main.py:2"
        assert result.reason.rank == 0
        assert abs(result.reason.time - time.time()) < 60

    def test_a_kill_is_explained(self, run):
        result = run("import os; os.kill(os.getpid(), 9)")
        assert result.reason.type == "Signal"
        assert "SIGKILL" in result.reason.message
        assert "memory" in result.reason.message


class TestEnvironment:
    SAVE = """
        import json, os
        with open(f"rank-{os.environ['RANK']}", "w") as file:
            json.dump({**os.environ, "parent": open(f"/proc/{os.getppid()}/maps").read()}, file)
    """

    def test_each_process_learns_its_place(self, run, tmp_path):
        group = {"PET_NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        result = run(self.SAVE, nproc=3, environ={"RANK": "1", "WORLD_SIZE": "6", **group})
        assert result.code == 0
        for local in range(3):
            seen = json.loads((tmp_path / f"rank-{3 + local}").read_text())
            expected = {
                "RANK": str(3 + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": "6",
                "LOCAL_WORLD_SIZE": "3",
                "GROUP_RANK": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_RUN_ID": "none",  # by it Lightning knows that torchrun's ranks hold
            }
            assert {name: seen[name] for name in expected} == expected
            assert LIFELINE_ENV not in seen, "a child of the script would take it for its own"
            assert "libtorch" not in seen["parent"], "the agent costs 0.5 GB with torch"

    @pytest.mark.parametrize("seed", [None, "7"])
    def test_the_hash_seed_is_the_same_in_all_ranks_nodes_and_starts(self, group, tmp_path, seed):
        script = """
            import os, signal
            name = "{RANK}-{TORCHELASTIC_RESTART_COUNT}".format_map(os.environ)
            open(f"hash-{name}", "w").write(f"{os.environ['PYTHONHASHSEED']} {hash('query')}")
            if name.endswith("0"):
                os.kill(os.getpid(), signal.SIGKILL)
        """
        # A node that comes late fails in the others' first restart.
        nodes = group(script, nproc=2, max_restarts=2, environ={"PYTHONHASHSEED": seed})
        assert [node.finish().code for node in nodes] == [0, 0]
        texts = [path.read_text() for path in tmp_path.glob("hash-*-*")]
        assert len(texts) == 8
        assert {text.split()[0] for text in texts} == {seed or "0"}
        assert len(set(texts)) == 1

    def test_a_group_with_a_master_is_a_fixed_one_whatever_its_bounds(self, run, tmp_path):
        """The operator gives it bounds under an elasticPolicy, and starts it at its full size."""
        group = {"PET_NNODES": "1:8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        assert run(self.SAVE, environ={"RANK": "1", "WORLD_SIZE": "4", **group}).code == 0
        assert json.loads((tmp_path / "rank-1").read_text())["PET_NNODES"] == "4"

    def test_a_single_node_gets_an_address_for_its_rendezvous(self, run, tmp_path):
        assert run(self.SAVE, environ={"PET_NPROC_PER_NODE": "auto"}).code == 0
        seen = json.loads((tmp_path / "rank-0").read_text())
        assert seen["MASTER_ADDR"] == "127.0.0.1"
        assert 0 < int(seen["MASTER_PORT"]) < 65536

    def test_local_rank_is_appended_for_scripts_that_parse_it(self, run, tmp_path):
        script = "import sys; open('args-' + sys.argv[-1][-1], 'w').write(repr(sys.argv[1:]))"
        assert run(script, "--lr", "1", nproc=2, local_rank_arg="--local-rank").code == 0
        assert (tmp_path / "args-0").read_text() == "['--lr', '1', '--local-rank=0']"
        assert (tmp_path / "args-1").read_text() == "['--lr', '1', '--local-rank=1']"

    def test_each_phase_of_the_start_is_one_event(self, start):
        out, _ = start("import time; time.sleep(1)", nproc=2).process.communicate(timeout=60)
        events = [Event.decode(line).data for line in out.splitlines()]
        assert events == [{"phase": name, "processes": 2} for name in ("python", "running")]


class TestFirstFailure:
    def test_the_others_are_ended_promptly_even_if_they_ignore_it(self, run):
        script = """
            import os, signal, time
            if os.environ["RANK"] == "1":
                time.sleep(0.5)
                raise ValueError("bad batch")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
        """
        result = run(script, nproc=3)
        assert result.code == 1
        assert (result.reason.rank, result.reason.type) == (1, "ValueError")
        assert result.seconds < 40

    def test_a_cause_that_is_slow_to_leave_is_still_the_cause(self, run):
        """Its reason is written; its atexit handler outlives the grace, and it is killed."""
        script = f"""
            import atexit, os, signal, time
            if os.environ["RANK"] == "1":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                atexit.register(time.sleep, 60)
                raise ValueError("the cause")
            time.sleep(1)
            raise RuntimeError({LOST})
        """
        result = run(script, nproc=2)
        assert (result.code, result.reason.message) == (1, "the cause")


class TestRestart:
    COUNT = """
        import os, pathlib
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        pathlib.Path(f"start-{restart}-{os.environ['RANK']}").touch()
    """

    def test_a_killed_process_is_restarted_with_its_peers(self, run, tmp_path):
        script = f"""
            if restart < 2:
                if os.environ["RANK"] == "1":
                    os.kill(os.getpid(), 9)
                raise RuntimeError({LOST})
        """
        result = run([self.COUNT, script], nproc=2, max_restarts=2)
        assert result.code == 0
        assert result.reason is None
        assert len(list(tmp_path.glob("start-*"))) == 6
        assert "restart 2 of 2" in result.err

    @pytest.mark.parametrize(
        ("end", "starts"),
        [("os.kill(os.getpid(), 9)", 3), ("1 / 0", 1), ("os._exit(2)", 1)],
    )
    def test_restarts_are_limited_and_only_for_what_they_may_cure(self, run, tmp_path, end, starts):
        result = run([self.COUNT, end], max_restarts=2)
        assert result.code == 137 if starts > 1 else 0 < result.code < 128
        assert len(list(tmp_path.glob("start-*"))) == starts

    def test_a_stop_ends_the_rest_before_a_restart(self, start):
        script = "import os; os.kill(os.getpid(), 9)"
        node = start(script, max_restarts=50, timeouts={"restart_max": 2.0})
        while "restart 4 of 50 in 1.6 s" not in node.process.stderr.readline():
            assert node.process.poll() is None
        node.send(signal.SIGTERM)
        assert node.finish(5).code == 143


class TestStop:
    READY = """
        import os, pathlib, signal, sys, time
        def on_stop(answer):
            signal.signal(signal.SIGTERM, answer)
        def wait():
            pathlib.Path("ready-" + os.environ["RANK"]).write_text("x")
            time.sleep(60)
    """

    @pytest.fixture
    def stop(self, start):
        def stop_ready_ranks(script, number=signal.SIGTERM, **options):
            node = start([self.READY, script, "\nwait()"], nproc=2, max_restarts=3, **options)
            node.until("ready-0")
            node.until("ready-1")
            node.send(number)
            return node.finish()

        return stop_ready_ranks

    @pytest.mark.parametrize(
        ("answer", "number", "code"),
        [
            ("lambda *_: sys.exit(0)", signal.SIGTERM, 0),
            ("lambda *_: sys.exit(143)", signal.SIGTERM, 143),
            ("lambda *_: sys.exit(1)", signal.SIGTERM, 143),
            ("signal.SIG_IGN", signal.SIGTERM, 143),  # killed at the deadline
            ("signal.SIG_DFL", signal.SIGINT, 130),
        ],
    )
    def test_the_code_is_that_of_a_stop_unless_all_finish(self, stop, answer, number, code):
        result = stop(f"on_stop({answer})", number, stop_grace=1.5)
        assert result.code == code
        assert result.seconds < 40
        if code:
            named = (result.reason.type, result.reason.message.partition(";")[0])
            assert named == ("Stopped", f"stopped by {number.name}")

    def test_sigterm_is_not_sent_to_a_data_loaders_worker(self, stop, tmp_path):
        """Only the rank itself gets SIGTERM: it may need its children for its last steps."""
        script = """
            import subprocess
            child = subprocess.Popen(["sleep", "60"])
            def last_step(*_):
                time.sleep(0.5)
                pathlib.Path("child-" + os.environ["RANK"]).write_text(str(child.poll()))
                sys.exit(0)
            on_stop(last_step)
        """
        assert stop(script).code == 0
        assert (tmp_path / "child-0").read_text() == "None"

    def test_a_failure_before_the_stop_is_the_reason(self, start):
        script = """
            on_stop(signal.SIG_IGN)
            if os.environ["RANK"] == "1":
                pathlib.Path("failing").write_text("x")
                raise ValueError("first")
            wait()
        """
        node = start([self.READY, script], nproc=2, stop_grace=30)
        node.until("failing")
        time.sleep(0.7)
        node.send(signal.SIGTERM)
        result = node.finish()
        assert (result.code, result.reason.message) == (1, "first")


@pytest.mark.skipif(sys.platform != "linux", reason="needs ptrace of Linux")
class TestUnkillable:
    """A rank in state D: here one that its tracer does not let go."""

    @staticmethod
    @contextmanager
    def held(pid):
        """SIGKILL does not end this process meanwhile."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long] * 4
        seize, trace_exit, detach = 0x4206, 0x40, 17
        if libc.ptrace(seize, pid, 0, trace_exit):
            pytest.skip(f"ptrace is not allowed: {os.strerror(ctypes.get_errno())}")
        try:
            yield
        finally:
            libc.ptrace(detach, pid, 0, 0)

    @pytest.mark.parametrize(
        ("end", "code"),
        [("pass", ExitCode.STOPPED), ("1 / 0", 1), ("os.kill(os.getpid(), signal.SIGSEGV)", 139)],
    )
    def test_the_agent_leaves_and_says_what_stays(self, start, tmp_path, end, code):
        script = f"""
            pathlib.Path("pid-" + os.environ["RANK"]).write_text(str(os.getpid()))
            while os.environ["RANK"] == "0" or not os.path.exists("go"):
                time.sleep(0.01)
            {end}
        """
        script = ["import os, pathlib, signal, time", TestRestart.COUNT, script]
        node = start(script, nproc=2, max_restarts=3, stop_grace=1.0, timeouts={"unkillable": 0.5})
        pid, _ = node.until("pid-0"), node.until("pid-1")
        with self.held(int(pid)):
            (tmp_path / "go").touch()
            if code == ExitCode.STOPPED:
                node.send(signal.SIGTERM)
            node.process.wait(30)
        result = node.finish()
        assert result.code == code
        assert f"rank 0 (process {pid} in state t" in result.reason.message
        assert len(list(tmp_path.glob("start-*"))) == 2, "it holds its GPU: no other start"


@pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")
@pytest.mark.parametrize(("nproc", "name"), [(2, "torchrun"), (1, "torchrun"), (2, "worker")])
def test_a_launcher_that_the_script_starts_itself(run, nproc, name):
    """A library may start one; in a job of one process it is right to do so."""
    script = f"""
        import subprocess, sys, time
        with open("{name}", "w") as file:
            file.write("import time; time.sleep(4)")
        subprocess.run([sys.executable, "./{name}", "--nproc_per_node=2", "train.py"])
    """
    result = run(script, nproc=nproc, timeouts={"launcher": 2.0})
    events = [event.data for event in map(Event.decode, result.out.splitlines()) if event]
    commands = [data["command"] for data in events if data.get("reason") == "own-launcher"]
    assert len(commands) == (nproc == 2 and name == "torchrun")
    assert all(" ./torchrun --nproc_per_node=2" in command for command in commands)


class TestOrphans:
    FAMILY = """
        import os, pathlib, subprocess, time
        child = subprocess.Popen(["sleep", "300"])
        pathlib.Path("pids").write_text(f"{os.getpid()} {child.pid}")
    """

    def test_what_a_rank_leaves_behind_ends_with_it(self, start, gone):
        node = start([self.FAMILY, "time.sleep(0.5)"])
        pids = node.until("pids").split()
        assert node.finish().code == 0
        assert all(gone(int(pid)) for pid in pids)

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets the agent adopt them")
    def test_what_has_left_the_group_ends_before_the_next_start(self, run):
        """As at the end of a container: no daemon of one start keeps a port of the next."""
        script = """
            import os, pathlib, subprocess, time
            old = pathlib.Path("old")
            if old.exists():
                print(pathlib.Path("/proc", old.read_text()).exists())
                raise SystemExit
            daemon = "setsid sleep 300 >&- 2>&- & echo $!"
            words = subprocess.check_output(["sh", "-c", daemon], env={}, text=True)
            old.write_text(words.strip())
            os.kill(os.getpid(), 9)
        """
        result = run(script, max_restarts=1)
        assert (result.code, result.out.splitlines()[-1]) == (0, "False")

    def test_a_killed_agent_takes_its_ranks_along(self, start, gone):
        node = start([self.FAMILY, "time.sleep(60)"])
        rank, child = node.until("pids").split()
        node.send(signal.SIGKILL)
        node.process.wait(timeout=60)
        assert gone(int(rank))
        os.kill(int(child), signal.SIGKILL)  # in a pod the kernel does that when PID 1 ends

    def test_a_parent_that_is_gone_ends_the_group(self, start, gone):
        read, write = os.pipe()
        os.set_inheritable(read, True)  # noqa: FBT003 - os has no keyword for it
        node = start(
            ["import signal; signal.signal(15, signal.SIG_IGN)", self.FAMILY, "time.sleep(60)"],
            environ={LIFELINE_ENV: str(read)},
            pass_fds=(read,),
            stop_grace=60,
        )
        os.close(read)
        pids = node.until("pids").split()
        os.close(write)
        end = time.monotonic()
        result = node.finish()
        assert time.monotonic() - end < 40
        assert (result.code, result.reason.type) == (143, "Stopped")
        assert all(gone(int(pid)) for pid in pids)


class TestHang:
    BEAT = """
        import ctypes, os, pathlib, signal, time
        from k8sjob.runtime.base.heartbeat import Observer
        def stop_myself():
            os.kill(os.getpid(), signal.SIGSTOP)
        def hold_the_lock():
            ctypes.PyDLL(None).sleep(60)
        if os.environ["RANK"] == "1":
            Observer.expect(progress=True)  # as in a session's training
    """

    @pytest.mark.parametrize(
        ("hang", "seen"),
        [("stop_myself", (0, 1) if sys.platform == "linux" else (1,)), ("hold_the_lock", (1,))],
    )
    def test_the_agent_ends_what_cannot_end_itself(self, run, tmp_path, hang, seen):
        """Rank 0 is not watched, so that it counts as hung where it is seen to be stopped."""
        result = run([self.BEAT, f"    {hang}()\n", "time.sleep(60)"], nproc=2, hang_timeout=1.0)
        assert result.code == ExitCode.HUNG
        assert result.reason.type == "Hang"
        assert result.reason.culprits, "on a busy machine one rank is seen before the other"
        assert set(result.reason.culprits) <= set(seen)
        assert result.seconds < 40
        for rank in (0, 1):
            assert f'[rank {rank}]   File "{tmp_path}/main.py", line' in result.err
        unmarked = [line for line in result.err.splitlines() if "File" in line and "[" not in line]
        assert unmarked == []

    def test_a_rank_that_cannot_stop_does_not_use_the_whole_grace(self, start, tmp_path):
        script = """
            import os, pathlib, signal
            from k8sjob.runtime.base.heartbeat import Observer
            Observer.watched = True
            signal.signal(signal.SIGTERM, lambda *_: None)  # as in a session
            pathlib.Path("ready").write_text("x")
            os.kill(os.getpid(), signal.SIGSTOP)
        """
        node = start(script, hang_timeout=1.0, stop_grace=60)
        node.until("ready")
        node.send(signal.SIGTERM)
        result = node.finish()
        assert result.code == ExitCode.HUNG
        assert f'File "{tmp_path}/main.py"' in result.err

    def test_the_culprit_writes_its_stacks_even_if_its_peer_has_ended_by_it(self, run, tmp_path):
        """A stopped rank answers no alarm; its peer's watchdog has ended the peer meanwhile."""
        script = """
            import os, signal, time
            signal.signal(signal.SIGTERM, lambda *_: None)  # as in a session
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)
            os._exit(140)
        """
        result = run(script, nproc=2, hang_timeout=60.0)
        assert result.code == ExitCode.HUNG
        assert f'File "{tmp_path}/main.py", line 5' in result.err

    def test_the_stacks_of_a_crash_name_their_rank(self, run, tmp_path):
        result = run("import os; os.abort()", nproc=2)
        assert f'[rank 0]   File "{tmp_path}/main.py", line 1 in <module>' in result.err
        assert "[rank 0] Fatal Python error: Aborted" in result.err
        assert result.reason.where == f"{tmp_path}/main.py:1"

    @pytest.mark.skipif(sys.platform != "linux", reason="tells a stopped process by /proc")
    def test_a_rank_that_is_stopped_before_its_first_beat_is_ended(self, run):
        """Its peers would wait for it in the rendezvous, again and again."""
        script = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
        result = run(script, hang_timeout=1.0)
        assert (result.code, result.reason.type) == (ExitCode.HUNG, "Hang")
        assert result.seconds < 40

    @pytest.mark.parametrize("watched", [True, False])
    def test_a_rank_whose_observer_runs_continues_as_one_that_is_not_watched(self, run, watched):
        script = f"""
            import ctypes, time
            from k8sjob.runtime.base.heartbeat import Observer
            Observer.watched = {watched}
            (time if Observer.watched else ctypes.PyDLL(None)).sleep(3)
        """
        assert run(script, hang_timeout=1.0).code == 0


def test_a_reason_in_one_line():
    from k8sjob.contract import Reason

    reason = Reason(1, rank=2, type="ValueError", message="a\n  b", where="main.py:3")
    assert describe(reason) == "rank 2: ValueError: a b (main.py:3), exit code 1"
    assert describe(Reason(7, type="Exit", message="exited with code 7")) == "exited with code 7"
    there = Reason(7, 0, "Exit", "exited with code 7", "main.py:2")
    assert describe(there) == "rank 0: exited with code 7 (main.py:2)"
    told = describe(Reason(1, 0, "AssertionError", "", "main.py:2"))
    assert told == "rank 0: AssertionError (main.py:2), exit code 1"
    named_exit = Reason(1, type="Exit", message="no data", where="main.py:3")
    assert describe(named_exit) == "Exit: no data (main.py:3), exit code 1"
