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
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.files import own_cache_folder, whole_file
from k8sjob.image.layers import CodeLayer
from k8sjob.image.registry.blob_content import FileContent
from k8sjob.image.secrets import Secret
from k8sjob.rendering.dockerfile import runtime_files

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from k8sjob.image.build_context import Context

_RACY_SECONDS: Final = 2.0
"""More than a tick of any file system's clock."""
_FOREIGN_SECONDS: Final = 3600.0
"""The same on another file system than the cache's, whose server may have a clock of its own."""


class PackedBefore:
    """What is remembered of the code in one folder.

    Args:
        context: as it was just read.
        folder: where it lies.
        alone: see pack_code.
        begun: the time before the context was read, in seconds since the epoch.
    """

    def __init__(self, context: Context, folder: Path, *, alone: bool, begun: float) -> None:
        self._cache = own_cache_folder()
        files = context.entries
        states = [(file.name, *_state(file.state, folder=file.is_folder)) for file in files]
        states += [(name, *_state(path.stat())) for name, path in runtime_files()]
        states += [(path.name, *_state(path.stat())) for path in _packers()]
        text = repr((states, alone, sys.version, zlib.ZLIB_RUNTIME_VERSION))
        self._states = hashlib.sha256(text.encode()).hexdigest()
        name = hashlib.sha256(repr((str(folder.resolve()), alone)).encode()).hexdigest()[:24]
        self._path = self._cache / f"code-{name}.json" if self._cache else None
        device = self._cache.stat().st_dev if self._cache else -1
        self._is_settled = all(
            max(file.state.st_mtime, file.state.st_ctime)
            < begun - (_RACY_SECONDS if file.state.st_dev == device else _FOREIGN_SECONDS)
            for file in files
            if not file.is_folder
        )

    def layer(self) -> CodeLayer | None:
        """The layer without its bytes; None where it has to be packed."""
        try:
            known = json.loads(self._path.read_bytes()) if self._path else {}
            if known["states"] != self._states:
                return None
            content = FileContent(known["digest"], known["size"], io.BytesIO())
            findings = tuple(Secret(*finding) for finding in known["findings"])
            return CodeLayer(content, known["diff_id"], findings)
        except (OSError, ValueError, KeyError, TypeError):  # none, or a damaged one
            return None

    def remember(self, layer: CodeLayer) -> None:
        """Keep the digests of a layer that was packed of these files."""
        if not (self._path and self._is_settled):
            return
        content = {"digest": layer.content.digest, "size": layer.content.size}
        content |= {"diff_id": layer.diff_id, "states": self._states, "findings": layer.findings}
        try:
            with whole_file(self._path) as out:
                out.write(json.dumps(content).encode())
        except OSError:
            pass  # the next push packs again


def _state(state: os.stat_result, *, folder: bool = False) -> tuple[int, ...]:
    # Of a folder only name and kind are in a layer, and its times change with what is left out.
    times = () if folder else (state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return (state.st_mode, *times, *(() if folder else (state.st_dev, state.st_ino)))


def _packers() -> Iterator[Path]:
    """The modules that decide about a layer's bytes and findings."""
    here = Path(__file__).parent
    return (here / name for name in ("layers.py", "layer_tar.py", "secrets.py", "secrets.tsv"))
