"""`python -P -m k8sjob.forking.ranks MODULE [IMPORTED ...]`: runs scripts, as the agent does.

Its requests are lines of JSON. The ranks of each are forked from one process, which has imported
MODULE, the program of a rank, and other modules.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any, Final

from k8sjob.runtime.agent.fork_server import ForkServer, adopt_orphans, die_with_parent
from k8sjob.runtime.agent.worker_group import Member, WorkerGroup, kill_children
from k8sjob.runtime.base.env import copy_environ, node_env
from k8sjob.runtime.base.frames import fatal_place
from k8sjob.runtime.base.network import reserve

_LOOK: Final = 0.02
_SAMPLE: Final = 0.1
_GRACE: Final = 2.0
"""Idle seconds that other ranks have to end after one has failed."""


def run_group(request: dict[str, Any], forks: ForkServer) -> dict[str, Any]:
    """Run a script in several processes, and wait for their end.

    Args:
        request: nodes (argv, env, cwd, mounts), mounter (the file that makes mounts); ranks (of all
            nodes); local_rank_arg, an option of the script, or None; root, the folder of all of the
            run's files; folder, of its record; options, for the ranks, and hashes (each rank has
            its own seed of hashes); quiet (seconds without a record and without work after which
            the group hangs), silent (seconds without a record after which it is ended), limit
            (seconds in all).
        forks: has imported the program of a rank; see script.run_rank.

    Returns:
        ranks (their number), hung, the places in the script where those are that did not end, and
        the exit codes of those that failed (of a signal: negative).
    """
    folder = Path(request["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    forks.settle()
    # Reserved until all ranks have ended, so that no run beside this one gets it.
    with reserve("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        try:
            nodes = range(len(request["nodes"]))
            members = [_members(request, node, port, forks) for node in nodes]
            return _watch(WorkerGroup([*chain(*members)]), folder, request)
        finally:
            kill_children({forks.pid})  # also workers that a rank has left
            # Here, since the command that has made these copies may have been killed.
            shutil.rmtree(Path(request["root"], "volumes"), ignore_errors=True)


def _members(request: dict[str, Any], index: int, port: int, forks: ForkServer) -> list[Member]:
    """The ranks of a node."""
    nodes = request["nodes"]
    node, processes = nodes[index], request["ranks"] // len(nodes)
    env = {
        **node["env"],
        "PET_NPROC_PER_NODE": str(processes),
        # As the training operator sets them on a node: the agent makes a rank's variables of them.
        "WORLD_SIZE": str(request["ranks"]),
        "RANK": str(index),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    env |= {name: str(len(nodes)) for name in ("PET_NNODES",) if name in env}
    env |= {name: str(index) for name in ("PET_NODE_RANK",) if name in env}
    environ = copy_environ() | env
    place = {name: node[name] for name in ("argv", "cwd", "mounts")}
    # The script's own, in which this package may be missing.
    place |= {"node": index, "pythonpath": environ["PYTHONPATH"]}
    environ["PYTHONPATH"] = copy_environ()["PYTHONPATH"]
    common = {name: request.get(name) for name in ("folder", "root", "options", "mounter")}
    members = []
    for local_rank in range(processes):
        option = request["local_rank_arg"]
        extra = [f"{option}={local_rank}"] if option else []
        variables = environ | node_env(env).process(local_rank)
        rank = int(variables["RANK"])
        if rank and request["options"].get("hashes"):
            variables["PYTHONHASHSEED"] = str(rank)
        argv = [json.dumps({**common, **place}), *extra]
        members.append(Member(rank, argv, variables, forks=forks))
    return members


def _watch(group: WorkerGroup, folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    hung, progress = False, (0, 0)
    begun = quiet_since = looked = recorded = time.monotonic()
    while True:
        group.poll()
        failed = {rank: -end.signal or end.code for rank, end in group.exits.items() if end.code}
        now = time.monotonic()
        if not group.alive or now - begun > request["limit"] or now - recorded > request["silent"]:
            break
        if now - looked > _SAMPLE:
            looked = now
            # Every batch, loss and step is a line, so a file that grows is progress.
            size = sum(file.stat().st_size for file in folder.glob("trace-*.jsonl"))
            if size != progress[0]:
                recorded = now
            if (size, len(group.alive)) != progress or group.works:
                progress, quiet_since = (size, len(group.alive)), now
        # The ranks wait for each other: nothing is written, and no process runs. After a failure
        # the others only have to notice it.
        if now - quiet_since > (_GRACE if failed else request["quiet"]):
            hung = not failed
            break
        time.sleep(_LOOK)
    # While they are alive: each writes its stack itself.
    group.send(signal.SIGUSR2)
    places = {rank: _place(folder / f"stack-{rank}") for rank in group.alive}
    # See Recorder.join: the number of the processes that the script has started itself.
    spawned = folder / "spawned"
    count = int(spawned.read_text()) if spawned.exists() else request["ranks"]
    return {"hung": hung, "places": places, "failed": failed, "ranks": count}


def _place(file: Path) -> str:
    """The place of a process in the user's code, from the stack that it is writing."""
    for _ in range(50):
        if file.exists() and file.stat().st_size:
            break
        time.sleep(_LOOK)
    time.sleep(_LOOK)
    return Path(fatal_place(file.read_text() if file.exists() else "")).name


def serve(program: str, *imported: str) -> None:
    """Answer requests from standard input until it ends."""
    answers = os.dup(1)
    # Only answers go to standard output; what libraries print goes to standard error.
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the ranks, too
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    # An optimizer's first step imports torch's compiler: once here, and not in each rank.
    modules = ["torch", "torch._dynamo", *imported]
    with ForkServer(modules, copy_environ(), main=("-m", program)) as forks:
        for line in sys.stdin:
            answer = run_group(json.loads(line), forks)
            os.write(answers, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    serve(*sys.argv[1:])
