"""The image that the replicas run: an existing one, or one to be built."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Tag

from k8sjob.findings import invalid
from k8sjob.references import is_repository
from k8sjob.requirements import PIP_NAME
from k8sjob.spec.base import Part, doc, refuse
from k8sjob.spec.values import ImageName, ObjectName, matching

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding

_APT = matching(
    re.compile(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9]+)?(?:=[A-Za-z0-9.+:~-]+)?"),
    "a Debian package",
    next_step="write name, name=version or name:architecture",
)
_PLATFORM = matching(
    re.compile(r"[a-z0-9]+/[a-z0-9_]+(?:/v[0-9]+)?"),
    "a platform",
    next_step="write os/architecture, such as linux/amd64",
)
_INDEX = matching(
    re.compile(r"https?://[^\s\"'`$\\<>{}|^@]+"),
    "the http(s) URL of an index without credentials",
    next_step="pass credentials to the build as a secret",
)


def _pip(value: str) -> str:
    if not PIP_NAME.match(value):
        refuse(f"{value!r} is not a requirement of pip", "write name or name[extra]>=1.2")
    if not value.isprintable() or "\\" in value or "$" in value:
        refuse(f"{value!r} has a character that pip or a Dockerfile would act on", "remove it")
    return value


def _relative(value: str) -> str:
    if not value or not value.isprintable() or value.startswith("/") or ".." in value.split("/"):
        refuse(f"{value!r} is not a path inside the context", "write it relative to the context")
    return value


def _folder(value: str) -> str:
    if not value or not value.isprintable():
        refuse(f"{value!r} is not a folder", "write a path relative to the job.yaml, such as .")
    return value


class Image(Part):
    """An image to build on `base`; without a base, an existing image."""

    repository: Annotated[
        ImageName,
        doc(
            "The repository of the built image, without a tag: the image is used by its"
            " digest. Without base: the image itself.",
            "registry.example/team/digits",
        ),
    ]
    base: ImageName | None = doc(
        "The image to build on, with Python and torch; null: nothing is built.",
        "pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime",
        default=None,
    )
    context: Annotated[str, AfterValidator(_folder)] = doc(
        "The folder that is copied to /app, relative to the job.yaml.", ".", "src", default="."
    )
    requirements: Annotated[str, AfterValidator(_relative)] | None = doc(
        "A pip requirements file inside the context, installed in its own layer before the code.",
        "requirements.txt",
        default=None,
    )
    apt: tuple[Annotated[str, _APT], ...] = doc(
        "Debian packages to install.", ["git", "libgl1"], default=()
    )
    pip: tuple[Annotated[str, AfterValidator(_pip)], ...] = doc(
        "Python requirements to install.", ["scikit-learn==1.7.2", "tqdm"], default=()
    )
    index_url: Annotated[str, _INDEX] | None = doc(
        "pip's index, instead of the public one; http or https.",
        "https://packages.internal/simple",
        default=None,
    )
    pull_secrets: tuple[ObjectName, ...] = doc(
        "Secrets with the registry's credentials, in the job's namespace.",
        ["registry-login"],
        default=(),
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = doc(
        "When a node pulls the image; null: Kubernetes' default, IfNotPresent for a digest.",
        "IfNotPresent",
        default=None,
    )
    platform: Annotated[str, _PLATFORM] | None = doc(
        "The platform of the image, as os/architecture; null: that of the base, or linux/amd64"
        " if the base has several.",
        "linux/amd64",
        default=None,
    )

    def rules(self) -> Iterator[Finding]:
        """A built image gets its tag from the build; what is not built has nothing to install."""
        if self.base is not None:
            if not is_repository(self.repository):
                bare = re.sub(r"(:[^/:]*)?(@.*)?$", "", self.repository)  # a port stays
                yield invalid(
                    ("repository",),
                    f"{self.repository!r} has a tag or a digest, which the build sets",
                    f"write it as repository: {bare}",
                )
            return
        for name in ("requirements", "apt", "pip", "index_url", "platform"):
            if getattr(self, name):
                yield invalid(
                    (name,), "has no effect without base", "set base to the image to build on"
                )


def _branch(value: Any) -> str:
    """The tag of the branch, in brackets to distinguish it from a key in a location."""
    return "<image>" if isinstance(value, dict | Image) else "<reference>"


AnyImage = Annotated[
    Annotated[ImageName, Tag("<reference>")] | Annotated[Image, Tag("<image>")],
    Discriminator(_branch),
]
"""An image reference that is used as it is, or an Image."""
