"""buildah and podman: no daemon; what they have built is pushed by k8sjob itself.

They would compress the base's layers anew, and so send all of it; here the layers above the base
are taken out of what they export, and the base's own are mounted or copied as they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import ImageError
from k8sjob.image.archive import Layer
from k8sjob.image.builders.child import Failed, run
from k8sjob.image.builders.recipe import written
from k8sjob.image.content import FileContent
from k8sjob.image.manifest import Manifest, read, read_object

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.image.append import Base
    from k8sjob.image.builders.recipe import Recipe
    from k8sjob.image.dependencies import Dependencies, Order

__all__ = ["build_argv", "make", "missing"]

_ISOLATION: Final = "BUILDAH_ISOLATION"
"""By which the user decides how commands are kept apart; then nothing else is tried."""
_NO_CONTAINERS: Final = re.compile(
    r"cgroup|creating container for|error running container|OCI runtime|user namespace|newuidmap"
    r"|\bunshare\b|\b(?:crun|runc)\b",
    re.IGNORECASE,
)
"""What is said where the machine runs no containers, as most containers do not."""


def missing(program: str) -> Callable[[Dependencies], str | None]:
    """The check of whether a program is there."""

    def check(_wanted: Dependencies) -> str | None:
        if shutil.which(program) is None:
            return f"{program} is not on PATH; on Debian and Ubuntu: apt install {program}"
        return None

    return check


def make(program: str) -> Callable[[Order], None]:
    """The way to an image by a program."""

    def by(order: Order) -> None:
        name = f"localhost/k8sjob-{order.tag}"
        with written(order) as recipe, ExitStack() as opened:
            _build(program, order, recipe, name)
            order.deliver(_exported(program, order.base, recipe.folder / "image", name, opened))

    return by


def build_argv(
    program: str, order: Order, recipe: Recipe, name: str, *, chroot: bool = False
) -> list[str]:
    """The command that builds an image.

    Args:
        program: buildah or podman.
        order: what is wanted.
        recipe: what it is made of.
        name: of the image in the program's own storage.
        chroot: keep commands apart by a changed root alone, which works in most containers.
    """
    docker = Path(os.environ.get("DOCKER_CONFIG", "")) / "config.json"
    logins = "DOCKER_CONFIG" in os.environ and "REGISTRY_AUTH_FILE" not in os.environ
    return [
        program,
        "build",
        "--layers",
        "--force-rm",  # a build that fails or is stopped leaves no container behind
        *([] if order.cached else ["--no-cache"]),
        *(["--isolation", "chroot"] if chroot else []),
        *(["--authfile", str(docker)] if logins and docker.is_file() else []),
        *(["--tls-verify=false"] if order.below.session.is_plain else []),
        f"--platform={order.base.platform}",
        *recipe.flags,
        f"--tag={name}",
        str(recipe.context),
    ]


def _build(program: str, order: Order, recipe: Recipe, name: str) -> None:
    try:
        run(build_argv(program, order, recipe, name), order.say)
    except Failed as failed:
        if _ISOLATION in os.environ or not _NO_CONTAINERS.search("\n".join(failed.words)):
            raise
        order.say(f"{program}: this machine runs no containers; once more with --isolation chroot")
        run(build_argv(program, order, recipe, name, chroot=True), order.say)


def _exported(program: str, base: Base, folder: Path, name: str, opened: ExitStack) -> list[Layer]:
    """The layers that were built upon the base, open for reading."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)
    for diff_id in base.diff_ids:
        # Taken for the layer, which is then not written: the base may have many gigabytes.
        (blobs / diff_id.removeprefix("sha256:")).touch()
    run(
        [program, "push", "--quiet", "--compression-format=gzip", name, f"oci:{folder}:made"],
        lambda _line: None,
    )
    manifest, diff_ids = _image(folder, name)
    below = len(base.diff_ids)
    if diff_ids[:below] != base.diff_ids or len(diff_ids) != len(manifest.layers):
        raise ImageError(
            f"{program} has built {name} on something else than {base.reference}; build again with"
            " --no-cache, or by another --builder"
        )
    layers = []
    for descriptor, diff_id in zip(manifest.layers[below:], diff_ids[below:], strict=True):
        file = opened.enter_context((blobs / descriptor.digest.partition(":")[2]).open("rb"))
        layers.append(Layer(FileContent(descriptor.digest, descriptor.size, file), diff_id))
    return layers


def _image(folder: Path, name: str) -> tuple[Manifest, list[Any]]:
    """What a layout holds: one image, and its layers as archives."""
    index = json.loads((folder / "index.json").read_bytes())
    entry = index["manifests"][0]
    manifest = read(_blob(folder, entry["digest"]), entry["mediaType"], name)
    if not isinstance(manifest, Manifest):
        raise ImageError(f"{name} is of several platforms; ask for one by --platform")
    config = read_object(_blob(folder, manifest.config.digest), name)
    return manifest, config["rootfs"]["diff_ids"]


def _blob(folder: Path, digest: str) -> bytes:
    return (folder / "blobs" / digest.replace(":", "/")).read_bytes()
