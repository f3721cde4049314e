"""Dependency images by a real builder, into a real registry.

The base is a shell and a `python` that notes what pip was asked for; real packages are installed in
tests/cluster.
"""

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from registries import Layout, read_image

from k8sjob.errors import ImageError
from k8sjob.image.builders import BUILDERS
from k8sjob.image.builders.containers import exported
from k8sjob.image.dependencies import Dependencies

pytestmark = pytest.mark.system
REGISTRIES = ("docker",)  # builders need a Debian as well

PROGRAMS = ("sh", "grep", "mkdir", "chmod", "chown", "cat", "sleep")
PIP = """#!/bin/sh
# Notes what it is asked for, and fails or waits for names that say so.
for last; do :; done
case "$*" in
  *no-such-package*) echo "ERROR: No matching distribution found for no-such-package"; exit 1;;
  *slow-package*) echo "waiting"; exec sleep 4807;;
esac
[ -f "$last" ] && cat "$last" >> /installed
echo "$*" >> /installed
[ -s /run/k8sjob/pip.conf ] && echo "a pip.conf is there"
echo "the certificates are at $PIP_CERT"
"""


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    """Where buildah keeps its images, away from the machine's."""
    if os.geteuid() != 0 or shutil.which("buildah") is None:
        pytest.skip("building images needs root, and on Debian: apt install buildah")
    folder = tmp_path_factory.mktemp("storage")
    conf = folder / "storage.conf"
    where = f'graphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    conf.write_text(f'[storage]\ndriver = "vfs"\n{where}')
    return conf


@pytest.fixture
def storage_of(storage, monkeypatch):
    """Builders started by a test use that storage."""
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(storage))


def buildah(storage, *args):
    env = os.environ | {"CONTAINERS_STORAGE_CONF": str(storage)}
    argv = ["buildah", *map(str, args)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def base(registry, storage, tmp_path_factory):
    """A root file system that is just large enough for a build, in the registry."""
    root = tmp_path_factory.mktemp("root")
    for folder in ("bin", "etc", "tmp", "root"):
        (root / folder).mkdir()
    for program in PROGRAMS:
        file = Path(shutil.which(program)).resolve()
        needed = subprocess.run(["ldd", file], capture_output=True, text=True, check=False).stdout
        for library in [word for word in needed.split() if word.startswith("/")]:
            target = root / library.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
        shutil.copy(file, root / "bin" / program)
    (root / "bin/python").write_text(PIP)
    (root / "bin/python").chmod(0o755)
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    name, reference = buildah(storage, "from", "scratch"), f"{registry.host}/build/base:1"
    buildah(storage, "copy", name, root, "/")
    buildah(storage, "config", "--env", "PATH=/bin", "--env", "PYTHONPATH=/base", name)
    buildah(storage, "commit", "--rm", "-q", name, "localhost/tiny")
    buildah(storage, "push", "-q", "--tls-verify=false", "localhost/tiny", f"docker://{reference}")
    return reference


@pytest.fixture
def built(registry, base, build_there, storage_of):
    """Builds, and gives what was made and what was said."""

    def call(repository, *, builder="buildah", at=registry, image=None, **options):
        image = image or {"pip": ["tqdm"]}
        done, lines = build_there(
            f"{at.host}/{repository}", base, image, builder=builder, **options
        )
        return done, "\n".join(lines)

    return call


def test_what_a_job_installs_is_built_once(registry, base, built, code, pushed):
    (code / "requirements.txt").write_text("einops\n")
    image = {"pip": ["tqdm"], "requirements": "requirements.txt"}
    first, detail = built("build/once", image=image)
    assert "STEP 1" in detail
    assert "the certificates are at /run/k8sjob/ca.crt" in detail
    assert registry.tags("build/once") == [first.tag]
    manifest, config, layers = read_image(first.reference)
    below, base_config, _ = read_image(base)
    assert manifest["layers"][: len(below["layers"])] == below["layers"]
    assert config["config"]["Env"] == base_config["config"]["Env"]
    installed = [layer["installed"].decode() for layer in layers if "installed" in layer]
    assert "tqdm" in installed[0]
    assert "einops" in installed[-1]
    again, detail = built("build/once", image=image)
    assert (again.reference, again.builder, detail) == (first.reference, None, "")
    done = pushed(f"{registry.host}/build/once", base, code, image=image)
    assert done.base == first.reference
    _, config, layers = read_image(done.reference)
    assert [layer["app/main.py"] for layer in layers if "app/main.py" in layer] != []
    assert "PYTHONPATH=/opt/k8sjob:/app:/base" in config["config"]["Env"]
    (code / "requirements.txt").write_text("einops\nrich\n")
    with pytest.raises(ImageError, match=r"2 lines has to be installed, .*build it with `k8sjob b"):
        pushed(f"{registry.host}/build/once", base, code, image=image)


@pytest.mark.parametrize("name", ["podman", "buildx"])
def test_other_builders_build_the_same(registry, base, built, name):
    if why := BUILDERS[name].missing(Dependencies()):
        pytest.skip(why)
    first, detail = built(f"build/{name}", builder=name)
    assert "the certificates are at /run/k8sjob/ca.crt" in detail
    assert (first.builder, registry.tags(f"build/{name}")) == (name, [first.tag])
    manifest, config, layers = read_image(first.reference)
    below, base_config, _ = read_image(base)
    assert config["rootfs"]["diff_ids"][:1] == base_config["rootfs"]["diff_ids"]
    assert len(manifest["layers"]) > len(below["layers"])
    assert config["config"]["Env"] == base_config["config"]["Env"]
    assert any("tqdm" in layer["installed"].decode() for layer in layers if "installed" in layer)
    assert not any("run/k8sjob/ca.crt" in layer and layer["run/k8sjob/ca.crt"] for layer in layers)
    assert built(f"build/{name}", builder=name)[0].builder is None  # it is found
    with pytest.raises(ImageError, match=r"no-such-package"):
        built(f"build/{name}", builder=name, image={"pip": ["no-such-package"]})
    assert registry.tags(f"build/{name}") == [first.tag]


def test_a_layer_like_one_of_the_base_is_written_all_the_same(storage, storage_of, tmp_path):
    layout = Layout(tmp_path / "twice")
    layout.index([layout.image([{"same": b"x"}, {"same": b"x"}, {"other": b"y"}])])
    name = buildah(storage, "pull", "-q", f"oci:{layout.folder}")
    config = json.loads(buildah(storage, "inspect", "--type", "image", name))["OCIv1"]
    first, again, other = config["rootfs"]["diff_ids"]
    below = SimpleNamespace(diff_ids=[first], reference="base")
    with ExitStack() as opened:
        order = SimpleNamespace(base=below, zstd=False)
        layers = exported("buildah", order, tmp_path / "out", name, opened)
        assert [layer.diff_id for layer in layers] == [again, other] == [first, other]
        for layer in layers:
            raw = gzip.decompress(b"".join(layer.content.blocks()))
            assert f"sha256:{hashlib.sha256(raw).hexdigest()}" == layer.diff_id


def test_layers_are_compressed_by_zstd_on_request(registry, built):
    done, _ = built("build/zstd", zstd=True)
    path = f"/v2/build/zstd/manifests/{done.tag}"
    manifest = json.loads(registry.get(path, "application/vnd.oci.image.manifest.v1+json"))
    kinds = [layer["mediaType"].rpartition("+")[2] for layer in manifest["layers"]]
    assert kinds[0] == "gzip"
    assert set(kinds[1:]) == {"zstd"}


def test_no_cache_builds_what_is_there_and_a_base_may_be_elsewhere(start_registry, built):
    other = start_registry()
    first, _ = built("build/anew", at=other)
    assert len(read_image(first.reference)[2]) > 1
    again, detail = built("build/anew", at=other, cached=False)
    assert (again.builder, again.tag) == ("buildah", first.tag)
    assert "Using cache" not in detail
    assert other.tags("build/anew") == [first.tag]


def test_nothing_to_install_is_the_base(registry, base, built):
    done, detail = built("build/nothing", image={"index_url": "https://packages.internal/simple"})
    assert (done.tag, done.builder, detail) == (None, None, "")
    assert done.reference == done.base == f"{base.rpartition(':')[0]}@{done.base.split('@')[1]}"
    assert registry.tags("build/nothing") == []


def test_a_build_that_fails_tags_nothing(registry, storage, built):
    with pytest.raises(ImageError) as failed:
        built("build/fails", image={"pip": ["no-such-package"]})
    assert "buildah failed (exit code 1), and nothing was pushed:" in str(failed.value)
    assert "No matching distribution found for no-such-package" in str(failed.value)
    assert registry.tags("build/fails") == []
    assert buildah(storage, "containers", "-q") == ""


def test_a_registry_that_refuses_does_so_before_the_build(readonly, base, built):
    detail = []
    with pytest.raises(ImageError, match="returned 405; it does not accept uploads"):
        built("build/refused", at=readonly, progress=lambda *_: detail.append(_))
    assert detail == []


def test_credentials_of_an_index_are_in_no_layer(built, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://somebody:very-secret@packages.internal/simple")
    done, detail = built("build/secret", image={"pip": ["secret-index"]})
    assert "a pip.conf is there" in detail
    manifest, config, layers = read_image(done.reference)
    contents = [content for layer in layers for content in layer.values() if content]
    assert not any(b"very-secret" in content for content in contents)
    assert "very-secret" not in f"{manifest} {config}"
    assert not [name for layer in layers for name in layer if "run/k8sjob/" in name and layer[name]]


@pytest.fixture
def job_file(registry, base, write_job):
    def write(repository, more="pip: [tqdm]", onto=base):
        return write_job(f"{registry.host}/{repository}", onto, f", {more}")

    return write


def test_the_command(registry, k8sjob, job_file, storage_of):
    file = job_file("build/command")
    would = k8sjob("build", file, "--builder", "buildah", "--dry-run")
    assert (would.returncode, would.stdout) == (0, "")
    assert "with buildah: pip: tqdm" in would.stderr
    assert registry.tags("build/command") == []
    done = k8sjob("build", file, "--builder", "buildah")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{registry.host}/build/command@sha256:")
    assert "built with buildah: deps-" in done.stderr
    again = k8sjob("build", file)  # whichever would build it
    assert again.stdout == done.stdout
    assert "already exists, for linux/amd64: pip: tqdm" in again.stderr
    code = k8sjob("push", file, "--build")
    assert code.returncode == 0, code.stderr
    assert "already exists" in code.stderr
    assert "on " + done.stdout.strip() in code.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_an_interrupted_build_leaves_nothing(registry, job_file, storage, tmp_path, number):
    file = job_file("build/stopped", "pip: [slow-package]")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {"CONTAINERS_STORAGE_CONF": str(storage), "TMPDIR": str(temporary)}
    # Whoever started these tests may ignore signals (nohup does), and children would, too.
    argv = ["env", "--default-signal", sys.executable, "-m", "k8sjob", "build", str(file)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*argv, "--builder", "buildah"], env=os.environ | env, **pipes)
    try:
        for line in process.stderr:
            if line.strip() == "waiting":
                break
        assert settles(sleeping)
        time.sleep(1)  # buildah watches for signals a moment after its step has begun
    finally:
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (128 + number, ""), err
    assert registry.tags("build/stopped") == []
    assert buildah(storage, "containers", "-q") == ""
    assert list(temporary.iterdir()) == []
    assert settles(lambda: not sleeping())
    assert str(storage.parent) not in Path("/proc/mounts").read_text()


def settles(holds):
    """Whether something comes to hold: a process is another one a moment later."""
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds()


def sleeping():
    """Whether the base's `pip` waits; processes in other tests' containers are seen, too."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (entry / "cmdline").read_bytes() == b"sleep\x004807\x00":
                return True
    return False


def test_each_platform_has_an_image_of_its_own(several, k8sjob, job_file):
    platforms = ("linux/amd64", "linux/arm64")
    flags = [f"--platform={name}" for name in platforms]
    file = job_file("build/platforms", onto=several("build/several:1", *platforms))
    would = k8sjob("build", file, "--builder=buildah", "--dry-run", *flags)
    assert (would.returncode, would.stdout) == (0, "")
    lines = [line for line in would.stderr.splitlines() if line.startswith("would build deps-")]
    assert ["linux/arm64" in line for line in lines] == [False, True]
    assert len({line.split()[2] for line in lines}) == 2
