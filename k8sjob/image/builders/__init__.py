"""The builders of dependency images by name, and the choice among them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.errors import ImageError
from k8sjob.image.builders import containers, uv

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.image.dependencies import BuildRequest, Dependencies

AUTO: Final = "auto"


class Builder(NamedTuple):
    """Something that builds dependency images.

    Attributes:
        name: of the builder.
        missing: why it cannot build this here, with the next step; None: it can.
        build: builds the image, pushes it, and writes its tag last of all.
        zstd: it can compress by zstd.
    """

    name: str
    missing: Callable[[Dependencies], str | None]
    build: Callable[[BuildRequest], None]
    zstd: bool = False

    def unsupported(self, dependencies: Dependencies, *, zstd: bool) -> str | None:
        """Why it cannot do what is asked for, with the next step; None: it can."""
        if zstd and not self.zstd:
            return "it compresses only with gzip; omit --zstd, or use another --builder"
        return self.missing(dependencies)


BUILDERS: Final = {
    builder.name: builder
    for builder in (
        Builder("uv", uv.missing, uv.build, zstd=True),
        Builder("buildx", containers.buildx_missing, containers.build_by_buildx),
        *(
            Builder(
                name,
                partial(containers.missing, name),
                partial(containers.build_by, name),
                zstd=True,
            )
            for name in ("podman", "buildah")
        ),
    )
}
"""In the order of preference."""


def choose(name: str, dependencies: Dependencies, *, zstd: bool = False) -> Builder:
    """The builder of this name for what is wanted; AUTO: the first that can.

    Raises:
        ImageError: it cannot be used here, or none of them.
    """
    if name not in {AUTO, *BUILDERS}:
        valid = ", ".join([AUTO, *BUILDERS])
        raise ImageError(f"builder: {name!r} is unknown; valid builders: {valid}")
    if name != AUTO:
        if why := BUILDERS[name].unsupported(dependencies, zstd=zstd):
            raise ImageError(f"--builder {name}: {why}")
        return BUILDERS[name]
    reasons = ""
    for builder in BUILDERS.values():
        why = builder.unsupported(dependencies, zstd=zstd)
        if why is None:
            return builder
        reasons += f"\n  {builder.name}: {why}"
    raise ImageError(f"nothing on this machine can build an image:{reasons}")
