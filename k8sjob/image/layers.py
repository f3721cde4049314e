"""The two layers that are put on a base, the job's code and the packages that it installs.

The code lies at /app and k8sjob's runtime at /opt/k8sjob; packages lie at /opt/deps, found by the
base's Python after its own. Equal files give equal bytes, on any machine and at any time: nothing
but names, contents and the executable bit of files is in a layer. Of the base's manifest and config
as little as possible is changed; with the code on it, the container is the one that the rendered
Dockerfile gives: same user, folder, variables and command.
"""

from __future__ import annotations

import copy
import os
import re
import stat
import tarfile
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import DEPS_HOME, RUNTIME_HOME, WORKDIR
from k8sjob.errors import ImageError
from k8sjob.image.build_context import File, unreadable
from k8sjob.image.layer_tar import Layer, entry, write_layer
from k8sjob.image.registry.blob_content import BLOCK
from k8sjob.image.registry.manifest import digest_of, encode, environment, labels, table
from k8sjob.image.secrets import SecretScanner
from k8sjob.rendering.image_files import HOME, IMAGE_UID, IMAGE_USER, runtime_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from k8sjob.image.build_context import Context
    from k8sjob.image.inventory import Inventory
    from k8sjob.image.registry.manifest import BaseImage
    from k8sjob.image.secrets import Secret

_OPAQUE: Final = ".wh..wh..opq"
"""In a folder: nothing of it in the layers below is there any more."""
OPEN_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

BASE_NAME: Final = "org.opencontainers.image.base.name"
"""Label, and in OCI manifests annotation, with the base as the spec names it."""
BASE_DIGEST: Final = "org.opencontainers.image.base.digest"
"""The same with the digest of the base's manifest."""
_CREATED: Final = "1970-01-01T00:00:00Z"
DEPS_BIN: Final = f"{DEPS_HOME}/bin"
"""The commands of installed packages."""
_PTH_FILE: Final = "zz-k8sjob-deps.pth"
"""In the last of the base's own folders of packages, so that nothing of the base is shadowed."""
_PTH_TEXT: Final = f"import site; site.addsitedir({DEPS_HOME!r})\n".encode()
_LEFT_OUT: Final = frozenset({"__pycache__", ".lock", "uv_cache.json", "direct_url.json"})
"""Files about the machine that unpacked the packages."""
_RECORDED: Final = re.compile(
    rb"^[^\n]*/(?:uv_cache|direct_url)\.json,[^\n]*\n|^(bin/[^\n,]*),[^\n]*$", re.MULTILINE
)
_SHEBANG: Final = re.compile(
    rb"#!(?=[^\n]*+\n)[^\n]*python[^\n]*\n|#!/bin/sh\n'''exec' [^\n]*\n' '''\n"
)
"""How a command names the Python that it was unpacked by."""


@dataclass(frozen=True, slots=True)
class CodeLayer(Layer):
    """The code, ready to be uploaded, with the contents that look like credentials."""

    findings: tuple[Secret, ...]


def pack_code(
    context: Context,
    *,
    alone: bool = False,
    progress: Callable[[int, int], object] = lambda _packed, _total: None,
) -> CodeLayer:
    """Make the layer with the code, to be closed by the caller.

    alone: hide what the layers below have at /app and /opt/k8sjob. `progress` is called with the
    bytes of code that are packed, and how many there are.

    Raises:
        ImageError: a file cannot be read or changes meanwhile, or there is no space for the layer.
    """
    findings: list[Secret] = []
    packed = 0

    def counted(file: File) -> Iterator[bytes]:
        nonlocal packed
        for block in _scanned(file, findings):
            packed += len(block)
            progress(packed, context.size)
            yield block

    def members() -> Iterator[tuple[tarfile.TarInfo, Iterable[bytes]]]:
        yield from _runtime_members(alone=alone)
        app = WORKDIR.strip("/")
        yield _folder(app, IMAGE_UID), ()
        if alone:
            yield entry(f"{app}/{_OPAQUE}", 0o644), ()
        for file in context.entries:
            has_content = stat.S_ISREG(file.state.st_mode)
            yield _member(f"{app}/{file.name}", file), counted(file) if has_content else ()

    layer = write_layer(members())
    return CodeLayer(layer.content, layer.diff_id, tuple(findings))


def find_secrets(context: Context) -> list[Secret]:
    """What looks like a credential in code that is not packed here."""
    findings: list[Secret] = []
    for file in context.entries:
        if stat.S_ISREG(file.state.st_mode):
            deque(_scanned(file, findings), 0)
    return findings


def _scanned(file: File, findings: list[Secret]) -> Iterator[bytes]:
    """The content of a file; at its end what looks like a credential in it is found."""
    scanner = SecretScanner(file.name)
    for block in _blocks(file):
        scanner.feed(block)
        yield block
    findings.extend(scanner.finish())


def _runtime_members(*, alone: bool) -> Iterator[tuple[tarfile.TarInfo, Iterable[bytes]]]:
    """The user's home, and k8sjob's own files, which are not scanned for credentials."""
    home, runtime = HOME.strip("/"), RUNTIME_HOME.strip("/")
    for folder, owner in ((home, IMAGE_UID), (runtime, 0)):
        yield _folder(folder.partition("/")[0]), ()
        yield _folder(folder, owner), ()
    if alone:
        yield entry(f"{runtime}/{_OPAQUE}", 0o644), ()
    folders = set()
    for name, path in runtime_files():
        folder = name.rpartition("/")[0]
        if folder not in folders:
            folders.add(folder)
            yield _folder(f"{runtime}/{folder}"), ()
        file = File(name, os.fsencode(path), path.stat())
        yield entry(f"{runtime}/{name}", 0o644, size=file.state.st_size), _blocks(file)


def _folder(name: str, owner: int = 0) -> tarfile.TarInfo:
    # A user whose number the cluster chooses, as OpenShift does, is in group 0.
    return entry(name, 0o775 if owner else 0o755, owner, kind=tarfile.DIRTYPE)


def _member(name: str, file: File, owner: int = IMAGE_UID) -> tarfile.TarInfo:
    if file.is_folder:
        return _folder(name, owner)
    if file.is_link:
        link = entry(name, 0o777, owner, kind=tarfile.SYMTYPE)
        link.linkname = _link_target(file)
        return link
    # The other bits depend on the umask of whoever has checked the code out.
    mode = 0o755 if file.state.st_mode & stat.S_IXUSR else 0o644
    return entry(name, mode, owner, size=file.state.st_size)


def _link_target(file: File) -> str:
    try:
        return os.readlink(file.path).decode()  # noqa: PTH115 - names are bytes
    except UnicodeDecodeError:
        raise ImageError(
            f"{file.name}: the link leads to a name that is not UTF-8, which an image needs;"
            " rename its target, or exclude it in .dockerignore"
        ) from None
    except OSError:
        raise _changed(file) from None


def _blocks(file: File) -> Iterator[bytes]:
    """The content of a file that must not change meanwhile."""
    remaining = file.state.st_size
    try:
        with open(os.open(file.path, OPEN_FLAGS), "rb", buffering=0) as opened:  # noqa: PTH123 - a descriptor
            while remaining > 0 and (block := opened.read(min(remaining, BLOCK))):
                remaining -= len(block)
                yield block
            # The header with the size is written already, so a file that changes cannot be packed
            # right.
            after = os.fstat(opened.fileno())
    except OSError as error:
        raise unreadable(file.path, error) from None
    if remaining or _version(after) != _version(file.state):
        raise _changed(file)


def _version(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _changed(file: File) -> ImageError:
    return ImageError(
        f"{file.name} changed while it was packed; push again when nothing writes to it, or exclude"
        " it in .dockerignore"
    )


def pack_packages(folder: Path, inventory: Inventory, *, zstd: bool = False) -> Layer:
    """Make the layer with packages as `pip install --target` unpacks them; see write_layer."""
    return write_layer(_package_members(folder, inventory), zstd=zstd)


def _package_members(
    folder: Path, inventory: Inventory
) -> Iterator[tuple[tarfile.TarInfo, Iterable[bytes]]]:
    home = DEPS_HOME.strip("/")
    yield _folder(home.partition("/")[0]), ()
    yield _folder(home), ()
    for file in _installed(os.fsencode(folder), ""):
        member = _member(f"{home}/{file.name}", file, 0)
        if file.is_folder:
            yield member, ()
        elif (data := _rewritten(file, inventory.python)) is not None:
            member.size = len(data)
            yield member, (data,)
        else:
            yield member, _blocks(file)
    # A .pth file adds /opt/deps after the base's own packages, in any interpreter of the base.
    yield entry(f"{inventory.site}/{_PTH_FILE}", 0o644, size=len(_PTH_TEXT)), (_PTH_TEXT,)


def _installed(folder: bytes, base: str) -> Iterator[File]:
    """Folders and files, sorted by their names; each folder before what is in it."""
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda file: file.name)
    for file in entries:
        if os.fsdecode(file.name) in _LEFT_OUT:
            continue
        try:
            name = base + file.name.decode()
        except UnicodeDecodeError:
            raise ImageError(
                f"{file.name!r}: a package has a name that is not UTF-8, which an image needs;"
                " leave it out, or use --builder buildah"
            ) from None
        # uv may be set up to link to the files in its cache
        yield File(name, os.path.realpath(file.path), file.stat())
        if file.is_dir():
            yield from _installed(file.path, f"{name}/")


def _rewritten(file: File, python: str) -> bytes | None:
    """A list of files, or a script for the base's Python; None: the file is packed as it is."""
    if file.name.endswith(".dist-info/RECORD"):
        data = b"".join(_blocks(file))
        # RECORD lists files that are left out, and has the hashes of scripts that are rewritten
        # below.
        return _RECORDED.sub(lambda row: row[1] + b",," if row[1] else b"", data)
    # Scripts name the Python of this machine.
    if file.name.startswith("bin/") and next(_blocks(file), b"").startswith(b"#!"):
        data = b"".join(_blocks(file))
        shebang = _SHEBANG.match(data)
        return f"#!{python}\n".encode() + data[shebang.end() :] if shebang else data
    return None


@dataclass(frozen=True, slots=True)
class Appended:
    """The image above, as its registry is to hold it: OCI's where a layer needs that."""

    manifest: bytes
    media_type: str
    config: bytes

    @property
    def digest(self) -> str:
        """The digest of the manifest."""
        return digest_of(self.manifest)


def append_code(base: BaseImage, layer: Layer, command: Sequence[str]) -> Appended:
    """Put the code on a base; a container of the image runs the command.

    A layer cannot add a line to the base's /etc/passwd without reading all of the base, so the name
    that torch looks up is in a variable. ImageError: the base's config does not fit its manifest.
    """
    variables = environment(base.config)
    paths = [RUNTIME_HOME, WORKDIR, *variables.get("PYTHONPATH", "").split(":")]
    variables["PYTHONPATH"] = ":".join(dict.fromkeys(path for path in paths if path))
    variables |= {"HOME": HOME, "USER": IMAGE_USER}
    user = f"{IMAGE_UID}:{IMAGE_UID}"
    run = {"WorkingDir": WORKDIR, "User": user, "Cmd": [*command]}
    return _append(base, [layer], variables, run, "k8sjob push")


def append_packages(
    base: BaseImage, layers: Sequence[Layer], variables: Mapping[str, str]
) -> Appended:
    """Put on a base what the code needs, the lowest layer first; nothing else about it changes.

    The variables replace those of the base. ImageError: its config does not fit its manifest.
    """
    return _append(base, layers, environment(base.config) | dict(variables), {}, "k8sjob build")


def _append(
    base: BaseImage,
    layers: Sequence[Layer],
    variables: Mapping[str, str],
    run: Mapping[str, Any],
    created_by: str,
) -> Appended:
    origin = {BASE_NAME: str(base.reference), BASE_DIGEST: base.manifest.digest}
    config = copy.deepcopy(base.config)
    config["rootfs"]["diff_ids"] = [*base.diff_ids, *(layer.diff_id for layer in layers)]
    config["created"] = _CREATED
    config.pop("container", None)
    config.pop("container_config", None)  # how an old docker has built the base
    # The entries of a history belong to the layers, one to each; without a history none is begun.
    if isinstance(config.get("history"), list):
        config["history"] += [{"created": _CREATED, "created_by": created_by} for _ in layers]
    config["config"] = {
        **table(base.config, "config"),
        "Env": [f"{name}={value}" for name, value in variables.items()],
        **run,
        "Labels": labels(base.config) | origin,
    }
    raw = encode(config)
    # Docker's manifests cannot express zstd; otherwise the base's media types stay as they are.
    below = base.manifest.as_oci() if any(layer.zstd for layer in layers) else base.manifest
    content = copy.deepcopy(below.content)
    content["config"] |= {"digest": digest_of(raw), "size": len(raw)}
    content["config"].pop("data", None)  # the base's config itself, which some put in
    content["layers"] += [
        {
            "mediaType": below.layer_type(zstd=layer.zstd),
            "digest": layer.content.digest,
            "size": layer.content.size,
        }
        for layer in layers
    ]
    if below.is_oci:
        content["annotations"] = table(content, "annotations") | origin
    return Appended(encode(content), below.media_type, raw)
