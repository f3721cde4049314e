from contextlib import suppress

import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import examples, json_values, texts

from k8sjob.errors import SpecError
from k8sjob.yamldoc import dump, flow, parse, scalar


@given(json_values())
@examples(300)
def test_what_is_dumped_is_read_back_by_any_reader(data):
    text = dump(data)
    assert same(yaml.safe_load(text), data)
    assert same(parse(text).data, data)
    assert text.isascii()
    assert same(yaml.safe_load(flow(data)), data)


@given(texts() | st.text(max_size=30))
@example("\ud83d\ude00")
@examples(300)
def test_every_text_survives_as_a_scalar(text):
    if any("\ud800" <= character <= "\udfff" for character in text):
        return
    line = scalar(text)
    assert "\n" not in line
    assert yaml.safe_load(f"a: {line}") == {"a": text}
    assert yaml.safe_load(f"[{line}, {line}]") == [text, text]


@given(st.text(max_size=60) | st.binary(max_size=60))
@examples(300)
def test_any_text_is_read_or_refused_and_never_crashes(text):
    with suppress(SpecError):
        assert parse(text, "x").source == "x"


def same(left, right):
    """Equal, and of equal types: 1 is not True."""
    if isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in right)
    if isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    alike = isinstance(left, float) == isinstance(right, float)
    return alike and isinstance(left, bool) == isinstance(right, bool) and left == right
