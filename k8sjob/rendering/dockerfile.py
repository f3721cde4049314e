"""The Dockerfile of an image that is to be built: dependencies first, the code last.

Plain `docker build .` and `buildah bud .` build it, in a folder that `write_context` has written.
Nothing that a spec says is acted on by the builder or a shell: names are checked, commands are in
exec form, and arguments of a shell are quoted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import RUNTIME_HOME, WORKDIR
from k8sjob.errors import RenderError
from k8sjob.rendering.manifest import IMAGE_UID, container_argv
from k8sjob.rendering.template import fill

if TYPE_CHECKING:
    from k8sjob.spec import Image, JobSpec

RUNTIME_SOURCE: Final = ".k8sjob"
"""Folder of a build context that becomes /opt/k8sjob in the image."""

HOME: Final = "/home/k8sjob"
"""The home folder of a built image's user."""
_REQUIREMENTS: Final = f"{RUNTIME_HOME}/requirements.txt"
# BuildKit secrets, so that neither a proxy's certificate nor an index's password is in a layer.
_CA: Final = "/run/k8sjob/ca.crt"
_PIP_CONF: Final = "/run/k8sjob/pip.conf"


def dockerfile(spec: JobSpec) -> str:
    """The Dockerfile of the job's image.

    The build may be given two secrets: `id=ca`, a bundle of certificates for pip, and `id=pip`, a
    pip.conf; it works without them.

    Raises:
        RenderError: the spec's image is a reference, or has a name that a Dockerfile cannot hold.
    """
    image = spec.image
    if isinstance(image, str) or image.base is None:
        raise RenderError(
            f"image: {spec.image_reference!r} is used as it is, so there is nothing to build; write"
            " `image: {repository: ..., base: ...}` to build one"
        )
    command, args = container_argv(spec)
    return fill(
        "Dockerfile.j2",
        **_below(image, image.base),
        code=True,
        platform=image.platform,
        runtime_home=RUNTIME_HOME,
        runtime_source=RUNTIME_SOURCE,
        command=[*command, *args],
    )


def dependencies_dockerfile(image: Image, base: str) -> str:
    """The part of a Dockerfile below the code, which changes with what is installed alone.

    Args:
        image: of the spec.
        base: what it is put on, best with its digest.

    Raises:
        RenderError: the requirements file has a name that a Dockerfile cannot hold.
    """
    return fill("Dockerfile.j2", **_below(image, base), code=False, platform=None)


def _below(image: Image, base: str) -> dict[str, Any]:
    return {
        "base": base,
        "apt": list(image.apt),
        "installs": _installs(image),
        "ca_secret": _CA,
        "pip_secret": _PIP_CONF,
        "user": f"{IMAGE_UID}:{IMAGE_UID}",
        "home": HOME,
        "passwd_pattern": [f"^[^:]*:[^:]*:{IMAGE_UID}:"],
        "passwd_line": [f"k8sjob:x:{IMAGE_UID}:{IMAGE_UID}::{HOME}:/bin/sh"],
        "workdir": WORKDIR,
    }


def _installs(image: Image) -> list[dict[str, Any]]:
    index = [f"--index-url={image.index_url}"] if image.index_url else []
    steps: list[dict[str, Any]] = []
    if image.pip:
        steps.append({"copies": None, "arguments": [*index, *image.pip]})
    if image.requirements is not None:
        copies = [_copied(image.requirements), _REQUIREMENTS]
        steps.append({"copies": copies, "arguments": [*index, "-r", _REQUIREMENTS]})
    return steps


def _copied(path: str) -> str:
    """A path for COPY, whose sources are expanded and matched as patterns in exec form too."""
    if not path.isprintable() or any(character in "\\$\"'*?[]" for character in path):
        raise RenderError(
            f"image.requirements: {path!r} has a character that COPY acts on; rename the file"
        )
    return path
