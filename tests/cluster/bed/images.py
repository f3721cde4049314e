"""What every bed starts with: a registry and a node that have the base image already.

Pushing and unpacking a gigabyte takes half a minute, so it is done once, and each bed gets its own
copy by hard links. An image that is built upon the base travels by its own layers alone.
"""

import hashlib
import shutil
import subprocess

from baseimage import Buildah, cache_home, once

# What their owners write in place; all other files are replaced, or never touched again.
DATABASES = "containerd/*/*.db"
REPOSITORIES = "registry/docker/registry/v2/repositories"


def template(pause, fill):
    """The folder to start from, made by `fill(buildah, base image, folder)` where it must be."""
    buildah = Buildah()
    base = buildah.base_image()
    key = hashlib.sha256(base.encode() + pause.read_bytes()).hexdigest()[:12]
    folder = cache_home() / f"node-{key}"
    with once("node"):
        if not folder.exists():
            making = folder.with_suffix(".making")
            shutil.rmtree(making, ignore_errors=True)
            fill(buildah, base, making)
            making.rename(folder)
    return folder


def pause_image(buildah, program, tag):
    """An image of the one program that holds a pod's namespaces."""
    container = buildah("from", "scratch")
    try:
        buildah("copy", "--quiet", container, program, "/pause")
        buildah("config", "--entrypoint", '["/pause"]', container)
        buildah("commit", "--quiet", container, tag)
    finally:
        buildah("rm", container)
    return tag


def clone(source, target):
    """Copy a template by hard links, except for what is written in place."""
    subprocess.run(["cp", "-al", f"{source}/.", target], check=True)
    for database in source.glob(DATABASES):
        own = target / database.relative_to(source)
        own.unlink()
        shutil.copy2(database, own)
    if (source / REPOSITORIES).exists():
        shutil.rmtree(target / REPOSITORIES)
        shutil.copytree(source / REPOSITORIES, target / REPOSITORIES)
