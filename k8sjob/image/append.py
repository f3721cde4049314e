"""An image and one layer more: the base's manifest and config, changed in as little as can be.

The container that comes of it is the one that the rendered Dockerfile gives: same user, folder,
variables and command.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import RUNTIME_HOME, WORKDIR
from k8sjob.errors import ImageError
from k8sjob.image.manifest import digest_of, encode
from k8sjob.rendering.dockerfile import HOME
from k8sjob.rendering.manifest import IMAGE_UID, container_argv

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k8sjob.image.archive import Layer
    from k8sjob.image.manifest import Manifest
    from k8sjob.image.reference import Reference
    from k8sjob.spec import JobSpec

__all__ = ["BASE_DIGEST", "BASE_NAME", "Appended", "Base", "append", "install"]

BASE_NAME: Final = "org.opencontainers.image.base.name"
"""Label, and in OCI manifests annotation, with the base as the spec names it."""
BASE_DIGEST: Final = "org.opencontainers.image.base.digest"
"""The same with the digest of the base's manifest."""
_CREATED: Final = "1970-01-01T00:00:00Z"
_USER_NAME: Final = "k8sjob"


@dataclass(frozen=True, slots=True)
class Base:
    """The image below.

    Attributes:
        reference: where it is.
        manifest: of one platform.
        config: parsed; not to be changed.
    """

    reference: Reference
    manifest: Manifest
    config: dict[str, Any]

    @property
    def platform(self) -> str:
        """What it is for: os/architecture."""
        return f"{self.config.get('os') or 'linux'}/{self.config.get('architecture') or 'amd64'}"

    @property
    def diff_ids(self) -> list[str]:
        """The digests of its layers as archives, the lowest first.

        Raises:
            ImageError: the config does not fit the manifest.
        """
        rootfs = self.config.get("rootfs")
        diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
        layers = len(self.manifest.layers)
        if not isinstance(diff_ids, list) or len(diff_ids) != layers:
            raise ImageError(
                f"{self.reference}: its config does not name its {layers} layers; the image is"
                " broken"
            )
        return diff_ids


@dataclass(frozen=True, slots=True)
class Appended:
    """The image above, as its registry is to hold it.

    Attributes:
        manifest: bytes.
        media_type: of the manifest: the base's, but OCI's where a layer needs that.
        config: bytes.
    """

    manifest: bytes
    media_type: str
    config: bytes

    @property
    def digest(self) -> str:
        """Of the manifest: the image's name for good."""
        return digest_of(self.manifest)


def append(base: Base, layer: Layer, spec: JobSpec) -> Appended:
    """Put the code on a base.

    Args:
        base: what is below.
        layer: the code.
        spec: says what the container runs.

    Raises:
        ImageError: the base's config does not fit its manifest.
    """
    return _stacked(base, [layer], _running(base, spec), "k8sjob push")


def install(base: Base, layers: Sequence[Layer], variables: Mapping[str, str]) -> Appended:
    """Put on a base what the code needs; nothing else about the base changes.

    Args:
        base: what is below.
        layers: what is installed, the lowest first.
        variables: of the environment, in place of the base's of those names.

    Raises:
        ImageError: the base's config does not fit its manifest.
    """
    below = _run(base)
    environment = {**_variables(below), **variables}
    run = {**below, "Env": _lines(environment), "Labels": _labels(base)}
    return _stacked(base, layers, run, "k8sjob build")


def _stacked(base: Base, layers: Sequence[Layer], run: dict[str, Any], by: str) -> Appended:
    config = encode(_config(base, layers, run, by))
    below = base.manifest.as_oci() if any(layer.zstd for layer in layers) else base.manifest
    content = copy.deepcopy(below.content)
    content["config"] |= {"digest": digest_of(config), "size": len(config)}
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
        annotations = content.get("annotations")
        kept = annotations if isinstance(annotations, dict) else {}
        content["annotations"] = {**kept, **_origin(base)}
    return Appended(encode(content), below.media_type, config)


def _config(base: Base, layers: Sequence[Layer], run: dict[str, Any], by: str) -> dict[str, Any]:
    config = copy.deepcopy(base.config)
    config["rootfs"]["diff_ids"] = [*base.diff_ids, *(layer.diff_id for layer in layers)]
    config["created"] = _CREATED
    config.pop("container", None)
    config.pop("container_config", None)  # how an old docker has built the base
    if isinstance(config.get("history"), list):
        config["history"] += [{"created": _CREATED, "created_by": by} for _ in layers]
    config["config"] = run
    return config


def _run(base: Base) -> dict[str, Any]:
    """What a container of the base is started with."""
    run = base.config.get("config")
    return run if isinstance(run, dict) else {}


def _running(base: Base, spec: JobSpec) -> dict[str, Any]:
    """What a container of the job is started with.

    A layer cannot add a line to the base's /etc/passwd without reading all of the base, so the name
    that torch looks up is in a variable.
    """
    command, args = container_argv(spec)
    below = _run(base)
    variables = _variables(below)
    paths = [RUNTIME_HOME, WORKDIR, *variables.get("PYTHONPATH", "").split(":")]
    variables["PYTHONPATH"] = ":".join(dict.fromkeys(path for path in paths if path))
    variables |= {"HOME": HOME, "USER": _USER_NAME}
    return {
        **below,
        "Env": _lines(variables),
        "WorkingDir": WORKDIR,
        "User": f"{IMAGE_UID}:{IMAGE_UID}",
        "Cmd": [*command, *args],
        "Labels": _labels(base),
    }


def _variables(run: dict[str, Any]) -> dict[str, str]:
    found = run.get("Env")
    lines = found if isinstance(found, list) else []
    return dict(str(line).partition("=")[::2] for line in lines)


def _lines(variables: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]


def _labels(base: Base) -> dict[str, str]:
    labels = _run(base).get("Labels")
    return {**(labels if isinstance(labels, dict) else {}), **_origin(base)}


def _origin(base: Base) -> dict[str, str]:
    return {BASE_NAME: str(base.reference), BASE_DIGEST: base.manifest.digest}
