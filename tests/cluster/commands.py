"""The command line in processes of its own, forked from one that has imported it.

To import it, and the Python client of Kubernetes, takes a second; the tests of a cluster start it
a thousand times.
"""

import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class Command:
    """A running `k8sjob ARGS`, with what is needed of the face of `subprocess.Popen`.

    Args:
        args: its arguments; numbers and paths are written as text.
        env: its environment, all of it.
        cwd: its folder; None: this process's.
    """

    def __init__(self, args, env, cwd=None):
        self.args = [str(arg) for arg in args]
        self.returncode = None
        self.stdout, out = pipe()
        self.stderr, err = pipe()
        self._state, state = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([self.args, dict(env), str(cwd or Path.cwd())]).encode()
        with state:
            socket.send_fds(server(), [request], [out, err, state.fileno()])
        os.close(out)
        os.close(err)
        self.pid = int(self._state.recv(64))

    def communicate(self, timeout=None):
        """Stdout and stderr, once it has ended; after so many seconds it is killed."""
        timer = threading.Timer(timeout or threading.TIMEOUT_MAX, self.kill)
        timer.start()
        with ThreadPoolExecutor(2) as pool, self.stdout, self.stderr:
            out, err = pool.map(lambda stream: stream.read(), (self.stdout, self.stderr))
        self.wait()
        timer.cancel()
        return out, err

    def wait(self):
        """Its exit code, negative for a signal, once it has ended."""
        if self.returncode is None:
            with self._state:
                self.returncode = int(self._state.recv(64))
        return self.returncode

    def send_signal(self, number):
        """Send it a signal; nothing where it has ended."""
        if self.returncode is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                self.wait()

    def kill(self):
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def run(*args, env, cwd=None, timeout=180):
    """A `k8sjob ARGS` that has ended, as `subprocess.run` gives it."""
    command = Command(args, env, cwd)
    out, err = command.communicate(timeout)
    return subprocess.CompletedProcess(command.args, command.returncode, out, err)


def pipe():
    """A pipe: what reads it as text, and the descriptor to write to."""
    end, start = os.pipe()
    return os.fdopen(end), start


@functools.cache
def server():
    """The socket of the process that forks; it ends with this process."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    streams = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, far.fileno(), 1),
    ]
    with far:
        os.posix_spawn(sys.executable, [sys.executable, __file__], os.environ, file_actions=streams)
    return near


def serve(requests):
    """Fork a command for each request: in a process between, which waits for its end."""
    from k8sjob.cli import main
    from k8sjob.cli.program import COMMANDS

    for name in (*(f"k8sjob.cli.{command.module}" for command in COMMANDS.values()), "kubernetes"):
        importlib.import_module(name)
    while True:
        request, descriptors, *_ = socket.recv_fds(requests, 1 << 20, 3)
        if not request:
            return
        if not os.fork():
            break
        for descriptor in descriptors:
            os.close(descriptor)
        while reaped():
            pass
    state = socket.socket(fileno=descriptors[2])
    if child := os.fork():
        for descriptor in (requests.fileno(), *descriptors[:2]):
            os.close(descriptor)
        state.send(str(child).encode())
        state.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
        os._exit(0)
    for inherited in (requests, state):
        inherited.detach()  # its number will be another's, which it would close at the end
    become(*json.loads(request), descriptors[:2])
    main()


def become(args, env, cwd, streams):
    """Take on the arguments, the environment, the folder and the streams of a command."""
    for number, descriptor in enumerate(streams, 1):
        os.dup2(descriptor, number)
    # Those of this process think that they write to what they had before.
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)  # noqa: SIM115
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = ["k8sjob", *args]


def reaped():
    """Whether one of those that wait for commands has ended."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0]
    except ChildProcessError:
        return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=1))
