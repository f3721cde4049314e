"""A port for a group's meeting, free now and kept so."""

from __future__ import annotations

import socket

__all__ = ["reserve"]


def reserve(addr: str) -> socket.socket:
    """A free port that stays ours: bound and never listened on, so rank 0 may bind it as well.

    Args:
        addr: the address of this machine at which the ranks will meet.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((addr, 0))
    return reserved
