"""Integrity of checkpoints: whether one is whole, and the newest whole one for all ranks."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch

from k8sjob.runtime.checkpoint import format as sharded
from k8sjob.runtime.checkpoint.format import decode
from k8sjob.runtime.checkpoint.store import (
    FROM_SCRATCH,
    check_digests,
    content_of,
    read_digests,
    remove,
    step_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from k8sjob.runtime.checkpoint.store import Checkpoints
    from k8sjob.runtime.comm.process_group import Group


_UNREADABLE: Final = "it cannot be read: "
"""How the problem of a checkpoint begins of which nobody knows whether it is whole."""


def sees_one_folder(checkpoints: Checkpoints, group: Group) -> bool:
    """Whether rank 0 sees in its folder what each rank writes there; all ranks call it."""
    if group.world_size == 1:
        return True
    first, mine = group.rank == 0, b""
    if first:
        with suppress(OSError):  # there may be no room
            # A draft, so that remove_partial() takes it away where this process is killed
            # meanwhile.
            mine = checkpoints.draft(0, folder=True).name.encode()
    probe_name = group.broadcast_bytes(mine)
    if not probe_name:
        return False
    probe = checkpoints.folder / probe_name.decode()
    with suppress(OSError):
        # A rank with another volume at this path has no such folder, and touches nothing.
        (probe / str(group.rank)).touch()
    group.barrier()
    files = len(list(probe.iterdir())) if first else 0
    if first:
        remove(probe)
    return int(group.broadcast(torch.tensor(files))) == group.world_size


def newest_whole(
    checkpoints: Checkpoints,
    group: Group,
    *,
    shared: bool,
    warn: Callable[[str], None],
    beat: Callable[[], None],
) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole and what it holds, on all ranks; None: there is none.

    All ranks call it. Of a common folder (`shared`, see sees_one_folder) each reads what it needs.
    `warn` gets each checkpoint that is skipped, and why; `beat` is called while one is read.

    Raises:
        OSError: none is whole, and of some the file system does not tell.
    """
    unreadable = ""
    # Rank 0's list counts for all, even of a common folder: the collectives below need one order.
    names = [path.name for path in checkpoints.newest_first()]
    listed = group.broadcast_bytes(json.dumps(names).encode())
    for name in json.loads(listed or b"[]"):
        path = checkpoints.folder / name
        if shared and not name.endswith(".pt"):
            problem = _verified(path, group, beat)
            state = None if problem else load(path)
        else:
            state, problem = _read_for_all(path, group)
        if state is not None:
            # The state has the same values on all ranks, and maybe tensors that are still in the
            # files.
            return path, state
        warn(f"checkpoint {path} is skipped: {problem}")
        if problem.startswith(_UNREADABLE):
            unreadable = unreadable or f"checkpoint {path}: {problem}"
    # A server that is away for a moment, or another user's files: they are whole perhaps.
    if unreadable:
        raise OSError(f"{unreadable}; make it readable and start again, or {FROM_SCRATCH}")
    return None


def _verified(path: Path, group: Group, beat: Callable[[], None]) -> str:
    """The fault of a folder, of which each rank checks some files; empty if there is none."""
    problem = ""
    try:
        verify(path, part=group.rank, of=group.world_size)
    except (OSError, ValueError) as error:
        problem = _problem(error)
    # To hash the files of a large checkpoint may take longer than the watchdog is patient.
    beat()
    # With a zero byte behind it, since torch makes no tensor of an empty buffer.
    text = torch.frombuffer(bytearray(problem.encode() + b"\0"), dtype=torch.uint8)
    problems = [bytes(part.tolist()).rstrip(b"\0").decode() for part in group.gather(text)]
    # What one rank finds damaged is damaged, whatever another one cannot read of it.
    return min(filter(None, problems), key=lambda text: text.startswith(_UNREADABLE), default="")


def _read_for_all(path: Path, group: Group) -> tuple[dict[str, Any] | None, str]:
    """The whole state, which rank 0 reads and sends to the others; or what is wrong with it."""
    content, problem = None, ""
    if group.rank == 0:
        try:
            content = _whole(path)
        except (OSError, ValueError) as error:
            problem = _problem(error)
    # None where rank 0 could not read it; then a second broadcast tells the others why.
    content = group.broadcast_bytes(content)
    if content is not None:
        return decode(content), ""
    return None, (group.broadcast_bytes(problem.encode() if problem else None) or b"").decode()


def _problem(error: OSError | ValueError) -> str:
    return f"{_UNREADABLE}{error.strerror or error}" if isinstance(error, OSError) else str(error)


def _whole(path: Path) -> bytes:
    """A checkpoint, which is whole, as the bytes of one file."""
    if not path.is_dir():
        content = content_of(path)
        _check_step(path, decode(content))
        return content
    # It is a folder that only rank 0 sees, so the others get its tensors whole, as one file.
    verify(path)
    whole = io.BytesIO()
    torch.save(sharded.gathered(load(path)), whole)
    return whole.getvalue()


def verify(path: Path, *, part: int = 0, of: int = 1) -> None:
    """Check that a checkpoint is whole, of its name, and holds only tensors and plain values.

    Ranks divide the files of a folder: each checks one `part`, 0 to of - 1.

    Raises:
        ValueError: it is not; which of its files, and why.
        OSError: it cannot be read.
    """
    folder = path.is_dir()
    if folder:
        digests = read_digests(path)
        check_digests(path, digests, sorted(digests)[part::of])
    if folder or part == 0:
        _check_step(path, load(path))


def load(path: Path) -> dict[str, Any]:
    """The state in a checkpoint; a folder's tensors are read as they are needed (see Stored)."""
    return sharded.read(path) if path.is_dir() else decode(content_of(path))


def _check_step(path: Path, state: dict[str, Any]) -> None:
    """Refuse a step that is not that of the name: the next checkpoints would not be the newest."""
    named = step_of(path)
    if named >= 0 and (type(state.get("step")) is not int or state["step"] != named):
        raise ValueError(f"it is not of step {named}, as its name says")
