"""docker buildx: BuildKit, here or elsewhere; it pushes what it has built itself."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from k8sjob.image.builders.child import answers, run
from k8sjob.image.builders.recipe import written

if TYPE_CHECKING:
    from k8sjob.image.builders.recipe import Recipe
    from k8sjob.image.dependencies import Dependencies, Order

__all__ = ["build_argv", "make", "missing"]


def missing(_wanted: Dependencies) -> str | None:
    """Why docker cannot build here."""
    if shutil.which("docker") is None:
        return "docker is not on PATH"
    if not answers(["docker", "buildx", "version"]):
        return "docker has no buildx; install its package docker-buildx-plugin, or docker-buildx"
    if not answers(["docker", "buildx", "inspect"]):
        return "docker buildx reaches no builder; start docker, or see: docker buildx ls"
    return None


def make(order: Order) -> None:
    """Build and push an image."""
    with written(order) as recipe:
        run(build_argv(order, recipe), order.say)


def build_argv(order: Order, recipe: Recipe) -> list[str]:
    """The command that builds and pushes an image; its tag is written when all of it is there."""
    output = f"type=image,name={order.target.reference},push=true"
    if order.target.session.is_plain:
        output += ",registry.insecure=true"
    return [
        "docker",
        "buildx",
        "build",
        "--progress=plain",
        "--provenance=false",  # or the tag would be of an index with a date in it
        *([] if order.cached else ["--no-cache"]),
        f"--platform={order.base.platform}",
        *recipe.flags,
        f"--output={output}",
        str(recipe.context),
    ]
