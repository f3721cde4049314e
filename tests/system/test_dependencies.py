"""What a job installs, by the base's own pip from an index that wants a password."""

import gzip
import json
import os
import shutil

import pytest
from indexes import serving
from registries import Registry, job
from wheelhouse import wheel

from k8sjob.image.build import build
from k8sjob.image.push import push
from k8sjob.image.registry.credentials import Keyring

pytestmark = pytest.mark.system

MAIN = "import json, torch, tinylib\nprint(json.dumps([tinylib.version, torch.__file__]))\n"


@pytest.fixture
def index(tmp_path):
    wheel(tmp_path / "wheels", "tinylib", "1.2")
    with serving(tmp_path / "wheels") as address:
        yield address


@pytest.fixture
def registry(buildah, tmp_path):
    registry = Registry(tmp_path / "registry")
    yield registry
    registry.stop()
    shutil.rmtree(registry.folder)  # the base is large


@pytest.fixture
def storage_of(buildah, tmp_path, monkeypatch):
    """Builders use the storage that has the base already."""
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(buildah.storage_conf(tmp_path)))


@pytest.fixture
def settings(index, monkeypatch):
    """This user's index is that one."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", index)
    # It listens on loopback, of which a build in a network of its own has another one.
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")


@pytest.fixture
def spec(buildah, base_image, registry, code):
    buildah.push(base_image, f"{registry.host}/base:1")
    return job(f"{registry.host}/team/app", f"{registry.host}/base:1", pip=["tinylib"])


@pytest.fixture
def code(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/main.py").write_text(MAIN)
    return tmp_path / "code"


@pytest.mark.usefixtures("settings", "storage_of")
def test_a_package_is_installed_and_the_code_put_on_it(buildah, registry, spec, code):
    keyring, said = Keyring({}), []
    built = build(spec, code, builder="buildah", cached=False, keyring=keyring, say=said.append)
    try:
        assert any("Successfully installed tinylib-1.2" in line for line in said)
        assert "very-secret" not in "\n".join(said)
        done = push(spec, code, keyring=keyring)
        assert done.base == built.reference
        check_layers(registry, built.base, done.reference)
        version, torch = output(buildah, done.reference)
        assert version == "1.2"
        assert torch.startswith("/usr/lib/python3/")
    finally:
        buildah("rmi", f"localhost/k8sjob-{built.tag}")


def check_layers(registry, base, image):
    """The base is as it was, and nothing upon it knows the password."""
    below, manifest = (read(registry, reference) for reference in (base, image))
    count = len(below["layers"])
    assert manifest["layers"][:count] == below["layers"]
    for part in (manifest["config"], *manifest["layers"][count:]):
        blob = registry.get(f"/v2/team/app/blobs/{part['digest']}")
        raw = gzip.decompress(blob) if blob.startswith(b"\x1f\x8b") else blob
        assert len(raw) > 100
        assert b"very-secret" not in raw


def read(registry, reference):
    repository, _, digest = reference.removeprefix(f"{registry.host}/").partition("@")
    accepted = "application/vnd.oci.image.manifest.v1+json"
    return json.loads(registry.get(f"/v2/{repository}/manifests/{digest}", accepted))


def output(buildah, reference):
    """What the image's command prints last."""
    name = buildah("from", "--tls-verify=false", reference)
    try:
        said = buildah("run", "--isolation", "chroot", name, "--", "python", "main.py")
    finally:
        buildah("rm", name)
        buildah("rmi", reference)
    return json.loads(said.splitlines()[-1])
