"""The image that layers make of a base: its manifest and its config.

As little as possible of the base's is changed. With the code on it, the container is the one that
the rendered Dockerfile gives: same user, folder, variables and command.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.contract import RUNTIME_HOME, WORKDIR
from k8sjob.image.registry.manifest import digest_of, encode, environment, labels, table
from k8sjob.rendering.image_files import HOME, IMAGE_UID, IMAGE_USER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k8sjob.image.registry.blob_content import FileContent
    from k8sjob.image.registry.manifest import BaseImage
    from k8sjob.image.secrets import Secret

BASE_NAME: Final = "org.opencontainers.image.base.name"
"""Label, and in OCI manifests annotation, with the base as the spec names it."""
BASE_DIGEST: Final = "org.opencontainers.image.base.digest"
"""The same with the digest of the base's manifest."""
_CREATED: Final = "1970-01-01T00:00:00Z"


class Layer(NamedTuple):
    """A layer, ready to be uploaded.

    Attributes:
        content: compressed.
        diff_id: digest of the archive before it was compressed.
        zstd: compressed by zstd, which only OCI's manifests can express; else by gzip.
        findings: of code, the contents that look like credentials.
    """

    content: FileContent
    diff_id: str
    zstd: bool = False
    findings: tuple[Secret, ...] = ()

    def close(self) -> None:
        """Remove the temporary file."""
        self.content.file.close()


class Appended(NamedTuple):
    """The image above, as its registry is to hold it: OCI's where a layer needs that."""

    manifest: bytes
    media_type: str
    config: bytes

    @property
    def digest(self) -> str:
        """The digest of the manifest."""
        return digest_of(self.manifest)


def append_code(base: BaseImage, layer: Layer, command: Sequence[str]) -> Appended:
    """Put the code on a base; a container of the image runs the command.

    A layer cannot add a line to the base's /etc/passwd without reading all of the base, so the name
    that torch looks up is in a variable. ImageError: the base's config does not fit its manifest.
    """
    variables = environment(base.config)
    paths = [RUNTIME_HOME, WORKDIR, *variables.get("PYTHONPATH", "").split(":")]
    variables["PYTHONPATH"] = ":".join(dict.fromkeys(path for path in paths if path))
    variables |= {"HOME": HOME, "USER": IMAGE_USER}
    user = f"{IMAGE_UID}:{IMAGE_UID}"
    run = {"WorkingDir": WORKDIR, "User": user, "Cmd": [*command]}
    return _append(base, [layer], variables, run, "k8sjob push")


def append_packages(
    base: BaseImage, layers: Sequence[Layer], variables: Mapping[str, str]
) -> Appended:
    """Put on a base what the code needs, the lowest layer first; nothing else about it changes.

    The variables replace those of the base. ImageError: its config does not fit its manifest.
    """
    return _append(base, layers, environment(base.config) | dict(variables), {}, "k8sjob build")


def _append(
    base: BaseImage,
    layers: Sequence[Layer],
    variables: Mapping[str, str],
    run: Mapping[str, Any],
    created_by: str,
) -> Appended:
    origin = {BASE_NAME: str(base.reference), BASE_DIGEST: base.manifest.digest}
    config = copy.deepcopy(base.config)
    config["rootfs"]["diff_ids"] = [*base.diff_ids, *(layer.diff_id for layer in layers)]
    config["created"] = _CREATED
    config.pop("container", None)
    config.pop("container_config", None)  # how an old docker has built the base
    # The entries of a history belong to the layers, one to each; without a history none is begun.
    if isinstance(config.get("history"), list):
        config["history"] += [{"created": _CREATED, "created_by": created_by} for _ in layers]
    config["config"] = {
        **table(base.config, "config"),
        "Env": [f"{name}={value}" for name, value in variables.items()],
        **run,
        "Labels": labels(base.config) | origin,
    }
    raw = encode(config)
    # Docker's manifests cannot express zstd; otherwise the base's media types stay as they are.
    below = base.manifest.as_oci() if any(layer.zstd for layer in layers) else base.manifest
    content = copy.deepcopy(below.content)
    content["config"] |= {"digest": digest_of(raw), "size": len(raw)}
    content["config"].pop("data", None)  # the base's config itself, which some put in
    content["layers"] += [
        {
            "mediaType": below.layer_type(zstd=layer.zstd),
            "digest": layer.content.digest,
            "size": layer.content.size,
        }
        for layer in layers
    ]
    if below.is_oci:
        content["annotations"] = table(content, "annotations") | origin
    return Appended(encode(content), below.media_type, raw)
