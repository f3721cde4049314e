"""buildah and podman: no daemon; what they have built is pushed by k8sjob itself.

They would compress the base's layers anew, and so send all of it; here the layers above the base
are taken out of what they export, and the base's own are mounted or copied as they are.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import ImageError
from k8sjob.image.archive import Layer
from k8sjob.image.builders.child import run
from k8sjob.image.builders.isolation import runs_containers
from k8sjob.image.builders.recipe import written
from k8sjob.image.content import FileContent
from k8sjob.image.manifest import Manifest, read, read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from k8sjob.image.builders.recipe import Recipe
    from k8sjob.image.dependencies import Dependencies, Order
    from k8sjob.image.manifest import Descriptor

__all__ = ["build_argv", "make", "missing"]

_ISOLATION: Final = "BUILDAH_ISOLATION"
"""The variable by which the user decides how commands are isolated; then nothing is probed."""


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
            order.deliver(_exported(program, order, recipe.folder / "images", name, opened))

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
        "bud" if program == "buildah" else "build",  # as older ones of either know it
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
    chroot = _ISOLATION not in os.environ and not runs_containers(program)
    if chroot:
        order.say(f"{program}: this machine runs no containers; building with --isolation chroot")
    run(build_argv(program, order, recipe, name, chroot=chroot), order.say)


def _exported(
    program: str, order: Order, folder: Path, name: str, opened: ExitStack
) -> list[Layer]:
    """The layers that were built upon the base, open for reading."""
    base = order.base
    below = len(base.diff_ids)
    flags = ["--compression-format=zstd"] if order.zstd else []
    # One that is the same as a layer of the base would be left out, too: then all are written.
    for number, left_out in enumerate((base.diff_ids, ())):
        layout = _Layout(folder / str(number), left_out)
        run([program, "push", "--quiet", *flags, name, f"oci:{layout.folder}:made"], _unheard)
        manifest, diff_ids = layout.image(name)
        if diff_ids[:below] != base.diff_ids or len(diff_ids) != len(manifest.layers):
            raise ImageError(
                f"{program} has built {name} on something else than {base.reference}; build again"
                " with --no-cache, or by another --builder"
            )
        if all(descriptor.size for descriptor in manifest.layers[below:]):
            break
    kinds = [layer["mediaType"] for layer in manifest.content["layers"]]
    return [
        Layer(layout.content(descriptor, opened), diff_id, zstd=kind.endswith("+zstd"))
        for descriptor, diff_id, kind in zip(
            manifest.layers[below:], diff_ids[below:], kinds[below:], strict=True
        )
    ]


def _unheard(_line: str) -> None:
    """What is said of an export is of interest when it fails."""


class _Layout:
    """A folder that an image is exported to."""

    def __init__(self, folder: Path, left_out: Iterable[str]) -> None:
        self.folder = folder
        blobs = folder / "blobs/sha256"
        blobs.mkdir(parents=True)
        for diff_id in left_out:
            # Taken for the layer, which is then not written: a base may have many gigabytes.
            (blobs / diff_id.removeprefix("sha256:")).touch()

    def image(self, name: str) -> tuple[Manifest, list[Any]]:
        """The image that is in it, and its layers as archives."""
        index = json.loads((self.folder / "index.json").read_bytes())
        entry = index["manifests"][0]
        manifest = read(self._path(entry["digest"]).read_bytes(), entry["mediaType"], name)
        if not isinstance(manifest, Manifest):
            raise ImageError(f"{name} is of several platforms; ask for one by --platform")
        config = read_object(self._path(manifest.config.digest).read_bytes(), name)
        return manifest, config["rootfs"]["diff_ids"]

    def content(self, descriptor: Descriptor, opened: ExitStack) -> FileContent:
        """A blob of it, open until the stack is closed."""
        file = opened.enter_context(self._path(descriptor.digest).open("rb"))
        return FileContent(descriptor.digest, descriptor.size, file)

    def _path(self, digest: str) -> Path:
        return self.folder / "blobs" / digest.replace(":", "/")
