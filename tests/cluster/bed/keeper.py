"""Keeps a bed's namespaces while they are wanted, and leaves nothing behind when they are not.

One process for each bed, outside of its namespaces. It ends the bed when it is told to (SIGTERM),
when its owner has died, or when the bed's first process ends; when it is killed itself, the kernel
ends the bed, and the next bed's `sweep` removes the folder. Prints the ports once all is ready.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
NEVER = 3600.0  # seconds after which a folder without a lock is one that was never finished


def listeners():
    """Free ports of loopback for the apiserver and the registry, held by listening."""
    for _ in range(2):
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen(512)
        yield sock


def make_cgroups(name):
    """A cgroup of the bed's own: two kubelets that share one would end each other's pods."""
    if (CGROUPS / "cgroup.controllers").exists():
        controllers = (CGROUPS / "cgroup.controllers").read_text().split()
        enable = " ".join(f"+{controller}" for controller in controllers)
        (CGROUPS / "cgroup.subtree_control").write_text(enable)
        (CGROUPS / name).mkdir()
        (CGROUPS / name / "cgroup.subtree_control").write_text(enable)
        return
    for hierarchy in filter(Path.is_dir, CGROUPS.iterdir()):
        if hierarchy.is_symlink() or not (hierarchy / "tasks").exists():
            continue
        (hierarchy / name).mkdir()
        for inherited in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / inherited).exists():
                (hierarchy / name / inherited).write_text((hierarchy / inherited).read_text())


def remove_cgroups(name, *, deadline=10.0):
    """Remove the bed's cgroups; the last process of one may still be on its way out."""
    until = time.monotonic() + deadline
    for top in (*CGROUPS.glob(name), *CGROUPS.glob(f"*/{name}")):
        while top.exists() and time.monotonic() < until:
            for folder, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    Path(folder).rmdir()
            if top.exists():
                time.sleep(0.05)


def remove(folder):
    """What a dead bed leaves: cgroups and a folder."""
    remove_cgroups(folder.name)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(beds):
    """Remove the beds whose keepers are dead; return their names."""
    gone = []
    for folder in beds.glob("k8sjob-bed-*"):
        lock = folder / "lock"
        try:
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - folder.stat().st_mtime < NEVER:
                    continue
        except BlockingIOError:
            continue
        remove(folder)
        gone.append(folder.name)
    return gone


def end(unshare):
    """End the bed's process 1, and with it all others in there; returns when they are gone."""
    children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
    while unshare.poll() is None:
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
        time.sleep(0.02)


def wait_for_end(child, owner):
    """Returns when the child or the owner ended, or when a signal says so."""
    signals, wakeup = socket.socketpair()
    wakeup.settimeout(0)
    signal.set_wakeup_fd(wakeup.fileno())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    watched = [signals, os.pidfd_open(child)]
    if owner:
        watched.append(os.pidfd_open(owner))
    select.select(watched, [], [])


def main():
    """Called with the bed's folder, the binaries' and the owner's process id (0: none)."""
    folder, binaries, owner = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    lock = (folder / "lock").open("w")  # held for as long as this process lives
    fcntl.flock(lock, fcntl.LOCK_EX)
    name = folder.name
    sockets = list(listeners())
    ports = {sock.getsockname()[1]: sock.fileno() for sock in sockets}
    make_cgroups(name)
    supervisor = Path(__file__).with_name("supervisor.py")
    python = [sys.executable, "-I", str(supervisor), str(folder), binaries, json.dumps(ports)]
    isolated = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc"]
    with (folder / "supervisor.log").open("ab") as log:
        # Should this process be killed, the kernel kills unshare, and that kills the bed.
        unshare = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *isolated, "--kill-child", "--", *python],
            pass_fds=list(ports.values()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    for sock in sockets:
        sock.close()
    try:
        apiserver, registry = ports
        detail = {"keeper": os.getpid(), "owner": owner}
        detail |= {"apiserver": apiserver, "registry": registry}
        (folder / "bed.json").write_text(json.dumps(detail))
        print(json.dumps(detail), flush=True)
        wait_for_end(unshare.pid, owner)
    finally:
        end(unshare)
        remove(folder)


if __name__ == "__main__":
    main()
