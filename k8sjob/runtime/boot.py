"""The first and the last code in a rank's process: around the user's program, not in its way.

`python -P -m k8sjob.runtime.boot SCRIPT | -m MODULE | --exec PROGRAM [ARGS...]`, started by the
agent alone. The program runs as Python would run it. Afterwards the process leaves by os._exit: a
gloo thread may drop its last tensor while the interpreter is being torn down, and the process would
then abort, exit code 134, after all work was done (pytorch#190489).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from k8sjob.contract import LIFELINE_ENV, ExitCode, Reason
from k8sjob.runtime import config
from k8sjob.runtime.env import EnvError, dist_env
from k8sjob.runtime.frames import RUNTIME, embedded, raised_at, shown
from k8sjob.runtime.last_words import (
    by_rank,
    in_a_line,
    is_first,
    keep_stacks,
    leave_reason,
    seen_file,
)
from k8sjob.runtime.observer import Observer
from k8sjob.runtime.peer import is_peer_loss, peer_loss
from k8sjob.runtime.script import run_as_main

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["exit_code", "main", "reason_of", "where"]

_LEAVE_LIMIT: Final = 10.0
"""Seconds that a failed process has for its threads and atexit handlers: its peers wait for it."""
_DESTROY_LIMIT: Final = 10.0
"""Seconds that destroying the process group may take; NCCL's can wait for ever for a lost peer."""
_PR_SET_PDEATHSIG: Final = 1
_KEPT: Final[list[Any]] = []
_INTERRUPTED: Final = 128 + signal.SIGINT


def main(argv: Sequence[str]) -> NoReturn:
    """Run the program and leave with its exit code.

    Args:
        argv: what to run; the agent has checked its form.
    """
    _die_with_parent()
    if argv[0] == "--exec":
        _replace(argv[1:])
    keep_stacks(config.error_file())
    observer = _observer()
    observer.start()
    code = 0
    try:
        run_as_main(argv)
    except BaseException as error:  # noqa: BLE001 - the program's last frame: nothing is above it
        code = exit_code(error)
        if code:
            reason = replace(reason_of(error, code), step=observer.seen.step)
            leave_reason(reason, config.error_file())
        _show(error)
    observer.write()  # what follows takes the process group away
    _leave(code)


def _observer() -> Observer:
    try:
        world_size = dist_env(os.environ).world_size
    except EnvError:
        world_size = 1
    try:
        hang_timeout = config.runtime_config().hang_timeout
    except EnvError:
        hang_timeout = 0.0
    return Observer(seen_file(config.error_file()), world_size, hang_timeout)


def exit_code(error: BaseException) -> int:
    """The exit code that an exception at the end of the program means."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else ExitCode.USER_ERROR
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    if type(error).__module__.startswith("k8sjob."):
        return int(getattr(error, "exit_code", ExitCode.USER_ERROR))
    return ExitCode.PEER_LOST if is_peer_loss(error) else ExitCode.USER_ERROR


def reason_of(error: BaseException, code: int) -> Reason:
    """What to tell the agent about an exception."""
    kind, message, place = type(error).__qualname__, str(error), where(error)
    if inner := embedded(message):
        kind, message, place = inner.kind, inner.message, inner.where or place
    elif isinstance(error, SystemExit):
        kind = "Stopped" if code == ExitCode.STOPPED else kind
        message = message if isinstance(error.code, str) else f"sys.exit({error.code!r})"
    elif code == ExitCode.PEER_LOST:
        kind, message = "PeerLost", peer_loss(error) or message
    try:
        rank = dist_env(os.environ).rank
    except EnvError:
        rank = -1
    return Reason(
        exit_code=code,
        rank=rank,
        type=kind,
        message=message,
        where=place,
        time=time.time(),
        culprits=tuple(getattr(error, "culprits", ())) if _is_own(error) else (),
    )


def where(error: BaseException) -> str:
    """The last frame in the user's own code, else the last of all, as file:line."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(error.filename)}:{error.lineno}"
    last = raised_at(_users_part(error.__traceback__))
    return f"{shown(last.filename)}:{last.lineno}" if last else ""


def _is_own(error: BaseException) -> bool:
    return type(error).__module__.startswith("k8sjob.")


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first frame on: without boot, script and importlib."""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((RUNTIME, "<frozen importlib")):
            break
        trace = trace.tb_next
    return trace


def _show(error: BaseException) -> None:
    """Print an exception as Python would at the end of a program."""
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)  # noqa: T201 - Python does
        return
    if isinstance(error, EnvError):
        return  # one line is enough, and the agent writes it
    trace = _users_part(error.__traceback__)
    error = error.with_traceback(trace)
    hook = sys.excepthook
    # torch.distributed sets one that marks the lines by the rank, as is done here.
    if hook is not sys.__excepthook__ and not str(hook.__module__).startswith("torch."):
        hook(type(error), error, trace)
        return
    text = shown("".join(traceback.format_exception(error)))
    if not is_first(config.error_file(), text):
        text = f"{in_a_line(error)}: the same traceback as of another rank\n"
    try:
        env = dist_env(os.environ)
    except EnvError:
        env = None
    sys.stderr.write(text if env is None or env.world_size == 1 else by_rank(env.rank, text))


def _leave(code: int) -> NoReturn:
    """Do what Python does at the end, except for tearing down the interpreter."""
    try:
        if code:
            limit = threading.Timer(_LEAVE_LIMIT, os._exit, [code])
            limit.daemon = True
            limit.start()
        else:
            _destroy_group()
        # What Py_FinalizeEx calls: it also wakes the idle workers of thread pools before it joins.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - no public form
        atexit._run_exitfuncs()  # noqa: SLF001 - no public form
    except BaseException as error:  # noqa: BLE001 - os._exit must be reached
        _show(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(code)


def _destroy_group() -> None:
    """Destroy the default process group that a script left behind."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    # Its last reference must not go: gloo's destructor may wait for ever, with the interpreter's
    # lock, for a thread that needs that lock (seen with torch 2.6). See process_group._KEPT.
    _KEPT.append(dist.group.WORLD)
    helper = threading.Thread(target=dist.destroy_process_group, daemon=True)
    helper.start()
    helper.join(_DESTROY_LIMIT)


def _replace(argv: Sequence[str]) -> NoReturn:
    """Become another program; the parent-death signal survives exec."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], list(argv))  # noqa: S606 - the user's own command, without a shell
    except OSError as error:
        print(f"k8sjob: cannot start {argv[0]!r}: {error.strerror}", file=sys.stderr)  # noqa: T201
        os._exit(ExitCode.CONFIG)


def _die_with_parent() -> None:
    """End when the agent does, even by SIGKILL: by the kernel on Linux, elsewhere by the lifeline.

    The agent may be gone before the kernel is asked; the lifeline's end tells that too.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    end = config.lifeline()
    os.environ.pop(LIFELINE_ENV, None)  # the number means nothing in the program's own children
    if end is not None:
        os.set_inheritable(end, False)  # noqa: FBT003 - os has no keyword for it
        threading.Thread(target=_watch_parent, args=(end,), daemon=True).start()


def _watch_parent(end: int) -> None:
    with suppress(OSError):
        while os.read(end, 4096):
            pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
