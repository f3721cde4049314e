from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from k8sjob.kube.quantity import canonical, parse
from k8sjob.references import is_repository
from k8sjob.spec import values
from k8sjob.spec.values import format_duration, parse_duration

GOOD = {
    "JobName": ["a", "a-b", "x1"],
    "NamespaceName": ["1a", "a" * 63],
    "ObjectName": ["a.b-c", "a" * 253],
    "LabelKey": ["a", "app.kubernetes.io/name", "A_b.c-D", "x/" + "a" * 63],
    "LabelValue": ["", "a", "A.b_c-1", "a" * 63],
    "ResourceName": ["nvidia.com/gpu", "rdma/hca", "nvidia.com/mig-1g.5gb"],
    "EnvName": ["A", "_a1"],
    "ImageName": [
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
    "ImageName": [
        "", "A/b", "a:", "a:b:c", "a//b", "a/-b", "r/x@sha256:0", "a b", "a\n", "-a",
        "a/" + "b" * 256,
    ],
    "AbsolutePath": ["", "a", "./a", "/a/../b", "/a:b"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "value"), [(k, v) for k, each in GOOD.items() for v in each])
def test_names_that_kubernetes_and_registries_take(kind, value):
    assert TypeAdapter(getattr(values, kind)).validate_python(value) == value


@pytest.mark.parametrize(("kind", "value"), [(k, v) for k, each in BAD.items() for v in each])
def test_names_that_they_refuse(kind, value):
    with pytest.raises(ValidationError):
        TypeAdapter(getattr(values, kind)).validate_python(value)


@pytest.mark.parametrize(("value", "text"), [(1, "1"), (0.1, "0.1"), (-5, "-5"), ("on", "on")])
def test_numbers_are_their_text(value, text):
    assert TypeAdapter(values.Text).validate_python(value) == text


@pytest.mark.parametrize("value", [True, False, None, [], {}, b"x", "\0", "\ud800"])
def test_what_is_no_text(value):
    with pytest.raises(ValidationError):
        TypeAdapter(values.Text).validate_python(value)


def test_a_trailing_slash_is_no_other_path():
    assert TypeAdapter(values.AbsolutePath).validate_python("/data/") == "/data"


def test_repositories_have_neither_tag_nor_digest():
    assert is_repository("localhost:5000/a")
    assert not is_repository("a:1")
    assert not is_repository("a@sha256:" + "0" * 64)


TABLE = Path(__file__).with_name("quantities.tsv")


def upstream():
    """What k8s.io/apimachinery v0.36.3 makes of a text: canonical form and value, or "ERR"."""
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()]
    return [(text, *(rest if len(rest) == 2 else ["ERR", ""])) for text, *rest in rows]


def test_quantities_are_parsed_and_written_as_kubernetes_does():
    wrong = [
        (text, expected, canonical(text), parse(text))
        for text, expected, value in upstream()
        if expected != "ERR" and (canonical(text) != expected or parse(text) != Decimal(value))
    ]
    assert not wrong


ODD = ["m", "Mi", ".", "", "+", " 1", "1Gi ", "٣", "1e1000", "9" * 1000]


@pytest.mark.parametrize("text", [*ODD, *(row[0] for row in upstream() if row[1] == "ERR")])
def test_what_kubernetes_refuses_is_refused(text):
    with pytest.raises(ValueError, match="is not a quantity"):
        parse(text)


SUFFIXES = ["", *"numkMGTP", "Ki", "Mi", "Gi", "Ti", "Pi", "e3", "E-2"]


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(SUFFIXES))
def test_the_canonical_form_means_the_same_and_is_its_own(whole, fraction, suffix):
    text = f"{whole}.{fraction}{suffix}"
    assert parse(canonical(text)) == parse(text)
    assert canonical(canonical(text)) == canonical(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60), ("10m", 600), ("1h30m", 5400), ("2d", 172800), ("1d2h3m4s", 93784),
        ("90", 90), (90, 90), (0, 0), ("0s", 0), ("90m", 5400), ("2147483647s", 2**31 - 1),
    ],
)  # fmt: skip
def test_a_duration_is_whole_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "value",
    ["", "s", "m1", "30m1h", "1.5h", "-5s", "5 m", "5M", "1w", -1, 1.0, True, None, "٣s", [],
     2**31, "9" * 50 + "d"],
)  # fmt: skip
def test_anything_else_is_refused(value):
    with pytest.raises(PydanticCustomError, match="is not a duration"):
        parse_duration(value)


@given(st.integers(0, 2**31 - 1))
def test_written_durations_are_read_back(seconds):
    assert parse_duration(format_duration(seconds)) == seconds


def test_durations_are_written_short():
    assert [format_duration(s) for s in (0, 59, 60, 3600, 90061)] == [
        "0s", "59s", "1m", "1h", "1d1h1m1s",
    ]  # fmt: skip
