"""The code layer of an earlier push, by its digest, while nothing that is in it has changed.

As git's index does it: a file whose state (device, inode, size, mode and both times) is that of
the packed one has the same content. A time that was too young at that moment is not trusted, since
another write at the same tick of the clock would leave it as it was.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from k8sjob.files import cached_value, keep_value, own_cache_folder
from k8sjob.image.appending import Layer
from k8sjob.image.build_context import OPEN_FLAGS
from k8sjob.image.code_image import package_states
from k8sjob.image.registry.blob_content import FileContent
from k8sjob.image.secrets import Secret

if TYPE_CHECKING:
    from pathlib import Path

    from k8sjob.image.build_context import Context, File

_RACY_SECONDS: Final = 2.0
"""More than a tick of any file system's clock."""
_FOREIGN_SECONDS: Final = 3600.0
"""The same on another file system than the cache's, whose server may have a clock of its own."""


class PackedBefore:
    """What is remembered of the code in a folder, whose context is read afterwards.

    alone: see pack_code.
    """

    def __init__(self, folder: Path, *, alone: bool) -> None:
        place = hashlib.sha256(repr((str(folder.resolve()), alone)).encode()).hexdigest()
        self._name, self._begun, self._device = f"code-{place[:24]}.json", 0.0, -1
        with suppress(OSError):
            if cache := own_cache_folder():
                os.utime(cache)  # the time now by the clock of its file system
                self._begun, self._device = cache.stat().st_mtime, cache.stat().st_dev

    def layer(self, context: Context) -> Layer | None:
        """The layer without its bytes; None where it has to be packed."""
        with suppress(OSError):  # a file cannot be read
            fields = cached_value(self._name, _states(context))
            if fields and all(map(_is_current, context.entries)):
                digest, size, diff_id, findings = fields
                content = FileContent(digest, size, io.BytesIO())
                secrets = tuple(Secret(*finding) for finding in findings)
                return Layer(content, diff_id, findings=secrets)
        return None

    def remember(self, context: Context, layer: Layer) -> None:
        """Keep the digests of a layer that was packed of these files."""
        if all(file.is_folder or self._is_settled(file) for file in context.entries):
            content = layer.content
            fields = [content.digest, content.size, layer.diff_id, layer.findings]
            keep_value(self._name, _states(context), fields)

    def _is_settled(self, file: File) -> bool:
        margin = _RACY_SECONDS if file.state.st_dev == self._device else _FOREIGN_SECONDS
        return max(file.state.st_mtime, file.state.st_ctime) < self._begun - margin


def _states(context: Context) -> str:
    """A digest of the states of all that decides about a layer's bytes and findings."""
    states = [(file.name, *_state(file.state)) for file in context.entries if not file.is_folder]
    versions = (sys.version, zlib.ZLIB_RUNTIME_VERSION, package_states())
    return hashlib.sha256(repr((states, versions)).encode()).hexdigest()


def _is_current(file: File) -> bool:
    """Whether the state is that of the opened file: NFS asks its server only at an open."""
    if not stat.S_ISREG(file.state.st_mode):
        return True
    descriptor = os.open(file.path, OPEN_FLAGS)
    try:
        return _state(os.fstat(descriptor)) == _state(file.state)
    finally:
        os.close(descriptor)


def _state(state: os.stat_result) -> tuple[int, ...]:
    changes = state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return (state.st_dev, state.st_ino, state.st_mode, *changes)
