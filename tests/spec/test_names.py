import pytest
from pydantic import TypeAdapter, ValidationError

from k8sjob.spec import names

GOOD = {
    "JobName": ["a", "a-b", "x1"],
    "NamespaceName": ["1a", "a" * 63],
    "ObjectName": ["a.b-c", "a" * 253],
    "LabelKey": ["a", "app.kubernetes.io/name", "A_b.c-D", "x/" + "a" * 63],
    "LabelValue": ["", "a", "A.b_c-1", "a" * 63],
    "ResourceName": ["nvidia.com/gpu", "rdma/hca", "nvidia.com/mig-1g.5gb"],
    "EnvName": ["A", "_a1"],
    "ImageReference": [
        "python", "python:3.12", "localhost:5000/a/b_c", "registry/a__b.c-d:T_1",
        "r/x@sha256:" + "0" * 64, "r/x:1@sha256:" + "a" * 64,
    ],
    "AbsolutePath": ["/", "/a", "/a b/ü"],
}  # fmt: skip
BAD = {
    "JobName": ["", "1a", "A", "a-", "a_b", "a.b", "a\n", "ä"],
    "NamespaceName": ["", "-a", "a.b", "a" * 64],
    "ObjectName": ["", "a..b", "A", "a" * 254, "a/b"],
    "LabelKey": ["", "/a", "a/", "a/b/c", "-a", "A.com/x", "a" * 64, "x/" + "a" * 64, "a b"],
    "LabelValue": ["-a", "a b", "a" * 64, "a/b", "a\n"],
    "ResourceName": ["gpu", "/gpu", "nvidia.com/"],
    "EnvName": ["", "1a", "a-b", "a b", "a=b", "A\n"],
    "ImageReference": [
        "", "A/b", "a:", "a:b:c", "a//b", "a/-b", "r/x@sha256:0", "a b", "a\n", "-a",
        "a/" + "b" * 256,
    ],
    "AbsolutePath": ["", "a", "./a", "/a/../b", "/a:b"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), [(k, v) for k, each in GOOD.items() for v in each])
def test_names_that_kubernetes_and_registries_take(kind, value):
    assert TypeAdapter(getattr(names, kind)).validate_python(value) == value


@pytest.mark.parametrize(("kind", "value"), [(k, v) for k, each in BAD.items() for v in each])
def test_names_that_they_refuse(kind, value):
    with pytest.raises(ValidationError):
        TypeAdapter(getattr(names, kind)).validate_python(value)


@pytest.mark.parametrize(("value", "text"), [(1, "1"), (0.1, "0.1"), (-5, "-5"), ("on", "on")])
def test_numbers_are_their_text(value, text):
    assert TypeAdapter(names.Text).validate_python(value) == text


@pytest.mark.parametrize("value", [True, False, None, [], {}, b"x", "\0", "\ud800"])
def test_what_is_no_text(value):
    with pytest.raises(ValidationError):
        TypeAdapter(names.Text).validate_python(value)


def test_a_trailing_slash_is_no_other_path():
    assert TypeAdapter(names.AbsolutePath).validate_python("/data/") == "/data"


def test_repositories_have_neither_tag_nor_digest():
    assert names.is_repository("localhost:5000/a")
    assert not names.is_repository("a:1")
    assert not names.is_repository("a@sha256:" + "0" * 64)
