import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from k8sjob.spec.quantity import format_duration, parse_duration


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
