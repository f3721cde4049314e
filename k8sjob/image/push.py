"""The code of a job into the registry: packed, put on its base there, written under its digest.

Nothing of the base goes over this machine where the registry has it; a tag is written last, when
all that it stands for is there.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k8sjob.errors import ImageError
from k8sjob.image.append import Base, append
from k8sjob.image.context import read_context
from k8sjob.image.credentials import Keyring
from k8sjob.image.delivery import Delivery
from k8sjob.image.layer import pack
from k8sjob.image.manifest import read_object
from k8sjob.image.parallel import begin
from k8sjob.image.reference import Reference
from k8sjob.image.repository import Repository
from k8sjob.image.session import Session
from k8sjob.image.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from k8sjob.image.credentials import Entry, Login
    from k8sjob.image.delivery import Blob
    from k8sjob.image.secrets import Finding
    from k8sjob.spec import Image, JobSpec

__all__ = ["Pushed", "push"]


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push has done, or would do.

    Attributes:
        reference: the image by its digest, for good.
        digest: of its manifest.
        tag: under which the registry keeps it.
        base: the image below, by its digest.
        platform: os/architecture.
        files: number of files of the user's in the code layer.
        code_size: their bytes.
        layer_size: bytes of the code layer as it is sent.
        blobs: the parts; empty where the image was there already.
        unchanged: the image was there already.
        private: files left out, since their names say that they hold credentials.
        findings: contents that look like credentials and are in the image all the same.
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
    findings: tuple[Finding, ...]


def push(
    spec: JobSpec,
    folder: str | Path = ".",
    *,
    onto: str | None = None,
    strict: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], object] = lambda _sent, _total: None,
    wire: Wire | None = None,
    keyring: Keyring | None = None,
) -> Pushed:
    """Put the job's code on its base, in the registry; equal code gives the same digest.

    Args:
        spec: the job; its image has a base.
        folder: what relative paths of the spec start from.
        onto: the image to put the code on, instead of the spec's base: one with what the spec
            installs. What it has at /app and /opt/k8sjob is hidden.
        strict: refuse contents that look like credentials.
        dry_run: read, and write nothing.
        progress: is called with the bytes sent, and how many there are to send.
        wire: how registries are spoken to; None: with the ordinary patience.
        keyring: the user's credentials; None: those of docker and podman.

    Raises:
        ImageError: the code cannot be packed, or a registry refuses, or cannot be reached. There is
            no new tag then.
    """
    image = _built(spec, onto)
    context = read_context(Path(folder) / image.context)
    with ExitStack() as opened:
        wire = opened.enter_context(closing(wire or Wire()))
        registries = _Registries(wire, keyring or Keyring.load())
        actions = "pull" if dry_run else "pull,push"
        target = registries.repository(Reference.parse(image.repository), actions)
        below = registries.repository(Reference.parse(onto or image.base or ""), "pull")
        fetched = begin(lambda: _base(below, image.platform))  # while the code is packed
        layer = opened.enter_context(closing(pack(context, alone=onto is not None)))
        if strict and layer.findings:
            raise ImageError(_refused(layer.findings))
        base: Base = fetched()
        made = append(base, layer, spec)
        tag = f"k8sjob-{made.digest.removeprefix('sha256:')[:12]}"
        unchanged = target.has(made.manifest, made.media_type)
        delivery = Delivery(target, below, progress, dry_run=dry_run)
        blobs = () if unchanged else delivery.blobs(base, made, layer)
        if not unchanged and not dry_run:
            target.put(made.manifest, made.media_type, tag)
    return Pushed(
        reference=target.reference.at(made.digest),
        digest=made.digest,
        tag=tag,
        base=below.reference.at(base.manifest.digest),
        platform=base.platform,
        files=context.files,
        code_size=context.size,
        layer_size=layer.content.size,
        blobs=blobs,
        unchanged=unchanged,
        private=context.private,
        findings=layer.findings,
    )


def _built(spec: JobSpec, onto: str | None) -> Image:
    """The image part of a spec whose code can be put on a base as it is."""
    image = spec.image
    if isinstance(image, str) or image.base is None:
        raise ImageError(
            f"image: {spec.image_reference!r} is used as it is, so there is nothing to push; write"
            " `image: {repository: ..., base: ...}` to put your code on a base"
        )
    for name in ("requirements", "apt", "pip"):
        value = getattr(image, name)
        if value and onto is None:
            shown = value if isinstance(value, str) else ", ".join(value)
            raise ImageError(
                f"image.{name}: {shown!r} has to be installed, for which an image must be built:"
                " build one with `k8sjob render -d build` and docker, podman or buildah, push it,"
                " and name it by --onto; code is then put on that"
            )
    return image


def _refused(findings: Iterable[Finding]) -> str:
    lines = "\n".join(str(finding) for finding in findings)
    return f"{lines}\nthese look like credentials; take them out, or push without --strict"


def _base(repository: Repository, platform: str | None) -> Base:
    manifest = repository.image(platform)
    config = read_object(repository.blob(manifest.config), str(repository.reference))
    base = Base(repository.reference, manifest, config)
    if platform and "/".join(platform.split("/")[:2]) != base.platform:
        raise ImageError(
            f"{base.reference} is for {base.platform}; image.platform says {platform}: take"
            " another base, or change it"
        )
    return base


class _Registries:
    """Sessions with the registries; one for all repositories that one login is good for."""

    def __init__(self, wire: Wire, keyring: Keyring) -> None:
        self._wire, self._keyring = wire, keyring
        self._sessions: dict[tuple[str, tuple[Entry, ...]], Session] = {}

    def repository(self, reference: Reference, actions: str) -> Repository:
        """A repository in which something is to be done."""
        entries = self._keyring.entries(reference)

        def login() -> Login | None:
            return next((login for entry in entries if (login := entry.login())), None)

        session = self._sessions.setdefault(
            (reference.endpoint, entries),
            Session(self._wire, reference.registry, reference.endpoint, login),
        )
        session.will(reference, actions)
        return Repository(session, reference)
