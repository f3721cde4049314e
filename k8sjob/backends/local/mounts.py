"""Folders at the paths where a container has them mounted, for one process of this machine.

`python mounts.py JSON COMMAND...` starts the command where each path of the JSON object is the
folder that it names. Its mounts are the process's own: nobody else sees them, and they end with it.
Run as a file, so that it imports nothing but the standard library.

Without root it needs a user namespace, in which the user has the same uid and no other: files of
other users appear as nobody's, and sudo or other setuid programs do not work.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NEW_USER, _NEW_MOUNTS, _DETACH = 0x10000000, 0x00020000, 2
_READ_ONLY, _REMOUNT, _BIND, _MOVE, _RECURSIVE = 0x1, 0x20, 0x1000, 0x2000, 0x4000
_UNBINDABLE, _PRIVATE, _SLAVE = 0x20000, 0x40000, 0x80000
_STAGE: Final = str(Path(__file__).parent)
"""Where a new folder is put together: any folder that exists."""


def with_mounts(mounts: Mapping[str, str], argv: Sequence[str]) -> list[str]:
    """The command, in a process of its own that has these mounts; as it is where there are none."""
    starter = [sys.executable, "-I", "-S", __file__, json.dumps(mounts)]
    return [*starter, *argv] if mounts else [*argv]


def refusal(mounts: Mapping[str, str]) -> str:
    """Why this machine refuses such mounts; empty if it makes them."""
    argv = with_mounts(mounts, [sys.executable, "-I", "-S", "-c", ""])
    answer = subprocess.run(argv, capture_output=True, text=True, check=False)
    return answer.stderr.strip().rpartition("\n")[2] if answer.returncode else ""


class Mounts:
    """The mounts of this process, from here on its own."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._cwd, self._new, uid = Path.cwd(), set[str](), os.geteuid()
        # Root needs no user namespace, in which it would lose its rights over others' files.
        self._call("unshare", _NEW_MOUNTS if uid == 0 else _NEW_USER | _NEW_MOUNTS)
        if uid:
            Path("/proc/self/setgroups").write_text("deny")  # or the kernel refuses a gid_map
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{os.getegid()} {os.getegid()} 1")
        # What the machine mounts from now on appears here as well, and nothing of this there.
        self._mount("none", "/", _SLAVE | _RECURSIVE)

    def add(self, mounts: Mapping[str, str]) -> None:
        """Mount each folder at its path, shorter paths first."""
        # Opened before any mount hides them; for the same reason the old root stays to the end.
        sources = {path: os.open(mounts[path], os.O_PATH) for path in sorted(mounts)}
        old = os.open("/", os.O_PATH)
        for path, source in sources.items():
            folder = Path(f"/proc/self/fd/{source}")
            self._make_point(Path(path), is_folder=folder.is_dir())
            self._mount(str(folder), path, _BIND | _RECURSIVE)
        if "/" in self._new:
            os.fchdir(old)
            self._call("umount2", b".", _DETACH)
        for rebuilt in self._new:
            self._mount("none", rebuilt, _BIND | _REMOUNT | _READ_ONLY)
        os.chdir(self._cwd)

    def _make_point(self, path: Path, *, is_folder: bool) -> None:
        if path.exists():
            return
        above = next(folder for folder in path.parents if folder.exists())
        # Root could make one in "/", but it would stay there, and the next script would find it.
        if str(above) not in self._new and (str(above) == "/" or not os.access(above, os.W_OK)):
            self._rebuild(str(above))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if is_folder else path.touch()

    def _rebuild(self, folder: str) -> None:
        """Replace a folder that cannot be written by one with the same contents that can."""
        self._mount("tmpfs", _STAGE, 0, kind=b"tmpfs")
        self._mount("none", _STAGE, _UNBINDABLE)  # no copy of it in what it has below
        Path(_STAGE).chmod(Path(folder).stat().st_mode & 0o7777)
        for entry in os.scandir(folder):
            point = Path(_STAGE, entry.name)
            if entry.is_symlink():
                point.symlink_to(Path(entry).readlink())
                continue
            point.mkdir() if entry.is_dir() else point.touch()
            # A mount that even root may not enter, such as another user's FUSE, is left out.
            with suppress(PermissionError):
                self._mount(entry.path, str(point), _BIND | _RECURSIVE)
        if folder == "/":
            os.chdir(_STAGE)
            self._call("pivot_root", b".", b".")
        else:
            self._mount(_STAGE, folder, _MOVE)
        self._mount("none", folder, _PRIVATE)
        self._new.add(folder)

    def _mount(self, source: str, target: str, flags: int, kind: bytes | None = None) -> None:
        self._call("mount", os.fsencode(source), os.fsencode(target), kind, flags, None)

    def _call(self, name: str, *values: object) -> None:
        if getattr(self._libc, name)(*values) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        Mounts().add(json.loads(sys.argv[1]))
    except (OSError, AttributeError) as error:  # AttributeError: macOS, or a libc without them
        sys.exit(f"k8sjob: the volumes cannot be mounted: {error}")
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - the command that was asked for
