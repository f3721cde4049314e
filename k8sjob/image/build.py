"""The image with a job's dependencies: found by its tag, or built and pushed."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError
from k8sjob.image.builders import AUTO, choose
from k8sjob.image.code_image import image_on_base
from k8sjob.image.dependencies import BuildRequest, Dependencies
from k8sjob.image.registry.blob_content import in_memory
from k8sjob.image.registry.credentials import Keyring
from k8sjob.image.registry.http_client import HttpClient
from k8sjob.image.registry.manifest import ImageReference
from k8sjob.image.registry.repository import Registries, Repository, read_base

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.spec import JobSpec

_EMPTY: Final = b"{}"
"""A blob that OCI itself calls empty; many registries have it already."""


@dataclass(frozen=True, slots=True)
class Built:
    """The image that the job's code is put on.

    Attributes:
        reference: by its digest, for good; None after a dry run, where there is no such image yet.
        tag: under which it is found; None if nothing is installed, so that it is the base.
        base: the image below, by its digest.
        platform: os/architecture.
        wanted: what is installed.
        builder: what has built it, or would; None: it was there already.
    """

    reference: str | None
    tag: str | None
    base: str
    platform: str
    wanted: str
    builder: str | None


def build(
    spec: JobSpec,
    folder: str | Path = ".",
    *,
    builder: str = AUTO,
    platform: str | None = None,
    cached: bool = True,
    zstd: bool = False,
    dry_run: bool = False,
    say: Callable[[str], object] = lambda _line: None,
    progress: Callable[[int, int], object] = lambda _sent, _total: None,
    http: HttpClient | None = None,
    keyring: Keyring | None = None,
) -> Built:
    """Make sure that the image with what the job installs is in the registry.

    One that is there is not built again: its tag follows from the base's digest and from what is
    installed. `push` finds it by that, too.

    Args:
        spec: the job; its image has a base.
        folder: what relative paths of the spec start from.
        builder: one of BUILDERS by its name; AUTO: the first that can.
        platform: os/architecture; None: the spec's, else what the base is for.
        cached: False: build even where the image is there, and use no step of an earlier build.
        zstd: compress what is installed by zstd, where it is built now; else by gzip.
        dry_run: look, and neither build nor write.
        say: is called with what is done, and with each line that the builder writes.
        progress: is called with the bytes sent, and how many there are to send.
        http: closed at the end; None: one with the default retry policy.
        keyring: the user's credentials; None: those of docker and podman.

    Raises:
        ImageError: there is no builder, it fails, or a registry refuses, or cannot be reached.
            There is no new tag then.
    """
    image = image_on_base(spec, "build")
    dependencies = Dependencies.of(image, Path(folder))
    with closing(http or HttpClient()) as client:
        registries = Registries(client, keyring or Keyring.load())
        repository = ImageReference.parse(image.repository)
        target = registries.repository(repository, "pull" if dry_run else "pull,push")
        below = registries.repository(ImageReference.parse(image.base or ""), "pull")
        base = read_base(below, platform or image.platform)
        if not dependencies:
            return Built(base.pinned, None, base.pinned, base.platform, "", None)
        # By the base's digest: after an update of its tag the dependencies are built again.
        place = Repository(target.client, dependencies.place(repository, base.manifest.digest))
        result = partial(
            Built,
            tag=place.reference.tag,
            base=base.pinned,
            platform=base.platform,
            wanted=str(dependencies),
        )
        if cached and place.is_there():
            return result(read_base(place, base.platform).pinned, builder=None)
        chosen = choose(builder, dependencies, zstd=zstd)
        if dry_run:
            return result(None, builder=chosen.name)
        # Write as little as possible, since a build takes minutes until the registry refuses it.
        place.add_blob(in_memory(_EMPTY), lambda _size: None)
        say(f"building {place.reference} with {chosen.name}: {dependencies}; on {base.reference}")
        chosen.build(
            BuildRequest(image, dependencies, base, below, place, cached, say, progress, zstd)
        )
        # Read back from the registry: buildx has pushed the image itself, and its digest is known
        # there alone.
        pushed = read_base(place, base.platform)
    if pushed.diff_ids[: len(base.diff_ids)] != base.diff_ids:
        raise ImageError(
            f"{place.reference} is not the image that was built on {base.reference}: another client"
            " writes to the repository; build again with --no-cache"
        )
    return result(pushed.pinned, builder=chosen.name)
