import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from view.conftest import summary_of

from k8sjob.contract import Event
from k8sjob.view.final_report import report
from k8sjob.view.formats import number


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
    lines = [line.plain for line in report(summary)]
    assert len(lines) < 40
    assert lines[2] == f"  {'grad/0':30}  1"
    assert lines[-1].split() == ["...", "271", "more"]
