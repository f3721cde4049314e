"""The code layer of an earlier push, by its digest, while nothing that is in it has changed.

As git's index does it: a file whose state (device, inode, size, mode and both times) is that of
the packed one has the same content. A time that was too young at that moment is not trusted, since
another write at the same tick of the clock would leave it as it was.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.files import own_cache_folder, whole_file
from k8sjob.image.layers import CodeLayer
from k8sjob.image.registry.blob_content import FileContent
from k8sjob.image.secrets import Secret
from k8sjob.rendering.dockerfile import runtime_files

if TYPE_CHECKING:
    import os

    from k8sjob.image.build_context import Context

_RACY_SECONDS: Final = 2.0
"""More than a tick of any file system's clock."""
_FOREIGN_SECONDS: Final = 3600.0
"""The same on another file system than the cache's, whose server may have a clock of its own."""
_PACKERS: Final = ("layers.py", "layer_tar.py", "secrets.py", "secrets.tsv")
"""The modules that decide about a layer's bytes and findings."""


class PackedBefore:
    """What is remembered of the code in a folder, whose context was read after `begun`.

    `begun` is in seconds since the epoch; alone: see pack_code.
    """

    def __init__(self, context: Context, folder: Path, *, alone: bool, begun: float) -> None:
        files = [(entry.name, entry.state) for entry in context.entries if not entry.is_folder]
        paths = [path for _, path in runtime_files()]
        paths += [Path(__file__).with_name(name) for name in _PACKERS]
        states = [(name, *_state(state)) for name, state in files]
        states += [(str(path), *_state(path.stat())) for path in paths]
        versions = (sys.version, zlib.ZLIB_RUNTIME_VERSION)
        self._states = hashlib.sha256(repr((states, versions)).encode()).hexdigest()
        self._path, device = None, -1
        if cache := own_cache_folder():
            place = hashlib.sha256(repr((str(folder.resolve()), alone)).encode()).hexdigest()
            self._path, device = cache / f"code-{place[:24]}.json", cache.stat().st_dev
        self._is_settled = all(
            max(state.st_mtime, state.st_ctime)
            < begun - (_RACY_SECONDS if state.st_dev == device else _FOREIGN_SECONDS)
            for _, state in files
        )

    def layer(self) -> CodeLayer | None:
        """The layer without its bytes; None where it has to be packed."""
        # There is none, or it is damaged.
        with suppress(OSError, ValueError, KeyError, TypeError):
            entry = json.loads(self._path.read_bytes()) if self._path else {}
            if entry["states"] == self._states:
                content = FileContent(entry["digest"], entry["size"], io.BytesIO())
                findings = (Secret(*finding) for finding in entry["findings"])
                return CodeLayer(content, entry["diff_id"], tuple(findings))
        return None

    def remember(self, layer: CodeLayer) -> None:
        """Keep the digests of a layer that was packed of these files."""
        if self._path and self._is_settled:
            entry = {"digest": layer.content.digest, "size": layer.content.size}
            entry |= {"diff_id": layer.diff_id, "states": self._states, "findings": layer.findings}
            with suppress(OSError), whole_file(self._path) as out:  # else the next push packs again
                out.write(json.dumps(entry).encode())


def _state(state: os.stat_result) -> tuple[int, ...]:
    changes = state.st_size, state.st_mtime_ns, state.st_ctime_ns
    return (state.st_dev, state.st_ino, state.st_mode, *changes)
