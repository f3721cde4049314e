"""The main program of a rank's process: runs the user's program and reports how it ended.

`python -P -m k8sjob.runtime.agent.rank_main SCRIPT | -m MODULE | --exec PROGRAM [ARGS...]`, or
--forks (see fork_server): only the agent starts it. The program runs as Python would run it. Not by
runpy: its run_path removes `__main__` when the script's last line is done, while threads and atexit
handlers that the script left still pickle and import by that name. Afterwards the process leaves by
os._exit: a gloo thread may drop its last tensor while the interpreter is being torn down, and the
process would then abort, exit code 134, after all work was done (pytorch#190489).
"""

from __future__ import annotations

import atexit
import builtins
import importlib.machinery
import importlib.util
import io
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from k8sjob.contract import ExitCode, Reason
from k8sjob.runtime.agent.fork_server import die_with_parent, process_arguments
from k8sjob.runtime.base import config
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.env import rank_or_none
from k8sjob.runtime.base.errors import (
    EnvError,
    causes,
    first_leaf,
    first_line,
    message_of,
    peer_loss,
)
from k8sjob.runtime.base.frames import RUNTIME, embedded, raised_at, with_user_paths
from k8sjob.runtime.base.heartbeat import Observer
from k8sjob.runtime.base.printed_output import PrintedOutput
from k8sjob.runtime.base.termination import (
    by_rank,
    enable_stacks,
    flush_output,
    is_first,
    seen_file,
    write_reason,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, TracebackType

_KEPT: Final[list[Any]] = []
_REMOTE: Final = {"RemoteTraceback", "_RemoteTraceback"}
"""The cause of an exception of a worker of multiprocessing.Pool or of ProcessPoolExecutor."""
_INTERRUPTIONS: Final = 3
"""Attempts at writing a report."""
_INTERRUPTED: Final = 128 + signal.SIGINT


def main(argv: Sequence[str]) -> NoReturn:
    """Run the program and leave with its exit code; the agent has checked the form of `argv`."""
    argv = process_arguments(argv)
    lifeline = config.take_lifeline()
    if argv[0] == "--exec":
        _exec(argv[1:])
    enable_stacks(config.error_file())
    env, settings = rank_or_none(), config.runtime_config()
    world_size = env.world_size if env else 1
    observer = Observer(seen_file(config.error_file()), world_size, settings.hang_timeout)
    code, output = 0, None
    try:
        # It forks, so it comes before any thread.
        if timeout := settings.preflight.get("timeout"):
            _preflight(timeout, observer)
        # The parent may be gone before the kernel is asked; the lifeline shows that too.
        if lifeline is not None:
            threading.Thread(
                target=_watch_parent, args=(lifeline,), daemon=True, name="k8sjob-parent"
            ).start()
        # Before the script: the imports take many seconds, which the agent reports.
        observer.start()
        if env and env.rank == 0 and settings.metrics != [] and config.started_by_k8sjob():
            output = PrintedOutput(settings.metrics)
            output.start()
        run_as_main(argv)
    except BaseException as error:  # noqa: BLE001 - the program's last frame: nothing is above it
        code = _report(error, observer)
    if output:
        output.stop()
    observer.write()  # what follows destroys the process group
    _leave(code)


def _preflight(timeout: float, observer: Observer) -> None:
    """Return if the nodes prove themselves, in a child of this process; else leave as it did.

    The child has the memory of the devices, the threads and the ports; the import of torch, which
    takes longer than the preflight, is this process's, for the program. It touches no device.
    """
    import torch.distributed  # noqa: F401 - a process without a preflight may need none

    joined, writer = os.pipe()
    flush_output()  # else the child would write the same once more
    child = os.fork()
    if not child:
        os.close(joined)
        _be_preflight(writer, observer)
    os.close(writer)
    os.read(joined, 1)  # when all ranks are there, or at the child's end
    # Where all is well in Python, it ends itself before that.
    ended, _, _ = select.select([joined], [], [], timeout + 2 * TIMEOUTS.lead)
    os.close(joined)
    if ended:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        problem = f"the checks ended with exit code {ExitCode.of_status(code)}"
    else:
        os.kill(child, signal.SIGKILL)  # in vain where a driver hangs, so it is not awaited
        code, problem = -signal.SIGKILL, f"the checks did not end within {timeout:g} s"
    if code < 0:
        env, node = rank_or_none(), config.node_name()
        rank = env.rank if env else -1
        text = f"node {node} (rank {rank}): {problem}"
        code, now, culprits = int(ExitCode.PREFLIGHT), time.time(), (rank,) if env else ()
        reason = Reason(code, rank, "Preflight", text, "", now, culprits, nodes=(node,))
        write_reason(reason, config.error_file())
    if code:
        _leave(code)


def _be_preflight(writer: int, observer: Observer) -> NoReturn:
    code = 0
    try:
        die_with_parent(signal.SIGKILL)
        from k8sjob.runtime.preflight.rank import take_part

        take_part(writer)
    except BaseException as error:  # noqa: BLE001 - the child's last frame
        if _is_k8sjobs(error):  # it says all, and its place is in no code of the user
            code = exit_code(error)
            write_reason(reason_of(error.with_traceback(None), code), config.error_file())
        else:
            code = _report(error, observer)
    finally:
        flush_output()
        # The examining thread may be in a collective, and the group's destructor would wait for it.
        os._exit(code)


def _report(error: BaseException, observer: Observer) -> int:
    """Write and show why the program ended; its exit code.

    Meanwhile a signal handler may raise, as torch's does when a DataLoader's worker has died. That
    tells more than the error that it caused, which it interrupts here.
    """
    code = int(ExitCode.USER_ERROR)
    for _ in range(_INTERRUPTIONS):
        try:
            if code := exit_code(error):
                reason = reason_of(error, code)._replace(step=observer.look().step)
                write_reason(reason, config.error_file())
            break
        except BaseException as later:  # noqa: BLE001 - as above
            later.__suppress_context__ = True
            error = later.with_traceback(error.__traceback__)
    try:
        _show(error)
    except BaseException:  # noqa: BLE001 - sys.excepthook may be the script's
        traceback.print_exception(error)
    return code


def exit_code(error: BaseException) -> int:
    """The exit code that an exception at the end of the program means."""
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        # The kernel keeps eight bits, and Python exits with 1 for an object that is no number.
        return error.code & 0xFF if isinstance(error.code, int) else ExitCode.USER_ERROR
    if isinstance(error, KeyboardInterrupt):
        return _INTERRUPTED
    if _is_k8sjobs(error):
        return int(getattr(error, "exit_code", ExitCode.USER_ERROR))
    return ExitCode.PEER_LOST if peer_loss(error) else ExitCode.USER_ERROR


def reason_of(error: BaseException, code: int) -> Reason:
    """The Reason for the agent, from the exception that ended the program."""
    kind, message = type(error).__qualname__, message_of(error) or _asserted(error)
    place = where(first_leaf(error)) or where(error)
    behind = () if _is_k8sjobs(error) else causes(error)
    remote = error.__cause__ if type(error.__cause__).__name__ in _REMOTE else None
    if isinstance(error, socket.gaierror):
        message += _unresolved_host(error)
    if inner := embedded(message if remote is None else str(remote)):
        kind, message, place, behind = inner.kind, inner.message, inner.where or place, ()
    elif isinstance(error, SystemExit):
        if not isinstance(error.code, str):  # its output has the reason, if there is one
            kind, message, behind = "Exit", f"exited with code {code}", ()
        kind = "Stopped" if code == ExitCode.STOPPED else kind
    elif code == ExitCode.PEER_LOST:
        kind, message, behind = "PeerLost", peer_loss(error) or message, ()
    env = rank_or_none()
    return Reason(
        exit_code=code,
        rank=env.rank if env else -1,
        type=kind,
        message=with_user_paths(message),
        where=place,
        time=time.time(),
        culprits=tuple(getattr(error, "culprits", ())) if _is_k8sjobs(error) else (),
        nodes=tuple(getattr(error, "nodes", ())) if _is_k8sjobs(error) else (),
        causes=tuple(map(with_user_paths, behind)),
    )


def _unresolved_host(error: BaseException) -> str:
    """`: NAME`, the name that the resolver was asked for; empty where it is not known."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    host = frames[-1].f_locals.get("host") if frames else None
    return f": {host}" if isinstance(host, str) else ""


def _asserted(error: BaseException) -> str:
    """The line of an `assert` that has no message of its own; empty for other exceptions."""
    frames = traceback.extract_tb(error.__traceback__) if type(error) is AssertionError else []
    return (frames[-1].line or "") if frames else ""


def where(error: BaseException) -> str:
    """The last frame in the user's code, else the last of all, as file:line."""
    if isinstance(error, SyntaxError) and error.filename:
        # The code that could not be compiled has no frame.
        return f"{with_user_paths(error.filename)}:{error.lineno}"
    last = raised_at(_user_traceback(error.__traceback__))
    return f"{with_user_paths(last.filename)}:{last.lineno}" if last else ""


def _is_k8sjobs(error: BaseException) -> bool:
    return type(error).__module__.startswith("k8sjob.")


def _user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first frame on: without this module and importlib."""
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
        return  # the agent writes one line
    trace = _user_traceback(error.__traceback__)
    error = error.with_traceback(trace)
    hook = sys.excepthook
    # torch.distributed sets a hook that marks the lines by the rank, as below.
    if hook is not sys.__excepthook__ and not str(hook.__module__).startswith("torch."):
        hook(type(error), error, trace)
        return
    text = with_user_paths("".join(traceback.format_exception(error)))
    if not is_first(config.error_file(), text):
        text = f"{first_line(error)}: the same traceback as another rank's\n"
    env = rank_or_none()
    sys.stderr.write(text if env is None or env.world_size == 1 else by_rank(env.rank, text))


def _leave(code: int) -> NoReturn:
    """Do what Python does at the end, except tearing down the interpreter."""
    try:
        if code:
            # The peers wait for the end of a failed rank, so what the script left running gets no
            # more than this. A rank that succeeded may take the time that its threads need.
            limit = threading.Timer(TIMEOUTS.exit, os._exit, [code])
            limit.daemon = True
            limit.start()
        else:
            # Only here: after a failure peers may be lost, and nccl would wait for them.
            _destroy_group()
        # As Py_FinalizeEx does: it also wakes the idle workers of thread pools before it joins.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - no public form
        atexit._run_exitfuncs()  # noqa: SLF001 - no public form
    except BaseException as error:  # noqa: BLE001 - os._exit must be reached
        _show(error)
    finally:
        flush_output()
        os._exit(code)


def _destroy_group() -> None:
    """Destroy the default process group that a script left behind."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    # Its last reference must not go: gloo's destructor may wait forever, with the interpreter's
    # lock, for a thread that needs that lock (seen with torch 2.6). See process_group._KEPT.
    _KEPT.append(dist.group.WORLD)
    helper = threading.Thread(target=dist.destroy_process_group, daemon=True)
    helper.start()
    helper.join(TIMEOUTS.destroy)


def _exec(argv: Sequence[str]) -> NoReturn:
    """Become another program; the parent-death signal survives exec."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], list(argv))  # noqa: S606 - the user's own command, without a shell
    except OSError as error:
        why = error.strerror
        file = shutil.which(argv[0])
        if isinstance(error, FileNotFoundError) and file:  # its interpreter is what is missing
            with open(file, "rb") as script:  # noqa: PTH123 - see run_as_main
                why = f"its first line, {script.readline(200)!r}, names a missing interpreter"
        print(f"k8sjob: cannot start {argv[0]!r}: {why}", file=sys.stderr)  # noqa: T201
        os._exit(ExitCode.CONFIG)


def _watch_parent(end: int) -> None:
    with suppress(OSError):
        while os.read(end, 4096):
            pass
    # The workers of its data loaders are in its group.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)


# --- the program --------------------------------------------------------------------------------


def run_as_main(argv: Sequence[str]) -> None:
    """Execute a program in a new `__main__`, which stays in place afterwards.

    Args:
        argv: what would follow `python`: SCRIPT [ARGS...] or -m MODULE [ARGS...]. A folder or a
            zip file with a `__main__.py` is a script too.

    Raises:
        EnvError: there is no such module; the agent has looked for a script.
        BaseException: the program's exception.
    """
    if argv[0] == "-m":
        name, arguments = argv[1], argv[2:]
        _set_path(os.getcwd())  # noqa: PTH109 - sys.path holds strings
        sys.argv = ["-m", *arguments]  # what Python shows while a module's parents are imported
        spec = _module_spec(name)
        sys.argv[0] = spec.origin or name
        _run_spec(spec, package=spec.parent or "")
        return
    path, arguments = argv[0], argv[1:]
    sys.argv = [path, *arguments]
    inner = _archive_spec(_absolute(path))
    if inner is not None:
        # Always first, PYTHONSAFEPATH or not: here it is the program itself.
        sys.path[:0] = [_absolute(path)]
        _run_spec(inner, package="")
    else:
        _set_path(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120 - as above
        _run_file(path)


def _absolute(path: str) -> str:
    """As Python makes the path of its program: joined, neither normalized nor resolved."""
    return os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - pathlib would normalize


def _set_path(first: str) -> None:
    """Put the program's folder in front, as Python does without PYTHONSAFEPATH.

    The flag -P is not the user's: the agent starts this process with it.
    """
    if not config.safe_path():
        sys.path[:0] = [first]


def _run_file(path: str) -> None:
    path = _absolute(path)
    with io.open_code(path) as stream:
        # Without dont_inherit this module's __future__ imports would apply to the script.
        code: CodeType = compile(stream.read(), path, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    attributes = dict.fromkeys(["__cached__", "__spec__", "__package__"])
    _execute(code, __file__=path, __loader__=loader, **attributes)


def _run_spec(spec: ModuleSpec, package: str) -> None:
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    if code is None:
        raise ImportError(f"no code object for {spec.name}: it is not written in Python")
    _execute(
        code,
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=loader,
        __spec__=spec,
        __package__=package,
    )


def _execute(code: CodeType, **attributes: Any) -> None:
    main = ModuleType("__main__")
    vars(main).update(attributes, __builtins__=builtins)
    sys.modules["__main__"] = main
    # What a spawned process returns names this alias, which multiprocessing makes at its import.
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = main
    exec(code, vars(main))  # noqa: S102 - running the user's program is the purpose


def _module_spec(name: str) -> ModuleSpec:
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _find(name)
    if spec is None or spec.loader is None:
        raise EnvError(f"there is no module {name!r} on sys.path; check run.module and PYTHONPATH")
    return spec


def _find(name: str) -> ModuleSpec | None:
    """A module's spec; None also if a parent of it is missing, but not where one fails."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _archive_spec(path: str) -> ModuleSpec | None:
    """The `__main__` of a folder or a zip file; None for a plain file."""
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is None and os.path.isdir(path):  # noqa: PTH112 - see run_as_main
        raise EnvError(f"there is no __main__.py in the folder {path!r}; check run.script")
    return spec


if __name__ == "__main__":
    main(sys.argv[1:])
