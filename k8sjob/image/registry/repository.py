"""Repositories of registries: manifests and small blobs, checked against their digests."""

from __future__ import annotations

import hashlib
from itertools import count
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError
from k8sjob.image.registry import manifest
from k8sjob.image.registry.blobs import RemoteContent, Upload
from k8sjob.image.registry.client import RegistryClient
from k8sjob.image.registry.http_client import MAX_BODY
from k8sjob.image.registry.manifest import Base, Index, digest_of, read_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.image.registry.blobs import Content, Sent
    from k8sjob.image.registry.credentials import Entry, Keyring, Login
    from k8sjob.image.registry.http_client import HttpClient, Response
    from k8sjob.image.registry.manifest import Descriptor, Manifest
    from k8sjob.image.registry.reference import Reference

_MAX_NESTING: Final = 3
"""Indexes in indexes that are followed."""
_EXISTS: Final = frozenset({200, 401, 403, 404})
"""Some registries answer 401 or 403 for what does not exist."""


class Registries:
    """Clients of the registries; one for all repositories that share a login."""

    def __init__(self, http: HttpClient, keyring: Keyring) -> None:
        self._http, self._keyring = http, keyring
        self._clients: dict[tuple[str, tuple[Entry, ...]], RegistryClient] = {}

    def repository(self, reference: Reference, actions: str) -> Repository:
        """A repository that is used for "pull", or for "pull,push"."""
        entries = self._keyring.entries(reference)

        def login() -> Login | None:
            return next((login for entry in entries if (login := entry.login())), None)

        client = self._clients.setdefault(
            (reference.endpoint, entries),
            RegistryClient(self._http, reference.registry, reference.endpoint, login),
        )
        client.add_scope(reference, actions)
        return Repository(client, reference)


class Repository:
    """The images of one name."""

    def __init__(self, client: RegistryClient, reference: Reference) -> None:
        self.client = client
        self.reference = reference
        self._manifests = f"/v2/{reference.repository}/manifests"

    def image(self, platform: str | None) -> Manifest:
        """The manifest of the reference, for one platform.

        Args:
            platform: os/architecture[/variant]; None: see Index.choose.

        Raises:
            ImageError: there is no such image, or none for the platform.
        """
        version = self.reference.version
        for _ in range(_MAX_NESTING):
            found = self._read(version)
            if not isinstance(found, Index):
                return found
            version = found.choose(platform, str(self.reference))
        raise ImageError(f"{self.reference}: an index in an index in an index; take another base")

    def is_there(self) -> bool:
        """Whether the registry shows an image of this reference."""
        return (
            self._head(self.reference.version, str(self.reference), manifest.ACCEPTED).status == 200
        )

    def has(self, raw: bytes, media_type: str) -> bool:
        """Whether a manifest is there."""
        digest = digest_of(raw)
        answer = self._head(digest, self.reference.at(digest), media_type)
        return answer.confirms(digest, len(raw))

    def _head(self, version: str, what: str, accept: str) -> Response:
        return self.client.request(
            "HEAD",
            f"{self._manifests}/{version}",
            ok=_EXISTS,
            doing=f"looking for {what}",
            headers={"Accept": accept},
        )

    def _read(self, version: str) -> Manifest | Index:
        answer = self.client.request(
            "GET",
            f"{self._manifests}/{version}",
            ok={200},
            doing=f"reading {self.reference}",
            headers={"Accept": manifest.ACCEPTED},
        )
        algorithm, is_digest, _ = version.partition(":")
        if is_digest:
            found = f"{algorithm}:{hashlib.new(algorithm, answer.body).hexdigest()}"
            if found != version:
                raise ImageError(
                    f"{self.reference}: what came as {version} has the digest {found}: the"
                    " registry, or a proxy on the way, is broken; try again"
                )
        return manifest.read(
            answer.body, answer.headers.get("Content-Type", ""), str(self.reference)
        )

    def blob(self, descriptor: Descriptor) -> bytes:
        """A small blob, whole; ImageError where it cannot be read, or is not what it should be."""
        if descriptor.size > MAX_BODY:
            raise ImageError(
                f"{self.reference}: its config has {descriptor.size} bytes; the image is broken"
            )
        return b"".join(RemoteContent(self.client, self.reference, descriptor).blocks())

    def holds(self, content: Content) -> bool:
        """Whether the repository has a blob."""
        return Upload(self.client, self.reference, content).is_there()

    def bring(
        self, content: Content, sent: Callable[[int], object], mount: Reference | None = None
    ) -> Sent:
        """Mount a blob from another repository that has it, or upload it; see Upload."""
        return Upload(self.client, self.reference, content, sent).run(mount)

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
        if stored != digest or not self.has(raw, media_type):
            raise ImageError(
                f"{name}: the registry has it as {stored} and not as {digest}; it is broken, or"
                " changes what it is given"
            )


def read_base(repository: Repository, platform: str | None) -> Base:
    """The image of a repository that layers are put on, for a platform; see Repository.image.

    Raises:
        ImageError: there is none, or none for the platform.
    """
    found = repository.image(platform)
    config = read_object(repository.blob(found.config), str(repository.reference))
    base = Base(repository.reference, found, config)
    if platform and "/".join(platform.split("/")[:2]) != base.platform:
        raise ImageError(
            f"{base.reference} is for {base.platform}; image.platform says {platform}: take"
            " another base, or change it"
        )
    return base
