"""The folder that a builder works in: a Dockerfile and the requirements, never the code."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.image.builders.settings import write_secrets
from k8sjob.rendering.dockerfile import dependencies_dockerfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.image.dependencies import Order

__all__ = ["Recipe", "written"]

_PROXIES: Final = ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "ftp_proxy")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is handed to a builder, for as long as it works.

    Attributes:
        folder: for what it gives back.
        context: with the Dockerfile in it.
        secrets: files by the names that the Dockerfile has for them.
    """

    folder: Path
    context: Path
    secrets: dict[str, Path]

    @property
    def flags(self) -> list[str]:
        """The secrets as all builders take them, and the proxies: in no layer either."""
        given = [f"id={name},src={path}" for name, path in self.secrets.items()]
        proxies = [name for name in os.environ if name.lower() in _PROXIES]
        return [
            *(word for secret in given for word in ("--secret", secret)),
            *(word for name in sorted(proxies) for word in ("--build-arg", name)),
        ]


@contextmanager
def written(order: Order) -> Iterator[Recipe]:
    """Write what is needed to build an image; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="k8sjob-build-") as name:
        folder = Path(name)
        context = folder / "context"
        context.mkdir()
        reference = order.base.reference
        base = f"{reference.registry}/{reference.repository}@{order.base.manifest.digest}"
        (context / "Dockerfile").write_text(dependencies_dockerfile(order.image, base))
        if order.image.requirements is not None and order.wanted.requirements is not None:
            file = context / order.image.requirements
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(order.wanted.requirements, encoding="utf-8")
        yield Recipe(folder, context, write_secrets(folder))
