"""What is remembered of a job.yaml: never what another file says, or another k8sjob reads in it."""

import os

import pytest

from k8sjob.cli.jobfile import JobFile
from k8sjob.files import cached_value, keep_value
from k8sjob.image import code_image
from k8sjob.image.code_image import CodeImage, Source
from k8sjob.image.registry.manifest import digest_of
from k8sjob.spec.load import load


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "k8sjob"


@pytest.fixture
def job(write_job):
    return write_job("reg.example/team/app", "reg.example/base:1", ", pip: [tqdm]")


def known(path):
    return CodeImage.remembered(Source.of(path, "2.8"))


def remember(path):
    image = CodeImage.of(load(path))
    image.remember(Source.of(path, "2.8"))
    return image


def test_a_file_says_what_it_said(job):
    assert known(job) is None
    image = remember(job)
    assert known(job) == known(job.parent) == image
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
    "another k8sjob": lambda code: [
        os.utime(code / "package/module.py", (1, 1)),
        code_image.package_states.cache_clear(),  # another process
    ],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(code, write_job, change, monkeypatch):
    job = write_job("reg.example/app", "base:1", ", context: src, requirements: list.txt")
    for name in ("src/list.txt", "src/main.py", "package/module.py"):
        (code / name).parent.mkdir(exist_ok=True)
        (code / name).touch()
    monkeypatch.setattr(code_image, "_PACKAGE", code / "package")
    code_image.package_states.cache_clear()
    remember(job)
    assert known(job)
    change(code)
    assert known(job) is None


def test_only_a_file_has_a_source(code, tmp_path):
    (tmp_path / "endless.yaml").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.yaml")
    names = ("code/main.py", "missing.yaml", "-", "endless.yaml", "pipe.yaml")
    assert not any(Source.of(tmp_path / name, "") for name in names)


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


def test_a_damaged_value_is_none(job, cache):
    remember(job)
    (file,) = cache.glob("job-*.json")
    whole = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    for damaged in ("", "{}", whole[:-1], whole.replace("base:1", "base:2")):
        file.write_text(damaged)
        assert known(job) is None


def test_changes_are_read_each_time(registry, base_image, write_job, k8sjob):
    job = write_job(f"{registry.host}/team/changes", base_image(registry))
    for option in (("--set", "run.args=[1.1]"), ("--set", "run.args=[1.10]"), ("--", "x"), ()):
        assert "unchanged" not in k8sjob("push", job, *option).stderr


def test_a_wrong_media_type_is_not_kept(registry, base_image, write_job, k8sjob):
    store, name = registry.store, "team/typeless"
    base_image(registry, f"{name}:1")
    media_type, raw = store.manifests[name, store.tags[name, "1"]]
    raw = raw.replace(f'"mediaType": "{media_type}", '.encode(), b"", 1)
    job = write_job(f"{registry.host}/team/app", f"{registry.host}/{name}@{digest_of(raw)}")
    for header, code in (("text/html", 1), (media_type, 0)):
        store.manifests[name, digest_of(raw)] = (header, raw)
        assert k8sjob("push", job).returncode == code


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
