"""A group of ranks on this machine, with the env that the operator would give them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["ended", "outputs", "results"]


def outputs(program: Path, *args: str, world: int, **env: str) -> list[str]:
    """Run a program as every rank of a group, and return what each printed.

    Args:
        program: a script.
        args: its arguments.
        world: how many ranks.
        env: more of their environment; LOCAL_WORLD_SIZE: how many of them are on one node.

    Raises:
        SystemExit: one of them failed.
    """
    ends = _ends(program, args, world, env, errors=None)
    if any(code for code, _ in ends):
        raise SystemExit(f"{program} {' '.join(args)} ended with {[code for code, _ in ends]}")
    return [printed for _, printed in ends]


def ended(program: Path, *args: str, world: int, **env: str) -> list[tuple[int, str]]:
    """As outputs(), but the ranks may fail: exit codes, as a shell's, and all that each wrote."""
    return _ends(program, args, world, env, errors=subprocess.STDOUT)


def _ends(
    program: Path, args: Sequence[str], world: int, env: Mapping[str, str], *, errors: int | None
) -> list[tuple[int, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "KINETO_LOG_LEVEL": "99",  # the profiler reports a missing GPU as an error
        **env,
    }
    argv, of_node = [sys.executable, str(program), *args], int(shared["LOCAL_WORLD_SIZE"])
    ranks = [
        subprocess.Popen(
            argv,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank % of_node)},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        for rank in range(world)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    return [
        (code if code >= 0 else 128 - code, text) for code, text in zip(codes, printed, strict=True)
    ]


def results(program: Path, *args: str, world: int, **env: str) -> list[dict[str, Any]]:
    """As outputs(), and return what the ranks that have one printed as JSON after RESULT."""
    lines = [
        line
        for output in outputs(program, *args, world=world, **env)
        for line in output.splitlines()
    ]
    return [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
