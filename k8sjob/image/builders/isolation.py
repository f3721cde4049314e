"""Whether buildah or podman can run containers here, found out before anything of the user's runs.

Inside most containers they cannot, and need `--isolation chroot`, which separates less. A build
step must not be able to bring that about, so its output and its failure say nothing here: what is
run is a program of ours, on an empty image.
"""

from __future__ import annotations

import platform
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from k8sjob.errors import ImageError
from k8sjob.image.builders.child import run

__all__ = ["runs_containers"]

_EXIT_0: Final = {
    "x86_64": (62, "31ffb83c0000000f05"),  # xor edi, edi; mov eax, 60; syscall
    "aarch64": (183, "000080d2a80b80d2010000d4"),  # mov x0, 0; mov x8, 93; svc 0
}
"""Number of the machine in ELF, and code that calls exit(0)."""
_ADDRESS: Final = 0x400000
_HEADERS: Final = 120
_DOCKERFILE: Final = 'FROM scratch\nCOPY probe /probe\nRUN ["/probe"]\n'
_NAME: Final = "localhost/k8sjob-probe"


def runs_containers(program: str) -> bool:
    """Whether a step of a build runs here as the program is set up.

    Args:
        program: buildah or podman.
    """
    probe = _program(platform.machine())
    if probe is None:  # a processor that we have no program for: as it is set up
        return True
    with tempfile.TemporaryDirectory(prefix="k8sjob-probe-") as name:
        folder = Path(name)
        (folder / "Dockerfile").write_text(_DOCKERFILE)
        (folder / "probe").write_bytes(probe)
        (folder / "probe").chmod(0o755)
        build = "bud" if program == "buildah" else "build"
        try:
            run([program, build, "--no-cache", "--force-rm", f"--tag={_NAME}", name], _ignore)
        except ImageError:
            return False
        with suppress(ImageError):
            run([program, "rmi", _NAME], _ignore)
    return True


def _program(machine: str) -> bytes | None:
    """A static ELF executable that ends at once with exit code 0."""
    if machine not in _EXIT_0:
        return None
    number, code = _EXIT_0[machine]
    content = bytes.fromhex(code)
    size = _HEADERS + len(content)
    start = _ADDRESS + _HEADERS
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack("<HHIQQQIHHHHHH", 2, number, 1, start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, _ADDRESS, _ADDRESS, size, size, 0x1000)
    return ident + header + segment + content


def _ignore(_line: str) -> None:
    """The exit code alone counts."""
