"""The first process of a bed's own namespaces: it sets them up and runs every component.

Started by `keeper` as process 1 of new network, mount and process namespaces. All that a bed does
on a machine hangs on it: when it ends, the kernel ends every process in there, unmounts what they
mounted and takes the interfaces away. The standard library alone, all imported before anything is
mounted, because what is imported later may lie below a mount.

It answers requests on the socket `control` in the bed's folder: one line of JSON each way.
"""

import asyncio
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

BED = Path("/run/bed")
NODE, DNS, WEBHOOK, APISERVER = "10.10.0.2", "10.96.0.10", "10.96.0.20", "10.96.0.1"
CONTROLLERS = {"jobset": "10.96.0.21", "trainer": "10.96.0.22", "kueue": "10.96.0.23"}
CHUNK = 1 << 18
ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


def make_mounts(folder, binaries):
    """Give the bed its own /run, /tmp, /var/lib and /var/log, so that default paths stay inside."""
    own = {"/tmp": "tmp", "/var/lib": "lib", "/var/log": "log"}
    for name in (*own.values(), "logs", "conf"):
        Path(folder, name).mkdir(exist_ok=True)
    Path(folder, "tmp").chmod(0o1777)
    # The bed's folder may lie below a path that is about to be covered: enter it by descriptor.
    here, there = (f"/proc/1/fd/{os.open(path, os.O_PATH)}" for path in (folder, binaries))

    def mount(*args):
        subprocess.run(["mount", "--no-canonicalize", *args], check=True)

    mount("-t", "tmpfs", "-o", "mode=755", "bed", "/run")
    for target, source in ((BED, here), (Path("/run/bin"), there)):
        target.mkdir()
        mount("--rbind", source, str(target))
    for target, name in own.items():
        mount("--bind", str(BED / name), target)
    os.chdir(BED)


def make_network():
    """A bridge is the node's interface: it needs no other end to be up."""
    services = (DNS, WEBHOOK, APISERVER, *CONTROLLERS.values())
    lines = ["link set lo up", "link add node0 type bridge", "link set node0 up"]
    lines += [f"addr add {address} dev node0" for address in (f"{NODE}/16", *services)]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)


async def relay(port, reader, writer):
    """Connect a caller to a port in here; when either side breaks, both hear of it."""
    try:
        inner, outer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        abort(writer)
        return

    async def copy(source, target):
        try:
            while data := await source.read(CHUNK):
                target.write(data)
                await target.drain()
            target.write_eof()
        except OSError:
            abort(writer)
            abort(outer)

    await asyncio.gather(copy(reader, outer), copy(inner, writer))
    for end in (writer, outer):
        end.close()


def abort(writer):
    """Close so that the other side sees a reset, as it would of a server that died."""
    if (sock := writer.get_extra_info("socket")) is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
    writer.transport.abort()


async def forward(listeners, apiserver):
    """Serve the host's listening sockets, and the address that pods know the apiserver by."""

    def handler(port):
        return lambda reader, writer: relay(port, reader, writer)

    servers = [await asyncio.start_server(handler(port), sock=sock) for port, sock in listeners]
    servers.append(await asyncio.start_server(handler(apiserver), APISERVER, 443))
    await asyncio.gather(*(server.serve_forever() for server in servers))


class Supervisor:
    """Starts and ends processes by name, reaps every orphan, and tells who runs."""

    def __init__(self, forwarder):
        self.running = {"forwarder": forwarder}  # name -> pid
        self.waiting = {}  # pid -> connections that wait for its end
        self.answers = {"start": self.start, "signal": self.signal, "status": self.status}

    def start(self, connection, name, argv, env):
        if name in self.running:
            return {"error": f"{name} is running"}
        with (BED / "logs" / f"{name}.log").open("ab") as log:
            # Not Popen: every child, also an orphan, is reaped in one place.
            pid = os.fork()
            if pid == 0:
                become(argv, env, log)
        self.running[name] = pid
        return {"pid": pid}

    def signal(self, connection, name, number):
        pid = self.running.get(name)
        if pid is None:
            return {"code": None}
        os.killpg(pid, number)
        self.waiting.setdefault(pid, []).append(connection)
        return None

    def status(self, connection):
        return {"running": self.running}

    def reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.running = {name: known for name, known in self.running.items() if known != pid}
            for connection in self.waiting.pop(pid, ()):
                answer(connection, {"code": os.waitstatus_to_exitcode(status)})

    def serve(self):
        inner, outer = socket.socketpair()
        outer.settimeout(0)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(outer.fileno(), warn_on_full_buffer=False)
        control = socket.socket(socket.AF_UNIX)
        control.bind(str(BED / "control.new"))
        control.listen(64)
        (BED / "control.new").rename(BED / "control")  # whoever sees it can connect
        with selectors.DefaultSelector() as ready:
            ready.register(inner, selectors.EVENT_READ)
            ready.register(control, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is inner:
                        inner.recv(4096)
                        self.reap()
                    else:
                        self.request(control.accept()[0])

    def request(self, connection):
        connection.settimeout(5)
        try:
            asked = json.loads(connection.makefile().readline())
            detail = self.answers[asked.pop("op")](connection, **asked)
        except (OSError, ValueError) as error:
            detail = {"error": str(error)}
        if detail is not None:
            answer(connection, detail)


def become(argv, env, log):
    """The child's side of a start: a session and a log of its own, then the program."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.execvpe(argv[0], argv, os.environ | env)
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def answer(connection, detail):
    """One line back; a caller that went away is no matter."""
    try:
        connection.sendall(json.dumps(detail).encode() + b"\n")
    except OSError:
        pass
    finally:
        connection.close()


def main():
    """Called with the bed's folder, the binaries' and {port: descriptor of a listening socket}."""
    folder, binaries, listening = sys.argv[1:]
    listeners = [
        (int(port), socket.socket(fileno=fd)) for port, fd in json.loads(listening).items()
    ]
    make_mounts(folder, binaries)
    make_network()
    forwarder = os.fork()
    if forwarder == 0:
        asyncio.run(forward(listeners, apiserver=listeners[0][0]))
    for _, sock in listeners:
        sock.close()
    Supervisor(forwarder).serve()


if __name__ == "__main__":
    main()
