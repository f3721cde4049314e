"""Checks of what a job.yaml says beside its manifest: its script, image and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.checks.base_images import too_old
from k8sjob.checks.finding import message
from k8sjob.contract import closest
from k8sjob.errors import SpecError
from k8sjob.findings import Finding
from k8sjob.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.spec import JobSpec
    from k8sjob.yamldoc.reading import Document

RULES: Final = Rules["JobFile"]("manifest")


class JobFile(NamedTuple):
    """A valid job.yaml with its folder."""

    spec: JobSpec
    document: Document
    folder: Path

    def at(self, field: str, message: str) -> Finding:
        """A finding at a field."""
        line, column = self.document.place((field,), key=True)
        return Finding("", message, line=line, column=column)

    @property
    def context(self) -> Path:
        """The folder that the image is built from."""
        return self.folder / getattr(self.spec.image, "context", ".")

    @property
    def script(self) -> Path | None:
        """The script that the job starts, if it is in the context."""
        run = self.spec.run
        name = run.script or next((word for word in run.command or () if word.endswith(".py")), "")
        module = (run.module or "").replace(".", "/")
        name = module or name.removeprefix("/app/")
        names = [f"{module}.py" if module else name, f"{name}/__main__.py"] if name else []
        return next((file for name in names if (file := self.context / name).is_file()), None)


@RULES.error
def _script_missing(job: JobFile) -> Iterator[Finding]:
    """An image that is built from the context contains only what is in the context."""
    from k8sjob.rendering.dockerfile import check_script  # noqa: PLC0415 - with pydantic

    module = job.spec.run.module or ""
    try:
        if job.spec.builds_image:
            check_script(job.spec, job.folder)
    except SpecError as error:
        yield job.at("run", error.findings[0].text)
    else:
        # A module of another package may be installed in the image.
        has_package = module and (job.context / module.partition(".")[0]).is_dir()
        if job.spec.builds_image and has_package and not job.script:
            context = getattr(job.spec.image, "context", ".")
            yield job.at("run", message("module-missing", module=module, context=context))


@RULES.warning
def _script_not_here(job: JobFile) -> Iterator[Finding]:
    """The image may have the script; where a file is nearly called that, it is misspelt."""
    script = job.spec.run.script or ""
    path = job.folder / script
    if job.spec.builds_image or not script or script.startswith("/") or job.script:
        return
    if close := closest(path.name, (file.name for file in path.parent.glob("*.py"))):
        meant = PurePosixPath(script).with_name(close)
        yield job.at("run", message("script-not-here", script=script, meant=meant))


@RULES.error
def _image_too_old(job: JobFile) -> Iterator[Finding]:
    """The runtime of k8sjob, which starts the script, needs Python 3.11 and torch 2.6."""
    image = getattr(job.spec.image, "base", "") or job.spec.image_reference
    if job.spec.uses_agent and (why := too_old(image)):
        yield job.at("image", f"{image} has {why}; use a newer image")


@RULES.warning
def _checkpoint_not_shared(job: JobFile) -> Iterator[Finding]:
    """A pod that is created again may be on another node, where such a folder is empty."""
    spec = job.spec
    if spec.nnodes == 1:
        return
    for remark in spec.remarks:
        if remark.startswith("checkpoint.dir: "):
            yield job.at("checkpoint", remark)
    # Checkpoints of the script itself: it loads what it saves, in a folder that it names.
    script = job.script.read_text(errors="replace") if job.script and not spec.checkpoint else ""
    if "torch.save(" not in script or "torch.load(" not in script:
        return
    words = (*(spec.run.command or ()), *spec.run.args, *spec.run.env.values(), script)
    for volume in spec.volumes:
        kind = "an empty_dir" if volume.empty_dir else "a host_path" if volume.host_path else ""
        mount = re.compile(rf"{re.escape(volume.mount)}(?![\w-])")
        if kind and not volume.read_only and any(map(mount.search, words)):
            yield job.at("volumes", message("own-checkpoint", mount=volume.mount, kind=kind))
