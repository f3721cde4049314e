"""A process that imports what all ranks of a node need, and forks each of them (Linux).

`ForkServer` is the agent's side. The server is a rank's program that stops before the script: as
`MAIN --forks SOCKET MODULES FOLDER ...` it imports, and then answers each request, a line of JSON,
with the number of a new process. That process is the agent's own child: the kernel gives it to the
nearest subreaper when the process between the two ends. So the agent waits for it, signals and
reaps it as one that it has started itself, and it ends with the agent.

The server touches no device and starts no thread, so it can be forked at any time. Where it cannot
be used, a rank is a new Python process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.env import copy_environ, replace_environ
from k8sjob.runtime.base.heartbeat import Observer
from k8sjob.runtime.base.termination import flush_output

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from k8sjob.runtime.base.signals import Inbox

RANK_MAIN: Final = ("-m", "k8sjob.runtime.agent.rank_main")
"""The program of a rank: what follows `python -P`."""
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_RESET: Final = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT]
"""Signals that Python, or a shell with `&`, ignores, and that a child would ignore as well."""
_READY: Final = "ready"
_COMM: Final = Path("/proc/self/comm")
_FILES: Final = Path("/proc/self/fd")
_SERVER: Final = "k8sjob-fork"
"""The name that `ps -o comm` shows of a server, whose command line is that of its ranks."""


def start_process(
    arguments: Sequence[str], environ: Mapping[str, str], main: Sequence[str] = RANK_MAIN
) -> int:
    """The number of a new Python process with a rank's program; it leads a session.

    Raises:
        OSError: it cannot be started.
    """
    argv = [sys.executable, "-P", *main, *arguments]
    return os.posix_spawnp(argv[0], argv, dict(environ), setsid=True, setsigdef=_RESET)


def process_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments of this process, which ends with its parent; a server forks in this call."""
    # First of all: the agent may be killed at any moment, and its ranks must not outlive it.
    die_with_parent(signal.SIGKILL)
    if arguments[0] != "--forks":
        return arguments
    arguments = _serve(arguments[1:])
    die_with_parent(signal.SIGKILL)  # a fork's parent is another process
    return arguments


def die_with_parent(by: signal.Signals) -> None:
    """End with the parent, even by SIGKILL: by the kernel on Linux, elsewhere by the lifeline."""
    # The kernel goes by the parent's thread: the agent starts its ranks from the main thread.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)


def adopt_orphans(*, adopts: bool = True) -> None:
    """Become the parent of every descendant whose parent ends (Linux), as PID 1 is in a pod.

    Such a process has left its rank's group: a daemon, or the leader of another session.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts))


class ForkServer:
    """A node's server, as its agent sees it.

    Attributes:
        pid: its number; None where none is needed, or it cannot be used.
        ready: whether it forks.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environ: Mapping[str, str],
        program: Sequence[str] = (),
        *,
        main: Sequence[str] = RANK_MAIN,
        folder: str = "",
    ) -> None:
        """Start a server if there are modules to import.

        Args:
            modules: their names, in their order.
            environ: what the processes have in common.
            program: what a rank's program gets; `ps` shows it for the server and its processes.
            main: the rank's program, which calls process_arguments.
            folder: that of the script, whose modules come before those of libraries.
        """
        self.pid: int | None = None
        self.ready, self._main = False, main
        # A process has one seed of hashes, and "random" means another one for each rank.
        self._seed = environ.get("PYTHONHASHSEED", "")
        if modules and self._seed.isdecimal() and sys.platform == "linux":
            self._socket, theirs = socket.socketpair()
            with theirs:
                theirs.set_inheritable(True)
                options = ["--forks", str(theirs.fileno()), ",".join(modules), folder]
                self.pid = start_process([*options, *program], environ, main)
            self._answers = self._socket.makefile()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def await_ready(self, inbox: Inbox, timeout: float) -> None:
        """Return once it has imported, where it cannot be used, and where the inbox is to stop.

        If it uses no CPU for `timeout` seconds, unless 0, its import hangs: each process is then to
        try for itself.
        """
        worked, moment = list[str](), time.monotonic()
        while self.pid and not self.ready and not inbox.stopping():
            with suppress(OSError):  # it has ended, which the socket shows
                stat = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
                if (work := stat[11:13]) != worked:
                    worked, moment = work, time.monotonic()
            inbox.wait(TIMEOUTS.look, self._socket.fileno())
            if select.select([self._socket], [], [], 0)[0]:
                self.settle()
            elif timeout and time.monotonic() - moment > timeout:
                self._close()

    def settle(self) -> None:
        """Return once it has imported, or cannot be used."""
        if self.pid and not self.ready:
            self.ready = self._answer() == _READY
            if not self.ready:
                self._close()

    def start(self, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
        """The number of a process as of start_process, forked where the server can be used."""
        forks = self.ready and environ.get("PYTHONHASHSEED") == self._seed
        forked = forks and self._fork(arguments, environ)
        return forked or start_process(arguments, environ, self._main)

    def _fork(self, arguments: Sequence[str], environ: Mapping[str, str]) -> int | None:
        # It may have been killed or stopped.
        self._socket.settimeout(TIMEOUTS.connect)
        request = {"argv": list(arguments), "environ": dict(environ)}
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            pid = int(self._answer())
            # Raises where a kernel has not made it this process's child; it then ends.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            self._socket.sendall(b"\n")
        except (OSError, ValueError):
            self._close()
            return None
        return pid

    def _answer(self) -> str:
        try:
            return self._answers.readline().strip()
        except OSError:
            return ""

    def _close(self) -> None:
        if self.pid:
            self._answers.close()
            self._socket.close()
            limit = time.monotonic() + TIMEOUTS.kernel
            with suppress(ChildProcessError):  # it had ended, and was reaped with the orphans
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.killpg(self.pid, signal.SIGKILL)  # with what an import has started
                while not os.waitpid(self.pid, os.WNOHANG)[0] and time.monotonic() < limit:
                    time.sleep(0.005)
        self.pid, self.ready = None, False


def _serve(arguments: Sequence[str]) -> list[str]:
    """Import, and fork; returns in each forked process, with its argv.

    Args:
        arguments: the socket's number, the modules' names with commas between them, the script's
            folder, and the program.
    """
    began = time.monotonic()
    channel = socket.socket(fileno=int(arguments[0]))
    channel.set_inheritable(False)
    # What fails here is not the script's: the agent then starts a process that reports the error.
    with suppress(Exception):
        name = _COMM.read_text().strip()
        _COMM.write_text(_SERVER)
        before = {*_FILES.iterdir()}
        imported = _import(arguments[1].split(","))
        Observer.shared_import_s = time.monotonic() - began
        # A file that stays open, as a device's, would be one for all ranks.
        same_files = before == {*_FILES.iterdir()}
        if not (same_files and _is_like_new(imported, arguments[2])):
            os._exit(1)
        requests = channel.makefile()
        channel.sendall(f"{_READY}\n".encode())
        while line := requests.readline():
            request: dict[str, Any] = json.loads(line)
            pid, go = _fork(request["environ"], name)
            if not pid:
                requests.close()
                channel.close()
                main = sys.orig_argv[: sys.orig_argv.index("--forks")]
                sys.orig_argv[:] = [*main, *request["argv"]]
                return list(request["argv"])
            channel.sendall(f"{pid}\n".encode())
            if not requests.readline():
                break
            os.write(go, b".")
            os.close(go)
    os._exit(1)  # never 0, with which a rank would have succeeded


def _import(names: Sequence[str]) -> set[str]:
    """Import modules; the top-level names of all that came with them."""
    before = set(sys.modules)
    # Nothing of an import is garbage, and a rank that looked for some would copy its memory.
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    return {name.partition(".")[0] for name in sys.modules.keys() - before}


def _is_like_new(imported: Collection[str], folder: str) -> bool:
    """Whether a fork of this process is like a new one in which the script imports the same."""
    # There a module of the script's folder would come before one that was imported here.
    files = (path for top in imported for path in (Path(f"{top}.py"), Path(top, "__init__.py")))
    if folder and any(Path(folder, file).exists() for file in files):
        return False
    flush_output()
    torch: Any = sys.modules["torch"]
    if not (child := os.fork()):
        os._exit(torch.cuda._is_in_bad_fork())  # noqa: SLF001 - of a GPU's driver; not public
    _, spoiled = os.waitpid(child, 0)
    # Of threads, OpenBLAS ends its own before a fork; one that is left may hold a lock.
    return not spoiled and len(list(Path("/proc/self/task").iterdir())) == 1


def _fork(environ: Mapping[str, str], name: str) -> tuple[int, int]:
    """The number of a new child of the agent, and the pipe that lets it begin; there (0, 0).

    It leads a session. It ends if this process does before it has let it begin.

    Raises:
        OSError, ValueError: there is no such child.
    """
    numbers, go = os.pipe(), os.pipe()
    between = os.fork()
    if not between:
        begins = b""
        with suppress(Exception):
            if os.fork():
                os._exit(0)
            os.setsid()
            _COMM.write_text(name)
            replace_environ({**copy_environ(), **environ})  # with what an import has set
            _forget_random_numbers()
            # Only now, as what fails must not end a rank: another process is then started for it.
            os.write(numbers[1], str(os.getpid()).encode())
            os.close(go[1])
            begins = os.read(go[0], 1)
        if not begins:  # the agent may count on this rank: no error of the script ends it
            os.kill(os.getpid(), signal.SIGKILL)
        for end in (*numbers, go[0]):
            os.close(end)
        return 0, 0
    os.close(numbers[1])
    os.close(go[0])
    pid = int(os.read(numbers[0], 20))
    os.close(numbers[0])
    # When it has ended, its child is the agent's.
    os.waitpid(between, 0)
    return pid, go[1]


def _forget_random_numbers() -> None:
    """Seed what a new process seeds by chance; Python's own generator does it at a fork."""
    torch: Any = sys.modules["torch"]
    torch.default_generator.seed()  # torch.seed() would set a seed for GPUs, too
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()
    from multiprocessing import current_process

    current_process().authkey = os.urandom(32)
