"""The code of a job into the registry: packed, put on its base there, written under its digest.

Nothing of the base goes over this machine where the registry has it; a tag is written last, when
all that it stands for is there.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from k8sjob.checkout import commit_of
from k8sjob.contract import counted
from k8sjob.errors import ImageError
from k8sjob.image.appending import BASE_DIGEST, BASE_NAME, append_code
from k8sjob.image.build_context import read_context, shown_size
from k8sjob.image.code_image import CodeImage
from k8sjob.image.dependencies import Dependencies
from k8sjob.image.packed_before import PackedBefore
from k8sjob.image.registry.credentials import Keyring
from k8sjob.image.registry.http_client import HttpClient
from k8sjob.image.registry.manifest import ImageReference, labels
from k8sjob.image.registry.repository import Registries, Repository, read_base, transfer
from k8sjob.provenance import ImageLayer, Provenance
from k8sjob.threads import start

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.image.appending import Layer
    from k8sjob.image.registry.manifest import BaseImage, Manifest
    from k8sjob.image.registry.oci_layout import Layout
    from k8sjob.image.registry.repository import Blob
    from k8sjob.image.secrets import Secret
    from k8sjob.spec import JobSpec


class Pushed(NamedTuple):
    """The result of a push, or of a dry run.

    Attributes:
        reference: the image by its digest, for good.
        tag: under which the registry, or the folder, keeps it.
        base: the image below, by its digest.
        platform: os/architecture.
        files: number of files of the user's in the code layer, of code_size bytes.
        layer_size: bytes of the code layer as it is sent.
        blobs: the parts; empty if the image was there already (unchanged).
        private: files left out, since their names say that they hold credentials.
        findings: contents that look like credentials and are in the image all the same.
        origin: what the image is made of, for the job to carry.
    """

    reference: str
    digest: str
    tag: str
    base: str
    platform: str
    files: int
    code_size: int
    layer_size: int
    blobs: tuple[Blob, ...]
    unchanged: bool
    private: tuple[str, ...]
    findings: tuple[Secret, ...]
    origin: Provenance


def push(
    job: JobSpec | CodeImage,
    folder: str | Path = ".",
    *,
    onto: str | None = None,
    strict: bool = False,
    dry_run: bool = False,
    output: str | Path | None = None,
    say: Callable[[str], object] = lambda _line: None,
    packs: Callable[[str], object] = lambda _line: None,
    packing: Callable[[int, int], object] = lambda _packed, _total: None,
    progress: Callable[[int, int], object] = lambda _sent, _total: None,
    http: HttpClient | None = None,
    keyring: Keyring | None = None,
    reads_commit: bool = True,
) -> Pushed:
    """Put the job's code on its base, in the registry; equal code gives the same digest.

    Where the job installs something, the code is put on the image that `build` has made of that.

    Args:
        job: the job, whose image has a base, or the part of it that is pushed.
        folder: what its relative paths start from.
        onto: the image to put the code on, instead of the job's base: one with what the job
            installs. What it has at /app and /opt/k8sjob is hidden.
        strict: refuse contents that look like credentials.
        dry_run: read, and write nothing.
        output: a folder that the whole image is written to, as an OCI layout, instead of the
            registry.
        say: is called with what may not be meant, before anything is packed.
        packs: is called with what is packed, and from which folder, before that.
        packing: is called with the bytes of code that are packed, and how many there are.
        progress: is called with the bytes sent, and how many there are to send.
        http: closed at the end; None: one with the default retry policy.
        keyring: the user's credentials; None: those of docker and podman.
        reads_commit: whether the result names the commit of the code, for which git runs.

    Raises:
        ImageError: the code cannot be packed, what it needs is not built, or a registry refuses, or
            cannot be reached. There is no new tag then.
    """
    image = job if isinstance(job, CodeImage) else CodeImage.of(job)
    dependencies = Dependencies.of(image, Path(folder)) if onto is None else Dependencies()
    root = Path(folder) / image.context
    commit = start(lambda: commit_of(root)) if reads_commit else None
    before = PackedBefore(root, alone=onto is not None)
    context = read_context(root)
    size = f"{counted(context.files, 'file')} ({shown_size(context.size)})"
    packs(f"code: {size} of {root.resolve()}")
    if context.remark:
        say(context.remark)
    with ExitStack() as opened:
        http = opened.enter_context(closing(http or HttpClient()))
        registries = Registries(http, keyring or Keyring.load())
        actions = "pull" if dry_run or output else "pull,push"
        target = registries.repository(ImageReference.parse(image.repository), actions)
        place: Repository | Layout = target
        if output:
            from k8sjob.image.registry.oci_layout import Layout  # noqa: PLC0415 - few write a folder

            place = opened.enter_context(closing(Layout(Path(output), target.reference)))
        below = registries.repository(ImageReference.parse(onto or image.base), "pull")
        # The base is read while the code is packed.
        bases = start(lambda: _bases(below, target, image, dependencies))

        def pack() -> Layer:
            from k8sjob.image.layers import pack_code  # noqa: PLC0415 - for what has changed

            packed = pack_code(context, alone=onto is not None, progress=packing)
            before.remember(context, opened.enter_context(closing(packed)))
            return packed

        earlier = before.layer(context)
        layer = earlier or pack()
        # After the packing, in which the files are read once for both.
        if strict and layer.findings:
            lines = "\n".join(map(str, layer.findings))
            raise ImageError(
                f"{lines}\nthese look like credentials; remove them, or push without --strict"
            )
        base, bare = bases.result()
        if output:
            base = base._replace(manifest=base.manifest.as_oci())
        image_to_push = append_code(base, layer, image.command)
        unchanged = place.has(image_to_push.manifest, image_to_push.media_type)
        if earlier and not unchanged:  # its bytes are needed
            layer = pack()
            image_to_push = append_code(base, layer, image.command)
        tag = f"k8sjob-{image_to_push.digest.removeprefix('sha256:')[:12]}"
        blobs: tuple[Blob, ...] = ()
        if not unchanged:
            # The image with the dependencies lies in the job's own repository, so its layers are
            # there.
            source = target if dependencies else below
            parts = (base, [layer.content], image_to_push.config)
            blobs = transfer(place, source, *parts, progress=progress, dry_run=dry_run)
        # The tag last: it never names an image of which a part is missing.
        if not unchanged and not dry_run:
            place.put(image_to_push.manifest, image_to_push.media_type, tag)
    reference = target.reference.at(image_to_push.digest)
    return Pushed(
        reference=reference,
        digest=image_to_push.digest,
        tag=tag,
        base=base.pinned,
        platform=base.platform,
        files=context.files,
        code_size=context.size,
        layer_size=layer.content.size,
        blobs=blobs,
        unchanged=unchanged,
        private=context.private,
        findings=layer.findings,
        origin=Provenance(
            image=reference,
            base=_base_by_digest(base, onto) if bare is None else below.reference.at(bare.digest),
            onto=base.pinned,
            platform=base.platform,
            layers=(
                *_added(base, bare),
                ImageLayer("code", layer.content.digest, layer.content.size),
            ),
            installed=str(dependencies),
            files=context.files,
            commit=commit.result() if commit else "",
        ),
    )


def _bases(
    below: Repository, target: Repository, image: CodeImage, dependencies: Dependencies
) -> tuple[BaseImage, Manifest | None]:
    """Read the image that the code is added to; if that has dependencies, its base as well."""
    if not dependencies:
        return read_base(below, image.platform), None
    bare = below.image(image.platform)
    place = dependencies.place(target.reference, bare.digest)
    repository = Repository(target.client, place)
    if not repository.is_there():
        raise ImageError(
            f"image: {dependencies} has to be installed, and no image has it: there is no {place};"
            " build it with `k8sjob build`, or specify one that has it with --onto"
        )
    return read_base(repository, image.platform), bare


def _base_by_digest(base: BaseImage, onto: str | None) -> str:
    """The base by its digest: the spec's, or the one that the named image is labeled with."""
    if onto is None:
        return base.pinned
    base_labels = labels(base.config)
    name, digest = str(base_labels.get(BASE_NAME, "")), str(base_labels.get(BASE_DIGEST, ""))
    try:
        return ImageReference.parse(name).at(digest) if name and digest else ""
    except ImageError:
        return ""


def _added(base: BaseImage, bare: Manifest | None) -> list[ImageLayer]:
    """The layers that were installed on the base; none if a builder has rebuilt the base's."""
    under = {layer.digest for layer in bare.layers} if bare else set()
    over = {layer.digest for layer in base.manifest.layers}
    if not under or not under <= over:
        return []
    added = [layer for layer in base.manifest.layers if layer.digest not in under]
    return [ImageLayer("dependencies", layer.digest, layer.size) for layer in added]
