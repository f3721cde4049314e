"""What a job installs beside its code, and the image that has it, found by what is in it.

The image lies in the job's repository under a tag that follows from the base and from what is
installed. Equal wishes are one image, whoever has built it, and with whatever.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from k8sjob.errors import ImageError, redacted
from k8sjob.image.append import install
from k8sjob.image.delivery import Delivery
from k8sjob.image.requirements import logical_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from k8sjob.image.append import Base
    from k8sjob.image.archive import Layer
    from k8sjob.image.reference import Reference
    from k8sjob.image.registries import Registries
    from k8sjob.image.repository import Repository
    from k8sjob.spec import Image, JobSpec

__all__ = ["Dependencies", "Order", "image_on_base"]

_RECIPE: Final = 1
"""Raised when something else is to be made of equal wishes: older images are not found then."""
_OUTSIDE: Final = re.compile(
    r"(?:-[rce]|--(?:requirement|constraint|editable)\b)[\s=]*+(?!(?!file:)[a-z+]+://)"
    r"|\.{0,2}/|[^#]*\bfile:"
)
"""A line of requirements that leads to another file of this machine."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What is to be installed on a base; false where that is nothing.

    Attributes:
        apt: Debian packages.
        pip: requirements, as pip takes them.
        requirements: contents of the requirements file; None: there is none.
        index_url: pip's index; None: pip's own choice.
    """

    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    requirements: str | None = None
    index_url: str | None = None

    @classmethod
    def of(cls, image: Image, folder: Path) -> Dependencies:
        """Read what a job installs.

        Args:
            image: of the spec.
            folder: what relative paths of the spec start from.

        Raises:
            ImageError: the requirements file cannot be read, or needs another file beside it.
        """
        text = None
        if image.requirements is not None:
            text = _requirements(folder / image.context / image.requirements)
        return cls(image.apt, image.pip, text, image.index_url)

    def __bool__(self) -> bool:
        return bool(self.apt or self.pip or self.requirements is not None)

    def key(self, base: str) -> str:
        """What the image is, as 64 hexadecimal digits; another one when anything changes.

        Args:
            base: digest of the base's manifest, for one platform.
        """
        content = [_RECIPE, base, self.apt, self.pip, self.requirements, self.index_url]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def place(self, repository: Reference, base: str) -> Reference:
        """Where the image is, or will be: a tag in the job's repository."""
        return replace(repository, tag=f"deps-{self.key(base)[:16]}", digest=None)

    def __str__(self) -> str:
        """In words, as in `apt: git; pip: tqdm, einops; a requirements file of 3 lines`."""
        parts = [f"{name}: {', '.join(getattr(self, name))}" for name in ("apt", "pip")]
        if self.requirements is not None:
            lines = len(self.requirements.splitlines())
            parts.append(f"a requirements file of {lines} line{'' if lines == 1 else 's'}")
        return "; ".join(part for part in parts if not part.endswith(": "))


@dataclass(frozen=True, slots=True)
class Order:
    """A dependency image that is to be made, and pushed.

    Attributes:
        image: of the spec.
        wanted: what is installed.
        base: what it is put on, for one platform.
        below: the base's repository, to read.
        target: the job's repository, to write; its reference has the tag under which the image is
            to be, last of all, when it is whole.
        registries: other repositories.
        cached: what earlier builds have left on this machine may be used.
        say: is called with each line of progress.
        progress: is called with the bytes sent, and how many there are to send.
        zstd: what is installed is compressed by it; else by gzip.
    """

    image: Image
    wanted: Dependencies
    base: Base
    below: Repository
    target: Repository
    registries: Registries
    cached: bool
    say: Callable[[str], object]
    progress: Callable[[int, int], object]
    zstd: bool = False

    @property
    def tag(self) -> str:
        """The tag under which the image is to be."""
        return self.target.reference.version

    def deliver(self, layers: Sequence[Layer], variables: Mapping[str, str] | None = None) -> None:
        """Push the base with what has been made upon it; the tag is written last.

        Args:
            layers: what is installed, the lowest first.
            variables: of the environment, that are others than in the base.

        Raises:
            ImageError: a registry refuses, or cannot be reached.
        """
        made = install(self.base, layers, variables or {})
        delivery = Delivery(self.target, self.below, self.progress, dry_run=False)
        delivery.blobs(self.base, [layer.content for layer in layers], made.config)
        self.target.put(made.manifest, made.media_type, self.tag)


def image_on_base(spec: JobSpec, verb: str) -> Image:
    """The image part of a spec, where it has a base that something is put on.

    Args:
        spec: the job.
        verb: what is to be done with the image, for the message.

    Raises:
        ImageError: the image is used as it is.
    """
    image = spec.image
    if isinstance(image, str) or image.base is None:
        raise ImageError(
            f"image: {spec.image_reference!r} is used as it is, so there is nothing to {verb};"
            " write `image: {repository: ..., base: ...}` to have one made of your code"
        )
    return image


def _requirements(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ImageError(
            f"image.requirements: {path}: cannot be read: {reason}; name a file inside the context"
        ) from None
    for number, line in logical_lines(text):
        shown = f"{path}:{number}: {redacted(line)!r}"
        if _OUTSIDE.match(line):
            raise ImageError(
                f"{shown} leads to another file, which is not there where packages are installed;"
                " put what that says into this one"
            )
        if "$" in line:
            raise ImageError(
                f"{shown} has a '$', by which variables of the environment, passwords too, would be"
                " sent to the host of an address; take it out"
            )
    return text
