"""Image references; and manifests, indexes and configs, OCI's and Docker's, read with care."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.errors import ImageError
from k8sjob.references import is_image_reference

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_REGISTRY: Final = "docker.io"
"""The registry of references that name none, a part of the format; it answers at another host."""
_DEFAULT_ENDPOINT: Final = f"registry-1.{DEFAULT_REGISTRY}"
DEFAULT_LOGIN: Final = f"https://index.{DEFAULT_REGISTRY}/v1/"
"""Under which `docker login` keeps the credentials for it."""
_ALIASES: Final = frozenset({DEFAULT_REGISTRY, f"index.{DEFAULT_REGISTRY}", _DEFAULT_ENDPOINT})

OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
ACCEPTED: Final = f"{OCI_MANIFEST}, {DOCKER_MANIFEST}, {OCI_INDEX}, {DOCKER_INDEX}"
DEFAULT_PLATFORM: Final = "linux/amd64"
"""Chosen from an index where the spec names none: a cluster, not this machine, runs the image."""

_LAYERS: Final = {
    OCI_MANIFEST: "application/vnd.oci.image.layer.v1.tar+gzip",
    DOCKER_MANIFEST: "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
_OCI_LAYERS: Final = {
    "application/vnd.docker.image.rootfs.diff.tar.gzip": _LAYERS[OCI_MANIFEST],
    "application/vnd.docker.image.rootfs.diff.tar": "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip": (
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
    ),
}
"""OCI's names of Docker's layers."""
_OCI_ZSTD: Final = "application/vnd.oci.image.layer.v1.tar+zstd"
_OCI_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_CONFIGS: Final = frozenset({_OCI_CONFIG, "application/vnd.docker.container.image.v1+json"})
_PLATFORM: Final = re.compile(r"[\w.+-]{1,32}(/[\w.+-]{1,32}){0,2}", re.ASCII)
_MOST_PLATFORMS: Final = 10
"""Platforms of an index that a message names."""
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")


class ImageReference(NamedTuple):
    """A reference to an image.

    Attributes:
        name: the reference as it was written, without tag and digest.
        registry: host[:port] as it stands in names; see `endpoint` for where it answers.
        repository: path in the registry, complete.
        tag: None if none was written.
        digest: "sha256:..."; None if none was written. It decides, whatever the tag.
    """

    name: str
    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> ImageReference:
        """Read [registry/]path[:tag][@sha256:digest]; ImageError where it is no reference."""
        if not is_image_reference(text):
            raise ImageError(
                f"{text!r} is not an image reference: [registry/]path[:tag][@sha256:digest],"
                " registry and path in lower case"
            )
        tagged, _, digest = text.partition("@")
        folders, slash, last = tagged.rpartition("/")
        last, _, tag = last.partition(":")
        name = folders + slash + last
        first, slash, path = name.partition("/")
        # The rule of docker: the first part is a host if it has a dot or a port, or is localhost.
        if slash and (first == "localhost" or set(first) & set(".:")):
            registry, repository = plain_host(first), path
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
        """The version in the repository: the digest, else the tag, else `latest`."""
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


class Descriptor(NamedTuple):
    """A blob and its size, as in a manifest; elsewhere: not in registries, at `urls`."""

    digest: str
    size: int
    elsewhere: bool = False

    @classmethod
    def of(cls, value: Any, where: str) -> Descriptor:
        """Read a descriptor; ImageError where it is none."""
        entry = value if isinstance(value, dict) else {}
        digest, size = entry.get("digest"), entry.get("size")
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ImageError(f"{where}: {digest!r} is not a digest; the image is broken")
        if not isinstance(size, int) or size < 0:
            raise ImageError(f"{where}: {digest} has the size {size!r}; the image is broken")
        # Foreign layers (of Windows) have URLs elsewhere, and a registry need not hold them.
        return cls(digest, size, bool(entry.get("urls")))


class Manifest(NamedTuple):
    """The manifest of one image, for one platform.

    Attributes:
        media_type: OCI's or Docker's.
        content: parsed; not to be changed.
        layers: bottom first.
    """

    digest: str
    media_type: str
    content: dict[str, Any]
    config: Descriptor
    layers: tuple[Descriptor, ...]

    def layer_type(self, *, zstd: bool) -> str:
        """The media type of a layer to be added, compressed by zstd (only OCI) or gzip."""
        return _OCI_ZSTD if zstd else _LAYERS[self.media_type]

    def as_oci(self) -> Manifest:
        """The same image with OCI's media types, and so another digest; itself where it has them.

        The formats of configs and layers are the same.
        """
        if self.is_oci:
            return self
        # Docker's manifests know no zstd and no annotations.
        content = {**self.content, "mediaType": OCI_MANIFEST}
        content["config"] = {**content["config"], "mediaType": _OCI_CONFIG}
        content["layers"] = [
            {**layer, "mediaType": _OCI_LAYERS.get(str(kind := layer.get("mediaType")), kind)}
            for layer in content["layers"]
        ]
        return self._replace(media_type=OCI_MANIFEST, content=content)

    @property
    def is_oci(self) -> bool:
        """Whether it may carry annotations."""
        return self.media_type == OCI_MANIFEST


class Index(NamedTuple):
    """The digests of images under one name, for each `os/architecture[/variant]`."""

    platforms: dict[str, str]

    def choose(self, platform: str | None, where: str) -> str:
        """The digest of the manifest for a platform; `linux/arm64` takes any variant of it.

        None: the only one there is, else DEFAULT_PLATFORM. ImageError: the image `where` has none.
        """
        if platform is None and len(self.platforms) == 1:
            return next(iter(self.platforms.values()))
        sought = platform or DEFAULT_PLATFORM
        for name, digest in self.platforms.items():
            # linux/arm64 is usually listed as linux/arm64/v8.
            if name == sought or name.startswith(f"{sought}/"):
                return digest
        names = sorted(self.platforms)
        more = f" and {len(names) - _MOST_PLATFORMS} more" if names[_MOST_PLATFORMS:] else ""
        shown = ", ".join(names[:_MOST_PLATFORMS]) + more
        reason = f"not for {sought}, only for {shown}; set image.platform"
        if not self.platforms:
            reason = "its index names no platform; use image@digest of one of its manifests"
        raise ImageError(f"{where}: {reason}, or use another base")


def digest_of(content: bytes) -> str:
    """The sha256 digest of bytes, as registries name them."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def encode(content: dict[str, Any]) -> bytes:
    """JSON for a registry: equal content gives equal bytes."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def read_object(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object; ImageError where it is none."""
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ImageError(f"{where}: not a JSON object; is it the name of an image?")
    return content


def read(raw: bytes, content_type: str, where: str) -> Manifest | Index:
    """Parse a registry's answer for a name; its content type is for manifests that lack one.

    Raises:
        ImageError: `where`, the name, is of no image that can be built on.
    """
    content = read_object(raw, where)
    # Optional in OCI's manifests; a registry then says it in the header.
    media_type = str(content.get("mediaType") or content_type.partition(";")[0].strip())
    digest = digest_of(raw)
    if media_type in {OCI_INDEX, DOCKER_INDEX} or "manifests" in content:
        return Index(_platforms(content.get("manifests"), where))
    if media_type not in _LAYERS:
        raise ImageError(
            f"{where}: its manifest is of the type {media_type!r}, which is too old, or not a"
            " container image; push it again with a recent tool"
        )
    config, layers = content.get("config"), content.get("layers")
    if not isinstance(config, dict) or not isinstance(layers, list):
        raise ImageError(f"{where}: its manifest has no config or no layers; the image is broken")
    # Helm charts and other artifacts have manifests, too.
    if str(config.get("mediaType")) not in _CONFIGS:
        raise ImageError(
            f"{where}: holds {config.get('mediaType')!r}, not a container image; use another base"
        )
    return Manifest(
        digest=digest,
        media_type=media_type,
        content=content,
        config=Descriptor.of(config, where),
        layers=tuple(Descriptor.of(layer, where) for layer in layers),
    )


def _platforms(entries: Any, where: str) -> dict[str, str]:
    digests: dict[str, str] = {}
    for entry in entries if isinstance(entries, list) else []:
        platform = table(entry, "platform") if isinstance(entry, dict) else {}
        parts = [platform.get(key) for key in ("os", "architecture", "variant")]
        if parts[0] == "unknown":
            continue  # not an image but what a builder attests of one
        name = "/".join(str(part) for part in parts if part) or "any"
        if not _PLATFORM.fullmatch(name):
            continue  # nobody can want it, and in a message a line break would begin a line of ours
        # The first entry of a platform counts.
        digests.setdefault(name, Descriptor.of(entry, where).digest)
    return digests


class BaseImage(NamedTuple):
    """The image below, of one platform; its config is parsed, and not to be changed."""

    reference: ImageReference
    manifest: Manifest
    config: dict[str, Any]

    @property
    def pinned(self) -> str:
        """Its reference by digest."""
        return self.reference.at(self.manifest.digest)

    @property
    def platform(self) -> str:
        """Its platform: os/architecture.

        Raises:
            ImageError: the config has something else there.
        """
        names = f"{self.config.get('os') or 'linux'}/{self.config.get('architecture') or 'amd64'}"
        if not _PLATFORM.fullmatch(names):
            raise ImageError(
                f"{self.reference}: its config is for {names[:80]!a}, which is not a platform; the"
                " image is broken"
            )
        return names

    @property
    def diff_ids(self) -> list[str]:
        """The digests of its layers as archives, the lowest first.

        Raises:
            ImageError: the config does not fit the manifest.
        """
        diff_ids = table(self.config, "rootfs").get("diff_ids")
        layers = len(self.manifest.layers)
        if not isinstance(diff_ids, list) or len(diff_ids) != layers:
            raise ImageError(
                f"{self.reference}: its config does not name its {layers} layers; the image is"
                " broken"
            )
        return diff_ids


def environment(config: dict[str, Any]) -> dict[str, str]:
    """The variables that a container with this image config starts with."""
    variables = table(config, "config").get("Env")
    lines = variables if isinstance(variables, list) else []
    return dict(str(line).partition("=")[::2] for line in lines)


def labels(config: dict[str, Any]) -> dict[str, Any]:
    """The labels in an image config."""
    return table(table(config, "config"), "Labels")


def table(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under this key; empty for anything else."""
    value = content.get(key)
    return value if isinstance(value, dict) else {}
