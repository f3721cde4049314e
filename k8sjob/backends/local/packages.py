"""What the job's image would bring along and this Python lacks, found before anything starts."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata, util
from typing import TYPE_CHECKING

from k8sjob.errors import BackendError
from k8sjob.spec import Image

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from k8sjob.spec import JobSpec

__all__ = ["check_packages"]

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def check_packages(spec: JobSpec, context: Path) -> None:
    """Refuse a job whose packages are not installed here.

    Names alone are compared, not versions: a laptop's may be newer than the image's. Lines with a
    marker, an option or a URL are passed over.

    Args:
        spec: the job.
        context: the folder with its code, and its requirements file.

    Raises:
        BackendError: with the command that installs them.
    """
    if spec.uses_agent and util.find_spec("torch") is None:
        raise BackendError(
            f"torch is not installed for {sys.executable}, which runs the job on this machine;"
            f" {_pip('torch')}"
        )
    if not isinstance(spec.image, Image):
        return
    missing, arguments = [], []
    if spec.image.requirements:
        file = context / spec.image.requirements
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise BackendError(
                f"image.requirements: {file} cannot be read: {error.strerror}; correct the path"
            ) from error
        lacking = [name for name in _names(lines) if not _installed(name)]
        if lacking:
            missing += lacking
            arguments += ["-r", str(file)]
    for line in spec.image.pip:
        for name in _names([line]):
            if not _installed(name):
                missing.append(name)
                arguments.append(line)
    if missing:
        raise BackendError(
            f"{sys.executable}, which runs the job on this machine, lacks {', '.join(missing)}"
            f" of the image's requirements; {_pip(*arguments)}"
        )


def _names(lines: list[str]) -> Iterator[str]:
    for line in lines:
        requirement = line.partition("#")[0].strip()
        name = _NAME.match(requirement)
        if name and ";" not in requirement and "://" not in requirement:
            yield name.group()


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _pip(*arguments: str) -> str:
    return f"install them by `{shlex.join([sys.executable, '-m', 'pip', 'install', *arguments])}`"
