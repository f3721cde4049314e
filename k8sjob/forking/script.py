"""The script in a rank: its start, how it ends, and functions that are wrapped before it starts."""

from __future__ import annotations

import faulthandler
import functools
import inspect
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from k8sjob.runtime.agent.fork_server import process_arguments
from k8sjob.runtime.agent.rank_main import exit_code, reason_of, run_as_main
from k8sjob.runtime.base.env import dist_env, export
from k8sjob.runtime.base.termination import flush_output
from k8sjob.runtime.comm import rng

if TYPE_CHECKING:
    from collections.abc import Callable

SEED: Final = 20250
"""Of the random numbers of rank 0."""


class StopScript(BaseException):
    """The training has been seen for long enough."""


def run_rank(run: Callable[[dict[str, Any], Callable[[], Any]], int]) -> NoReturn:
    """Be a rank, and end this process; `run` calls the script, with the request of its rank.

    The request, in JSON, is the process's argument; see k8sjob.forking.ranks.
    """
    code = 1
    try:
        encoded, *local_rank = process_arguments(sys.argv[1:])
        request = json.loads(encoded)
        folder, rank = Path(request["folder"]), dist_env().rank
        # Standard input carries requests, of which a script must read nothing.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, name in ((1, "out"), (2, "err")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(folder / f"{name}-{rank}", flags, 0o600), stream)
        export("PYTHONPATH", request["pythonpath"])
        # faulthandler writes the stack, since a rank that hangs in C runs no handler of Python.
        stack = (folder / f"stack-{rank}").open("w")
        faulthandler.register(signal.SIGUSR2, stack, all_threads=False)
        os.chdir(request["cwd"])
        if mounts := request["mounts"]:  # also of what is there, so that no script writes to it
            runpy.run_path(request["mounter"])["Mounts"]().add(mounts)
        # All ranks share this machine, and the sums of one thread have one order.
        torch.set_num_threads(1)
        rng.seed_all(SEED, rank)
        code = run(request, lambda: run_as_main([*request["argv"], *local_rank]))
    finally:
        # Nothing of the server may run in a rank, such as its exit handlers.
        flush_output()
        os._exit(code)


def run_to_end(function: Callable[[], Any]) -> tuple[int, dict[str, Any]]:
    """Run a part of a script: the exit code, and how it ended."""
    try:
        function()
    # StopScript is a BaseException, so that `except Exception` of a script does not catch it.
    except StopScript as stopped:
        return 0, {"how": "enough", "message": str(stopped)}
    except BaseException as error:  # noqa: BLE001 - nothing is above it
        if code := exit_code(error):
            reason = reason_of(error, code)
            # As Python prints it: the script's standard error is kept beside the record.
            sys.excepthook(type(error), error, error.__traceback__)
            about = {"type": reason.type, "message": reason.message[:2000], "where": reason.where}
            return code, {"how": "error", **about}
    return 0, {"how": "done"}


def wrap(owners: Any, names: Any, function: Callable[..., Any]) -> None:
    """Call function(original, ...) in place of a function; several owners may have it."""
    owners = owners if isinstance(owners, tuple) else (owners,)
    for name in [names] if isinstance(names, str) else names:
        original = getattr(owners[0], name, None)
        if original is None:
            continue

        def wrapped(*args: Any, _original: Any = original, **options: Any) -> Any:
            return function(_original, *args, **options)

        # Scripts and libraries ask for names and signatures; the attributes stay with the original.
        functools.update_wrapper(wrapped, original, updated=())
        for owner in owners:
            setattr(owner, name, wrapped)


def without_gpus() -> None:
    """Let a script for GPUs run on CPUs: gloo in place of nccl, and nothing compiled."""

    def start(original: Any, *args: Any, **options: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **options).arguments
        if "nccl" in str(bound.get("backend")):
            bound["backend"] = "gloo"
        return original(**bound)

    wrap((distributed_c10d, dist), "init_process_group", start)
    # A compiler merges operations: the modules' hooks and torch's dispatcher would not see them.
    # As a decorator torch.compile has no model yet.
    wrap(torch, "compile", lambda _, model=None, **__: model or (lambda function: function))
