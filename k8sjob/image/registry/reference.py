"""Image references, with docker's rules for what may be left out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from k8sjob.errors import ImageError
from k8sjob.spec.values import is_image_reference

DEFAULT_REGISTRY: Final = "docker.io"
"""The registry of references that name none, a part of the format; it answers at another host."""
_DEFAULT_ENDPOINT: Final = f"registry-1.{DEFAULT_REGISTRY}"
DEFAULT_LOGIN: Final = f"https://index.{DEFAULT_REGISTRY}/v1/"
"""Under which `docker login` keeps the credentials for it."""
_ALIASES: Final = frozenset({DEFAULT_REGISTRY, f"index.{DEFAULT_REGISTRY}", _DEFAULT_ENDPOINT})


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an image is.

    Attributes:
        name: the reference as it was written, without tag and digest.
        registry: host[:port] as it stands in names; see `endpoint` for where it answers.
        repository: path in the registry, complete.
        tag: None where none was written.
        digest: "sha256:..."; None where none was written. It decides, whatever the tag.
    """

    name: str
    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Read a reference: [registry/]path[:tag][@sha256:digest].

        Raises:
            ImageError: it is none.
        """
        if not is_image_reference(text):
            raise ImageError(
                f"{text!r} is not an image reference: [registry/]path[:tag][@sha256:digest],"
                " registry and path in lower case"
            )
        tagged, _, digest = text.partition("@")
        folders, slash, last = tagged.rpartition("/")
        last, _, tag = last.partition(":")
        name = folders + slash + last
        first, slash, rest = name.partition("/")
        if slash and (first == "localhost" or set(first) & set(".:")):
            registry, repository = plain_host(first), rest
        else:
            registry, repository = DEFAULT_REGISTRY, name
        if registry == DEFAULT_REGISTRY and "/" not in repository:
            repository = f"library/{repository}"
        return cls(name, registry, repository, tag or None, digest or None)

    @property
    def endpoint(self) -> str:
        """The host[:port] that answers for the registry."""
        return _DEFAULT_ENDPOINT if self.registry == DEFAULT_REGISTRY else self.registry

    @property
    def version(self) -> str:
        """What is asked for in the repository: the digest, else the tag, else `latest`."""
        return self.digest or self.tag or "latest"

    def at(self, digest: str) -> str:
        """The reference to one image of the repository, for good."""
        return f"{self.name}@{digest}"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return self.name + tag + (f"@{self.digest}" if self.digest else "")


def plain_host(host: str) -> str:
    """A registry by the name that references use for it: the default one has several."""
    return DEFAULT_REGISTRY if host in _ALIASES else host
