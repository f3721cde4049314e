"""What is remembered of a job.yaml: never what another file says, or another k8sjob reads in it."""

import os

import pytest

from k8sjob.cli.jobfile import JobFile
from k8sjob.files import cached_value, keep_value
from k8sjob.image import code_image
from k8sjob.image.code_image import CodeImage, Source
from k8sjob.spec.changes import Change
from k8sjob.spec.load import load


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "k8sjob"


@pytest.fixture
def job(write_job):
    return write_job("reg.example/team/app", "reg.example/base:1", ", pip: [tqdm]")


def known(path, changes=()):
    return CodeImage.remembered(Source.of(path, changes))


def remember(path, changes=()):
    image = CodeImage.of(load(path, changes))
    image.remember(Source.of(path, changes))
    return image


def test_a_file_says_what_it_said(job):
    changes = (Change.parse("image.platform=linux/arm64"),)
    assert known(job) is None
    image, other = remember(job), remember(job, changes)
    assert known(job) == known(job.parent) == image
    assert known(job, changes) == other != image
    assert image.pip == ("tqdm",)
    assert image.command[-1] == "main.py"


def leads_out(code):
    (code / "src").rename(code.with_name("elsewhere"))
    (code / "src").symlink_to(code.with_name("elsewhere"))


CHANGES = {
    "another text": lambda code: (code / "job.yaml").write_text("name: other\n"),
    "no script": lambda code: (code / "src/main.py").unlink(),
    "a script that is left out": lambda code: (code / "src/.dockerignore").write_text("*.py\n"),
    "a folder elsewhere": leads_out,
    "a list elsewhere": lambda code: [
        (code / "src/list.txt").unlink(),
        (code / "src/list.txt").symlink_to("/etc/hostname"),
    ],
    "another k8sjob": lambda code: os.utime(code / "package/module.py", (1, 1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(code, write_job, change, monkeypatch):
    job = write_job("reg.example/app", "base:1", ", context: src, requirements: list.txt")
    for name in ("src/list.txt", "src/main.py", "package/module.py"):
        (code / name).parent.mkdir(exist_ok=True)
        (code / name).touch()
    monkeypatch.setattr(code_image, "_PACKAGE", code / "package")
    remember(job)
    assert known(job)
    change(code)
    assert known(job) is None


def test_only_a_file_has_a_source(code, tmp_path):
    for path in (code / "main.py", tmp_path / "missing.yaml", code.parent / "-"):
        assert Source.of(path, ()) is None


def test_a_file_that_is_written_while_it_is_read_is_not_remembered(
    registry, base_image, write_job, k8sjob, monkeypatch
):
    job = write_job(f"{registry.host}/team/written", base_image(registry))
    read, written = JobFile.load, []

    def load_late(self):
        with job.open("a") as file:
            file.write("# more\n")
        written.append(job)
        return read(self)

    monkeypatch.setattr(JobFile, "load", load_late)
    k8sjob("push", job)
    monkeypatch.setattr(JobFile, "load", lambda self: written.append(job) or read(self))
    for _ in range(2):
        assert k8sjob("push", job).returncode == 0
    assert len(written) == 2  # the first two times


DAMAGES = {
    "empty": lambda whole: "",
    "another form": lambda whole: "{}",
    "cut short": lambda whole: whole[:-1],
    "one character": lambda whole: whole.replace("base:1", "base:2"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_value_is_none(job, cache, damage):
    remember(job)
    (file,) = cache.glob("job-*.json")
    whole = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(damage(whole))
    assert known(job) is None


def test_the_oldest_values_are_forgotten(cache, monkeypatch):
    monkeypatch.setattr("k8sjob.files._MOST_VALUES", 3)
    keep_value("code-1.json", "key", 1)
    for number in range(5):
        keep_value(f"job-{number}.json", "key", number)
        os.utime(cache / f"job-{number}.json", (number, number))
    assert sorted(path.name for path in cache.iterdir()) == [
        "code-1.json",
        *(f"job-{number}.json" for number in (2, 3, 4)),
    ]
    assert cached_value("job-4.json", "key") == 4
    assert cached_value("job-4.json", "other") is None
