"""A program in a rank's process behaves as under plain Python, and leaves a reason."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import k8sjob.runtime
from k8sjob.contract import PATHS_ENV, SOURCE_ENV, WORKDIR, ExitCode, Reason
from k8sjob.runtime.agent import rank_main
from k8sjob.runtime.agent.rank_main import exit_code, reason_of
from k8sjob.runtime.base.errors import EnvError, PeerLost, first_line
from k8sjob.runtime.base.heartbeat import Observer
from k8sjob.runtime.base.termination import read_reason, write_reason

LOOK = """
import json, sys
main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": __spec__ and __spec__.name,
    "loader": type(__loader__).__name__,
    "main": main.__dict__ is globals(),
    "builtins": type(__builtins__).__name__,
    "cached": __cached__ if "__cached__" in globals() else None,
}))
"""
FAIL = """
import functools
def inner(x):
    return 1 / x
def outer(x):
    try:
        return inner(x)
    except ZeroDivisionError as error:
        raise ValueError("outer") from error
functools.reduce(lambda a, b: outer(b), [1, 0])
"""


@pytest.fixture
def plain(tmp_path):
    """plain(*argv) -> what Python itself does with the same program."""

    def run_python(*argv, **options):
        return subprocess.run(
            [sys.executable, *argv],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    return run_python


def without_agent(text):
    """What a rank wrote, without the agent's own lines."""
    return "".join(
        line for line in text.splitlines(keepends=True) if not line.startswith("k8sjob: ")
    )


class TestAsPython:
    @pytest.fixture
    def programs(self, tmp_path):
        (tmp_path / "pkg" / "sub").mkdir(parents=True)
        (tmp_path / "pkg" / "__init__.py").write_text("import sys; early = list(sys.argv)")
        (tmp_path / "pkg" / "train.py").write_text(LOOK)
        (tmp_path / "pkg" / "sub" / "__init__.py").touch()
        (tmp_path / "pkg" / "sub" / "__main__.py").write_text(LOOK)
        (tmp_path / "nested").mkdir()
        (tmp_path / "nested" / "look.py").write_text(LOOK)
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "__main__.py").write_text(LOOK)
        (tmp_path / "link.py").symlink_to("nested/look.py")
        with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
            archive.writestr("__main__.py", LOOK)

    @pytest.mark.parametrize(
        "argv",
        [
            ["nested/look.py", "--lr", "1", "-m", "x"],
            ["./nested/../nested/look.py"],
            ["link.py"],
            ["-m", "pkg.train", "--epochs", "2"],
            ["-m", "pkg.sub"],
            ["folder", "a"],
            ["app.zip"],
        ],
    )
    def test_a_program_sees_what_python_shows_it(self, run, plain, programs, argv):
        expected = plain(*argv)
        assert expected.returncode == 0, expected.stderr
        result = run("", argv=argv)
        assert result.code == 0, result.err
        assert json.loads(result.out) == json.loads(expected.stdout)

    @pytest.mark.parametrize("other", ["k8sjob.py", "k8sjob/__init__.py"])
    def test_a_file_of_the_runtimes_name_does_not_hide_it(self, run, tmp_path, other):
        (tmp_path / "k8sjob").mkdir()
        (tmp_path / other).write_text("raise SystemExit('another k8sjob')")
        (tmp_path / "beside.py").write_text("value = 3")
        result = run("import beside, k8sjob.runtime; print(beside.value, k8sjob.runtime.__file__)")
        assert result.code == 0, result.err
        assert result.out.split() == ["3", k8sjob.runtime.__file__]

    def test_a_safe_path_is_kept_where_the_user_set_it(self, run, tmp_path):
        (tmp_path / "beside.py").touch()
        result = run("import beside", environ={"PYTHONSAFEPATH": "1"})
        assert "ModuleNotFoundError: No module named 'beside'" in result.err

    @pytest.mark.parametrize(
        "script", [FAIL, "x = (\n", "raise SystemExit('no data')", "import pkg_that_is_not_there"]
    )
    def test_an_error_looks_as_python_prints_it(self, run, plain, tmp_path, script):
        result = run(script)
        expected = plain(str(tmp_path / "main.py"))
        assert without_agent(result.err) == expected.stderr
        assert result.code == expected.returncode

    def test_the_scripts_excepthook_is_used(self, run):
        result = run("import sys; sys.excepthook = lambda *a: print('mine', a[0].__name__); 1 / 0")
        assert result.out == "mine ZeroDivisionError\n"
        assert result.code == 1

    def test_ranks_with_the_same_error_show_its_traceback_once(self, run):
        result = run("import torch.distributed\nraise KeyError('no column')", nproc=2)
        lines = without_agent(result.err).splitlines()
        assert sum(line.endswith("Traceback (most recent call last):") for line in lines) == 1
        same = "KeyError: 'no column': the same traceback as another rank's"
        assert sum(line.endswith(same) for line in lines) == 1
        assert all(line.startswith("[rank ") for line in lines)

    def test_the_users_own_path_is_shown_for_that_of_the_copy(self, run, tmp_path):
        environ = {SOURCE_ENV: "/home/me/job", PATHS_ENV: json.dumps({WORKDIR: str(tmp_path)})}
        result = run("def f():\n    1 / open(__file__ + 'x')\nf()", environ=environ)
        assert 'File "/home/me/job/main.py", line 2, in f' in result.err
        assert result.reason.message.endswith("'/home/me/job/main.pyx'")
        assert result.reason.where == "/home/me/job/main.py:2"
        assert f"{tmp_path}/" not in result.err

    def test_the_cause_in_another_process_comes_first(self, run):
        script = """
            class SpawnError(Exception):
                pass
            text = '  File "/app/a.py", line 3, in f\\nOSError: x'
            raise SpawnError("Traceback (most recent call last):\\n" + text)
        """
        reason = run(script).reason
        assert (reason.type, reason.message, reason.where) == ("OSError", "x", "/app/a.py:3")

    def test_the_line_in_a_pools_worker_is_named(self, run, tmp_path):
        script = """
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import Pool
            def half(n):
                return 1 / n
            if __name__ == "__main__":
                with Pool(1) as pool:
                    try:
                        pool.map(half, [0])
                    except ZeroDivisionError as error:
                        print(type(error.__cause__).__name__)
                with ProcessPoolExecutor(1) as pool:
                    list(pool.map(half, [0]))
        """
        result = run(script)
        assert result.out == "RemoteTraceback\n"
        assert result.reason.message == "division by zero"
        assert result.reason.where == f"{tmp_path}/main.py:5"

    def test_a_script_can_spawn_processes(self, run):
        script = """
            import multiprocessing as mp
            def work(x):
                return x * x
            if __name__ == "__main__":
                with mp.get_context("spawn").Pool(1) as pool:
                    print(pool.map(work, [3]))
        """
        result = run(script)
        assert (result.code, result.out) == (0, "[9]\n")

    @pytest.mark.parametrize(
        ("argv", "seen"),
        [
            (["gone.py"], "there is no script 'gone.py'"),
            (["-m", "gone"], "there is no module 'gone'"),
            (["-m", "json.gone"], "there is no module 'json.gone'"),
            (["-m", "gone.deep.er"], "there is no module 'gone.deep.er'"),
            (["empty"], "there is no __main__.py in the folder"),
        ],
    )
    def test_a_missing_program_is_one_line(self, run, tmp_path, argv, seen):
        (tmp_path / "empty").mkdir()
        result = run("", argv=argv)
        assert result.code == ExitCode.CONFIG
        assert seen in result.reason.message
        assert "Traceback" not in result.err


class TestTheEnd:
    def test_it_does_what_python_does_at_the_end(self, run):
        """Threads are joined, idle pools released, atexit handlers run, output flushed."""
        script = """
            import atexit, ctypes, sys, threading, time
            from concurrent.futures import ThreadPoolExecutor
            ThreadPoolExecutor(2).submit(print, "pool", flush=True).result()
            def late():
                time.sleep(0.3)
                print("thread", __name__, sys.modules["__main__"].__dict__ is globals())
            threading.Thread(target=late).start()
            atexit.register(print, "atexit", end="")
            ctypes.CDLL(None).printf(b"from C\\n")
        """
        result = run(script)
        assert result.code == 0
        assert sorted(result.out.split()) == sorted(
            ["pool", "thread", "__main__", "True", "atexit", "from", "C"]
        )
        assert result.out.index("thread") < result.out.index("atexit")

    def test_it_never_tears_the_interpreter_down(self, run):
        """A finaliser at teardown is where a finished gloo process aborts."""
        script = """
            class Noisy:
                def __del__(self):
                    import os
                    os.abort()
            keep = Noisy()
            import builtins
            builtins.keep = keep
        """
        assert run(script).code == 0

    def test_a_failed_process_does_not_wait_for_an_endless_thread(self, run):
        script = """
            import threading, time
            threading.Thread(target=time.sleep, args=(120,)).start()
            raise ValueError("over")
        """
        result = run(script, timeouts={"exit": 0.5})
        assert (result.code, result.reason.message) == (1, "over")
        assert result.seconds < 60

    def test_a_failing_str_or_excepthook_hides_nothing(self, run):
        script = """
            import sys
            class Odd(Exception):
                def __str__(self):
                    return 1 / 0
            sys.excepthook = lambda *_: 1 / 0
            raise Odd
        """
        result = run(script)
        assert (result.code, result.reason.type) == (1, "Odd")
        assert result.reason.message == "(its __str__ raised ZeroDivisionError)"
        assert result.reason.where.endswith("main.py:7")
        assert "rank_main" not in result.err

    def test_a_failing_atexit_handler_changes_nothing(self, run):
        result = run("import atexit; atexit.register(lambda: 1 / 0)")
        assert result.code == 0
        assert "ZeroDivisionError" in result.err


def test_what_a_signal_handler_raises_during_the_report_is_the_reason(monkeypatch, capsys):
    """Torch's handler does so for a DataLoader's worker; the line is that of the program."""
    written = []

    def write(reason, _file):
        if not written:
            written.append(None)
            raise RuntimeError("a worker has died")
        written.append(reason)

    monkeypatch.setattr(rank_main, "write_reason", write)
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018 - for its exception
    line = caught.value.__traceback__.tb_lineno
    assert rank_main._report(caught.value, Observer(None, 1, 0)) == ExitCode.USER_ERROR
    assert written[1].message == "a worker has died"
    assert written[1].where.endswith(f"{Path(__file__).name}:{line}")
    assert "ZeroDivisionError" not in capsys.readouterr().err


NONE = "FileNotFoundError: [Errno 2] No such file or directory: '/none'"
OSERROR, HANDLING, FIRST = (f"from {NONE}",), (f"while handling {NONE}",), (f"first {NONE}",)
IN_GROUP = """def f():
 open('/none')
try: f()
except OSError as e: x = e
raise ExceptionGroup('no', [x, KeyError()])"""
NESTED = ("first ExceptionGroup: no (1 sub-exception)", "first KeyError: 'x'")


class TestReason:
    def test_a_name_that_does_not_resolve_is_in_the_message(self):
        with pytest.raises(socket.gaierror) as caught:
            socket.create_connection(("no-such-host.invalid", 1))
        assert reason_of(caught.value, 1).message.endswith(": no-such-host.invalid")

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (ValueError("x"), 1),
            (SystemExit(), 0),
            (SystemExit(0), 0),
            (SystemExit(True), 1),  # noqa: FBT003 - not a flag
            (SystemExit(300), 300 & 0xFF),
            (SystemExit("words"), 1),
            (KeyboardInterrupt(), 130),
            (EnvError("x"), ExitCode.CONFIG),
            (PeerLost("x"), ExitCode.PEER_LOST),
            (RuntimeError("gloo/transport/tcp/pair.cc:1] Connection closed by peer"), 138),
            (MemoryError(), 1),
        ],
    )
    def test_exit_codes_of_exceptions(self, error, code):
        assert exit_code(error) == code

    def test_a_lost_peer_is_one_line_and_missing_ranks_are_culprits(self):
        text = "[/a/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1. "
        error = RuntimeError(f"{text}This is typically caused by a remote worker crashing. Check")
        reason = reason_of(error, 138)
        assert reason.type == "PeerLost"
        assert reason.message == "another rank is gone: Connection closed by peer [127.0.0.1]:1"
        assert reason_of(PeerLost("gone", (2, 3)), 138).culprits == (2, 3)
        assert reason_of(SystemExit(143), 143).type == "Stopped"

    def test_a_message_may_begin_with_empty_lines(self):
        error = ValueError("\n\nno key\nsee the manual\n")
        assert reason_of(error, 1).message == "no key\nsee the manual"
        assert first_line(error) == "ValueError: no key"

    def test_an_assertion_without_a_message_is_reported_by_its_line(self, run):
        reason = run("x = '1.0'\nassert x == '0.3.2'  # version check\n").reason
        assert (reason.type, reason.message) == (
            "AssertionError",
            "assert x == '0.3.2'  # version check",
        )
        assert reason_of(AssertionError("no GPU"), 1).message == "no GPU"

    @pytest.mark.parametrize(
        ("script", "causes", "line"),
        [
            ("raise ValueError('no')", (), 1),
            ("try: open('/none')\nexcept OSError as e: raise ValueError('no') from e", OSERROR, 2),
            ("try: open('/none')\nfinally: raise ValueError('no')", HANDLING, 2),
            ("try: open('/none')\nexcept OSError: raise ValueError('no') from None", (), 2),
            ("e = ValueError('no')\nraise e from e", (), 2),
            (
                IN_GROUP,
                FIRST,
                2,
            ),
            ("raise ExceptionGroup('no', [ExceptionGroup('no', [KeyError('x')])])", NESTED, 1),
            ("import sys\ntry: open('/none')\nexcept OSError: sys.exit(3)", (), 3),
        ],
    )
    def test_the_exceptions_behind_one_are_reported(self, run, script, causes, line):
        reason = run(script).reason
        assert reason.causes == causes
        assert reason.where.endswith(f":{line}")

    def test_a_code_alone_is_no_error(self):
        """argparse has said by itself what it refuses."""
        for code in (2, True):
            reason = reason_of(SystemExit(code), int(code))
            assert (reason.type, reason.message) == ("Exit", f"exited with code {int(code)}")
        assert reason_of(SystemExit("no data"), 1).message == "no data"

    def test_the_place_is_in_the_users_own_code(self, run, tmp_path):
        result = run("import json\n\njson.loads('{')\n")
        assert result.reason.type == "JSONDecodeError"
        assert result.reason.where == f"{tmp_path}/main.py:3"

    def test_a_syntax_error_is_where_it_is(self, run, tmp_path):
        assert run("a = 1\nb = (\n").reason.where == f"{tmp_path}/main.py:2"

    def test_the_first_reason_stays(self, tmp_path):
        file = tmp_path / "reason.json"
        write_reason(Reason(140, type="Hang"), file)
        write_reason(Reason(138, type="PeerLost"), file)
        assert read_reason(file).type == "Hang"
        assert list(tmp_path.iterdir()) == [file]
