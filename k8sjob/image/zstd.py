"""zstd, which Python has from 3.14 on and a package brings to older ones."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, cast

from k8sjob.errors import ImageError

if TYPE_CHECKING:
    from typing import IO, BinaryIO

__all__ = ["BROKEN", "MAGIC", "compressor", "reader"]

MAGIC: Final = b"\x28\xb5\x2f\xfd"
"""What its frames begin with."""
_LEVEL: Final = 3
"""The format's own."""
BROKEN: tuple[type[Exception], ...] = ()
"""What reading raises where the format is not kept to."""

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    BROKEN = (zstd.ZstdError,)
except ImportError:  # an extra
    pass


def compressor() -> zstd.ZstdCompressor:
    """A compressor with a checksum at the end.

    Raises:
        ImageError: there is no zstd here.
    """
    _check("a layer compressed by zstd cannot be written")
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: _LEVEL,
        zstd.CompressionParameter.checksum_flag: 1,
    }
    return zstd.ZstdCompressor(options=options)


def reader(file: BinaryIO, what: str) -> IO[bytes]:
    """The contents of a compressed file.

    Args:
        file: whose position is at its beginning.
        what: it is, for messages.

    Raises:
        ImageError: there is no zstd here.
    """
    _check(f"{what} is compressed by zstd and cannot be read")
    return cast("IO[bytes]", zstd.ZstdFile(file))


def _check(what: str) -> None:
    if not BROKEN:
        raise ImageError(f"{what}: Python's module for it is missing; pip install 'k8sjob[deps]'")
