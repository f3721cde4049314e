"""What a job installs, built once and below the code, in the containers of a real cluster."""

import os

import pytest
from baseimage import Buildah, missing_tools
from indexes import serving
from wheelhouse import wheel

MAIN = "import tinylib, torch\nprint('tinylib', tinylib.version, torch.ones(2).sum().item())\n"


@pytest.fixture
def buildah(tmp_path, monkeypatch):
    """Builders of this test's processes use the storage that has the base already."""
    if reason := missing_tools():
        pytest.skip(reason)
    buildah = Buildah()
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(buildah.storage_conf(tmp_path)))
    return buildah


@pytest.fixture
def _index(tmp_path, monkeypatch):
    """This user's index has one package."""
    wheel(tmp_path / "wheels", "tinylib", "1.2")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    with serving(tmp_path / "wheels") as address:
        monkeypatch.setenv("PIP_INDEX_URL", address)
        # It listens on loopback, of which a build in a network of its own has another one.
        monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
        yield


@pytest.mark.usefixtures("_index")
def test_a_job_finds_what_was_built_for_it(desk, buildah):
    code = desk.folder / "code"
    code.mkdir()
    (code / "main.py").write_text(MAIN)
    image = {"repository": f"{desk.cluster.registry}/built/code", "base": desk.cluster.base_image}
    job = desk.file(
        image={**image, "context": "code", "pip": ["tinylib>=1.2"]},
        run={"script": "main.py"},
        replicas={"workers": 0},
        resources={"cpu": "100m", "memory": "300Mi"},
    )
    _, err = desk.call("submit", job, code=1)
    assert "build it with `k8sjob build`" in err
    assert desk.objects("pytorchjobs") == {}
    reference, err = desk.call("build", job, "--builder", "buildah")
    assert "very-secret" not in err  # the password of the index
    tag = err.rpartition("built with buildah: ")[2].split()[0]
    try:
        _, err = desk.call("submit", job, "--build", "--watch")
        assert f"unchanged: {tag} already exists" in err
        assert f"on {reference.strip()} for" in err
        out, _ = desk.call("logs", "tiny", "-n", desk.namespace)
        assert "tinylib 1.2 2.0" in out
    finally:
        buildah("rmi", f"localhost/k8sjob-{tag}")
