"""The publication of a release: python packaging/publish.py [--dry-run], or make publish.

K8SJOB_REPOSITORY is the project's address (https://HOST/OWNER/k8sjob), K8SJOB_IMAGE the client's
image without a tag. The git remote is origin; uv publish reads its UV_PUBLISH_* variables.
Everything is built and checked before anything leaves this machine. After a failure, run the same
command again: it builds the same files, so what has been published stays as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
TAG = f"v{VERSION}"
BUILDER = next((name for name in ("docker", "podman", "buildah") if shutil.which(name)), "")


def problems() -> Iterator[str]:
    """The problems that prevent the publication of this version."""
    for variable in ("K8SJOB_REPOSITORY", "K8SJOB_IMAGE"):
        if not os.environ.get(variable):
            yield f"{variable} is not set"
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(VERSION)}\]", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no heading [{VERSION}], as in pyproject.toml: rename [Unreleased]"
    if _git("status", "--porcelain"):
        yield "the checkout has changes: commit them"
    if _git("tag", "--list", TAG) and _git("rev-parse", f"{TAG}^{{}}") != _git("rev-parse", "HEAD"):
        yield f"the tag {TAG} is at another commit: raise the version in pyproject.toml"
    if not BUILDER:
        yield "there is no docker, podman or buildah to build the image"


def main(*, dry_run: bool) -> None:
    """Build and check everything, then publish it."""
    if lines := list(problems()):
        sys.exit("\n".join(f"error: {line}" for line in lines))
    image = f"{os.environ['K8SJOB_IMAGE']}:{VERSION}"
    _run("make", "release")
    _run(BUILDER, "build", "-f", "packaging/Dockerfile", "-t", image, ".")
    packages = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("dist/k8sjob-*"))
    steps = [
        ("git", "push", "origin", TAG),
        (BUILDER, "push", image),
        ("uv", "publish", *packages),  # last: an index never takes a file back
    ]
    if not _git("tag", "--list", TAG):
        steps.insert(0, ("git", "tag", "-a", TAG, "-m", f"k8sjob {VERSION}"))
    for step in steps:
        if dry_run:
            sys.stdout.write(f"not run: {shlex.join(step)}\n")
        else:
            _run(*step)
    sys.stdout.write(
        f"Attach dist/krew/kubectl-k8sjob.tar.gz to the release {TAG} at "
        f"{os.environ['K8SJOB_REPOSITORY']}; dist/krew/k8sjob.yaml is its manifest for krew.\n"
    )


def _git(*argv: str) -> str:
    command = ["git", *argv]
    return subprocess.run(
        command, check=True, cwd=ROOT, text=True, stdout=subprocess.PIPE
    ).stdout.strip()


def _run(*argv: str) -> None:
    sys.stdout.write(f"$ {shlex.join(argv)}\n")
    sys.stdout.flush()
    if code := subprocess.run(argv, check=False, cwd=ROOT).returncode:
        sys.exit(f"error: {shlex.join(argv)}: exit code {code}; run the same command again")


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--dry-run"]):
        sys.exit("usage: python packaging/publish.py [--dry-run]")
    main(dry_run="--dry-run" in sys.argv)
