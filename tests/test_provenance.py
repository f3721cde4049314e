import json
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.checkout import commit_of
from k8sjob.provenance import ImageLayer, Provenance

PARTS = st.builds(ImageLayer, kind=st.text(), digest=st.text(), size=st.integers(min_value=0))
ORIGINS = st.builds(
    Provenance,
    image=st.text(),
    base=st.text(),
    onto=st.text(),
    platform=st.text(),
    layers=st.lists(PARTS).map(tuple),
    installed=st.text(),
    files=st.integers(min_value=0),
    commit=st.text(),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(ORIGINS)
def test_what_is_written_is_read(origin):
    assert Provenance.decode(origin.encode()) == origin
    assert origin.encode().isascii()


@given(JSON, st.sampled_from(["image", "base", "layers", "files", "installed"]))
def test_whatever_somebody_else_wrote_is_no_error(value, key):
    known = Provenance("i", "b", "b", "linux/amd64", (ImageLayer("code", "sha256:0", 1),)).as_dict()
    for text in (json.dumps(value), json.dumps({**known, key: value})):
        found = Provenance.decode(text)
        assert found is None or found.platform == "linux/amd64"


@pytest.mark.parametrize("text", [None, "", "{", "[" * 100_000, '{"layers": 1}'])
def test_what_is_no_origin(text):
    assert Provenance.decode(text) is None


def test_what_a_newer_one_adds_is_passed_over():
    origin = Provenance("i", "b", "b", "linux/amd64", ())
    body = {**json.loads(origin.encode()), "version": 9, "signed": True}
    assert Provenance.decode(json.dumps(body)) == origin


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_the_commit_of_a_checkout_and_its_changes(tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        argv = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    assert commit_of(tmp_path) == ""
    git("init", "-q")
    assert commit_of(tmp_path) == ""
    (tmp_path / "train.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "x")
    git("tag", "v1")
    (tmp_path / "train.log").write_text("not tracked")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD")
    (tmp_path / "train.py").write_text("2")
    assert commit_of(tmp_path) == f"{git('rev-parse', 'HEAD')}-dirty"
