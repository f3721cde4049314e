"""Checks of the images that a job names: whether they can be pulled, and are recent enough."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.lint.finding import Hit, Rule, Severity, rule
from k8sjob.spec.names import is_image_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.lint.manifest_facts import Job

__all__ = ["RULES", "too_old", "wrong_host"]

_HUB: Final = "docker.io"
_REGISTRIES: Final = (
    _HUB,
    "gcr.io",
    "ghcr.io",
    "icr.io",
    "index.docker.io",
    "lscr.io",
    "mcr.microsoft.com",
    "nvcr.io",
    "public.ecr.aws",
    "quay.io",
    "registry.gitlab.com",
    "registry.k8s.io",
)
_MIN_LABEL: Final = 5
"""Letters in a name from which one wrong letter is a slip; of shorter names several exist."""
_HUB_PARTS: Final = 2
"""Docker Hub's repositories are user/name."""
_OLDEST: Final = (
    (re.compile(r"docker\.io/(?:library/)?python:(\d+)\.(\d+)"), (3, 11), "Python"),
    (re.compile(r"[^/]+/pytorch/pytorch:(\d+)\.(\d+)\b"), (2, 6), "torch"),
    (re.compile(r"nvcr\.io/nvidia/pytorch:(\d\d)\.(\d\d)\b"), (25, 1), "NVIDIA's PyTorch release"),
)
"""Images whose tag is a version, and the first one that is enough for k8sjob's runtime."""


def wrong_host(image: str) -> str:
    """Why no registry can have an image of this name, and what to write; else empty."""
    if not is_image_reference(image):
        return ""  # other checks say so
    registry, path = _split(image)
    if registry == _HUB:
        parts = path.partition(":")[0].split("/")
        if len(parts) > _HUB_PARTS:
            return (
                f"{parts[0]!r} is not a registry's host (it has neither a dot nor a port), and "
                f"{_HUB} has no names of {len(parts)} parts; write the registry's whole host in "
                "front"
            )
        return ""
    meant = [known for known in _REGISTRIES if _is_slip(registry, known)]
    if not meant or registry in _REGISTRIES:
        return ""
    return f"there is no registry {registry!r}; did you mean {meant[0]!r}?"


def _split(image: str) -> tuple[str, str]:
    """The registry of a reference, and the rest of it; Docker Hub where none is written."""
    first, slash, rest = image.partition("@")[0].partition("/")
    if slash and (first == "localhost" or set(first) & set(".:")):
        return first, rest
    return _HUB, image.partition("@")[0]


def _is_slip(seen: str, known: str) -> bool:
    """Whether one name is the other with two letters exchanged, or with one wrong or missing."""
    if sorted(seen) == sorted(known) and seen != known:
        wrong = [at for at, (a, b) in enumerate(zip(seen, known, strict=True)) if a != b]
        return len(wrong) == 2 and wrong[1] - wrong[0] == 1
    seen_name, _, seen_end = seen.rpartition(".")
    name, _, end = known.rpartition(".")
    if seen_name == name:
        return seen_end != end and _one_letter(seen_end, end) and end == "io"
    return seen_end == end and len(name) > _MIN_LABEL and _one_letter(seen_name, name)


def _one_letter(seen: str, known: str) -> bool:
    shorter, longer = sorted((seen, known), key=len)
    if len(shorter) == len(longer):
        return sum(a != b for a, b in zip(shorter, longer, strict=True)) == 1
    drops = (longer[:at] + longer[at + 1 :] for at in range(len(longer)))
    return shorter in drops


def too_old(image: str) -> str:
    """What of an image is older than k8sjob's runtime needs, with the first one that is not."""
    name = "/".join(_split(image))
    for pattern, oldest, what in _OLDEST:
        found = pattern.match(name)
        if found and (int(found[1]), int(found[2])) < oldest:
            width = 2 if "NVIDIA" in what else 1
            needed = f"{oldest[0]}.{oldest[1]:0{width}}"
            return f"{what} {found[1]}.{found[2]}, and k8sjob's runtime needs {needed} or later"
    return ""


@rule(
    "image-host",
    Severity.WARNING,
    "manifest",
    "An image is pulled from the host that its name begins with; without one, from Docker Hub.",
)
def _image_host(job: Job) -> Iterator[Hit]:
    for replica in job.replicas:
        for container in (*replica.containers(), *replica.containers("initContainers")):
            image = str(container.data.get("image") or "")
            if why := wrong_host(image):
                yield job.at((*container.path, "image"), f"image {image!r}: {why}")


@rule(
    "latest-image-kept",
    Severity.WARNING,
    "manifest",
    "A node that has some image of that tag does not look for a newer one.",
)
def _latest_image_kept(job: Job) -> Iterator[Hit]:
    for _, container in job.trainers():
        image, policy = str(container.data.get("image")), container.data.get("imagePullPolicy")
        name = image.rpartition("/")[2]
        latest = "@" not in name and (":" not in name or name.endswith(":latest"))
        if latest and policy == "IfNotPresent":
            yield job.at(
                (*container.path, "imagePullPolicy"),
                f"{image!r} with IfNotPresent: each node runs whichever `latest` it pulled first, "
                "so replicas may run different code; use a tag of its own, or a digest",
            )


RULES: Final[tuple[Rule[Job], ...]] = (_image_host, _latest_image_kept)
