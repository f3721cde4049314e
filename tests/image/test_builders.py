"""How builders are called, and what of this machine they are given."""

import os
import stat
from contextlib import contextmanager

import pytest
from registries import CONFIG, job

from k8sjob.errors import ImageError
from k8sjob.image.builders import BUILDERS, choose, containers
from k8sjob.image.builders.containers import written
from k8sjob.image.builders.pip_settings import write_secrets
from k8sjob.image.builders.process import BuilderError, run
from k8sjob.image.dependencies import BuildRequest, Dependencies
from k8sjob.image.registry import manifest
from k8sjob.image.registry.credentials import Keyring
from k8sjob.image.registry.http_client import HttpClient
from k8sjob.image.registry.manifest import DEFAULT_REGISTRY, BaseImage, ImageReference
from k8sjob.image.registry.repository import Registries, Repository

MANIFEST = {
    "schemaVersion": 2,
    "mediaType": manifest.OCI_MANIFEST,
    "config": {
        "mediaType": "application/vnd.oci.image.config.v1+json",
        "digest": "sha256:" + "c" * 64,
        "size": 9,
    },
    "layers": [],
}


@pytest.fixture
def order(code):
    """Makes orders for images in registries that nobody asks."""

    def make(
        registry="reg.example", base="reg.example/team/base:1", *, plain=(), cached=True, **image
    ):
        registries = Registries(HttpClient(plain_http=plain), Keyring({}))
        spec = job(f"{registry}/team/app", base, **(image or {"pip": ["tqdm"]}))
        raw = manifest.encode(MANIFEST)
        config = {"os": "linux", "architecture": "arm64", "config": CONFIG}
        found = BaseImage(ImageReference.parse(base), manifest.read(raw, "", base), config)
        wanted = Dependencies.of(spec.image, code)
        target = registries.repository(ImageReference.parse(spec.image.repository), "pull,push")
        place = Repository(target.client, wanted.place(target.reference, found.manifest.digest))
        below = registries.repository(found.reference, "pull")
        quiet = (lambda _line: None, lambda _sent, _total: None)
        return BuildRequest(spec.image, wanted, found, below, place, cached, *quiet)

    return make


@pytest.fixture
def bare(monkeypatch):
    """A machine that says nothing of indexes, proxies and logins."""
    for name in os.environ:
        if name.startswith("PIP_") or name in {
            "REQUESTS_CA_BUNDLE",
            "BUILDAH_ISOLATION",
            "KUBERNETES_SERVICE_HOST",
            "KUBERNETES_SERVICE_PORT",
        }:
            monkeypatch.delenv(name)


@contextmanager
def recipe_of(order):
    with written(order) as recipe:
        yield recipe
    assert not recipe.folder.exists()


def test_a_recipe_is_the_part_below_the_code(order, code, bare):
    (code / "lists").mkdir()
    (code / "lists/all.txt").write_text("einops\n")
    wished = order(apt=["git"], requirements="lists/all.txt")
    with recipe_of(wished) as recipe:
        text = (recipe.context / "Dockerfile").read_text()
        assert f"FROM reg.example/team/base@{wished.base.manifest.digest}\n" in text
        assert "apt-get install -y --no-install-recommends git" in text
        assert 'COPY ["lists/all.txt", "/opt/k8sjob/requirements.txt"]' in text
        for line in ("CMD", "WORKDIR", "ENV", "USER 1000"):
            assert f"\n{line}" not in text
        names = sorted(file.name for file in recipe.context.rglob("*") if file.is_file())
        assert names == ["Dockerfile", "all.txt"]  # never the code


def test_the_short_name_of_a_base_is_complete(order, bare):
    with recipe_of(order(base="python:3.13")) as recipe:
        text = (recipe.context / "Dockerfile").read_text()
        assert f"FROM {DEFAULT_REGISTRY}/library/python@sha256:" in text


def test_how_buildah_is_called(order, bare, monkeypatch, home):
    monkeypatch.setenv("https_proxy", "http://proxy.internal:3128")
    with recipe_of(order()) as recipe:
        argv = containers.buildah_argv("buildah", order(), recipe, "localhost/x")
        assert argv[:2] == ["buildah", "bud"]
        assert argv[-1] == str(recipe.context)
        assert {"--force-rm", "--layers", "--platform=linux/arm64", "--tag=localhost/x"} <= set(
            argv
        )
        assert argv[argv.index("--build-arg") + 1] == "https_proxy"  # its value is not in it
        assert not {"--no-cache", "--isolation", "--authfile", "--tls-verify=false"} & set(argv)
        (home / "config.json").write_text("{}")
        monkeypatch.setenv("DOCKER_CONFIG", str(home))
        wished = order(base="127.0.0.1:9/team/base:1", plain=["127.0.0.1:9"], cached=False)
        argv = containers.buildah_argv("podman", wished, recipe, "localhost/x", chroot=True)
        assert argv[:2] == ["podman", "build"]
        assert {"--no-cache", "--tls-verify=false"} <= set(argv)
        assert argv[argv.index("--isolation") + 1] == "chroot"
        assert argv[argv.index("--authfile") + 1] == str(home / "config.json")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """program(script): a buildah on PATH; the arguments of its calls, a line each."""

    def write(script, name="buildah"):
        file = tmp_path / "bin" / name
        file.parent.mkdir()
        file.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{script}\n')
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(file.parent), prepend=os.pathsep)
        monkeypatch.delenv("BUILDAH_ISOLATION", raising=False)
        return tmp_path / "calls"

    return write


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("where", [None, "container", "pod", "privileged container"])
def test_in_a_container_the_isolation_is_by_chroot(order, program, monkeypatch, home, where):
    """But not in a privileged one, where containers run, and who leaves a chroot has all of it."""
    mark, status = home / "mark", home / "status"
    monkeypatch.setattr(containers, "_CONTAINER_MARKS", (str(mark),))
    monkeypatch.setattr(containers, "_STATUS", status)
    bounds = "000001ffffffffff" if where == "privileged container" else "00000000a80425fb"
    status.write_text(f"CapPrm:\t0000000000000000\nCapBnd:\t{bounds}\n")
    if where and where != "pod":
        mark.touch()
    if where == "pod":
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    calls = program("exit 1")
    for isolation in (None, "oci"):
        if isolation:
            monkeypatch.setenv("BUILDAH_ISOLATION", isolation)
        with pytest.raises(ImageError, match=r"buildah failed .*no output$"):
            BUILDERS["buildah"].build(order())
    called = ["--isolation chroot" in line for line in calls.read_text().splitlines()]
    assert called == [where in {"container", "pod"}, False]


def test_where_no_containers_run_the_variable_is_named_and_its_price(order, bare, program):
    """A build step can print the same words, so that its reader lowers the isolation."""
    program("echo 'crun: cgroups: denied'; exit 1")
    with pytest.raises(
        ImageError, match=r"crun: cgroups: denied\nif .* leave a chroot: BUILDAH_ISOLATION=chroot$"
    ):
        BUILDERS["buildah"].build(order())


def test_how_buildx_is_called(order, bare):
    wished = order()
    with recipe_of(wished) as recipe:
        argv = containers.buildx_argv(wished, recipe)
        assert argv[:3] == ["docker", "buildx", "build"]
        assert f"--output=type=image,name=reg.example/team/app:{wished.tag},push=true" in argv
        assert {"--progress=plain", "--provenance=false", "--platform=linux/arm64"} <= set(argv)
        assert argv[-1] == str(recipe.context)
        plain = containers.buildx_argv(order(plain=["reg.example"], cached=False), recipe)
        assert "--no-cache" in plain
        assert [word for word in plain if word.endswith(",push=true,registry.insecure=true")]


def test_no_builder_is_there(program, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError) as failed:
        choose("auto", Dependencies(apt=("git",)))
    assert str(failed.value).startswith("nothing on this machine can build an image:\n")
    for reason in ("buildx: docker is not on PATH", "buildah: buildah is not on PATH; on Debian"):
        assert f"  {reason}" in str(failed.value)
    with pytest.raises(ImageError, match="builder podman: podman is not on PATH"):
        choose("podman", Dependencies())
    with pytest.raises(ImageError, match="builder: 'kaniko' is unknown; valid builders: auto, "):
        choose("kaniko", Dependencies())
    program("exit 1", "docker")
    with pytest.raises(ImageError, match="--builder buildx: docker has no buildx; install"):
        choose("buildx", Dependencies())


def secret(tmp_path, environ, conf=None):
    """What a build is given where this is the user's pip.conf."""
    folder = tmp_path / "secrets"
    folder.mkdir(exist_ok=True)
    if conf is not None:
        (tmp_path / "pip.conf").write_text(conf)
        environ = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **environ}
    return write_secrets(folder, {"HOME": str(tmp_path), **environ})


def test_pip_gets_the_index_and_nothing_of_this_machine(tmp_path):
    conf = """[global]
index-url = https://me:secret@packages.internal/simple
extra_index_url =
    https://one.internal/simple
    https://two.internal/simple
require-virtualenv = true
target = /opt/mine
[install]
user = true
trusted-host = packages.internal
find-links = /opt/wheels https://wheels.internal/
"""
    given = secret(tmp_path, {"PIP_TIMEOUT": "7", "PIP_USER": "1"}, conf)
    assert given["pip"].read_text() == (
        "[global]\n"
        "index-url = https://me:secret@packages.internal/simple\n"
        "extra-index-url = https://one.internal/simple\n    https://two.internal/simple\n"
        "trusted-host = packages.internal\n"
        "timeout = 7\n"
        "find-links = https://wheels.internal/\n"
    )
    assert stat.S_IMODE(given["pip"].stat().st_mode) == 0o600


def test_variables_are_above_files_which_may_be_turned_off(tmp_path):
    environ = {"PIP_INDEX_URL": "https://other.internal/simple"}
    given = secret(tmp_path, environ, "[global]\nindex-url = https://packages.internal/simple\n")
    assert "other.internal" in given["pip"].read_text()
    assert "packages.internal" not in given["pip"].read_text()
    (tmp_path / ".pip").mkdir()
    (tmp_path / ".pip/pip.conf").write_text("[global]\nindex-url = https://packages.internal/x\n")
    assert "pip" in secret(tmp_path, {})
    assert "pip" not in secret(tmp_path, {"PIP_CONFIG_FILE": os.devnull})


def test_the_certificates_are_those_of_pip(tmp_path):
    for name in ("pip", "requests"):
        (tmp_path / f"{name}.pem").write_text("")
    environ = {"REQUESTS_CA_BUNDLE": str(tmp_path / "requests.pem")}
    conf = f"[global]\ncert = {tmp_path}/pip.pem\n"
    assert secret(tmp_path, {}, conf)["ca"].name == "pip.pem"
    assert "pip" not in secret(tmp_path, {}, conf)
    assert secret(tmp_path, environ, conf)["ca"].name == "requests.pem"
    environ["PIP_CERT"] = str(tmp_path / "pip.pem")
    assert secret(tmp_path, environ)["ca"].name == "pip.pem"


def test_a_builder_is_heard_to_its_end():
    detail = []
    run(["sh", "-c", "echo one; echo two >&2; printf 'a\\rb\\n\\n'"], detail.append)
    assert detail == ["one", "two", "a", "b"]
    with pytest.raises(
        BuilderError, match=r"sh failed \(exit code 3\), and nothing was pushed:\n  why"
    ):
        run(["sh", "-c", "echo why; exit 3"], detail.append)
    with pytest.raises(BuilderError, match=r"sh failed \(signal 9\).* no output"):
        run(["sh", "-c", "kill -9 $$"], detail.append)
    with pytest.raises(BuilderError) as failed:
        run(["sh", "-c", "seq 100; exit 1"], detail.append)
    assert (failed.value.lines[-1], "50" in failed.value.lines) == ("100", False)
    with pytest.raises(ImageError, match=r"no-such-program cannot be started: No such file"):
        run(["no-such-program"], detail.append)


def test_of_an_endless_line_of_a_builder_the_beginning_is_read():
    """A step of a build can write one; 300 MB of it took nine minutes and 600 MB of memory."""
    lines = []
    run(["sh", "-c", "head -c 100000000 /dev/zero | tr '\\0' a; echo; echo b"], lines.append)
    assert [(line[0], len(line)) for line in lines] == [("a", 1 << 14), ("b", 1)]


def test_nothing_of_a_builder_is_left_when_its_reader_fails(tmp_path):
    def stop(_line):
        raise KeyboardInterrupt

    pid = tmp_path / "pid"
    with pytest.raises(KeyboardInterrupt):
        run(["sh", "-c", f"echo $$ > {pid}; echo ready; exec sleep 600"], stop)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
