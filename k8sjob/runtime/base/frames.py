"""Stack frames: the place in the user's code where a thread is, or where an error was raised."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.contract import WORKDIR
from k8sjob.runtime.base import config
from k8sjob.runtime.base.errors import EnvError

if TYPE_CHECKING:
    from types import FrameType, TracebackType

RUNTIME: Final = str(Path(__file__).parents[2]) + os.sep
"""The folder of k8sjob's code."""
_COLLECTIVES: Final = (
    f"torch{os.sep}distributed{os.sep}",
    f"torch{os.sep}futures{os.sep}",
    # Backward: its kernels end, but what DDP and FSDP send between them may not.
    f"torch{os.sep}autograd{os.sep}graph.py",
)
_PACKAGES: Final = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Library folders of any environment: the user's, a venv's base, the system's."""
_FRAME: Final = re.compile(r'^ +File "([^"\n]+)", line (\d+)', re.MULTILINE)
_STARTED: Final = re.compile(
    rf'^  File "(?:{re.escape(RUNTIME)}.*{os.sep}rank_main\.py|<frozen runpy>)", line .*\n'
    r"|^\n?Extension modules: .*\n?",
    re.MULTILINE,
)
"""The frames below a script's first one, and the list of compiled modules, in such a dump."""
_RAISED: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::\s+(.*))?$", re.MULTILINE)


class Inner(NamedTuple):
    """An exception of another process, found in the message of one of this process."""

    kind: str  # its class
    message: str  # its first line that is not empty
    where: str  # the last line of the user's code, as file:line; empty if there is none


class CodePlace(NamedTuple):
    """The place of a thread in the code."""

    where: str  # the last line of the user's code, as file:line in function; empty if there is none
    waits: bool  # whether it is in torch's distributed code, called from there, or in backward


def place_of_thread(thread: int) -> CodePlace:
    """The place of a thread by its identity, seen from another one."""
    innermost = sys._current_frames().get(thread)  # noqa: SLF001 - documented, in spite of its name
    frames = [frame for frame, _ in traceback.walk_stack(innermost)] if innermost else []
    user_frame = next(
        (at for at, frame in enumerate(frames) if _is_users(frame.f_code.co_filename)), None
    )
    within = frames[:user_frame]
    waits = any(place in frame.f_code.co_filename for frame in within for place in _COLLECTIVES)
    if user_frame is None:
        return CodePlace("", waits=waits)
    code, number = frames[user_frame].f_code, frames[user_frame].f_lineno
    # A torch.distributed.Work waits in C++, without a Python frame.
    line = linecache.getline(code.co_filename, number)
    waits = waits or (user_frame == 0 and ".wait(" in line and "os.wait(" not in line)
    return CodePlace(f"{with_user_paths(code.co_filename)}:{number} in {code.co_name}", waits=waits)


def caller(frame: FrameType | None) -> tuple[str, int]:
    """(file, line) of the innermost frame of the user's code; ("", 0) if there is none."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def with_user_paths(text: str) -> str:
    """A text with the user's paths in place of those of the copy that runs on this machine.

    The local back end does the same to lines of code in the output, which may come from any
    program. This is for what ranks say of places in reasons and to each other, and for all paths
    in an error.
    """
    try:
        source, copy = config.source_folder(), config.mapped_paths().get(WORKDIR)
    except EnvError:
        return text
    if source is None or copy is None:
        return text
    for folder in {copy, os.path.realpath(copy)}:
        text = text.replace(folder + os.sep, f"{source}{os.sep}")
    return text


def stacks() -> str:
    """All threads' stacks, as faulthandler shows them, without k8sjob's threads.

    Reads no file: the disk may be what a thread waits for.
    """
    # A thread that threading did not start has a number instead of a name.
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads_in_words = []
    for ident, top in sys._current_frames().items():  # noqa: SLF001 - as above
        if not names.get(ident, "").startswith("k8sjob-"):
            calls = [
                f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n'
                for frame, line in traceback.walk_stack(top)
            ]
            name = names.get(ident, ident)
            threads_in_words.append(f"Thread {name} (most recent call first):\n{''.join(calls)}")
    return with_user_paths("\n".join(threads_in_words))


def users_threads(dump: str) -> str:
    """A dump of faulthandler's with the user's paths, without k8sjob's threads and first frames."""
    blocks = _STARTED.sub("", dump).split("\n\n")
    return with_user_paths("\n\n".join(block for block in blocks if not _is_of_k8sjob(block)))


def fatal_place(dump: str) -> str:
    """The place of a fatal error in the user's code, as file:line, from faulthandler's dump.

    Where a thread without Python frames failed, it is the main thread's place, the last of all.
    """
    # faulthandler marks the thread that failed, and lists the main thread last.
    _, marker, after = dump.rpartition("Current thread ")
    threads = (after if marker else dump).split(" (most recent call first):\n")
    if len(threads) < 2:
        return ""
    return next(iter(_places(threads[1 if marker else -1].partition("\n\n")[0])), "")


def _is_of_k8sjob(block: str) -> bool:
    files = re.findall(r'^  File "([^"]+)"', block, re.MULTILINE)
    ours = any(file.startswith(RUNTIME) for file in files) and not any(map(_is_users, files))
    # k8sjob's threads are those of threading, whose first frame, the last line, is _bootstrap.
    return ours and block.rstrip().endswith(" in _bootstrap")


def embedded(message: str) -> Inner | None:
    """The cause within an exception's message, where that has a traceback of another process.

    Those of torch's DataLoader workers and of torch.multiprocessing.spawn do.
    """
    _, marker, after = message.rpartition("Traceback (most recent call last):\n")
    raised = _RAISED.search(after) if marker else None
    if raised is None:
        return None
    return Inner(raised[1], raised[2] or "", next(reversed(_places(after[: raised.start()])), ""))


def _places(text: str) -> list[str]:
    """The frames of the user's code in a text, in their order, each as file:line."""
    places = _FRAME.findall(text)
    return [f"{with_user_paths(file)}:{line}" for file, line in places if _is_users(file)]


def failed_at(error: BaseException) -> str:
    """The line of the user's code that an error comes from, as file:line in function.

    Where an error is handled before it comes there, it is the line that is running now, without
    the function; empty if there is none.
    """
    at = raised_at(error.__traceback__)
    if at and _is_users(at.filename):
        return f"{with_user_paths(at.filename)}:{at.lineno} in {at.name}"
    file, line = caller(sys._getframe(1))  # noqa: SLF001 - documented
    return f"{with_user_paths(file)}:{line}" if file else ""


def raised_at(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """The last frame of the user's code, else the last of all; None if there is no frame."""
    frames = traceback.extract_tb(trace)
    of_user = [frame for frame in frames if _is_users(frame.filename)]
    return next(reversed(of_user or frames), None)


def _is_users(file: str) -> bool:
    """Whether the code of a file belongs neither to Python, nor to a package, nor to k8sjob."""
    # "<string>" and "<frozen importlib>" are no files.
    if file.startswith((*_libraries(), RUNTIME, "<")):
        return False
    return not any(folder in file for folder in _PACKAGES)


@cache
def _libraries() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    # A virtual environment's folders may be links, and frames have either path.
    places = {sysconfig.get_path(name) for name in names}
    return tuple(place + os.sep for place in {*places, *map(os.path.realpath, places)})
