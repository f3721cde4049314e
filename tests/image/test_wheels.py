"""Wheels by uv for Pythons and platforms that are not this machine's."""

import os
import subprocess
import tempfile
from dataclasses import replace

import indexes
import pytest
import wheelhouse
from wheelhouse import wheel

from k8sjob.errors import ImageError
from k8sjob.image.builders import choose, uv
from k8sjob.image.builders.uv import find_uv, unpack
from k8sjob.image.dependencies import Dependencies
from k8sjob.image.inventory import Inventory

pytestmark = pytest.mark.skipif(find_uv() is None, reason="uv missing; pip install 'k8sjob[build]'")

TAGS = {
    "amd64, glibc": "cp313-cp313-manylinux_2_28_x86_64",
    "arm64, glibc": "cp313-cp313-manylinux_2_28_aarch64",
    "amd64, musl": "cp313-cp313-musllinux_1_2_x86_64",
    "amd64, older": "cp312-cp312-manylinux_2_17_x86_64",
    "any": "cp310-abi3-manylinux_2_17_x86_64",
}
BASE = Inventory("reg.example/base:1", "/usr/bin/python", "3.13", "amd64", (2, 41), "site", {})


@pytest.fixture(autouse=True)
def links(tmp_path, monkeypatch):
    """A version of `fast` for each platform, and no index."""
    folder = tmp_path / "links"
    for tag in TAGS.values():
        wheel(folder, "fast", "1.0", tag=tag, files={"fast/__init__.py": tag})
    wheel(folder, "pure", "1.0", requires=["fast", 'never ; python_version < "3.13"'])
    wheelhouse.alone(folder, tmp_path, monkeypatch)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    return folder


def unpacked(folder, *pip, base=BASE, **more):
    detail = []
    unpack(base, Dependencies(pip=pip, **more), folder, detail.append)
    return detail


@pytest.mark.parametrize(
    ("which", "change"),
    [
        ("amd64, glibc", {}),
        ("arm64, glibc", {"architecture": "arm64"}),
        ("amd64, musl", {"glibc": None}),
        ("any", {"glibc": (2, 17)}),
    ],
)
def test_the_platform_is_that_of_the_base(tmp_path, which, change):
    detail = unpacked(tmp_path / "deps", "pure", base=replace(BASE, **change))
    assert detail[-1] == "fast==1.0, pure==1.0"
    assert (tmp_path / "deps/fast/__init__.py").read_text() == TAGS[which]


def test_the_python_is_that_of_the_base(tmp_path, links):
    wheel(links, "never", "1.0")
    detail = unpacked(tmp_path / "deps", "pure", base=replace(BASE, version="3.12", glibc=(2, 17)))
    assert detail[-1] == "fast==1.0, never==1.0, pure==1.0"
    assert (tmp_path / "deps/fast/__init__.py").read_text() == TAGS["amd64, older"]


def test_a_requirements_file_may_name_an_index(tmp_path, set_up_for_pip, links):
    set_up_for_pip()
    with indexes.serving(links) as address:
        text = f"--index-url {address}\n# a comment\npure \\\n  ==1.0 # another\n"
        assert unpacked(tmp_path / "deps", requirements=text)[-1] == "fast==1.0, pure==1.0"


@pytest.fixture
def set_up_for_pip(tmp_path, monkeypatch):
    """uv has no settings, and is not offline; pip has what a test gives it."""
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_", "SSL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))

    def write(**settings):
        lines = [f"{key.replace('_', '-')} = {value}\n" for key, value in settings.items()]
        (tmp_path / "pip.conf").write_text("".join(["[global]\n", *lines]))

    return write


def test_the_index_that_pip_is_set_up_for(tmp_path, links, set_up_for_pip):
    with indexes.serving(links) as address:
        set_up_for_pip(index_url=address)
        detail = unpacked(tmp_path / "deps", "pure")
        assert detail[-1] == "fast==1.0, pure==1.0"
        with pytest.raises(ImageError) as refused:
            unpacked(tmp_path / "none", "pure>=2")
    for text in (*detail, str(refused.value)):
        assert "very-secret" not in text


@pytest.fixture
def signed(certificate, tmp_path):
    """A certificate that the other one has signed, and its key."""
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    name = ["-subj", "/CN=127.0.0.1", "-keyout", "own.key", "-out", "own.csr"]
    ca = ["-CA", certificate[0], "-CAkey", certificate[1], "-days", "2"]
    for argv in (
        ["req", "-newkey", "rsa:2048", "-nodes", *name],
        ["x509", "-req", "-in", "own.csr", *ca, "-extfile", "names", "-out", "own.crt"],
    ):
        subprocess.run(["openssl", *argv], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "own.crt", tmp_path / "own.key"


def test_certificates_that_pip_is_set_up_for(tmp_path, links, set_up_for_pip, certificate, signed):
    with indexes.serving(links, signed) as address:
        set_up_for_pip(index_url=address)
        with pytest.raises(ImageError, match=r"certificate"):
            unpacked(tmp_path / "none", "pure")
        set_up_for_pip(index_url=address, cert=certificate[0])
        assert unpacked(tmp_path / "deps", "pure")[-1] == "fast==1.0, pure==1.0"
        set_up_for_pip(index_url=address, trusted_host="127.0.0.1")
        assert unpacked(tmp_path / "trusted", "pure")[-1] == "fast==1.0, pure==1.0"


@pytest.mark.parametrize("how", ["pip's folders", "variable", "file", "spec"])
def test_where_wheels_come_from(tmp_path, links, set_up_for_pip, monkeypatch, how):
    """By pip's settings; those of uv itself, and the spec's index, come before them."""
    wrong, more = {"index_url": "http://127.0.0.1:9/simple"}, {}
    with indexes.serving(links) as address:
        if how == "pip's folders":
            set_up_for_pip(no_index="true", find_links=links)
        elif how == "spec":
            set_up_for_pip(**wrong)
            more = {"index_url": address}
        else:
            set_up_for_pip(**wrong, no_index="true")
        if how == "variable":
            monkeypatch.setenv("UV_DEFAULT_INDEX", address)
        if how == "file":
            monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
            (tmp_path / "config/uv").mkdir(parents=True)
            (tmp_path / "config/uv/uv.toml").write_text(f'[pip]\nindex-url = "{address}"\n')
        assert unpacked(tmp_path / "deps", "pure", **more)[-1] == "fast==1.0, pure==1.0"


def test_projects_and_settings_around_it_have_no_say(tmp_path, monkeypatch, links):
    monkeypatch.delenv("UV_CONFIG_FILE")
    (tmp_path / "uv.toml").write_text('[pip]\nno-binary = [":all:"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("UV_FIND_LINKS", str(links))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    assert unpacked(tmp_path / "deps", "pure")[-1] == "fast==1.0, pure==1.0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "s390x"}, r"is for s390x; --builder uv supports amd64 and arm64: use"),
        ({"glibc": (2, 12)}, r"has glibc 2\.12, which is too old for wheels; use a newer base"),
        ({"version": "3.9"}, r"cannot be installed for reg.example/base:1 \(Python 3\.9, x86"),
    ],
)
def test_a_base_that_nothing_is_made_for(tmp_path, change, message):
    with pytest.raises(ImageError, match=message):
        unpacked(tmp_path / "deps", "fast", base=replace(BASE, **change))


@pytest.mark.parametrize(
    "lines",
    [
        "--no-binary :all:",
        "--no-binary=evil",
        "--only-binary :none:",
        "--config-settings=x=y",
        "--no-such-option",
        "-e {evil}",
        "--editable={evil}",
        "-r https://127.0.0.1:9/r.txt",
        "-c https://127.0.0.1:9/c.txt",
        "--find-links {evil}",
        "--index-url=file://{evil}",
        "{evil}",
        "./evil",
        "evil/",
        "evil @ file://{evil}",
        "evil[x]@git+https://127.0.0.1:9/x",
        "evil @ https://127.0.0.1:9/evil-1.tar.gz",
        "evil @ https://127.0.0.1:9/evil-1.tar.gz#x.whl",
        "evil @ https://127.0.0.1:9/x.whl @ file://{evil}",
        "https://127.0.0.1:9/evil-1.tar.gz",
        "evil --config-settings x=y",
        "evil --no-binary :all:",
        "evil ; python_version > '3' --global-option=x",
        "--no-bin\\\nary evil",
        "evil\u2028-e {evil}",
    ],
)
def test_a_line_that_could_run_code_here_is_refused(tmp_path, lines):
    mark, evil = tmp_path / "was-run", tmp_path / "evil"
    evil.mkdir()
    (evil / "setup.py").write_text(f"open({str(mark)!r}, 'w')")
    text = f"fast\n{lines.format(evil=evil)}\n"
    with pytest.raises(ImageError, match=r"image\.requirements:[23]: .* use --builder buildah"):
        unpacked(tmp_path / "deps", requirements=text)
    assert not mark.exists()


@pytest.mark.parametrize(
    "line",
    [
        "fast>=1,<2 ; python_version > '3'",
        "fast [x, y] (~=1.0)",
        "fast==1.0 --hash=sha256:00ff --hash sha256:11ee",
        "fast @ https://127.0.0.1:9/fast-1.0-py3-none-any.whl#sha256=00 ; sys_platform == 'linux'",
        "--extra-index-url https://127.0.0.1:9/simple",
        "-i https://127.0.0.1:9/simple",
        "--pre",
    ],
)
def test_lines_that_only_name_wheels(line):
    assert uv.missing(Dependencies(requirements=line)) is None


def test_what_others_have_to_build():
    why = uv.missing(Dependencies(pip=("fast", "evil @ file:///evil")))
    assert "image.pip[1]: 'evil @ file:///evil'" in why
    with pytest.raises(ImageError, match=r"--builder uv: Debian packages \(git\) .* use --bui"):
        choose("uv", Dependencies(apt=("git",)))
    with pytest.raises(ImageError, match=r"--builder buildx: it compresses only with gzip; omit"):
        choose("buildx", Dependencies(), zstd=True)
