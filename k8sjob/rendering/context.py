"""The folder that an image is built from: `docker build DIR` and `buildah bud DIR` need no more.

Beside the user's files stand the Dockerfile, a .dockerignore, the manifest, and `.k8sjob/` with the
part of k8sjob that runs in the containers (standard library and torch alone).
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.contract import WORKDIR
from k8sjob.errors import ImageError, Problem, SpecError
from k8sjob.rendering.dockerfile import (
    HISTORY,
    PRIVATE_FILES,
    RUNTIME_SOURCE,
    dockerfile,
    dockerignore,
)
from k8sjob.rendering.ignore import Ignore, own_patterns
from k8sjob.rendering.manifest import render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.spec import JobSpec

__all__ = ["COPY_MARK", "MADE_HERE", "OWN_IGNORE", "check_script", "runtime_files", "write_context"]

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_MARK: Final = "# Rendered by k8sjob"
_MANIFEST, _DOCKERFILE, OWN_IGNORE = "pytorchjob.yaml", "Dockerfile", ".dockerignore"
MADE_HERE: Final = frozenset({RUNTIME_SOURCE, _MANIFEST, _DOCKERFILE, OWN_IGNORE})
"""Names at the top of a context that are not the user's code."""
COPY_MARK: Final = f"{RUNTIME_SOURCE}/COPY"
"""A file that is in copies of a context alone."""
_COPY_TEXT: Final = "This folder is a copy. `k8sjob render -d` empties it and makes it anew.\n"


def write_context(
    spec: JobSpec, source: Path, target: Path, *, image: str | None = None
) -> list[Path]:
    """Write the manifest, and what the image is built from, into a folder.

    A target other than the context itself becomes a copy of it, without what its .dockerignore
    leaves out and what often holds credentials; it is emptied first where an earlier call has made
    it. For an image that is used as it is there is the manifest alone. No link is followed.

    Args:
        spec: the job.
        source: the build context: the spec's `image.context`, from where its job.yaml lies.
        target: the folder to write, made where it is missing; may be `source`.
        image: as for render.

    Returns:
        The files that were rendered, as paths under target; not those that were copied.

    Raises:
        ImageError: a file that k8sjob has not written would be lost, or the source is no folder.
    """
    rendered = {_MANIFEST: render(spec, image)}
    if not spec.builds_image:
        return _write(rendered, target)
    rendered[_DOCKERFILE] = dockerfile(spec)
    if not source.is_dir():
        raise ImageError(f"image.context: {source} is not a folder; name the one with your code")
    own = source / OWN_IGNORE
    theirs = own_patterns(own)
    kept = Ignore(theirs or "")  # here, so that an error names the line of their file
    patterns = dockerignore() if theirs is None else f"{HISTORY}{PRIVATE_FILES}\n{theirs}"
    if target.resolve() == source.resolve():
        _refuse_foreign(rendered, target)
        if theirs is None:
            rendered[OWN_IGNORE] = patterns
        else:
            _refuse_hidden_runtime(own, kept)
            _refuse_private(own, kept, Ignore(patterns))
        _copy_runtime(target / RUNTIME_SOURCE)
    else:
        _copy(source, target, Ignore(patterns))
        # Taken back in, in case a pattern of the user's leaves out all names with a dot.
        rendered[OWN_IGNORE] = f"{patterns}\n!{RUNTIME_SOURCE}\n"
        _copy_runtime(target / RUNTIME_SOURCE)
        (target / COPY_MARK).write_text(_COPY_TEXT, encoding="utf-8")
    return _write(rendered, target)


def check_script(spec: JobSpec, folder: Path, *, here: bool = False) -> None:
    """Make sure that the replicas have the script.

    Args:
        spec: the job; in a cluster, an image that is used as it is may have any script.
        folder: what `image.context` starts from.
        here: the job is to run on this machine, where each replica has a copy of the context.

    Raises:
        SpecError: the script is not in the context, or is left out of the image.
    """
    script = spec.run.script
    if script is None or not (here or spec.builds_image):
        return
    shown = "." if isinstance(spec.image, str) else spec.image.context
    context, name = folder / shown, script.removeprefix(f"{WORKDIR}/")
    if not spec.builds_image and name.startswith("/"):
        return
    if not ((context / name).is_file() or (context / name / "__main__.py").is_file()):
        message = (
            f"{script!r} is not in the context {shown!r}, of which the image is made; write a path"
            " inside it, or set image.context"
        )
        if not spec.builds_image:
            message = (
                f"{script!r} is not in {context.absolute()}, which stands for {WORKDIR} of the"
                " image on this machine; correct the path"
            )
        raise SpecError([Problem("run.script", message)])
    own = context / OWN_IGNORE
    patterns = own_patterns(own)
    if Ignore(dockerignore() if patterns is None else patterns)(name):
        message = f"{script!r} is left out of the image by {own}; add a last line '!{name}' to it"
        raise SpecError([Problem("run.script", message)])


def _write(files: dict[str, str], target: Path) -> list[Path]:
    _refuse_foreign(files, target)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(target / name, flags, 0o666), "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            file.write(text)
    return [target / name for name in files]


def _refuse_foreign(names: dict[str, str], target: Path) -> None:
    """A Dockerfile of the user's own is not k8sjob's to replace, nor what a link leads to."""
    for name in (*names, RUNTIME_SOURCE):
        path = target / name
        if path.is_symlink():
            raise ImageError(
                f"{path} is a symbolic link, and what it leads to would be changed; remove it, or"
                " render into another folder"
            )
        if name == RUNTIME_SOURCE:
            continue
        if name != OWN_IGNORE and path.exists() and not _is_ours(path):
            raise ImageError(
                f"{path} was not written by k8sjob and would be lost; move it away, or render into"
                " another folder"
            )


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK.encode()


def _refuse_hidden_runtime(path: Path, ignore: Ignore) -> None:
    if ignore(f"{RUNTIME_SOURCE}/k8sjob/__init__.py"):
        raise ImageError(
            f"{path} leaves out {RUNTIME_SOURCE}, which the image needs; add a last line"
            f" '!{RUNTIME_SOURCE}'"
        )


def _refuse_private(path: Path, theirs: Ignore, all_patterns: Ignore) -> None:
    """A build in the user's own folder follows their .dockerignore alone."""
    shown = (name for name in theirs.walk(path.parent) if all_patterns(name))
    if names := list(itertools.islice(shown, 3)):
        raise ImageError(
            f"{path} lets files into the image that often hold credentials: {', '.join(names)};"
            " name them there, or with '!' in front if the image needs them"
        )


def _copy(source: Path, target: Path, ignore: Ignore) -> None:
    """Copy the context; links stay links, as docker takes them."""
    if target.is_symlink():
        raise ImageError(f"{target} is a symbolic link; name the folder itself")
    if target.exists() and any(target.iterdir()):
        if not (target / COPY_MARK).is_file():
            raise ImageError(
                f"{target} has files that k8sjob has not written; name a new or an empty folder"
            )
        shutil.rmtree(target)
    inside = target.resolve()  # a target inside the context must not contain itself
    names = [name for name in ignore.walk(source) if not _lies_in(source / name, inside)]
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if name.split("/")[0] not in MADE_HERE:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name, follow_symlinks=False)


def _lies_in(path: Path, folder: Path) -> bool:
    return path.parent.resolve().is_relative_to(folder)


def _copy_runtime(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    for name, file in runtime_files():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        copy.chmod(0o644)  # whatever the umask: they are root's in the image, and read by others
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    (target / ".gitignore").write_text("*\n", encoding="utf-8")


def runtime_files() -> Iterator[tuple[str, Path]]:
    """What is to lie at RUNTIME_HOME: names there and files here, in a fixed order.

    These parts of k8sjob need torch and the standard library alone.
    """
    shared = (_PACKAGE / name for name in ("__init__.py", "compat.py", "contract.py"))
    for file in (*shared, *sorted((_PACKAGE / "runtime").rglob("*.py"))):
        yield f"{_PACKAGE.name}/{file.relative_to(_PACKAGE).as_posix()}", file
