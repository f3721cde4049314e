"""The script in a rank: how it ends, and functions that are wrapped before it starts."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from k8sjob.runtime.agent.rank_main import exit_code, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable


class StopScript(BaseException):
    """The training has been seen for long enough."""


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
