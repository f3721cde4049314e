"""Where a program is, or was when it failed: the frame that its author wrote."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from types import FrameType, TracebackType

__all__ = ["RUNTIME", "Spot", "caller", "raised_at", "shown", "where_is"]

RUNTIME: Final = str(Path(__file__).parent) + os.sep
"""The folder of this package's own code."""
_COLLECTIVES: Final = (
    f"torch{os.sep}distributed{os.sep}",
    f"torch{os.sep}futures{os.sep}",
    # Backward: its kernels come to an end, what DDP and FSDP send between them may not.
    f"torch{os.sep}autograd{os.sep}graph.py",
)


class Spot(NamedTuple):
    """Where a thread is.

    Attributes:
        where: the last line of the author's own, as file:line in function; empty if there is none.
        waits: whether it is in torch's distributed code, called from there, or in backward.
    """

    where: str
    waits: bool


def where_is(thread: int) -> Spot:
    """Where a thread is, by its identity, seen from another one."""
    found = sys._current_frames().get(thread)  # noqa: SLF001 - documented, in spite of its name
    frames = [frame for frame, _ in traceback.walk_stack(found)] if found else []
    own = next((at for at, one in enumerate(frames) if _is_own(one.f_code.co_filename)), None)
    within = frames[:own]
    waits = any(place in one.f_code.co_filename for one in within for place in _COLLECTIVES)
    if own is None:
        return Spot("", waits=waits)
    code, number = frames[own].f_code, frames[own].f_lineno
    # A torch.distributed.Work waits in C++, without a frame of its own.
    line = linecache.getline(code.co_filename, number)
    waits = waits or (own == 0 and ".wait(" in line)
    return Spot(f"{code.co_filename}:{number} in {code.co_name}", waits=waits)


def caller(frame: FrameType | None) -> tuple[str, int]:
    """(file, line) of the innermost frame of the author's own; ("", 0): there is none."""
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def shown(file: str) -> str:
    """A file as its author calls it: below the working directory without that."""
    return file.removeprefix(str(Path.cwd()) + os.sep)


def raised_at(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """The last frame of the author's own, else the last of all; None: there is no frame."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if _is_own(frame.filename)]
    return next(reversed(own or frames), None)


def _is_own(file: str) -> bool:
    """Whether code of this file is neither Python's, nor a package's, nor this runtime's."""
    return not file.startswith((*_libraries(), RUNTIME, "<"))


@cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple(sysconfig.get_path(name) + os.sep for name in names)
