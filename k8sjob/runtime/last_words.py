"""How a rank's Reason reaches the agent of its node: a file, written once, whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from k8sjob.contract import Reason

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["leave_reason", "read_reason"]


def leave_reason(reason: Reason, file: Path | None) -> None:
    """Write a reason, unless this process has given one already: the first is the cause.

    Args:
        reason: why the process is about to end.
        file: where the agent looks; None: nobody asked.
    """
    if file is None:
        return
    draft = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        draft.write_text(reason.encode())
        # A hard link, unlike a rename, does not replace what is there.
        with suppress(FileExistsError):
            os.link(draft, file)
        draft.unlink()


def read_reason(file: Path | None) -> Reason | None:
    """The reason in a file; None where there is none."""
    try:
        return Reason.decode(file.read_text()) if file else None
    except (OSError, ValueError):
        return None
