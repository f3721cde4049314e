"""The packages that `pip install` takes, a wheel and a sdist: built here, installed, and used."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
URL = "https://forge.example/team/k8sjob"


def run(*argv, cwd=None, **env):
    """What a program prints; it must succeed."""
    given = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "K8SJOB_REPOSITORY"}}
    done = subprocess.run(
        [str(arg) for arg in argv],
        cwd=cwd,
        env=given | env,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(source, folder, kind, **env):
    """The package that hatchling makes of a folder of sources."""
    pytest.importorskip("hatchling", reason="needs hatchling: pip install --group dev")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, "-t", kind, cwd=source, **env)
    [built] = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that a sdist becomes, as an index's users may build it."""
    folder = tmp_path_factory.mktemp("package")
    sdist = build(ROOT, folder / "sdist", "sdist", K8SJOB_REPOSITORY=URL)
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(folder)], check=True)
    [source] = folder.glob("k8sjob-*/")
    return build(source, folder / "wheel", "wheel")


@pytest.mark.slow
def test_a_wheel_of_the_sdist_is_the_wheel_of_the_checkout(wheel, tmp_path):
    direct = build(ROOT, tmp_path, "wheel", K8SJOB_REPOSITORY=URL)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(direct) as other:
        names = sorted(one.namelist())
        assert names == sorted(other.namelist())
        assert {name.partition("/")[0] for name in names} == {"k8sjob", "k8sjob-0.1.0.dist-info"}
        same = {name for name in names if one.read(name) == other.read(name)}
    assert {name for name in names if name not in same} == set()


@pytest.mark.slow
def test_what_an_index_shows(wheel):
    shown = metadata(wheel)
    urls = dict(line.split(", ") for line in shown.get_all("Project-URL"))
    assert urls["Source"] == URL
    assert shown["Author"] == "The k8sjob authors"
    assert urls["Changelog"] == f"{URL}/blob/v0.1.0/CHANGELOG.md"
    links = re.findall(r"\]\(([^)]+)\)", shown.get_payload())
    assert f"{URL}/raw/v0.1.0/docs/images/run.svg" in links
    assert [link for link in links if not link.startswith(("https:", "#"))] == []
    renderer = pytest.importorskip("readme_renderer.markdown")
    page = renderer.render(shown.get_payload())
    assert page is not None
    assert "<h2>Install" in re.sub(r"<h2[^>]*>", "<h2>", page)


@pytest.mark.slow
def test_without_an_address_no_link_leads_nowhere(tmp_path):
    shown = metadata(build(ROOT, tmp_path, "wheel"))
    assert shown.get_all("Project-URL") is None
    assert re.findall(r"\]\((?!https:)[^)]*\)", shown.get_payload()) == []


@pytest.mark.slow
def test_an_address_that_is_none(tmp_path):
    with pytest.raises(AssertionError, match="write https://HOST/OWNER/REPOSITORY"):
        build(ROOT, tmp_path, "wheel", K8SJOB_REPOSITORY="git@forge.example:team/k8sjob")


@pytest.mark.slow
def test_the_installed_wheel(wheel, tmp_path):
    """Installed beside the libraries that are here: nothing of the checkout is needed."""
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    [site] = home.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join([sysconfig.get_path("purelib"), *here]))
    python = [home / "bin/python", "-P", "-c"]
    k8sjob = [*python, "from k8sjob.cli import main; main()"]
    env = {"K8SJOB_STATE": str(tmp_path / "state"), "KUBECONFIG": str(tmp_path / "none")}
    where = run(*python, "import k8sjob; print(k8sjob.__file__)")
    assert where.startswith(str(site))
    assert run(*k8sjob, "version", **env).startswith("k8sjob 0.1.0\n")
    run(*k8sjob, "init", "mine", cwd=tmp_path, **env)
    assert ": valid: " in run(*k8sjob, "validate", "mine/job.yaml", cwd=tmp_path, **env)
    example = ROOT / "manifests/own-script"
    rendered = run(*k8sjob, "render", example / "job.yaml", **env)
    assert rendered == (example / "pytorchjob.yaml").read_text()
    pytest.importorskip("torch")
    assert "Succeeded" in run(*k8sjob, "run", "mine/job.yaml", cwd=tmp_path, **env)
