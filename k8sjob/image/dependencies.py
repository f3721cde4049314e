"""The dependencies that a job installs, and the tag of the image that has them.

The image lies in the job's repository under a tag that follows from the base and from what is
installed. Equal dependencies are one image, whoever has built it, and with whatever builder.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.errors import ImageError, redacted
from k8sjob.image.appending import append_packages
from k8sjob.image.registry.repository import transfer
from k8sjob.requirements import PIP_NAME, requirement_lines, requirements_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from k8sjob.image.appending import Layer
    from k8sjob.image.code_image import CodeImage
    from k8sjob.image.registry.manifest import BaseImage, ImageReference
    from k8sjob.image.registry.repository import Repository
    from k8sjob.spec import Image

_KEY_VERSION: Final = 2
"""Raised when equal dependencies are to give another image: older ones are not found then."""
_OTHER_FILE: Final = (
    r"(?:-[rce]|--(?:requirement|constraint|editable)\b)[\s=]*+(?!(?!file:)[a-z+]+://)"
    r"|\.{0,2}/|[^#]*\bfile:"
)
"""A line of requirements that leads to another file of this machine."""
_OPTION: Final = (
    r"--(?:no-index|pre|prefer-binary|require-hashes)"
    r"|(?:-i|-f|--index-url|--extra-index-url|--find-links)[\s=]++https?://\S++"
)
"""Options that change where wheels come from, and not that they are wheels."""
_HASH: Final = r"\s--hash[\s=]\s*\w+:[0-9a-fA-F]+(?=\s|$)"
_REQUIREMENT: Final = (
    rf"(?a)(?!.*\s-){PIP_NAME.pattern}\s*+(?:\[[\s\w.,-]*+\]\s*+)?+"
    r"(?:@\s*https?://[^\s;?#]+\.whl(?:#[^\s;]*+)?\s*+|[\s\w.,<>=!~*+()-]*+)(?:;.*)?"
)
"""name[extras], then versions or the URL of a wheel, then a marker; no options."""


class Dependencies(NamedTuple):
    """The dependencies to install on a base; false if there are none.

    Attributes:
        requirements: contents of the requirements file; None: there is none.
        index_url: pip's index; None: pip's own choice.
    """

    apt: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    requirements: str | None = None
    index_url: str | None = None

    @classmethod
    def of(cls, image: Image | CodeImage, folder: Path) -> Dependencies:
        """Read what a job installs; relative paths of the spec start from the folder.

        ImageError: the requirements file cannot be read, or needs another file beside it.
        """
        text = None
        if image.requirements is not None:
            text = _requirements(folder / image.context / image.requirements)
        return cls(image.apt, image.pip, text, image.index_url)

    def __bool__(self) -> bool:
        return bool(self.apt or self.pip or self.requirements is not None)

    def key(self, base: str) -> str:
        """64 hexadecimal digits that change when anything changes; base: its manifest's digest."""
        # The order of packages counts, too: it is that of the commands in the Dockerfile.
        content = [_KEY_VERSION, base, self.apt, self.pip, self.requirements, self.index_url]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def place(self, repository: ImageReference, base: str) -> ImageReference:
        """The reference of the image, whether it exists or not: a tag in the job's repository."""
        return repository._replace(tag=f"deps-{self.key(base)[:16]}", digest=None)

    def __str__(self) -> str:
        """A summary: `apt: git; pip: tqdm, einops; a requirements file of 3 lines`."""
        parts = [f"{name}: {', '.join(getattr(self, name))}" for name in ("apt", "pip")]
        if self.requirements is not None:
            lines = len(self.requirements.splitlines())
            parts.append(f"a requirements file of {lines} line{'' if lines == 1 else 's'}")
        return "; ".join(part for part in parts if not part.endswith(": "))

    def refused_line(self) -> str | None:
        """The first line that uv must not read, and why; None: there is none.

        uv runs on this machine, so it may install only wheels: nothing of them runs. Lines like
        `--no-binary` and `-e` take precedence over uv's own `--only-binary`.
        """
        for place, line in self._located_lines():
            # Hashes follow the version as options do, and are harmless.
            plain = re.sub(_HASH, "", line)
            if not re.fullmatch(_OPTION if plain.startswith("-") else _REQUIREMENT, plain):
                return (
                    f"{place}: {redacted(line)!r} is not a package by name and version, nor the"
                    " http(s) URL of a wheel or of an index; anything else could run code on this"
                    " machine: use --builder buildah, podman or buildx, which install in a"
                    " container"
                )
        return None

    def checked_lines(self) -> list[str]:
        """The requirements for uv: never the user's file, but its lines as parsed here."""
        return [line for _, line in self._located_lines()]

    def _located_lines(self) -> Iterator[tuple[str, str]]:
        for number, value in enumerate(self.pip):
            yield f"image.pip[{number}]", value
        for number, line in requirement_lines(self.requirements or ""):
            yield f"image.requirements:{number}", line


def _requirements(path: Path) -> str:
    text = requirements_text(path)
    for number, line in requirement_lines(text):
        shown = f"{path}:{number}: {redacted(line)!r}"
        if re.match(_OTHER_FILE, line):
            raise ImageError(
                f"{shown} refers to another file, which is not available where packages are"
                " installed; copy its contents into this file"
            )
        # pip and uv expand ${NAME} in requirements.
        if "$" in line:
            raise ImageError(
                f"{shown} has a '$', which would send variables of the environment, passwords"
                " included, to the host of the address; remove it"
            )
    return text


class BuildRequest(NamedTuple):
    """A dependency image that is to be built and pushed.

    Attributes:
        image: of the spec.
        base: what it is put on, for one platform.
        below: the base's repository, to read.
        target: the job's repository, to write; its reference has the tag under which the image is
            to be, last of all, when it is whole.
        cached, say, progress, zstd: as in k8sjob.image.build.build.
    """

    image: Image
    dependencies: Dependencies
    base: BaseImage
    below: Repository
    target: Repository
    cached: bool
    say: Callable[[str], object]
    progress: Callable[[int, int], object]
    zstd: bool = False

    @property
    def tag(self) -> str:
        """The tag under which the image is to be."""
        return self.target.reference.version

    def push(self, layers: Sequence[Layer], variables: Mapping[str, str] | None = None) -> None:
        """Push the base with layers on it, the lowest first, and variables that differ from its."""
        image = append_packages(self.base, layers, variables or {})
        contents = [layer.content for layer in layers]
        parts = (self.base, contents, image.config)
        transfer(self.target, self.below, *parts, progress=self.progress)
        self.target.put(image.manifest, image.media_type, self.tag)
