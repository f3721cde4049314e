"""The registries that one command speaks to, and the images that code is put on there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k8sjob.errors import ImageError
from k8sjob.image.append import Base
from k8sjob.image.manifest import read_object
from k8sjob.image.repository import Repository
from k8sjob.image.session import Session

if TYPE_CHECKING:
    from k8sjob.image.credentials import Entry, Keyring, Login
    from k8sjob.image.reference import Reference
    from k8sjob.image.wire import Wire

__all__ = ["Registries", "read_base"]


class Registries:
    """Sessions with the registries; one for all repositories that one login is good for."""

    def __init__(self, wire: Wire, keyring: Keyring) -> None:
        self._wire, self._keyring = wire, keyring
        self._sessions: dict[tuple[str, tuple[Entry, ...]], Session] = {}

    def repository(self, reference: Reference, actions: str) -> Repository:
        """A repository in which something is to be done: "pull", or "pull,push"."""
        entries = self._keyring.entries(reference)

        def login() -> Login | None:
            return next((login for entry in entries if (login := entry.login())), None)

        session = self._sessions.setdefault(
            (reference.endpoint, entries),
            Session(self._wire, reference.registry, reference.endpoint, login),
        )
        session.will(reference, actions)
        return Repository(session, reference)


def read_base(repository: Repository, platform: str | None) -> Base:
    """The image of a repository that something is to be put on.

    Args:
        repository: with the image's tag or digest.
        platform: os/architecture[/variant]; None: see Index.choose.

    Raises:
        ImageError: there is none, or none for the platform.
    """
    manifest = repository.image(platform)
    config = read_object(repository.blob(manifest.config), str(repository.reference))
    base = Base(repository.reference, manifest, config)
    if platform and "/".join(platform.split("/")[:2]) != base.platform:
        raise ImageError(
            f"{base.reference} is for {base.platform}; image.platform says {platform}: take"
            " another base, or change it"
        )
    return base
