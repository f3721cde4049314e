import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from k8sjob.view.lines import number
from k8sjob.view.report import plot


def test_a_falling_line_falls_from_corner_to_corner():
    lines = plot([(0, 3.0), (1, 1.0)], width=30, height=4)
    assert lines[0].startswith("3 |*")
    assert lines[3].startswith("1 |")
    assert lines[3].endswith("*")
    assert len(lines) == 5
    columns = [line.index("*") for line in lines[:4]]
    assert columns == sorted(columns)
    assert len(set(columns)) == 4


@pytest.mark.parametrize(
    "points", [[], [(1, 1)], [(1, 1), (1, 2)], [(0, math.nan), (1, 2), (2, math.inf)]]
)
def test_too_little_to_draw_is_not_drawn(points):
    assert plot(points) == []


def test_a_flat_line_is_drawn_in_the_middle():
    lines = plot([(0, 0.5), (9, 0.5)], width=30, height=3)
    assert [("*" in line) for line in lines] == [False, True, False, False]


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats()), min_size=2).map(
        lambda points: sorted(points, key=lambda p: p[0])
    ),
    st.integers(1, 200),
    st.integers(1, 20),
)
def test_any_points_fit_the_space(points, width, height):
    lines = plot(points, width=width, height=height)
    assert len(lines) in (0, height + 1)
    assert all(cell_len(line) <= max(width, 16) for line in lines)
    assert all(line.isascii() for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.123456, "0.1235"),
        (-2.5, "-2.5"),
        (1234.5, "1,234"),
        (9999999.0, "9,999,999"),
        (1e9, "1e+09"),
        (0.00001234, "1.234e-05"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text
