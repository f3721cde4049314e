"""Builders that run the base in containers: buildah, podman, and docker buildx.

buildx pushes what it has built itself. buildah and podman would compress the base's layers again,
and so send all of it; here the layers above the base are taken out of what they export, and the
base's own are mounted or copied as they are.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.environment import ISOLATION, api_server, variables
from k8sjob.errors import ImageError
from k8sjob.image.appending import Layer
from k8sjob.image.builders.pip_settings import write_secrets
from k8sjob.image.builders.process import BuilderError, run, succeeds
from k8sjob.image.registry.blob_content import FileContent
from k8sjob.image.registry.manifest import Manifest, read, read_object
from k8sjob.rendering.dockerfile import dependencies_dockerfile
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.image.dependencies import BuildRequest, Dependencies
    from k8sjob.image.registry.manifest import Descriptor

_CONTAINER_MARKS: Final = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")
"""Files that docker, podman and systemd (in WSL, too) put into containers."""
_STATUS: Final = Path("/proc/self/status")
_LOADS_MODULES: Final = 1 << 16
"""CAP_SYS_MODULE, which of containers only privileged ones have: others run in them."""
_OCI_RUNTIME: Final = re.compile(r"\b(?:crun|runc)\b")
_PROXIES: Final = ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "ftp_proxy")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The files that a builder reads, kept while it works: never the code.

    Attributes:
        folder: for what it gives back.
        context: with the Dockerfile and the requirements in it.
        secrets: files by the Dockerfile's names for them.
    """

    folder: Path
    context: Path
    secrets: dict[str, Path]

    @property
    def flags(self) -> list[str]:
        """The secrets as all builders take them, and the proxies: in no layer either."""
        # A secret is mounted for one RUN. A --build-arg without a value takes that of the variable
        # here.
        secrets = [f"id={name},src={path}" for name, path in self.secrets.items()]
        proxies = [name for name in variables() if name.lower() in _PROXIES]
        return [
            *(word for secret in secrets for word in ("--secret", secret)),
            *(word for name in sorted(proxies) for word in ("--build-arg", name)),
        ]


@contextmanager
def written(request: BuildRequest) -> Iterator[Recipe]:
    """The files for a build; they are removed afterwards."""
    with temporary_folder("build") as folder:
        context = folder / "context"
        context.mkdir()
        reference = request.base.reference
        # By the digest of one platform: the builder puts it on the same base as k8sjob has read. In
        # full, since podman asks for short names.
        base = f"{reference.registry}/{reference.repository}@{request.base.manifest.digest}"
        (context / "Dockerfile").write_text(dependencies_dockerfile(request.image, base))
        requirements = request.dependencies.requirements
        if request.image.requirements is not None and requirements is not None:
            file = context / request.image.requirements
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(requirements, encoding="utf-8")
        yield Recipe(folder, context, write_secrets(folder))


def buildx_missing(_dependencies: Dependencies) -> str | None:
    """Why docker cannot build here; None: it can."""
    if shutil.which("docker") is None:
        return "docker is not on PATH"
    if not succeeds(["docker", "buildx", "version"]):
        return "docker has no buildx; install its package docker-buildx-plugin, or docker-buildx"
    if not succeeds(["docker", "buildx", "inspect"]):
        return "docker buildx cannot reach a builder; start docker, or see: docker buildx ls"
    return None


def build_by_buildx(request: BuildRequest) -> None:
    """Build and push an image by docker buildx."""
    with written(request) as recipe:
        run(buildx_argv(request, recipe), request.say)


def buildx_argv(request: BuildRequest, recipe: Recipe) -> list[str]:
    """The command that builds and pushes an image; its tag is written when all of it is there."""
    output = f"type=image,name={request.target.reference},push=true"
    if request.target.client.is_plain:
        output += ",registry.insecure=true"
    return [
        *("docker", "buildx", "build"),
        "--progress=plain",
        "--provenance=false",  # or the tag would be of an index with a date in it
        *([] if request.cached else ["--no-cache"]),
        f"--platform={request.base.platform}",
        *recipe.flags,
        f"--output={output}",
        str(recipe.context),
    ]


def missing(program: str, _dependencies: Dependencies) -> str | None:
    """Why buildah or podman cannot build here; None: it can."""
    if shutil.which(program) is None:
        return f"{program} is not on PATH; on Debian and Ubuntu: apt install {program}"
    return None


def build_by(program: str, request: BuildRequest) -> None:
    """Build an image by buildah or podman, and push it."""
    name = f"localhost/k8sjob-{request.tag}"
    # In an unprivileged container the OCI runtime seldom works. In a privileged one it does, and
    # there a setup.py that leaves a mere chroot would reach the node's disks.
    chroot = ISOLATION not in variables() and is_container() and not is_privileged()
    if chroot:
        request.say(
            f"{program}: this is an unprivileged container, in which containers rarely work;"
            f" building with --isolation chroot, unless {ISOLATION} says otherwise"
        )
    with written(request) as recipe, ExitStack() as opened:
        try:
            run(buildah_argv(program, request, recipe, name, chroot=chroot), request.say)
        except BuilderError as failed:
            if _OCI_RUNTIME.search("\n".join(failed.lines)):
                raise ImageError(
                    f"{failed}\nif this machine runs no containers, and you trust the packages,"
                    f" whose code can leave a chroot: {ISOLATION}=chroot"
                ) from None
            raise
        request.push(exported(program, request, recipe.folder / "images", name, opened))


def is_container() -> bool:
    """Whether this is a container, or a pod of Kubernetes."""
    marks = map(Path, _CONTAINER_MARKS)
    return api_server() is not None or any(mark.exists() for mark in marks)


def is_privileged() -> bool:
    """Whether this may do what the machine's root may: then a step can leave a mere chroot."""
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text().splitlines()
        rights = next(line for line in lines if line.startswith("CapBnd:"))
        return bool(int(rights.split()[1], 16) & _LOADS_MODULES)
    return False


def buildah_argv(
    program: str, request: BuildRequest, recipe: Recipe, name: str, *, chroot: bool = False
) -> list[str]:
    """The command that builds an image under a name in the program's own storage."""
    named = variables()
    docker = Path(named.get("DOCKER_CONFIG", "")) / "config.json"
    # ~/.docker/config.json they find by themselves.
    logins = "DOCKER_CONFIG" in named and "REGISTRY_AUTH_FILE" not in named
    return [
        program,
        "bud" if program == "buildah" else "build",  # as older ones of either know it
        "--layers",
        "--force-rm",  # a build that fails or is stopped leaves no container behind
        *([] if request.cached else ["--no-cache"]),
        *(["--isolation", "chroot"] if chroot else []),
        *(["--authfile", str(docker)] if logins and docker.is_file() else []),
        *(["--tls-verify=false"] if request.below.client.is_plain else []),
        f"--platform={request.base.platform}",
        *recipe.flags,
        f"--tag={name}",
        str(recipe.context),
    ]


def exported(
    program: str, request: BuildRequest, folder: Path, name: str, opened: ExitStack
) -> list[Layer]:
    """The layers that were built on the base, open for reading until the stack is closed."""
    base = request.base
    below = len(base.diff_ids)
    flags = ["--compression-format=zstd"] if request.zstd else []
    # One that is the same as a layer of the base would be left out, too: then all are written.
    for number, left_out in enumerate((base.diff_ids, ())):
        layout = _Export(folder / str(number), left_out)
        target = f"oci:{layout.folder}:made"
        run([program, "push", "--quiet", *flags, name, target], lambda _line: None)
        manifest, diff_ids = layout.image(name)
        if diff_ids[:below] != base.diff_ids or len(diff_ids) != len(manifest.layers):
            raise ImageError(
                f"{program} has built {name} on something other than {base.reference}; build again"
                " with --no-cache, or with another --builder"
            )
        # An empty file that stands for a layer has the size 0.
        if all(descriptor.size for descriptor in manifest.layers[below:]):
            break
    types = [layer["mediaType"] for layer in manifest.content["layers"]]
    return [
        Layer(layout.content(descriptor, opened), diff_id, zstd=media_type.endswith("+zstd"))
        for descriptor, diff_id, media_type in zip(
            manifest.layers[below:], diff_ids[below:], types[below:], strict=True
        )
    ]


class _Export:
    """An OCI layout that an image is exported to."""

    def __init__(self, folder: Path, left_out: Iterable[str]) -> None:
        self.folder = folder
        blobs = folder / "blobs/sha256"
        blobs.mkdir(parents=True)
        for diff_id in left_out:
            # Taken for the layer, which is then not written: a base may have many gigabytes.
            (blobs / diff_id.removeprefix("sha256:")).touch()

    def image(self, name: str) -> tuple[Manifest, list[Any]]:
        """The image that is in it, and its layers' digests as archives."""
        index = json.loads((self.folder / "index.json").read_bytes())
        entry = index["manifests"][0]
        manifest = read(self._path(entry["digest"]).read_bytes(), entry["mediaType"], name)
        if not isinstance(manifest, Manifest):
            raise ImageError(f"{name} is for several platforms; choose one with --platform")
        config = read_object(self._path(manifest.config.digest).read_bytes(), name)
        return manifest, config["rootfs"]["diff_ids"]

    def content(self, descriptor: Descriptor, opened: ExitStack) -> FileContent:
        file = opened.enter_context(self._path(descriptor.digest).open("rb"))
        return FileContent(descriptor.digest, descriptor.size, file)

    def _path(self, digest: str) -> Path:
        return self.folder / "blobs" / digest.replace(":", "/")
