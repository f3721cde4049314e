"""The folder that an image is built from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from k8sjob.errors import ImageError, K8sJobError, SpecError
from k8sjob.rendering import image_files
from k8sjob.rendering.dockerfile import check_script, dockerfile, write_context
from k8sjob.rendering.manifest import render


@pytest.fixture
def code(tmp_path):
    """A user's folder."""
    folder = tmp_path / "code"
    (folder / "pkg").mkdir(parents=True)
    (folder / "main.py").write_text("print('hello')\n")
    (folder / "pkg/__init__.py").write_text("")
    (folder / ".env").write_text("TOKEN=secret\n")
    return folder


def names(folder):
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in found if not str(path).startswith(".k8sjob/")}


RENDERED = {"pytorchjob.yaml", "Dockerfile", ".dockerignore"}


def test_a_copy_has_all_that_the_build_needs(built, code, tmp_path):
    spec = built()
    target = tmp_path / "deep/build"
    files = write_context(spec, code, target, image="registry.example/x:1")
    assert {file.name for file in files} == RENDERED
    assert names(target) == {"main.py", "pkg/__init__.py", *RENDERED}
    assert (target / "Dockerfile").read_text() == dockerfile(spec)
    assert (target / "pytorchjob.yaml").read_text() == render(spec, "registry.example/x:1")
    assert names(code) == {"main.py", "pkg/__init__.py", ".env"}


def test_a_copy_follows_its_source(built, code, tmp_path):
    target = tmp_path / "build"
    write_context(built(), code, target)
    (code / "main.py").rename(code / "train.py")
    write_context(built(), code, target)
    assert names(target) == {"train.py", "pkg/__init__.py", *RENDERED}


@pytest.mark.parametrize("before", [None, "empty", "copy"])
def test_a_copy_is_written_whole_or_not_at_all(built, code, tmp_path, before, full_disk):
    target = tmp_path / "build"
    if before == "copy":
        write_context(built(), code, target)
    elif before:
        target.mkdir()
    there = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    (code / "main.py").write_text("print('changed')\n")
    (code / "data.bin").write_bytes(bytes(1 << 20))
    with full_disk(1 << 19), pytest.raises(K8sJobError, match="cannot be written: File too large"):
        write_context(built(), code, target)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == there
    assert target.exists() == bool(before)
    (target / ".k8sjob-killed").mkdir(parents=True)
    write_context(built(), code, target)
    assert names(target) == {"main.py", "data.bin", "pkg/__init__.py", *RENDERED}
    assert not list(target.glob(".k8sjob-*"))


def test_a_target_inside_the_context(built, code):
    target = code / "build"
    for _ in range(2):
        write_context(built(), code, target)
        assert names(target) == {"main.py", "pkg/__init__.py", *RENDERED}


def test_the_runtime_in_it_runs_without_the_clients_packages(built, code, tmp_path):
    write_context(built(), code, tmp_path / "build")
    home = tmp_path / "build/.k8sjob"
    script = (
        "import sys, k8sjob.runtime.__main__, k8sjob.runtime.agent.rank_main;"
        "print(k8sjob.__file__);"
        "print(sorted({'pydantic', 'yaml', 'jinja2', 'click', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [str(home / "k8sjob/__init__.py"), "[]"]
    top = {path.name for path in (home / "k8sjob").iterdir()}
    shared = {"contract.py", "printed_metrics.py", "printed_metrics.tsv", "strategies.py"}
    assert top == {"__init__.py", "runtime", "temporary.py", *shared}
    assert not list(home.rglob("*.pyc"))


def test_the_runtime_can_be_read_whatever_the_umask(built, code, tmp_path):
    before = os.umask(0o077)
    try:
        write_context(built(), code, tmp_path / "build")
    finally:
        os.umask(before)
    runtime = tmp_path / "build/.k8sjob"
    for path in (runtime, *(runtime / "k8sjob").rglob("*"), runtime / "k8sjob"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


def test_the_users_dockerignore_is_honored(built, code, tmp_path):
    (code / ".dockerignore").write_text("pkg\n.*\n")
    target = tmp_path / "build"
    write_context(built(), code, target)
    assert names(target) == {"main.py", *RENDERED}
    assert (target / ".dockerignore").read_text().endswith("\npkg\n.*\n\n!.k8sjob\n")


@pytest.mark.parametrize("name", [".env", "deep/id_rsa", ".git/config", "deep/.kube/config"])
def test_what_often_holds_credentials_stays_here(built, code, tmp_path, name):
    (code / ".env").unlink()
    (code / name).parent.mkdir(parents=True, exist_ok=True)
    (code / name).write_text("secret")
    (code / ".dockerignore").write_text("pkg\n")
    write_context(built(), code, tmp_path / "build")
    assert names(tmp_path / "build") == {"main.py", *RENDERED}
    (code / ".dockerignore").write_text(f"pkg\n!{name}\n")
    write_context(built(), code, tmp_path / "build")
    assert names(tmp_path / "build") == {"main.py", name, *RENDERED}


@pytest.mark.parametrize("text", ["# Generated by k8sjob, once", None])
def test_no_link_in_the_target_is_followed(job, built, code, tmp_path, text):
    victim = tmp_path / "victim"
    if text:
        victim.write_text(text)
    (code / "pytorchjob.yaml").symlink_to(victim)
    with pytest.raises(ImageError, match="is a symbolic link, and what it leads"):
        write_context(job(), code, code)
    with pytest.raises(ImageError, match="is a symbolic link; specify the folder itself"):
        write_context(built(), code, code / "pytorchjob.yaml")
    assert (victim.read_text() if victim.exists() else None) == text


def test_a_manifest_of_the_users_own_is_not_lost(job, built, code, tmp_path):
    (code / "pytorchjob.yaml").write_text("mine\n")
    with pytest.raises(ImageError, match="was not written by k8sjob"):
        write_context(job(), code, code)
    write_context(built(), code, tmp_path / "build")
    rendered = (tmp_path / "build/pytorchjob.yaml").read_text()
    assert rendered.startswith("# Generated by k8sjob")
    assert (code / "pytorchjob.yaml").read_text() == "mine\n"


def test_a_folder_with_other_files_is_not_emptied(built, code, tmp_path):
    target = tmp_path / "other"
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(ImageError, match="specify a new or an empty folder"):
        write_context(built(), code, target)
    with pytest.raises(ImageError, match="has the code that would be copied"):
        write_context(built(), code, code.parent)
    assert (target / "precious").exists()


def test_links_and_modes_are_kept(built, code, tmp_path):
    (code / "link.py").symlink_to("main.py")
    (code / "run.sh").write_text("")
    (code / "run.sh").chmod(0o755)
    os.mkfifo(code / "pipe")
    target = tmp_path / "build"
    write_context(built(), code, target)
    assert (target / "link.py").readlink().name == "main.py"
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    assert not (target / "pipe").exists()


def test_an_existing_image_needs_only_the_manifest(job, code, tmp_path):
    files = write_context(job(), code, tmp_path / "build")
    assert [file.name for file in files] == ["pytorchjob.yaml"]
    assert names(tmp_path / "build") == {"pytorchjob.yaml"}


def test_a_context_that_is_missing(built, tmp_path):
    with pytest.raises(ImageError, match=r"image\.context: .*gone is not a folder"):
        write_context(built(), tmp_path / "gone", tmp_path / "build")


def test_the_script_lies_in_the_context(built, tmp_path):
    spec = built().with_(run={"script": "/app/src/main.py"})
    with pytest.raises(SpecError, match=r"run\.script: '/app/src/main\.py' is not in the context"):
        check_script(spec, tmp_path)
    there = spec.with_(image="r/x:1")
    check_script(there, tmp_path)
    with pytest.raises(SpecError, match=f"'/app/src/main.py' is not in {tmp_path}, which stands"):
        check_script(there, tmp_path, local=True)
    check_script(there.with_(run={"script": "/opt/main.py"}), tmp_path, local=True)
    code = tmp_path / spec.image.context
    (code / "src").mkdir(parents=True)
    (code / "src/main.py").touch()
    check_script(spec, tmp_path)
    (code / ".dockerignore").write_text("src\n")
    with pytest.raises(SpecError, match=r"left out of the image by .*\.dockerignore; add a last"):
        check_script(spec, tmp_path)


def test_a_folder_that_python_can_run_is_a_script(built, tmp_path):
    spec = built().with_(run={"script": "src"})
    (folder := tmp_path / spec.image.context / "src").mkdir(parents=True)
    with pytest.raises(SpecError, match="'src' is not in the context"):
        check_script(spec, tmp_path)
    (folder / "__main__.py").touch()
    check_script(spec, tmp_path)


def test_k8sjob_may_lie_in_the_root_of_a_disk(monkeypatch):
    monkeypatch.setattr(image_files, "_PACKAGE", Path("/k8sjob"))
    assert next(image_files.runtime_files())[0] == "k8sjob/__init__.py"
