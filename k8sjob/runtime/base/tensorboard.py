"""Numbers in files that TensorBoard draws, written without its packages.

A file is a row of records (tensorflow/core/lib/io/record_writer.h), each an Event in the wire
format of protocol buffers (tensorflow/core/util/event.proto, framework/summary.proto).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["ScalarFile", "crc32c"]

_VERSION: Final = b"brain.Event:2"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""
_MASK: Final = 0xA282EAD8
"""Added to checksums, so that a record may hold records."""


class ScalarFile:
    """One file of a run; every start makes another, and TensorBoard joins those of a folder.

    Nothing stays open between two writes, so that what was written is on a shared volume too.
    """

    def __init__(self, folder: Path) -> None:
        """Begin a file.

        Raises:
            OSError: it cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._record(_event(time.time(), _field(3, _BYTES, _VERSION)))

    def add(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Write numbers by their names, and out to the disk.

        Args:
            step: where they stand along the axis.
            values: name -> number, in single precision.
            at: seconds since the epoch.

        Raises:
            OSError: there is no room, or no disk.
        """
        pairs = (
            _field(1, _BYTES, name.encode()) + _field(2, _FIXED32, struct.pack("<f", value))
            for name, value in values.items()
        )
        summary = b"".join(_field(1, _BYTES, pair) for pair in pairs)
        step_field = _field(2, _VARINT, _varint(step))
        self._record(_event(at, step_field + _field(5, _BYTES, summary)))

    def _record(self, content: bytes) -> None:
        length = struct.pack("<Q", len(content))
        with self.path.open("ab") as file:
            file.write(length + _checksum(length) + content + _checksum(content))


def crc32c(content: bytes) -> int:
    """The checksum of Castagnoli (RFC 3720, B.4), which zlib does not have."""
    value = 0xFFFFFFFF
    for byte in content:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _table() -> list[int]:
    made = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # noqa: PLW2901 - a shift register
        made.append(value)
    return made


_TABLE: Final = _table()


def _checksum(content: bytes) -> bytes:
    value = crc32c(content)
    return struct.pack("<I", ((value >> 15 | value << 17) + _MASK) & 0xFFFFFFFF)


def _event(at: float, rest: bytes) -> bytes:
    return _field(1, _FIXED64, struct.pack("<d", at)) + rest


def _field(number: int, kind: int, content: bytes) -> bytes:
    length = _varint(len(content)) if kind == _BYTES else b""
    return _varint(number << 3 | kind) + length + content


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
