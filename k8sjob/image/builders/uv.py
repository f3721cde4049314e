"""Dependency images without a builder: wheels for the base's Python, put on it as one layer.

Nothing of the base runs, so it needs neither a daemon nor root nor the base's processor.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.image.builders.wheels import find_uv, unpack
from k8sjob.image.context import shown_size
from k8sjob.image.inventory import DEFAULT_PATH, environment, read_inventory
from k8sjob.image.packages import BIN, pack_packages
from k8sjob.image.requirements import refused_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.image.append import Base
    from k8sjob.image.dependencies import Dependencies, Order

__all__ = ["make", "missing"]

_EVERY: Final = 5.0
"""Seconds between two lines about a base that is being read."""


def missing(wanted: Dependencies) -> str | None:
    """Why uv cannot install this here, with the next step; None: it can."""
    if wanted.apt:
        return (
            f"Debian packages ({', '.join(wanted.apt)}) are installed by a builder that runs the"
            " base; take --builder buildah, podman or buildx"
        )
    if find_uv() is None:
        return "uv is not here; pip install 'k8sjob[deps]'"
    return refused_line(wanted)


def make(order: Order) -> None:
    """Install what is wanted, and push the image.

    Raises:
        ImageError: something cannot be had for the base, or does not fit it; a registry refuses.
    """
    order.say(f"reading what {order.base.reference} has")
    inventory = read_inventory(order.base, order.below, _Reading(order.say))
    with tempfile.TemporaryDirectory(prefix="k8sjob-") as folder:
        target = Path(folder, "deps")
        unpack(inventory, order.wanted, target, order.say, cached=order.cached)
        layer = pack_packages(target, inventory, zstd=order.zstd)
    with closing(layer):
        order.deliver([layer], {"PATH": _path(order.base)})


class _Reading:
    """Says now and then how much of a large base has been read."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._next = time.monotonic() + _EVERY

    def __call__(self, read: int, total: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._say(f"read {shown_size(read)} of {shown_size(total)}")


def _path(base: Base) -> str:
    """Where commands are looked for: the base's own come first."""
    folders = (environment(base).get("PATH") or DEFAULT_PATH).split(":")
    return ":".join([*folders, *([] if BIN in folders else [BIN])])
