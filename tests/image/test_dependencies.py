"""What a job installs has one key, which follows from all that is installed and nothing else."""

import re
from pathlib import Path

import pytest
import yaml
from registries import job

from k8sjob.errors import ImageError
from k8sjob.image.dependencies import Dependencies
from k8sjob.image.registry.manifest import ImageReference
from k8sjob.requirements import required_names

REAL = Path(__file__).parent / "requirements.yaml"
BASE = "sha256:" + "1" * 64
IMAGE = {"apt": ["git"], "pip": ["tqdm"], "requirements": "requirements.txt"}


@pytest.fixture
def wanted(code):
    def make(text="einops\n", **image):
        (code / "requirements.txt").write_text(text, newline="")
        names = {"repository": "reg.example/team/app", "base": "reg.example/base:1"}
        spec = job(**{**names, **IMAGE, **image})
        return Dependencies.of(spec.image, code)

    return make


@pytest.mark.parametrize(
    ("text", "names"),
    [pytest.param(text, names, id=of) for of, text, names in yaml.safe_load(REAL.read_text())],
)
def test_real_requirements(text, names):
    assert required_names(text) == names


def test_a_key_says_what_is_installed(wanted):
    first = wanted()
    assert first
    assert re.fullmatch(r"[0-9a-f]{64}", first.key(BASE))
    for change in (
        {"apt": ["git", "curl"]},
        {"apt": []},
        {"pip": ["tqdm==4.67"]},
        {"pip": [], "apt": ["git", "tqdm"]},
        {"text": "einops==0.8\n"},
        {"requirements": None},
        {"index_url": "https://packages.internal/simple"},
    ):
        assert wanted(**change).key(BASE) != first.key(BASE)
    assert first.key("sha256:" + "2" * 64) != first.key(BASE)


def test_what_is_not_installed_does_not_change_it(wanted, code):
    key = wanted().key(BASE)
    (code / "main.py").write_text("changed\n")
    assert wanted(text="einops\r\n").key(BASE) == key
    assert wanted(repository="reg.example/other", base="mirror.example/base:2").key(BASE) == key


def test_its_place_is_a_tag_in_the_jobs_repository(wanted):
    place = wanted().place(ImageReference.parse("reg.example/team/app"), BASE)
    assert str(place) == f"reg.example/team/app:deps-{wanted().key(BASE)[:16]}"


def test_it_is_described_in_words(wanted):
    assert str(wanted(text="a\nb\n")) == "apt: git; pip: tqdm; a requirements file of 2 lines"
    assert str(wanted(apt=[], requirements=None)) == "pip: tqdm"
    assert not wanted(apt=[], pip=[], requirements=None, index_url="https://packages.internal/x")
    assert wanted(text="", apt=[], pip=[])


@pytest.mark.parametrize(
    "line",
    [
        "-rmore.txt",
        "--requirement=more.txt",
        "-c pins.txt",
        "-e file:///lib",
        "../lib",
        "/lib.whl",
        "lib @ file:///lib.whl",
    ],
)
def test_a_requirements_file_stands_alone(wanted, line):
    with pytest.raises(ImageError, match=r"requirements\.txt:2: .* refers to another file"):
        wanted(text=f"einops\n{line}\n")


@pytest.mark.parametrize("line", ["x @ https://${TOKEN}@host/x.whl", "-i https://\\\n${A_B}/"])
def test_variables_are_not_sent_to_a_host(wanted, line):
    with pytest.raises(ImageError, match=r"requirements\.txt:2: .* has a '\$', which would send"):
        wanted(text=f"# $1\n{line}\n")


def test_what_the_network_has_may_be_named(wanted):
    lines = (
        "-r  https://packages.internal/r.txt",
        "--constraint=https://packages.internal/c.txt",
        "-e git+https://packages.internal/lib.git",
        "lib @ https://packages.internal/lib.whl",
        "--index-url https://packages.internal/simple",
        "requests  # not of file: or -r",
        "constraint",
    )
    assert wanted(text="\n".join(lines))


def test_a_requirements_file_that_cannot_be_read(code):
    (code / "requirements.txt").write_bytes(b"\xff")
    spec = job("reg.example/app", "reg.example/base:1", **IMAGE)
    with pytest.raises(ImageError, match=r"requirements\.txt cannot be read: not UTF-8; specify"):
        Dependencies.of(spec.image, code)
