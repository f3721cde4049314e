"""A process that imports torch once, and forks the ranks of each run of a script."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from k8sjob.runtime.agent.rank_main import die_with_parent, run_as_main
from k8sjob.runtime.base.env import export, node_env
from k8sjob.runtime.base.frames import fatal_place
from k8sjob.runtime.base.network import reserve
from k8sjob.runtime.comm import rng

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[dict[str, Any], int, Callable[[], Any]], int]

SEED: Final = 20250
"""Of the random numbers of rank 0."""
_LOOK: Final = 0.02
_SAMPLE: Final = 0.1
_GRACE: Final = 2.0
"""Idle seconds that other ranks have to end after one has failed."""


def run_group(request: dict[str, Any], run: Run) -> dict[str, Any]:
    """Run a script in several processes, and wait for their end.

    Args:
        request: nodes (argv, env, cwd, mounts), mounter (the file that makes mounts); ranks (of all
            nodes); local_rank_arg, an option of the script, or None; root, the folder of all of the
            run's files; folder, of its record; options, for `run`, and hashes (each rank has its
            own seed of hashes); quiet (seconds without a record and without work after which the
            group hangs), silent (seconds without a record after which it is ended), limit (seconds
            in all).
        run: calls the script in a rank: with the request, the rank and the script; the exit code.

    Returns:
        ranks (their number), hung, the places in the script where those are that did not end, and
        the exit codes of those that failed (of a signal: negative).
    """
    folder, ranks = Path(request["folder"]), request["ranks"]
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Reserved until all ranks have ended, so that no run beside this one gets it.
        port = stack.enter_context(reserve("127.0.0.1")).getsockname()[1]
        children = {}
        try:
            for rank in range(ranks):
                pid = os.fork()
                if not pid:
                    _run_rank(request, rank, port, run)
                children[rank] = pid
            return _watch(children, folder, request)
        finally:
            for pid in children.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # Each rank leads a process group: see _run_rank.
                    os.killpg(pid, signal.SIGKILL)  # also workers that a rank has left
            # Here, since the command that has made these copies may have been killed.
            shutil.rmtree(Path(request["root"], "volumes"), ignore_errors=True)


def local_place(request: dict[str, Any], rank: int) -> tuple[int, int]:
    """The index of a rank's node, and its local rank there."""
    processes: int = request["ranks"] // len(request["nodes"])
    return divmod(rank, processes)


def _run_rank(request: dict[str, Any], rank: int, port: int, run: Run) -> None:
    """Make this process a rank, and end it."""
    code = 1
    try:
        if rank and request["options"].pop("hashes", False):  # a process has one seed all its life
            export("PYTHONHASHSEED", str(rank))
            program = sys.modules["__main__"].__spec__
            line = [sys.executable, "-P", "-m", program.name if program else ""]
            os.execv(line[0], [*line, json.dumps([request, rank, port])])  # noqa: S606 - as it is
        # As the leader of a session: one signal reaches the rank and all that it starts.
        os.setsid()
        # serve() has a handler, which a fork inherits.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(signal.SIGKILL)
        folder = Path(request["folder"])
        # Standard input carries the requests of the parent, of which a script must read nothing.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, name in ((1, "out"), (2, "err")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(folder / f"{name}-{rank}", flags, 0o600), stream)
        nodes = request["nodes"]
        index, local_rank = local_place(request, rank)
        node = nodes[index]
        env = {
            **node["env"],
            "PET_NPROC_PER_NODE": str(request["ranks"] // len(nodes)),
            # As the training operator sets them on a node: node_env() makes the variables of a
            # process of them, as the agent does.
            "WORLD_SIZE": str(request["ranks"]),
            "RANK": str(index),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        env |= {name: str(len(nodes)) for name in ("PET_NNODES",) if name in env}
        env |= {name: str(index) for name in ("PET_NODE_RANK",) if name in env}
        for name, value in {**env, **node_env(env).process(local_rank)}.items():
            export(name, value)
        # faulthandler writes the stack, since a rank that hangs in C runs no handler of Python.
        faulthandler.register(
            signal.SIGUSR2, (folder / f"stack-{rank}").open("w"), all_threads=False
        )
        os.chdir(node["cwd"])
        if node["mounts"]:  # also of what this machine has there, so that no script writes to it
            runpy.run_path(request["mounter"])["Mounts"]().add(node["mounts"])
        if option := request["local_rank_arg"]:
            node["argv"].append(f"{option}={local_rank}")
        # All ranks share this machine, and the sums of one thread have one order.
        torch.set_num_threads(1)
        rng.seed_all(SEED, rank)
        code = run(request, rank, lambda: run_as_main(node["argv"]))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Nothing of the parent process may run in a rank, such as its exit handlers.
        os._exit(code)


def _watch(children: dict[int, int], folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    alive, failed, hung, progress = dict(children), dict[int, int](), False, (0, 0)
    begun = quiet_since = looked = recorded = time.monotonic()
    while True:
        for rank, pid in list(alive.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del alive[rank]
                failed |= {rank: os.waitstatus_to_exitcode(status)} if status else {}
        now = time.monotonic()
        if not alive or now - begun > request["limit"] or now - recorded > request["silent"]:
            break
        if now - looked > _SAMPLE:
            looked = now
            # Every batch, loss and step is a line, so a file that grows is progress.
            sizes = [file.stat().st_size for file in folder.glob("trace-*.jsonl")]
            if sum(sizes) != progress[0]:
                recorded = now
            if (sum(sizes), len(alive)) != progress or any(map(_is_active, alive.values())):
                progress, quiet_since = (sum(sizes), len(alive)), now
        # The ranks wait for each other: nothing is written, and no process runs. After a failure
        # the others only have to notice it.
        if now - quiet_since > (_GRACE if failed else request["quiet"]):
            hung = not failed
            break
        time.sleep(_LOOK)
    # While they are alive: each writes its stack itself.
    places = {rank: _place(pid, folder / f"stack-{rank}") for rank, pid in alive.items()}
    for pid in alive.values():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    # See Recorder.join: the number of the processes that the script has started itself.
    spawned = folder / "spawned"
    count = int(spawned.read_text()) if spawned.exists() else request["ranks"]
    return {"hung": hung, "places": places, "failed": failed, "ranks": count}


def _is_active(pid: int) -> bool:
    """Whether the main thread of a process, or of a child, runs, could run, or reads a disk.

    Those of a backend wake up now and then while the main thread waits.
    """
    with contextlib.suppress(OSError, IndexError):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "RD":
            return True
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return any(_is_active(int(child)) for child in children)
    return False


def _place(pid: int, file: Path) -> str:
    """The place of a process in the user's code."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    for _ in range(50):
        if file.exists() and file.stat().st_size:
            break
        time.sleep(_LOOK)
    time.sleep(_LOOK)
    return Path(fatal_place(file.read_text() if file.exists() else "")).name


def serve(run: Run) -> None:
    """Answer requests, one per line, from standard input until it ends; for `run` see run_group."""
    if sys.argv[1:]:
        # A rank with its own seed of hashes: see _run_rank, which has started this interpreter.
        request, rank, port = json.loads(sys.argv[1])
        _run_rank(request, rank, port, run)
    answers = os.dup(1)
    # Only answers go to standard output; what libraries print goes to standard error.
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the ranks, too
    die_with_parent(signal.SIGTERM)
    _warm()
    for line in sys.stdin:
        answer = run_group(json.loads(line), run)
        os.write(answers, (json.dumps(answer) + "\n").encode())


def _warm() -> None:
    """Import what the first step of an optimizer would import in each process."""
    with contextlib.suppress(ImportError):
        import numpy as np  # noqa: F401, PLC0415 - a script has its own random numbers of it seeded
    # The first step of an optimizer imports torch._dynamo: once here, and not in each rank.
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()
