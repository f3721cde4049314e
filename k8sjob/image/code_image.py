"""The part of a job that an image is made of, and what is remembered of it.

To read a job.yaml takes most of the time of a small push, for all that it loads: pydantic, YAML and
the kinds of jobs. A file with the same bytes says the same to the same k8sjob.
"""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.contract import JOB_FILE, WORKDIR
from k8sjob.errors import ImageError
from k8sjob.files import cached_value, keep_value, leads_out
from k8sjob.rendering.dockerignore import has_script, leaves_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.spec import Image, JobSpec

_PACKAGE: Final = Path(__file__).resolve().parents[1]


def image_on_base(spec: JobSpec, verb: str) -> Image:
    """The image part of a spec; ImageError, with this verb, where it has no base."""
    image = spec.image
    if isinstance(image, str) or image.base is None:
        raise ImageError(
            f"image: {spec.image_reference!r} is used as it is, so there is nothing to {verb};"
            " write `image: {repository: ..., base: ...}` to have one built from your code"
        )
    return image


class CodeImage(NamedTuple):
    """An image with a job's code.

    Attributes:
        command: what its containers run.
        script: the program in the context; None: the job starts something else.
        remarks: on the image.
        others: fields of the spec's image.
    """

    repository: str
    base: str
    platform: str | None
    context: str
    apt: tuple[str, ...]
    pip: tuple[str, ...]
    requirements: str | None
    index_url: str | None
    command: tuple[str, ...]
    script: str | None
    remarks: tuple[str, ...]

    @classmethod
    def of(cls, spec: JobSpec, more_remarks: Iterable[str] = ()) -> CodeImage:
        """The image of a job; ImageError where it has no base."""
        from k8sjob.rendering.manifest import container_argv  # noqa: PLC0415 - see the module

        image, script = image_on_base(spec, "push"), spec.run.script
        command, args = container_argv(spec)
        return cls(
            repository=image.repository,
            base=image.base or "",
            platform=image.platform,
            context=image.context,
            apt=image.apt,
            pip=image.pip,
            requirements=image.requirements,
            index_url=image.index_url,
            command=(*command, *args),
            script=script and script.removeprefix(f"{WORKDIR}/"),
            remarks=(
                *(remark for remark in spec.remarks if remark.startswith("image.")),
                *more_remarks,
            ),
        )

    @classmethod
    def remembered(cls, source: Source) -> CodeImage | None:
        """The image that was kept for a job.yaml; None: the file has to be read.

        As for a file that is read, no path leads out of the folder, and it has the script.

        Raises:
            ImageError: the .dockerignore cannot be read.
        """
        fields = cached_value(source.name, source.inputs)
        if fields is None:
            return None
        tuples: dict[str, Any] = {
            name: tuple(value) for name, value in fields.items() if isinstance(value, list)
        }
        image, context = cls(**{**fields, **tuples}), source.folder / fields["context"]
        script = image.script
        has_changed = (
            leads_out(source.folder, image.context)
            or leads_out(context, image.requirements or ".")
            or (script and (not has_script(context, script) or leaves_out(context, script)))
        )
        return None if has_changed else image

    def remember(self, source: Source) -> None:
        """Keep the image for a job.yaml."""
        keep_value(source.name, source.inputs, self._asdict())


class Source(NamedTuple):
    """A job.yaml, as it was at a moment.

    Attributes:
        folder: that its relative paths start from.
        name: under which its image is kept.
        inputs: a digest of all that the image follows from.
    """

    folder: Path
    name: str
    inputs: str

    @classmethod
    def of(cls, path: Path, torch: str) -> Source | None:
        """The source of a file, or of the job.yaml in a folder; None where it is none.

        torch: the version on this machine, which remarks name.
        """
        file = path / JOB_FILE if path.is_dir() else path
        # A script's job follows from the working folder, and a pipe is read only once.
        if file.suffix not in {".yaml", ".yml"} or not file.is_file():
            return None
        try:
            with file.open("rb") as opened:
                content = opened.read(2**21)  # one that is longer is no job.yaml
            inputs = (content, sys.version, torch, package_states())
        except OSError:
            return None
        place = os.path.realpath(file)
        digests = [hashlib.sha256(repr(part).encode()).hexdigest() for part in (place, inputs)]
        return cls(file.parent, f"job-{digests[0][:24]}.json", digests[1])


@cache
def package_states() -> str:
    """A digest of the states of k8sjob's own files: another one may make another image."""
    return hashlib.sha256(repr([*_states(_PACKAGE)]).encode()).hexdigest()


def _states(folder: str | Path) -> Iterator[tuple[str, int, int, int]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.endswith((".py", ".tsv", ".toml")):
                state = entry.stat()
                # Also the time of change: archives and installers may set the other one.
                yield entry.path, state.st_size, state.st_mtime_ns, state.st_ctime_ns
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _states(entry.path)
