"""Where a group meets: a port that is kept free for it, and whether it stays on this machine."""

from __future__ import annotations

import ipaddress
import socket

__all__ = ["is_loopback", "reserve"]


def reserve(addr: str) -> socket.socket:
    """A free port that stays ours: bound and never listened on, so rank 0 may bind it as well.

    Args:
        addr: the address of this machine at which the ranks will meet.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((addr, 0))
    return reserved


def is_loopback(addr: str) -> bool:
    """Whether an address stays on this machine."""
    try:
        return ipaddress.ip_address(addr).is_loopback
    except ValueError:
        return addr == "localhost"
