"""Records in a bucket of S3, or of storage with the same interface, through fsspec.

fsspec and s3fs are an extra, and imported here alone, once a URL is given. Credentials are found by
them, in the environment: they are no option of k8sjob, and in no message.
"""

from __future__ import annotations

import importlib
import re
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, Final

from k8sjob.backends.record import DAMAGE, SUFFIX, UNSENT, RecordBackend, write_record
from k8sjob.contract import __version__
from k8sjob.errors import K8sJobError, StorageError, install_step, redacted
from k8sjob.sanitize import safe_line
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Iterator

    from k8sjob.backends.api import Backend, JobRef, Snapshot
    from k8sjob.backends.record import Judge

_URL: Final = re.compile(r"(?P<scheme>\w+)://(?P<path>[a-z0-9][a-z0-9._-]*(?:/[^\s?*\[\]]*)?)")
_PACKAGES: Final = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""What fsspec needs for a scheme."""
_BLOCK: Final = 1 << 22
"""Bytes of a record that are read at once: most of it is often not needed."""
_UPLOAD: Final = {"s3": {"chunksize": 1 << 23, "max_concurrency": 2}}
"""Of a large record; s3fs would hold 500 MiB of it in memory, and collect writes four at once."""


class StoredRecords:
    """Records in a bucket, as Records in a folder: URL/NAMESPACE/NAME@RUN.k8sjob.

    None is ever removed: the bucket's own lifecycle rules do that.

    Raises:
        K8sJobError: the URL is not one, or a package is missing.
    """

    def __init__(self, url: str) -> None:
        self._files, self._root = _connect(url)
        self._url = url.rstrip("/")
        self._upload = _UPLOAD.get(url.partition(":")[0], {})

    def check(self) -> None:
        """Write a small file and look for one, to find what is wrong before the first record.

        Raises:
            StorageError: it is denied, or not possible: without ListBucket nothing is ever absent.
        """
        with _explained(self._url):
            self._files.pipe_file(f"{self._root}/k8sjob-collect", __version__.encode())
            self._files.exists(f"{self._root}/k8sjob-none")

    def keep(
        self,
        backend: Backend,
        ref: JobRef,
        snapshot: Snapshot | None = None,
        judge: Judge | None = None,
    ) -> str:
        """Keep a brief record of a job, as write_record does; it is there whole or not at all."""
        with temporary_folder("record") as folder, (folder / "record").open("w+b") as out:
            write_record(
                backend, ref, out, brief=True, snapshot=snapshot, earlier=self.open, judge=judge
            )
            out.flush()
            with _explained(self._url):
                path = f"{self._root}/{_name(ref, SUFFIX)}"
                # An upload is there whole or not at all in an object store, so it needs no draft
                # with another name.
                self._files.put_file(out.name, path, **self._upload)
        return f"{self._url}/{_name(ref, SUFFIX)}"

    def open(self, ref: JobRef) -> RecordBackend:
        """The record of a job; see Records."""
        return StoredRecord(f"{self._url}/{_name(ref, SUFFIX)}")

    def mark(self, ref: JobRef, word: str) -> bool:
        """Note something about a job; False where it was noted before."""
        path = f"{self._root}/{_name(ref, f'.{word}')}"
        with _explained(self._url):
            try:
                # Not atomic: of two collectors on one bucket both may note it, and send its
                # message.
                self._files.info(path)
            except FileNotFoundError:
                self._files.pipe_file(path, b"")
                return True
        return False

    def messages(self) -> dict[str, str]:
        """The messages that wait to be sent, by their names."""
        with _explained(self._url):
            paths: list[str] = self._files.find(f"{self._root}/{UNSENT}")
            return {
                path.rpartition("/")[2]: self._files.cat_file(path).decode(errors="replace")
                for path in sorted(paths)
            }

    def keep_message(self, name: str, text: str) -> None:
        """Keep a message that waits to be sent."""
        with _explained(self._url):
            self._files.pipe_file(f"{self._root}/{UNSENT}/{name}", text.encode(errors="replace"))

    def drop_message(self, name: str) -> None:
        """Forget a message."""
        with _explained(self._url), suppress(FileNotFoundError):  # S3 itself raises none
            self._files.rm_file(f"{self._root}/{UNSENT}/{name}")


class StoredRecord(RecordBackend):
    """A record in a bucket; the parts that are needed are read, and checked as those of a file."""

    def __init__(self, url: str) -> None:
        """Open the record at a URL.

        Raises:
            K8sJobError: the URL is not that of a record, or a package is missing.
            BackendError: see RecordBackend.
        """
        if not url.endswith(SUFFIX):
            raise K8sJobError(
                f"{redacted(url)!r} is not a record; write s3://BUCKET/PREFIX/NAMESPACE/NAME@RUN{SUFFIX}"
            )
        self._files, self._remote = _connect(url)
        super().__init__(url)

    def _file(self) -> IO[bytes]:
        file: IO[bytes] = self._files.open(self._remote, "rb", block_size=_BLOCK)
        return file

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        explained = _explained(str(self.path), passing=(K8sJobError, *DAMAGE))
        with explained, super()._opened() as archive:
            yield archive


def _name(ref: JobRef, suffix: str) -> str:
    return f"{ref.namespace}/{ref.name}@{ref.uid[:8]}{suffix}"


def _connect(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    match = _URL.fullmatch(url)
    if not match or match["scheme"] not in _PACKAGES:
        raise K8sJobError(
            f"{redacted(url)!r} is not a location for records; write s3://BUCKET/PREFIX (or gs://, az://)"
            " without credentials, which come from the environment"
        )
    package = _PACKAGES[match["scheme"]]
    try:
        import fsspec  # noqa: PLC0415 - an extra

        importlib.import_module(package)
    except ImportError as error:
        step = install_step("s3") if package == "s3fs" else f"pip install {package}"
        raise K8sJobError(f"{match['scheme']}:// needs another package ({error})", step) from error
    with _explained(url):
        # A cached listing would not show the marks and messages of other collectors.
        files = fsspec.filesystem(match["scheme"], use_listings_cache=False)
    return files, match["path"].rstrip("/")


@contextmanager
def _explained(url: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Whatever the packages raise as a StorageError; errors of `passing` are no OSErrors of them.

    Each of them has classes of its own beside OSError.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(f"{url} does not exist; check the bucket and the path") from error
    except Exception as error:
        if isinstance(error, passing) and not isinstance(error, OSError):
            raise
        reason = safe_line(redacted(str(error))) or type(error).__name__
        if isinstance(error, PermissionError):
            raise StorageError(
                f"{url}: access is denied ({reason}); check the credentials in the environment"
                " and their permissions"
            ) from error
        raise StorageError(
            f"{url} cannot be read or written: {reason}; check the network, and the endpoint and"
            " credentials in the environment"
        ) from error
