"""The names in a build context and in an image that are k8sjob's own, and its files there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.targets import MANIFEST_FILES

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNTIME_SOURCE: Final = ".k8sjob"
"""Folder of a build context that becomes /opt/k8sjob in the image."""
HOME: Final = "/home/k8sjob"
"""The home folder of a built image's user."""
IMAGE_UID: Final = 1000
"""User and group, by number, as which the containers of a built image run."""
IMAGE_USER: Final = "k8sjob"
"""The user's name, which torch looks up; also of a user that the cluster chooses."""
_PACKAGE: Final = Path(__file__).resolve().parents[1]
DOCKERFILE, OWN_IGNORE = "Dockerfile", ".dockerignore"
MADE_HERE: Final = frozenset({RUNTIME_SOURCE, *MANIFEST_FILES, DOCKERFILE, OWN_IGNORE})
"""Names at the top of a context that are not the user's code."""
COPY_MARK: Final = f"{RUNTIME_SOURCE}/COPY"
"""A file that is only in copies of a context."""


def runtime_files() -> Iterator[tuple[str, Path]]:
    """The files for RUNTIME_HOME: names there and files here, in a fixed order.

    These parts of k8sjob need only torch and the standard library.
    """
    names = (
        "__init__.py contract.py printed_metrics.py printed_metrics.tsv strategies.py temporary.py"
    )
    shared = (_PACKAGE / name for name in names.split())
    for file in (*shared, *sorted((_PACKAGE / "runtime").rglob("*.py"))):
        yield str(file).removeprefix(str(_PACKAGE.parent)).lstrip("/"), file
