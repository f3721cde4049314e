"""The builders by name, and which of them is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.errors import ImageError
from k8sjob.image.builders import buildah, buildx, uv

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.image.dependencies import Dependencies, Order

__all__ = ["AUTO", "BUILDERS", "Builder", "choose"]

AUTO: Final = "auto"


class Builder(NamedTuple):
    """Something that makes dependency images.

    Attributes:
        name: by which it is asked for.
        missing: why it cannot make this one here, with the next step; None: it can.
        make: makes the image, pushes it, and writes its tag last of all.
        zstd: it can compress by that.
    """

    name: str
    missing: Callable[[Dependencies], str | None]
    make: Callable[[Order], None]
    zstd: bool = False

    def unable(self, wanted: Dependencies, *, zstd: bool) -> str | None:
        """Why it cannot do what is asked for, with the next step; None: it can."""
        if zstd and not self.zstd:
            return "it compresses by gzip alone; leave --zstd out, or take another --builder"
        return self.missing(wanted)


BUILDERS: Final = {
    builder.name: builder
    for builder in (
        Builder("uv", uv.missing, uv.make, zstd=True),
        Builder("buildx", buildx.missing, buildx.make),
        Builder("podman", buildah.missing("podman"), buildah.make("podman"), zstd=True),
        Builder("buildah", buildah.missing("buildah"), buildah.make("buildah"), zstd=True),
    )
}
"""The first one that can is taken, where none is named."""


def choose(name: str, wanted: Dependencies, *, zstd: bool = False) -> Builder:
    """The builder for what is wanted.

    Args:
        name: of a builder, or AUTO.
        wanted: what is to be installed.
        zstd: it is to be compressed by that.

    Raises:
        ImageError: it cannot be used here, or none of them.
    """
    if name not in {AUTO, *BUILDERS}:
        there = ", ".join([AUTO, *BUILDERS])
        raise ImageError(f"builder: {name!r} is none; there are {there}")
    if name != AUTO:
        if why := BUILDERS[name].unable(wanted, zstd=zstd):
            raise ImageError(f"--builder {name}: {why}")
        return BUILDERS[name]
    reasons = []
    for builder in BUILDERS.values():
        why = builder.unable(wanted, zstd=zstd)
        if why is None:
            return builder
        reasons.append(f"  {builder.name}: {why}")
    raise ImageError("\n".join(["nothing on this machine can build an image:", *reasons]))
