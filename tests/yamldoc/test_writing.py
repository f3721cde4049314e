import pytest
import yaml

from k8sjob.errors import RenderError
from k8sjob.yamldoc import dump, flow, parse, scalar


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), (False, "false"), (0, "0"), (-7, "-7"), (1.5, "1.5"),
        (1e16, "1.0e+16"), (1e-7, "1.0e-07"), (1.25e20, "1.25e+20"),
        ("a", "a"), ("a/b-c_d.e", "a/b-c_d.e"), ("/data", "/data"), ("main.py", "main.py"),
        ("", '""'), ("on", '"on"'), ("No", '"No"'), ("y", '"y"'), ("null", '"null"'),
        ("1", '"1"'), ("1e3", '"1e3"'), ("a b", '"a b"'), ("a:b", '"a:b"'), ("~", '"~"'),
        ("-x", '"-x"'), ("é", r'"\xe9"'), ("\x7f", r'"\x7f"'), ("\x85", r'"\x85"'),
        ("\u2028", r'"\u2028"'), ("\U0001f600", r'"\U0001f600"'), ("\ud83d\ude00".encode(
            "utf-16", "surrogatepass").decode("utf-16"), r'"\U0001f600"'),
        ('"\\', r'"\"\\"'), ("a\nb", r'"a\nb"'), ("##vso[a]", r'"#\x23vso[a]"'),
        ("$(X)", '"$(X)"'), ("\\ud83d", r'"\\ud83d"'),
    ],
)  # fmt: skip
def test_scalars(value, text):
    assert scalar(value) == text
    assert yaml.safe_load(text) == value


@pytest.mark.parametrize("value", ["\ud83d", "a\udc00b", float("nan"), float("inf"), b"x", [], {}])
def test_what_yaml_cannot_carry_is_refused(value):
    with pytest.raises(RenderError):
        scalar(value)


def test_blocks():
    data = {"a": {"b": [1, {"c": None, "d": []}, [[2], {}]], "e": {}}, "f": ("x",)}
    assert dump(data) == (
        "a:\n  b:\n    - 1\n    - c: null\n      d: []\n    - - - 2\n      - {}\n  e: {}\n"
        "f:\n  - x\n"
    )
    assert dump([]) == "[]\n"
    assert dump("on") == '"on"\n'


def test_keys_are_quoted_like_values_and_must_be_text():
    assert dump({"on": 1, "a b": 2}) == '"on": 1\n"a b": 2\n'
    with pytest.raises(RenderError, match="the key 1 is not text"):
        dump({1: 2})
    data = {"k" * 1100: [1, {"l" * 1100: 2}], "b": [{"m" * 1100: 3}]}
    assert yaml.safe_load(dump(data)) == data == parse(dump(data)).data


def test_flow_is_one_line():
    assert flow({"a": [1, "on", {"b c": None}]}) == '{a: [1, "on", {"b c": null}]}'
    assert yaml.safe_load(flow({"a": ["x", {}]})) == {"a": ["x", {}]}
