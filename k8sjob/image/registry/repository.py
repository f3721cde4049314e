"""Repositories of registries, and the transfer of an image's parts into them.

All that is read is checked against its digest. A registry may lose an upload, cut the connection or
forget the token: then the upload starts again, and the registry itself checks what it ends up with.
Several parts are transferred at a time.
"""

from __future__ import annotations

import hashlib
import threading
from contextlib import closing, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlencode

from k8sjob.errors import ImageError
from k8sjob.files import cached_value, keep_value
from k8sjob.image.registry import manifest
from k8sjob.image.registry.blob_content import RemoteContent, Sent, counted, in_memory
from k8sjob.image.registry.client import RegistryClient
from k8sjob.image.registry.http_client import MAX_BODY, TransportError, host_of
from k8sjob.image.registry.manifest import BaseImage, Index, digest_of, read_object
from k8sjob.threads import run_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8sjob.image.registry.blob_content import Content
    from k8sjob.image.registry.credentials import CredentialEntry, Keyring, Login
    from k8sjob.image.registry.http_client import HttpClient, Response
    from k8sjob.image.registry.manifest import ImageReference, Manifest
    from k8sjob.image.registry.oci_layout import Layout

_MAX_NESTING: Final = 3
"""Indexes in indexes that are followed."""
_EXISTS: Final = frozenset({200, 401, 403, 404})
"""Some registries answer 401 or 403 for what does not exist, even to those who may create it."""
_WIDTH: Final = 6
"""Blobs that are transferred at the same time; each takes some hundred kilobytes of memory."""


class Registries:
    """Clients of the registries; one for all repositories that share a login."""

    def __init__(self, http: HttpClient, keyring: Keyring) -> None:
        self._http, self._keyring = http, keyring
        self._clients: dict[tuple[str, tuple[CredentialEntry, ...]], RegistryClient] = {}

    def repository(self, reference: ImageReference, actions: str) -> Repository:
        """A repository that is used for "pull", or for "pull,push"."""
        entries = self._keyring.entries(reference)

        def login() -> Login | None:
            return next((login for entry in entries if (login := entry.login())), None)

        # A client is a login at a host: with the same one a blob can be mounted from another
        # repository.
        client = self._clients.setdefault(
            (reference.endpoint, entries),
            RegistryClient(self._http, reference.registry, reference.endpoint, login),
        )
        client.add_scope(reference, actions)
        return Repository(client, reference)


class Repository:
    """The images of one name."""

    def __init__(self, client: RegistryClient, reference: ImageReference) -> None:
        self.client = client
        self.reference = reference
        self._manifests = f"/v2/{reference.repository}/manifests"
        self._blobs = f"/v2/{reference.repository}/blobs"

    def image(self, platform: str | None) -> Manifest:
        """The manifest of the reference, for a platform; see Index.choose.

        Raises:
            ImageError: there is no such image, or none for the platform.
        """
        version = self.reference.version
        # OCI allows an index in an index.
        for _ in range(_MAX_NESTING):
            content = self._read(version)
            if not isinstance(content, Index):
                return content
            version = content.choose(platform, str(self.reference))
        raise ImageError(f"{self.reference}: indexes nested too deeply; use another base")

    def is_there(self) -> bool:
        """Whether the registry shows an image of this reference."""
        return (
            self._head(self.reference.version, str(self.reference), manifest.ACCEPTED).status == 200
        )

    def has(self, raw: bytes, media_type: str) -> bool:
        """Whether a manifest exists."""
        digest = digest_of(raw)
        answer = self._head(digest, self.reference.at(digest), media_type)
        return answer.describes(digest, len(raw))

    def _head(self, version: str, subject: str, accept: str) -> Response:
        return self.client.request(
            "HEAD",
            f"{self._manifests}/{version}",
            ok=_EXISTS,
            doing=f"looking for {subject}",
            headers={"Accept": accept},
        )

    def _read(self, version: str) -> Manifest | Index:
        path, receive = f"{self._manifests}/{version}", partial(self._received, version)
        # A tag may name another image the next time.
        text, media_type = self._kept(path, receive) if ":" in version else receive()
        return manifest.read(text.encode("latin-1"), media_type, str(self.reference))

    def _received(self, version: str) -> list[str]:
        """A manifest, whose bytes are characters here, and the media type in its header."""
        answer = self.client.request(
            "GET",
            f"{self._manifests}/{version}",
            ok={200},
            doing=f"reading {self.reference}",
            headers={"Accept": manifest.ACCEPTED},
        )
        # A tag has no digest to compare with; the manifest's own becomes that of the base.
        algorithm, is_digest, _ = version.partition(":")
        if is_digest:
            digest = f"{algorithm}:{hashlib.new(algorithm, answer.body).hexdigest()}"
            if digest != version:
                raise ImageError(
                    f"{self.reference}: what was received as {version} has the digest {digest}: the"
                    " registry, or a proxy in between, is broken; try again"
                )
        media_type = answer.headers.get("Content-Type", "")
        manifest.read(answer.body, media_type, str(self.reference))  # a wrong type is not kept
        return [answer.body.decode("latin-1"), media_type]

    def config(self, image: Manifest) -> dict[str, Any]:
        """The config of an image; ImageError where it cannot be read, or is none."""
        blob = image.config
        if blob.size > MAX_BODY:
            raise ImageError(
                f"{self.reference}: its config has {blob.size} bytes; the image is broken"
            )

        def receive() -> list[str]:
            content = RemoteContent(self.client, self.reference, blob)
            return [b"".join(content.blocks()).decode("latin-1")]

        (text,) = self._kept(f"{self._blobs}/{blob.digest}", receive)
        return read_object(text.encode("latin-1"), str(self.reference))

    def _kept(self, path: str, receive: Callable[[], list[str]]) -> list[str]:
        """What lies at a path that ends in its digest; the first time it is received, and kept."""
        key = self.reference.registry + path
        name = f"image-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        value: list[str] | None = cached_value(name, key)
        if value is None:
            value = receive()
            keep_value(name, key, value)
        return value

    def holds(self, content: Content) -> bool:
        """Whether the repository has a blob."""
        doing = f"{self._uploading(content)}: looking for it"
        path = f"{self._blobs}/{content.digest}"
        answer = self.client.request("HEAD", path, ok=_EXISTS, doing=doing)
        return answer.describes(content.digest, content.size)

    def add_blob(
        self,
        content: Content,
        on_bytes: Callable[[int], object],
        mount: ImageReference | None = None,
    ) -> Sent:
        """Mount a blob from another repository of the registry that has it, or upload it.

        `on_bytes` is called with the bytes that go out, or less than 0: were lost.

        Raises:
            ImageError: the registry does not take it.
        """
        retry, doing, lost = self.client.retry, self._uploading(content), None
        # As docker and containerd do it: an upload that breaks starts again from its beginning.
        # Registries differ in what they say about the bytes that they have.
        for failures in range(1, retry.tries + 1):
            location = self._begin(content, mount, doing)
            if location is None:
                return Sent.MOUNTED
            mount = None  # it was not granted
            lost = self._send(content, location, on_bytes, doing)
            if lost is None:
                return Sent.UPLOADED
            retry.wait(failures)
            if self.holds(content):
                return Sent.UPLOADED  # the answer was lost, not the blob
        raise ImageError(f"{doing}: {lost}; tried {retry.tries} times")

    def _uploading(self, content: Content) -> str:
        return f"uploading {content.digest[:19]} to {self.reference.name}"

    def _begin(self, content: Content, mount: ImageReference | None, doing: str) -> str | None:
        """The location of a new upload; None if the blob was mounted instead."""
        uploads = f"{self._blobs}/uploads/"
        if mount is not None:
            query = urlencode({"mount": content.digest, "from": mount.repository})
            # ECR answers a mount with 202 (an upload has begun), Harbor with 401.
            with suppress(ImageError):  # a real obstacle stops the upload, too
                answer = self.client.request(
                    "POST", f"{uploads}?{query}", ok={201, 202}, doing=doing, body=b""
                )
                return None if answer.status == 201 else self._location(answer, doing)
        answer = self.client.request("POST", uploads, ok={202}, doing=doing, body=b"")
        return self._location(answer, doing)

    def _location(self, answer: Response, doing: str) -> str:
        if not (location := answer.headers.get("Location")):
            raise ImageError(f"{doing}: the registry returned no location to send it to")
        url = self.client.url(location, answer)
        # The location gets the login and the code. Redirected downloads are different: they are
        # checked by their digest.
        if not self.client.owns(url):
            raise ImageError(
                f"{doing}: {self.client.registry} wants it to be sent to another host,"
                f" {host_of(url)}; write that host into image.repository, or correct the registry"
            )
        return url

    def _send(
        self, content: Content, location: str, on_bytes: Callable[[int], object], doing: str
    ) -> str | None:
        """Send a blob; why it was lost where a new upload may succeed, else None."""
        url = f"{location}{'&' if '?' in location else '?'}{urlencode({'digest': content.digest})}"
        size = str(content.size)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": size}
        out = 0

        def note(size: int) -> None:
            nonlocal out
            on_bytes(size)
            out += size

        # An error keeps hold of a body that was not read to its end: closed here, so that the
        # connection it is read from is released.
        try:
            with closing(counted(content, note)) as body:
                answer = self.client.send("PUT", url, headers=headers, body=body)
        except TransportError as error:
            lost = str(error)
        else:
            stored = answer.headers.get("Docker-Content-Digest", content.digest)
            if answer.status == 201 and stored == content.digest:
                return None
            refusal = self.client.refusal(answer, doing)
            # Another attempt would be refused as well.
            if answer.status in {403, 405, 413}:
                raise refusal
            lost = f"the registry stored it as {stored}" if answer.status == 201 else str(refusal)
        on_bytes(-out)
        return lost

    def put(self, raw: bytes, media_type: str, tag: str) -> None:
        """Write a manifest under a tag; all that it names must be there.

        Raises:
            ImageError: the registry does not take it, or stores something else.
        """
        retry, digest, name = self.client.retry, digest_of(raw), f"{self.reference.name}:{tag}"
        for failures in count(1):
            answer = self.client.request(
                "PUT",
                f"{self._manifests}/{tag}",
                ok={201, 400, 404},
                doing=f"writing {name}",
                headers={"Content-Type": media_type},
                body=raw,
            )
            if answer.status == 201:
                break
            # While another client pushes the same blob, a registry may not know it for a moment.
            if failures == retry.tries or b"BLOB_UNKNOWN" not in answer.body:
                raise self.client.refusal(answer, f"writing {name}")
            retry.wait(failures)
        stored = answer.headers.get("Docker-Content-Digest", digest)
        # In a registry that converts manifests the digest would name no image.
        if stored != digest or not self.has(raw, media_type):
            raise ImageError(
                f"{name}: the registry has it as {stored} and not as {digest}; it is broken, or"
                " changes what it receives"
            )


def read_base(repository: Repository, platform: str | None) -> BaseImage:
    """The image of a repository that layers are put on, for a platform; see Repository.image.

    Raises:
        ImageError: there is none, or none for the platform.
    """
    image = repository.image(platform)
    base = BaseImage(repository.reference, image, repository.config(image))
    # An image without an index is of one platform, whatever is asked for.
    if platform and "/".join(platform.split("/")[:2]) != base.platform:
        raise ImageError(
            f"{base.reference} is for {base.platform}; image.platform says {platform}: use"
            " another base, or change it"
        )
    return base


class Blob(NamedTuple):
    """A part of an image, its size in bytes, and how it came to the repository."""

    digest: str
    size: int
    sent: Sent


def transfer(
    target: Repository | Layout,
    below: Repository,
    base: BaseImage,
    layers: Sequence[Content],
    config: bytes,
    *,
    progress: Callable[[int, int], object],
    dry_run: bool = False,
) -> tuple[Blob, ...]:
    """Bring what is missing of a base, the layers on it, and the config of both together.

    `progress` is called with the bytes sent, and how many there are to send.

    Returns:
        The parts in the manifest's order, the config last.
    """
    # A mount is possible within one registry and with one login.
    mount = below.reference if below.client is target.client else None
    lock, over, done, total = threading.Lock(), threading.Event(), 0, 0

    def expect(size: int) -> None:
        nonlocal total
        with lock:
            total += size

    def note(size: int) -> None:
        nonlocal done
        with lock:
            # Threads cannot be stopped from outside; this call, of each block, is where they end.
            if over.is_set():
                raise ImageError("stopped, since another part failed")
            done += size
            progress(done, total)

    def add_blob(content: Content, mount: ImageReference | None) -> Blob:
        if target.holds(content):
            return Blob(content.digest, content.size, Sent.THERE)
        if dry_run:
            return Blob(content.digest, content.size, Sent.MISSING)
        expect(content.size)
        way = target.add_blob(content, note, mount)
        if way is Sent.MOUNTED:
            # Nothing of it goes over the network, so it is no part of the total.
            expect(-content.size)
        return Blob(content.digest, content.size, way)

    parts: list[tuple[Content, ImageReference | None]] = [
        (RemoteContent(below.client, below.reference, descriptor), mount)
        # A base may have the same layer twice, such as an empty one.
        for descriptor in dict.fromkeys(base.manifest.layers)
        if not descriptor.elsewhere
    ]
    parts += [(content, None) for content in (*layers, in_memory(config))]
    try:
        return tuple(run_parallel([partial(add_blob, *part) for part in parts], _WIDTH))
    finally:
        over.set()  # threads that are still at work end with their next block
