import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.origin import Origin, Part

PARTS = st.builds(Part, kind=st.text(), digest=st.text(), size=st.integers(min_value=0))
ORIGINS = st.builds(
    Origin,
    image=st.text(),
    base=st.text(),
    onto=st.text(),
    platform=st.text(),
    layers=st.lists(PARTS).map(tuple),
    installed=st.text(),
    files=st.integers(min_value=0),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(ORIGINS)
def test_what_is_written_is_read(origin):
    assert Origin.decode(origin.encode()) == origin
    assert origin.encode().isascii()


@given(JSON, st.sampled_from(["image", "base", "layers", "files", "installed"]))
def test_whatever_somebody_else_wrote_is_no_error(value, key):
    known = Origin("i", "b", "b", "linux/amd64", (Part("code", "sha256:0", 1),)).as_dict()
    for text in (json.dumps(value), json.dumps({**known, key: value})):
        found = Origin.decode(text)
        assert found is None or found.platform == "linux/amd64"


@pytest.mark.parametrize("text", [None, "", "{", "[" * 100_000, '{"layers": 1}'])
def test_what_is_no_origin(text):
    assert Origin.decode(text) is None


def test_what_a_newer_one_adds_is_passed_over():
    origin = Origin("i", "b", "b", "linux/amd64", ())
    body = {**json.loads(origin.encode()), "version": 9, "signed": True}
    assert Origin.decode(json.dumps(body)) == origin
