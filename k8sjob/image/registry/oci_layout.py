"""Images in a folder instead of a registry, as an OCI layout: for places without a network.

The index is written last, when all that it names is there.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import ImageError
from k8sjob.image.registry.blob_content import Sent, counted, in_memory
from k8sjob.image.registry.manifest import OCI_INDEX, digest_of, encode, read_object
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from k8sjob.image.registry.blob_content import Content
    from k8sjob.image.registry.manifest import ImageReference

_MARK, _INDEX = "oci-layout", "index.json"
_VERSION: Final = b'{"imageLayoutVersion":"1.0.0"}'
_TAG: Final = "org.opencontainers.image.ref.name"
"""The annotation by which tools find an image of a layout."""
_NAME: Final = "io.containerd.image.name"
"""The annotation by which containerd and docker name an image that they load."""


class Layout:
    """A folder that images are written to; it has the methods of a Repository that a push needs."""

    client: Final = None  # nothing can be mounted here

    def __init__(self, folder: Path, reference: ImageReference) -> None:
        """Check the folder, which may not exist; ImageError where it is something else."""
        self.folder = folder
        self.reference = reference
        self._unfinished: Path | None = None
        self._at_end = ExitStack()
        self._lock = threading.Lock()
        with _errors_explained(folder):
            if folder.exists() and not (folder / _MARK).exists() and any(folder.iterdir()):
                raise ImageError(
                    f"{folder}: not empty, and not an OCI layout; specify a folder that does not"
                    " exist yet"
                )
            self._entries()

    def close(self) -> None:
        """Remove what is not complete."""
        self._at_end.close()

    def has(self, raw: bytes, media_type: str) -> bool:
        """Whether an image exists, by its manifest."""
        digest = digest_of(raw)
        return any(
            entry.get("digest") == digest and entry.get("mediaType") == media_type
            for entry in self._entries()
        )

    def holds(self, content: Content) -> bool:
        """Whether the folder has a blob."""
        path = self.path(content.digest)
        # By its size alone: blobs get their names when they are complete, and to hash gigabytes
        # takes seconds.
        return path.is_file() and path.stat().st_size == content.size

    def add_blob(
        self,
        content: Content,
        on_bytes: Callable[[int], object],
        _mount: ImageReference | None = None,
    ) -> Sent:
        """Write a blob; `on_bytes` is called with each number of bytes. ImageError: no space."""
        with _errors_explained(self.folder):
            self.write(self.path(content.digest), counted(content, on_bytes))
        return Sent.UPLOADED

    def put(self, raw: bytes, media_type: str, tag: str) -> None:
        """Write a manifest and name it; all that it names must be there."""
        digest = digest_of(raw)
        # The manifest before the index: whoever reads the index finds all that it names.
        self.add_blob(in_memory(raw), lambda _size: None)
        config = json.loads(self.path(json.loads(raw)["config"]["digest"]).read_bytes())
        entry = {
            "mediaType": media_type,
            "digest": digest,
            "size": len(raw),
            "platform": {key: config[key] for key in ("os", "architecture") if key in config},
            "annotations": {_TAG: tag, _NAME: f"{self.reference.name}:{tag}"},
        }
        with _errors_explained(self.folder), _locked(self.folder):
            # Read under the lock: another push may have added its image since.
            entries = [old for old in self._entries() if old.get("digest") != digest]
            index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [*entries, entry]}
            self.write(self.folder / _INDEX, [encode(index)])

    def write(self, path: Path, blocks: Iterable[bytes]) -> None:
        """Write a file that gets its name when it is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several parts are written by threads; one of them makes the folder.
        with self._lock:
            if self._unfinished is None:
                folder = temporary_folder("layout", str(self.folder))
                self._unfinished = self._at_end.enter_context(folder)
                # First of all: the next process continues in the folder of one that was killed.
                (self.folder / _MARK).write_bytes(_VERSION)
        # In the layout's own file system, so that the rename is atomic.
        with tempfile.NamedTemporaryFile(dir=self._unfinished, delete=False) as file:
            for block in blocks:
                file.write(block)
            file.flush()
            # Temporary files are for their owner alone, and the layout is to be carried elsewhere.
            os.fchmod(file.fileno(), 0o644)
        Path(file.name).replace(path)

    def path(self, digest: str) -> Path:
        """The path of a blob."""
        return self.folder.joinpath("blobs", *digest.split(":"))

    def _entries(self) -> list[dict[str, Any]]:
        path = self.folder / _INDEX
        if not path.exists():
            return []
        entries: Any = read_object(path.read_bytes(), str(path)).get("manifests")
        if isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
            return entries
        raise ImageError(f"{path}: not the index of an OCI layout; specify another folder")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from writing the index."""
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _errors_explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ImageError(
            f"{folder}: cannot be written: {error.strerror}; free some space there, or specify"
            " another folder"
        ) from None
