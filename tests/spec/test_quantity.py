from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.kube.quantity import canonical, parse

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
