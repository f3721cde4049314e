"""Dependencies without a builder: real wheels by uv, on bases with a Python, in a real registry."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import wheelhouse
from registries import docker_alone, read_image, read_manifest
from wheelhouse import SITE, wheel

from k8sjob.errors import ImageError, install_step

COMMAND = "[console_scripts]\nskl = skl:main\n"
NATIVE = "cp311-cp311-{}"


@pytest.fixture(scope="module")
def links(tmp_path_factory):
    """All the wheels that there are in these tests."""
    folder = tmp_path_factory.mktemp("links")
    wheel(
        folder,
        "skl",
        "1.0",
        requires=["numpy>=2", "tiny"],
        entry_points=COMMAND,
        files={"skl/__init__.py": "import numpy, tiny\ndef main(): print('skl', numpy.version)\n"},
    )
    wheel(folder, "skl", "2.0", requires=["numpy>=2.3"])
    wheel(folder, "tiny", "0.1")
    wheel(folder, "numpy", "2.5.5")
    wheel(folder, "torch", "2.12.0", requires=["numpy"])
    wheel(folder, "fast", "3.0", tag=NATIVE.format("manylinux_2_28_x86_64"))
    wheel(folder, "fast", "4.0", tag=NATIVE.format("manylinux_2_39_x86_64"))
    wheel(folder, "slow", "1.0", tag=NATIVE.format("win_amd64"))
    with tarfile.open(folder / "source-1.0.tar.gz", "w:gz") as archive:
        (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: source\nVersion: 1.0\n")
        archive.add(folder / "PKG-INFO", "source-1.0/PKG-INFO")
    return folder


@pytest.fixture(autouse=True)
def place(links, tmp_path, monkeypatch):
    """No index, and caches that nobody else has."""
    wheelhouse.alone(links, tmp_path, monkeypatch)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def built(build_there):
    """Builds what is asked for by uv; the lines that were printed are in `.detail`."""

    def call(repository, base, *pip, image=None, **options):
        image = {"pip": pip, **(image or {})}
        done, call.detail = build_there(repository, base, image, builder="uv", **options)
        return done

    return call


@pytest.fixture(scope="module")
def debian(registry, base_image):
    """A base with Python 3.11, numpy 2.2.4 and torch 2.6.0+cpu."""
    return base_image(registry, "uv/debian:1", layers=wheelhouse.base(more=EXTRA))


EXTRA = wheelhouse.installed(
    "ray",
    "2.0",
    "Provides-Extra: tune",
    'Requires-Dist: tiny ; extra == "tune"',
    "Requires-Dist: skl",
)


def test_what_fits_the_base_is_installed_beside_it(registry, debian, built, code):
    (code / "requirements.txt").write_text("fast  # compiled\n")
    image = {"requirements": "requirements.txt"}
    done = built(f"{registry.host}/uv/app", debian, "skl", "torch>=2", image=image)
    manifest, config, layers = read_image(done.reference)
    below, base_config, _ = read_image(debian)
    assert manifest["layers"][:-1] == below["layers"]
    names = {name for name in layers[-1] if name.endswith(".dist-info")}
    # the newest that this numpy and this C library do, and neither of the base's own again
    assert names == {f"opt/deps/{n}.dist-info" for n in ("skl-1.0", "tiny-0.1", "fast-3.0")}
    assert f"{SITE}/zz-k8sjob-deps.pth" in layers[-1]
    environment = dict(item.split("=", 1) for item in config["config"]["Env"])
    assert environment["PATH"] == "/usr/bin:/bin:/opt/deps/bin"
    assert environment["PYTHONPATH"] == "/base/lib"
    assert config["config"]["Entrypoint"] == base_config["config"]["Entrypoint"]
    assert built.detail[-1] == "fast==3.0, skl==1.0, tiny==0.1"
    again = built(f"{registry.host}/uv/app", debian, "skl", "torch>=2", image=image)
    assert (again.reference, again.builder) == (done.reference, None)


def test_the_same_wishes_give_the_same_digest(registry, debian, built, tmp_path, monkeypatch):
    first = built(f"{registry.host}/uv/first", debian, "skl")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "other/uv"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("UV_COMPILE_BYTECODE", "1")
    previous = os.umask(0o077)
    try:
        second = built(f"{registry.host}/uv/second", debian, "skl")
    finally:
        os.umask(previous)
    assert first.reference.rpartition("@")[2] == second.reference.rpartition("@")[2]


def test_extras_of_what_the_base_has(registry, debian, built):
    done = built(f"{registry.host}/uv/extras", debian, "ray[tune]")
    assert "opt/deps/tiny/__init__.py" in read_image(done.reference)[2][-1]
    assert built.detail[-1] == "tiny==0.1"


def test_where_the_base_has_all_of_it(registry, debian, built):
    done = built(f"{registry.host}/uv/nothing", debian, "numpy>=2", "torch")
    assert list(read_image(done.reference)[2][-1]) == [
        "opt",
        "opt/deps",
        f"{SITE}/zz-k8sjob-deps.pth",
    ]
    assert built.detail[-1] == f"{debian} already has all of it"


def test_a_version_that_is_none_is_not_pinned(registry, base_image, built):
    more = wheelhouse.installed("tiny", "1.0-of-ours")
    base = base_image(registry, "uv/odd:1", layers=wheelhouse.base(more=more))
    done = built(f"{registry.host}/uv/odd-app", base, "skl")
    assert built.detail[-1] == "skl==1.0"
    assert not any("tiny" in name for name in read_image(done.reference)[2][-1])


@pytest.fixture(params=["oci", "v2s2"])
def either(registry, base_image, request):
    """A base in either form."""
    name = f"uv/{request.param}:1"
    return base_image(registry, name, layers=wheelhouse.base(), form=request.param)


@docker_alone
def test_a_layer_compressed_by_zstd(either, built, pushed, code, buildah):
    name = f"{either.rpartition(':')[0]}-app"
    done = built(name, either, "skl", zstd=True)
    raw, _ = read_manifest(done.reference)
    layer = "application/vnd.oci.image.layer.v1.tar"
    assert [each["mediaType"] for each in raw["layers"]] == [
        *[f"{layer}+gzip"] * 2,
        f"{layer}+zstd",
    ]
    # the same again is there already, whatever it would be compressed by
    assert built(name, either, "skl").reference == done.reference
    app = pushed(name, either, code, image={"pip": ["skl"]})
    container = buildah("from", "--tls-verify=false", app.reference)
    try:
        root = Path(buildah("mount", container))
        assert (root / "opt/deps/skl/__init__.py").is_file()
        assert (root / "app/main.py").is_file()
    finally:
        buildah("rm", container)
        buildah("rmi", app.reference)
    # and can be built upon itself: what lies in such a layer is read
    built(f"{name}-more", done.reference, "skl", "fast")
    assert built.detail[-1] == "fast==3.0"


def test_what_is_at_opt_deps_belongs_to_the_base(registry, debian, built):
    below = built(f"{registry.host}/uv/below", debian, "tiny").reference
    above = built(f"{registry.host}/uv/above", below, "skl").reference
    assert built.detail[-1] == "skl==1.0"
    assert "PATH=/usr/bin:/bin:/opt/deps/bin" in read_image(above)[1]["config"]["Env"]


REFUSED = {
    "torch>=2.12": r"(?s)torch>=2\.12.*has torch 2\.6\.0\+cpu, which stays",
    "source": r"(?s)source.*or use --builder buildah, which can compile",
    "slow": r"(?s)slow.*or use --builder buildah",
    "fast>=4": r"(?s)fast.*or use --builder buildah",
}


@pytest.mark.parametrize("wish", REFUSED)
def test_what_cannot_be_had_is_reported_and_nothing_is_pushed(registry, debian, built, wish):
    name = "uv/refused"
    with pytest.raises(ImageError, match=REFUSED[wish]) as caught:
        built(f"{registry.host}/{name}", debian, wish)
    assert str(caught.value).startswith(f"the packages cannot be installed for {debian} (Python")
    assert registry.tags(name) == []


WITHOUT = {
    "sys.modules['uv'] = None": f"--builder uv: uv is not installed; {install_step('build')}",
    "sys.modules['compression'] = sys.modules['backports'] = None": (
        "a layer compressed by zstd cannot be written: Python's module for it is missing;"
        f" {install_step('build')}"
    ),
}


@pytest.mark.parametrize("missing", WITHOUT)
def test_without_the_extra(registry, debian, write_job, missing):
    """In an interpreter that finds neither the package nor the program."""
    file = write_job(f"{registry.host}/uv/none", debian, ", pip: [tiny]")
    program = f"import sys; {missing}; from k8sjob.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "build", "--builder", "uv", "--zstd", str(file)],
        env=os.environ | {"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == f"error: {WITHOUT[missing]}"


@pytest.mark.system
def test_python_finds_them_behind_what_the_base_has(registry, base_image, built, links, tmp_path):
    """The image's files in one folder, and its own Python run in it."""
    layers = wheelhouse.running()
    if layers is None or os.geteuid() != 0:
        pytest.skip("needs root and the system's own python3, as on Debian")
    wheel(links, "clash", "1.0", files={"numpy/__init__.py": "version = 'of clash'\n"})
    path = ["PATH=/usr/bin:/bin"]
    base = base_image(registry, "uv/runs:1", layers=layers, config={"Env": path})
    done = built(f"{registry.host}/uv/runs-app", base, "skl", "clash")
    root = tmp_path / "root"
    root.mkdir()
    manifest, read = read_manifest(done.reference)
    for layer in manifest["layers"]:
        blob = read("blobs", layer["digest"])
        subprocess.run(["tar", "-xz", "-C", root], input=blob, check=True)
    ask = "import skl, numpy, clash; print(numpy.version, skl.__file__)"
    for argv, detail in (
        (["/usr/bin/python", "-c", ask], "2.2.4 /opt/deps/skl/__init__.py"),
        (["skl"], "skl 2.2.4"),
    ):
        ran = subprocess.run(
            [shutil.which("chroot", path="/usr/sbin:/usr/bin"), str(root), *argv],
            env={"PATH": "/usr/bin:/bin:/opt/deps/bin"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.stdout.strip() == detail, ran.stderr
