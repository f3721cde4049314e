"""From which checkpoint all ranks go on, found together."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from k8sjob.runtime import shards
from k8sjob.runtime.checkpoint import decode, load, passed_over, remove, verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from k8sjob.runtime.checkpoint import Checkpoints
    from k8sjob.runtime.process_group import Group

__all__ = ["newest_whole", "sees_one_folder"]


def sees_one_folder(checkpoints: Checkpoints, group: Group) -> bool:
    """Whether what each rank writes in its folder, rank 0 sees in its own; all ranks call it."""
    if group.world_size == 1:
        return True
    first = group.rank == 0
    name = checkpoints.probe() if first else None
    found = group.broadcast_bytes(name.encode() if name else None)
    if found is None:
        return False
    probe = checkpoints.folder / found.decode()
    with suppress(OSError):
        (probe / str(group.rank)).touch()
    group.barrier()
    seen = len(list(probe.iterdir())) if first else 0
    if first:
        remove(probe)
    return int(group.broadcast(torch.tensor(seen))) == group.world_size


def newest_whole(
    checkpoints: Checkpoints,
    group: Group,
    *,
    shared: bool,
    warn: Callable[[str], None],
    beat: Callable[[], None],
) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole and what it holds, on all ranks; None: there is none.

    Args:
        checkpoints: where rank 0 looks.
        group: the ranks, which all call it.
        shared: see sees_one_folder; of a folder that all see each rank reads what it needs.
        warn: told of each one that is passed over.
        beat: called while a checkpoint is read.
    """
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
            return path, state
        warn(passed_over(path, problem))
    return None


def _verified(path: Path, group: Group, beat: Callable[[], None]) -> str:
    """What is wrong with a folder, of which each rank looks at its share; empty: nothing."""
    said = ""
    try:
        verify(path, part=group.rank, of=group.world_size)
    except (OSError, ValueError) as error:
        said = str(error)
    beat()
    text = torch.frombuffer(bytearray(said.encode() + b"\0"), dtype=torch.uint8)
    told = [bytes(one.tolist()).rstrip(b"\0").decode() for one in group.gather(text)]
    return next(filter(None, told), "")


def _read_for_all(path: Path, group: Group) -> tuple[dict[str, Any] | None, str]:
    """The whole state, which rank 0 reads and gives to the others; or what is wrong with it."""
    content, problem = None, ""
    if group.rank == 0:
        try:
            content = _whole(path)
        except (OSError, ValueError) as error:
            problem = str(error)
    content = group.broadcast_bytes(content)
    if content is not None:
        return decode(content), ""
    return None, (group.broadcast_bytes(problem.encode() if problem else None) or b"").decode()


def _whole(path: Path) -> bytes:
    """A checkpoint as the bytes of one file.

    Raises:
        ValueError: it is torn, or holds anything but tensors and plain values.
        OSError: it cannot be read.
    """
    if not path.is_dir():
        content = path.read_bytes()
        decode(content)
        return content
    verify(path)
    whole = io.BytesIO()
    torch.save(shards.gathered(load(path)), whole)
    return whole.getvalue()
