from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from k8sjob.kube.capacity import canonical, parse
from k8sjob.spec.quantity import format_duration, parse_duration

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


@pytest.mark.parametrize("text", [row[0] for row in upstream() if row[1] == "ERR"])
def test_what_kubernetes_refuses_is_refused(text):
    with pytest.raises(ValueError, match="is not a quantity"):
        parse(text)


@pytest.mark.parametrize("text", ["m", "Mi", ".", "", "+", " 1", "1Gi ", "٣", "1e1000", "9" * 1000])
def test_quantities_without_digits_or_end_are_refused(text):
    with pytest.raises(ValueError, match="is not a quantity"):
        canonical(text)


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
