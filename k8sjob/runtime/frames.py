"""Where a program is, or was when it failed: the frame that its author wrote."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

__all__ = ["RUNTIME", "Spot", "main_thread", "raised_at"]

RUNTIME: Final = str(Path(__file__).parent) + os.sep
"""The folder of this package's own code."""
_LIBRARIES: Final = ("stdlib", "platstdlib", "purelib", "platlib")
_COLLECTIVES: Final = (
    f"torch{os.sep}distributed{os.sep}",
    # Backward: its kernels come to an end, what DDP and FSDP send between them may not.
    f"torch{os.sep}autograd{os.sep}graph.py",
)


class Spot(NamedTuple):
    """Where a thread is.

    Attributes:
        where: the last line of the author's own, as file:line in function; empty if there is none.
        waits: whether it is in a collective of torch's, as far as a stack can tell.
    """

    where: str
    waits: bool


def main_thread() -> Spot:
    """Where the main thread is, seen from another one."""
    frames = list(_outwards(sys._current_frames().get(threading.main_thread().ident or 0)))  # noqa: SLF001 - documented, in spite of its name
    own = next((one for one in frames if _is_own(one.f_code.co_filename)), None)
    inner = frames[0].f_code.co_filename if frames else ""
    return Spot(
        f"{own.f_code.co_filename}:{own.f_lineno} in {own.f_code.co_name}" if own else "",
        waits=any(place in inner for place in _COLLECTIVES),
    )


def raised_at(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """The last frame of the author's own, else the last of all; None: there is no frame."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if _is_own(frame.filename)]
    return next(reversed(own or frames), None)


def _is_own(file: str) -> bool:
    """Whether code of this file is neither Python's, nor a package's, nor this runtime's."""
    libraries = [sysconfig.get_path(name) + os.sep for name in _LIBRARIES]
    return not file.startswith((*libraries, RUNTIME, "<"))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
