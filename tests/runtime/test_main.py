"""The container's entrypoint: what it says, refuses and waits for before the first process."""

from __future__ import annotations

import signal
import struct
import sys
import time
from types import SimpleNamespace

import pytest
from clocks import COMPILER, Clocks

from k8sjob import contract
from k8sjob.contract import ExitCode
from k8sjob.runtime.base.env import NodeEnv
from k8sjob.runtime.base.network import await_master

NODE_1 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "PET_NNODES": "2",
    # An empty label: refused by the encoder, so no question leaves this machine.
    "MASTER_ADDR": "digits..master-0",
    "MASTER_PORT": "23456",
}


class TestBanner:
    def test_it_comes_first_and_names_the_node(self, run):
        result = run("import sys; sys.stderr.write('script')", nproc=2, job="digits")
        first = result.err.splitlines()[0]
        versions = f"Python {'.'.join(map(str, sys.version_info[:3]))}, torch 2."
        assert first.startswith("k8sjob: ")
        for part in (
            "job digits",
            "node 0 of 1",
            "2 processes of 2",
            versions,
        ):
            assert part in first

    @pytest.mark.parametrize(("given", "threads"), [(None, "1"), ("5", "5")])
    def test_one_thread_for_each_of_several_processes(self, run, given, threads):
        # One write a line: two unbuffered processes print into each other's.
        script = "import os; os.write(1, os.environ['OMP_NUM_THREADS'].encode() + b'\\n')"
        result = run(script, nproc=2, environ={"OMP_NUM_THREADS": given})
        assert result.out.split() == [threads] * 2
        assert ("OMP_NUM_THREADS is set to 1" in result.err) is (given is None)


class TestRefusals:
    @pytest.mark.parametrize(
        ("argv", "environ", "seen"),
        [
            (["main.py"], {"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 is not below"),
            (["main.py"], {"LOCAL_RANK": "0"}, "another launcher"),
            (["main.py"], {contract.CONFIG_ENV: "{"}, "K8SJOB_CONFIG is not JSON"),
            (["no.py"], {}, "there is no script 'no.py'"),
            (["--exec"], {}, "nothing to run"),
            (["-m"], {}, "nothing to run"),
            (["--help"], {}, "usage: python -m k8sjob.runtime"),
            (["--exec", "no-such-program"], {}, "cannot start 'no-such-program'"),
            (["--exec", "./crlf.sh"], {}, r"b'#!/bin/sh\r\n', names a missing interpreter"),
        ],
    )
    def test_one_line_and_the_code_for_it(self, run, tmp_path, argv, environ, seen):
        (tmp_path / "crlf.sh").write_bytes(b"#!/bin/sh\r\ntrue\r\n")
        (tmp_path / "crlf.sh").chmod(0o755)
        result = run("", argv=argv, environ=environ)
        assert result.code == ExitCode.CONFIG
        assert seen in result.err
        assert "Traceback" not in result.err

    @pytest.mark.skipif(not COMPILER, reason="there is no C compiler")
    def test_a_clock_before_1970_in_which_gloo_never_returns(self, run, tmp_path):
        clocks = Clocks(tmp_path / "clocks", 1)
        (tmp_path / "clocks/client").write_bytes(struct.pack("q", -int(time.time()) - 9999))
        result = run("", environ=clocks.env)
        assert result.code == ExitCode.CONFIG
        assert "the clock is before 1970" in result.err
        assert result.reason.exit_code == ExitCode.CONFIG

    @pytest.mark.parametrize(
        ("version", "code", "seen"),
        [
            ("2.5.1", 2, "torch 2.5.1 is too old; install torch >= 2.6"),
            ("1.13.1+cu117", 2, "too old"),
            ("2.6.0a0+ecf3bae40a.nv25.01", 0, ""),
            ("2.10.0", 0, ""),
        ],
    )
    def test_torch_by_its_metadata(self, run, tmp_path, version, code, seen):
        info = tmp_path / "site" / f"torch-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        result = run("", environ={"PYTHONPATH": str(tmp_path / "site")})
        assert result.code == code
        assert seen in result.err


class TestSpentRestarts:
    KILLED = "import os; os.kill(os.getpid(), 9)"

    def test_the_exit_code_keeps_the_operator_from_starting_it_again(self, run):
        result = run(self.KILLED, max_restarts=1, restart_policy="ExitCode")
        assert result.code == ExitCode.RESTARTS_SPENT
        assert (result.reason.exit_code, result.reason.type) == (137, "Signal")
        assert "restart 1 of 1" in result.err

    @pytest.mark.parametrize(
        ("script", "policy", "code"),
        [(KILLED, "OnFailure", 137), ("raise SystemExit(7)", "ExitCode", 7)],
        ids=["the operator counts", "an error of the script"],
    )
    def test_else_the_code_stays_what_it_is(self, run, script, policy, code):
        assert run(script, max_restarts=0, restart_policy=policy).code == code

    def test_a_stop_keeps_its_code(self, start):
        script = "import pathlib, time; pathlib.Path('ready').write_text('x'); time.sleep(60)"
        node = start(script, restart_policy="ExitCode")
        node.until("ready")
        node.send(signal.SIGTERM)
        assert node.finish().code == 143

    def test_a_master_that_may_still_come_is_waited_for_by_a_new_pod(self, run):
        result = run("", environ=NODE_1, rendezvous_timeout=0.5, restart_policy="ExitCode")
        assert result.code == ExitCode.PEER_LOST


class TestMastersName:
    def test_the_wait_has_a_deadline_and_names_the_master(self, run):
        result = run("print('never')", environ=NODE_1, rendezvous_timeout=0.5)
        assert result.code == ExitCode.PEER_LOST
        assert result.reason.culprits == (0,)
        assert "digits..master-0 did not resolve within 0.5 s" in result.reason.message
        assert result.out == ""

    def test_a_stop_ends_the_wait(self, start):
        node = start("print('never')", environ=NODE_1, rendezvous_timeout=60)
        node.process.stderr.readline()
        node.send(signal.SIGTERM)
        result = node.finish(40)
        assert (result.code, result.reason.type) == (143, "Stopped")
        assert result.out == ""

    @pytest.mark.parametrize(
        ("rank", "addr", "wait"),
        [
            (0, "job-master-0", False),
            (1, "job-master-0", True),
            (1, "127.0.0.1", False),
            (1, "::1", False),
            (1, "localhost", False),
        ],
    )
    def test_only_another_pods_name_is_waited_for(self, rank, addr, wait, monkeypatch):
        names = []
        monkeypatch.setattr("socket.getaddrinfo", lambda name, _port: names.append(name))
        inbox = SimpleNamespace(stopping=lambda: False, wait=time.sleep)
        await_master(NodeEnv(rank, 2, 1, addr, 1), 5, inbox)
        assert names == [addr] * wait


class TestExec:
    def test_a_command_runs_with_its_environment_untouched(self, run):
        result = run(
            argv=["--exec", "sh", "-c", "echo $RANK/$WORLD_SIZE/$K8SJOB_LIFELINE_FD."],
            environ={"RANK": "9", "WORLD_SIZE": "2"},
        )
        assert (result.code, result.out) == (0, "9/2/.\n")
        assert result.err == ""

    def test_it_is_not_restarted(self, run, tmp_path):
        result = run(argv=["--exec", "sh", "-c", "echo x >> starts; kill -9 $$"], max_restarts=3)
        assert result.code == 137
        assert (tmp_path / "starts").read_text() == "x\n"

    def test_a_broken_pipe_ends_it_as_usual(self, run):
        """Python ignores SIGPIPE, and a program that it becomes must not."""
        assert run(argv=["--exec", "sh", "-c", "kill -PIPE $$; echo alive"]).code == 141


class TestKeras:
    SCRIPT = "import os; print(os.environ.get('KERAS_BACKEND'))"

    @pytest.mark.parametrize(
        ("strategy", "options", "given", "backend"),
        [
            ("keras", {}, None, "torch"),
            ("keras", {}, "torch", "torch"),
            ("keras_mesh", {}, None, "jax"),
            ("ddp", {}, None, "None"),
        ],
    )
    def test_the_backend_is_set_before_the_first_import(
        self, run, strategy, options, given, backend
    ):
        environ = {"KERAS_BACKEND": given}
        result = run(self.SCRIPT, strategy=strategy, options=options, environ=environ)
        assert result.out.split() == [backend]

    def test_another_choice_is_refused(self, run):
        result = run(self.SCRIPT, strategy="keras", environ={"KERAS_BACKEND": "jax"})
        assert result.code == ExitCode.CONFIG
        assert "KERAS_BACKEND is jax, and strategy.kind: keras trains with torch" in result.err
