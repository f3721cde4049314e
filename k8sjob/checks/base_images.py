"""The names of base images, and what is too old in them; a push needs no more of lint."""

from __future__ import annotations

import re

from k8sjob.checks.finding import table
from k8sjob.image.registry.manifest import ImageReference
from k8sjob.references import is_image_reference


def reference_of(image: str) -> ImageReference | None:
    """The parts of an image's name; None if it is none, as other checks say."""
    return ImageReference.parse(image) if is_image_reference(image) else None


def too_old(image: str, torch: str = "") -> str:
    """The part of an image that is too old for the runtime, and the first version that is not.

    With the `torch` of this machine also an older torch: what runs here may not run there.
    """
    reference = reference_of(image)
    name = reference and f"{reference.registry}/{reference.repository}:{reference.tag}"
    for form, oldest in table("oldest").items():
        needed, _, software = oldest.partition(" ")
        if not (version := re.match(form, name or "")):
            continue
        label, numbers = ".".join(version.groups()), [*map(int, version.groups())]
        if numbers < [*map(int, needed.split("."))]:
            return f"{software} {label}, and k8sjob's runtime needs {needed} or later"
        installed = re.match(r"(\d+)\.(\d+)", torch)
        if software == "torch" and installed and numbers < [*map(int, installed.groups())]:
            return f"torch {label}, and this machine has {torch}"
    return ""
