"""Ranks that are forked after one import of torch: of which scripts, and like new processes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from k8sjob.contract import ExitCode
from k8sjob.runtime.agent.early_imports import early_imports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no rank is forked")

TORCH, COMPILER = ("torch",), ("torch", "torch._dynamo")


@pytest.mark.parametrize(
    ("script", "modules"),
    [
        ('"""Text."""\nimport os\nfrom torch import nn\n', COMPILER),
        ("import torch, os\nos.environ['TORCHDYNAMO_DISABLE'] = '1'\n", TORCH),
        ("import torch, os\nos.environ['TRITON_INTERPRET'] = '1'\n", TORCH),
        ("import torch, os\nos.environ['TORCHELASTIC_RUN_ID']\n", COMPILER),
        ("from package.configures import x\n", TORCH),
        ("SIZE, NAMES = 3, ['a']\nimport torch\n", COMPILER),
        ("from beside import x\nimport torch\n", COMPILER),
        ("from k8sjob import runtime\nimport torch\n", (*COMPILER, "k8sjob.runtime.sessions")),
        ("from k8sjob.runtime import session\n", (*COMPILER, "k8sjob.runtime.sessions")),
        # The library that is loaded first brings its OpenMP; one may read the variables of a rank.
        ("import sklearn.svm, numpy as np, torch\n", ("sklearn", "numpy", *COMPILER)),
        ("import torch, numpy\n", COMPILER),
        ("A = '\\d'\nimport torch\n", COMPILER),  # with a warning, which the rank shows
        ("import lightning as L\nimport torch\n", COMPILER),
        # What torch reads at its import may be changed before.
        ("from k8sjob import runtime\nimport os\nos.environ['A'] = 'b'\nimport torch\n", ()),
        ("import os\nif True:\n    os.putenv('A', 'b')\nimport torch\n", ()),
        ("import sys\nsys.path.insert(0, 'lib')\nimport torch\n", ()),
        ("from acts import x\nimport torch\n", ()),
        ("def set(): pass\nset()\nimport torch\n", ()),
        # A library may do that, or has to be loaded first.
        ("import unsloth\nimport torch\n", ()),
        # Late, in another module of that name, not at all, or not to be read.
        ("def main():\n    import torch\nmain()\n", ()),
        ("import own.torch\n", ()),
        ("import json\nprint('torch')\n", ()),
        ("import torch\nthis is no Python\n", ()),
        ("import torch\nx = " + 9999 * "-" + "1\n", ()),
    ],
)  # fmt: skip
def test_torch_is_imported_early_where_the_script_does_nothing_before(
    script, modules, tmp_path, monkeypatch
):
    files = {
        "main.py": script,
        "beside.py": "import json\n",
        "acts.py": "import os\nos.environ.setdefault('KMP_BLOCKTIME', '1')\n",
        "own/torch.py": "",
        "package/__init__.py": "from . import constants\n",
        "package/constants.py": "SIZE = 3\n",
        "package/trains.py": "import torch\n",
        "package/configures.py": "import torch, os\nos.environ['TORCHINDUCTOR_X'] = '1'\n",
        "package/__main__.py": "from .trains import x\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert early_imports(["main.py", "--lr", "1"], 2) == modules
    assert early_imports(["-m", "main"], 2) == modules
    assert early_imports(["-m", "package"], 2) == COMPILER
    assert early_imports(["-m", "package"], 1) == TORCH
    assert early_imports(["-m", "nothing"], 2) == early_imports(["package"], 2) == ()


FACTS = """
import argparse, atexit, faulthandler, gc, json, locale, multiprocessing, os, random, re, resource
import signal, sys, threading, time
import numpy
import sklearn
import torch
from torch.utils.data import DataLoader, Dataset

class Point:
    pass

class Squares(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index * index

def facts(rank):
    main = sys.modules["__main__"]
    streams = (sys.stdin, sys.stdout, sys.stderr)
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    comm = open("/proc/self/comm").read()
    return {
        "main": [str(getattr(main, name)) for name in ("__file__", "__spec__", "__package__")],
        "same": main.facts is facts,
        "path": sys.path, "argv": [sys.argv, sys.orig_argv],
        "flags": str(sys.flags), "hash": hash("x"), "comm": comm,
        "cwd": os.getcwd(), "umask": os.umask(0o22), "nice": os.nice(0),
        "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "handlers": [str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()],
        "leads": os.getsid(0) == os.getpgrp() == os.getpid(),
        "limits": [resource.getrlimit(n) for n in range(16)],
        "oom": open("/proc/self/oom_score_adj").read(), "garbage": gc.isenabled(),
        "descriptors": sum(1 for _ in os.scandir("/proc/self/fd")),
        "streams": [[s.encoding, s.line_buffering, s.fileno(), s.closed] for s in streams],
        "threads": sorted(t.name for t in threading.enumerate()), "main thread":
            threading.main_thread() is threading.current_thread()
            and threading.get_native_id() == os.getpid(),
        "faults": faulthandler.is_enabled(), "locale": locale.setlocale(locale.LC_ALL),
        "recursion": sys.getrecursionlimit(), "torch threads": torch.get_num_threads(),
        "cuda": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()],
        "start": multiprocessing.get_start_method(), "no new": status["NoNewPrivs"],
        "environ": {
            k: v for k, v in os.environ.items() if not re.search("ERROR_FILE|_PORT|INDUCTOR", k)
        },
    }

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    options = parser.parse_args()
    rank = os.environ["RANK"]
    report = facts(rank)
    report["lr"] = options.lr
    # A worker that is spawned unpickles a class of __main__.
    for start in ("fork", "spawn") if rank == "0" else ():
        loader = DataLoader(Squares(), num_workers=1, multiprocessing_context=start)
        report[start] = [batch.item() for batch in loader]
    if rank == "1":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            report["pool"] = type(pool.apply(Point)) is Point
    chance = [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed(),
              multiprocessing.current_process().authkey.hex()]
    atexit.register(lambda: open(f"end-{rank}", "w").write("done"))
    json.dump([report, chance], open(f"facts-{rank}", "w"))
    while rank == "1" and not os.path.exists("end-0"):  # its failure would end the other
        time.sleep(0.05)
    sys.exit(7 if rank == "1" else 0)
"""


def test_a_forked_rank_is_like_a_new_process(run, tmp_path):
    def facts(script):
        result = run(script, "--lr", "0.5", nproc=2)
        assert (result.code, result.reason.message) == (7, "exited with code 7"), result.err
        assert (tmp_path / "end-0").read_text() == "done"
        (tmp_path / "end-0").unlink()
        (tmp_path / "termination-log.restarts").unlink()  # else the next start is a restart
        ranks = [json.loads((tmp_path / f"facts-{rank}").read_text()) for rank in range(2)]
        return [facts for facts, _ in ranks], [chance for _, chance in ranks]

    forked, chances = facts(FACTS)
    own_processes, others = facts("print('first')\n" + FACTS)
    assert forked == own_processes
    drawn = [number for chance in chances + others for number in chance]
    assert len(set(drawn)) == len(drawn)


FAKE = """
import os
class cuda:
    _is_in_bad_fork = staticmethod(lambda: False)
class default_generator:
    seed = staticmethod(lambda: None)
with open("imports", "a") as file:
    print(os.getpid(), file=file)
"""
WHO = """
import torch
import os, signal, sys
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"who-{rank}-{restart}", "w").write(f"{os.getpid()} {os.getppid()}")
def siblings(name):
    children = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
    return [int(pid) for pid in children if name in open(f"/proc/{pid}/comm").read()]
"""


@pytest.fixture
def fake(tmp_path):
    """fake(addition) -> environ: a torch that writes into `imports` who imports it."""

    def write(addition=""):
        (tmp_path / "lib/torch").mkdir(parents=True)
        (tmp_path / "lib/torch/__init__.py").write_text(FAKE + addition)
        (tmp_path / "lib/torch/_dynamo.py").touch()
        path = [str(Path(__file__).parents[2]), str(tmp_path / "lib")]
        return {"PYTHONPATH": ":".join(path)}

    return write


@pytest.fixture
def importers(tmp_path):
    """importers() -> the processes that have imported torch."""
    return lambda: (tmp_path / "imports").read_text().split()


KILLED = 'if (rank, restart) == ("1", "0"): os.kill(os.getpid(), signal.SIGKILL)\n'


def test_the_ranks_of_all_starts_share_one_import_and_are_the_agents(
    start, fake, importers, tmp_path
):
    node = start((WHO, KILLED), nproc=2, max_restarts=1, environ=fake())
    assert node.finish().code == 0
    assert len(importers()) == 1
    ranks = [path.read_text().split() for path in tmp_path.glob("who-*")]
    assert len({pid for pid, _ in ranks} | set(importers())) == 5
    assert {parent for _, parent in ranks} == {str(node.process.pid)}


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_without_their_server_ranks_are_started_each_by_itself(run, fake, importers, number):
    lost = f"""
    import time
    while not os.path.exists("who-1-0"):  # all are forked
        time.sleep(0.01)
    if restart == rank == "0":
        os.kill(*siblings("k8sjob-fork"), signal.{number})
    time.sleep(0.2 * (restart == "0"))
    """
    result = run((WHO, lost, KILLED), nproc=2, max_restarts=1, environ=fake(),
                 timeouts={"connect": 0.5})  # fmt: skip
    assert result.code == 0
    assert len(importers()) == 3


def test_a_rank_whose_server_is_killed_before_it_begins_is_started_again(run, fake):
    killed = "write = os.write\ndef begin(file, data):\n"
    killed += "    write(file, data) if data != b'.' else os.kill(os.getpid(), 9)\n"
    assert run(WHO, nproc=2, max_restarts=1, environ=fake(killed + "os.write = begin\n")).code == 0


@pytest.mark.parametrize(
    "addition",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=[1]).start()\n",
        "import colorsys\n",
        "cuda._is_in_bad_fork = lambda: True\n",
        "device = open('/dev/zero')\n",
        "import signal, sys\nif '--forks' in sys.orig_argv: os.kill(os.getpid(), signal.SIGSTOP)\n",
        "default_generator.seed = None\n",
        "del cuda._is_in_bad_fork\n",
        "",
    ],
    ids=["thread", "module", "driver", "device", "stopped", "seed", "other torch", "hash"],
)
def test_ranks_are_not_forked_where_they_would_not_be_like_new(
    run, fake, importers, tmp_path, addition
):
    (tmp_path / "colorsys.py").write_text("of_script = True\n")
    uses = "" if not addition.startswith("import color") else "assert torch.colorsys.of_script\n"
    seed = {"PYTHONHASHSEED": "0" if addition else "random"}
    assert run((WHO, uses), nproc=2, environ=fake(addition) | seed, hang_timeout=5.0).code == 0
    ranks = [path.read_text().split()[0] for path in tmp_path.glob("who-*")]
    assert len(set(ranks) & set(importers())) == 2


def test_an_import_that_fails_is_reported_at_the_line_of_the_script(run, fake, tmp_path):
    result = run("import torch\n", nproc=2, environ=fake("import missing_library\n"))
    assert result.code == ExitCode.USER_ERROR
    assert result.reason.message == "No module named 'missing_library'"
    assert f'"{tmp_path}/main.py", line 1' in result.err
    assert result.err.count("Traceback") == 1


def test_a_stop_does_not_wait_for_the_import_and_ends_what_it_has_started(start, fake, gone):
    waits = "import subprocess\nsubprocess.run(['sleep', '600'])\n"
    node = start(WHO, nproc=2, environ=fake(waits))
    server = int(node.until("imports"))
    node.send(signal.SIGTERM)
    assert node.finish(30).code == ExitCode.STOPPED
    assert gone(server)


def test_the_phases_are_those_of_the_import_and_of_the_script(start, fake):
    out, _ = start(
        WHO + "import time; time.sleep(1)\n", nproc=2, environ=fake()
    ).process.communicate(timeout=60)
    phases = [json.loads(line.partition(" ")[2])["data"].get("phase") for line in out.splitlines()]
    assert phases[:2] == ["importing", "running"]
