import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from view.conftest import summary_of

from k8sjob.contract import Event, EventKind
from k8sjob.view.final_report import plot, report
from k8sjob.view.formats import number


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


def test_each_curve_has_its_mark_and_a_steep_one_a_log_scale():
    falling = [(x, 2.0 ** (3 - x)) for x in range(16)]
    *rows, axis = plot(falling, [(0, 4.0), (15, 4.0)], width=40, height=9)
    columns = [row.index("*") for row in rows if "*" in row]
    assert columns == sorted(columns)
    assert rows[4].lstrip().startswith("0.04419 |")  # the middle of the scale, not of the values
    assert rows[1].count("o") > 25
    assert axis.strip("+- ") == ""
    assert plot([(x, 9.0 - x) for x in range(9)], width=40)[4].count("|*") == 0


def test_test_metrics_are_drawn_beside_the_loss(progress):
    summary = summary_of([])
    for epoch in range(9):
        summary.add(progress(epoch, 20, loss=1 / (epoch + 1), epochs=9))
        measured = {"test_loss": 2 / (epoch + 1), "test_accuracy": epoch / 10, "lr": 0.1}
        summary.add(Event(EventKind.METRICS, measured))
    text = "\n".join(line.plain for line in report(summary))
    assert "* loss  o test_loss, epoch 1 to 9" in text
    assert "   test_accuracy, epoch 1 to 9" in text
    assert " lr, epoch" not in text


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
    [(0.0, "0"), (1.0, "1"), (0.123456, "0.1235"), (-2.5, "-2.5"), (1234.5, "1,234"),
     (9999999.0, "9,999,999"), (1e9, "1e+09"), (0.00001234, "1.234e-05"), (math.nan, "nan"),
     (-math.inf, "-inf")],
)  # fmt: skip
def test_numbers_are_short(value, text):
    assert number(value) == text


@given(st.floats())
def test_numbers_stay_short(value):
    assert len(number(value)) <= 11


def test_a_report_of_many_metrics_and_of_a_long_name_stays_short():
    names = ["x" * 500, *(f"grad/{at}" for at in range(300))]
    summary = summary_of([Event("metrics", dict.fromkeys(names, 1.0), 1.0, "master-0")])
    lines = [line.plain for line in report(summary, width=40)]
    assert len(lines) < 40
    assert lines[2] == f"  {'grad/0':30}  1"
    assert lines[-1].split() == ["...", "271", "more"]
