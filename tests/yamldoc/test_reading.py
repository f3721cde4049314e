import copy
import json
import pickle

import pytest

from k8sjob.errors import SpecError
from k8sjob.yamldoc import Document, WrittenFloat, parse, parse_all, reading
from k8sjob.yamldoc.reading import MAX_BYTES

TEXT = """\
name: x          # comment
run:
  args:
    - --lr
    - 0.1
  env: {A: 1, "b c": [x, {y: z}]}
empty:
text: |
  two
  lines
"""


def refused(text):
    with pytest.raises(SpecError) as caught:
        parse(text, "job.yaml")
    (problem,) = caught.value.findings
    return problem


def test_data_is_json():
    assert json.loads(json.dumps(parse(TEXT).data)) == {
        "name": "x",
        "run": {"args": ["--lr", 0.1], "env": {"A": 1, "b c": ["x", {"y": "z"}]}},
        "empty": None,
        "text": "two\nlines\n",
    }


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (("name",), (1, 7), (1, 1)),
        (("run", "args"), (3, 3), (3, 3)),
        (("run", "args", 1), (5, 7), (5, 7)),
        (("run", "env", "A"), (6, 12), (6, 9)),
        (("run", "env", "b c", 1, "y"), (6, 30), (6, 27)),
        (("text",), (8, 7), (8, 1)),
        (("run", "missing"), (2, 1), (2, 1)),
        (("nowhere",), (1, 1), (1, 1)),
        ((), (1, 1), (1, 1)),
    ],
)
def test_every_field_has_its_place(path, value, key):
    document = parse(TEXT)
    assert document.place(path) == value
    assert document.place(path, key=True) == key


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-5", -5), ("0", 0), ("1.5", 1.5), ("-.5", -0.5), ("1e3", 1000.0),
        ("1E-3", 0.001),
        ("010", "010"), ("+5", "+5"), ("1_000", "1_000"), ("0x1F", "0x1F"), ("0o7", "0o7"),
        ("0b1", "0b1"), ("12:30", "12:30"), ("12:30:45.5", "12:30:45.5"),
        ("2020-01-01", "2020-01-01"),
        (".inf", ".inf"), (".nan", ".nan"), ("1.2.3", "1.2.3"), ("true", True),
        ("Off", False), ("yes", True), ("y", "y"), ("tRue", "tRue"), ("~", None), ("Null", None),
        ("'1'", "1"), ('"on"', "on"), ("!!str 1", "1"), ("!!int '7'", 7), ("!!float 1", 1.0),
        ("9" * 101, "9" * 101),
    ],
)  # fmt: skip
def test_what_a_bare_text_is(text, value):
    seen = parse(f"a: {text}").data["a"]
    assert seen == value
    assert type(seen) is type(value) or isinstance(seen, WrittenFloat)


def test_a_float_remembers_its_text():
    number = parse("1.10").data
    assert (number, number.text) == (1.1, "1.10")
    for same in (copy.deepcopy(number), pickle.loads(pickle.dumps(number))):
        assert same == 1.1
    assert json.dumps(number) == "1.1"


def test_merged_keys_and_aliases():
    text = "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\nc:\n  <<: [{x: 5}, *a]\nd: *a\n"
    document = parse(text)
    assert document.data["b"] == {"x": 1, "y": 3}
    assert document.data["c"] == {"x": 5, "y": 2}
    assert document.data["d"] == {"x": 1, "y": 2}
    assert document.place(("b", "y")) == (4, 6)
    assert document.place(("b", "x")) == (1, 11)
    assert parse("a: &a {x: 1}\nb:\n  x: 2\n  <<: *a\n").place(("b", "x")) == (3, 6)


def test_a_key_may_be_a_number_but_no_boolean():
    assert parse("{1: a, 1.50: b}").data == {"1": "a", "1.50": "b"}
    for text in ("on: x", "null: x", "? [a]\n: b"):
        assert "cannot be a key" in refused(text).message


def test_nothing_at_all():
    for text in ("", "\n# comment\n", "---\n", b"\xef\xbb\xbf"):
        assert parse(text).data is None


def test_a_byte_order_mark_and_windows_line_ends_are_read():
    assert parse(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n").data == {"a": 1, "b": 2}
    assert parse("\ufeffa: 1").data == {"a": 1}


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, 1, "'a' is duplicated, first in line 1"),
        ("a: {b: 1, b: 2}", 1, 11, "'b' is duplicated, first in line 1"),
        ("a: 1\n--- \nb: 2", 3, 1, "second document"),
        (b"a: x\nb: \xff\n", 2, 0, "byte 0xff is not UTF-8"),
        ("a: x\nb: '\x07'", 2, 5, "the character '\\x07'"),
        ("a:\n\t- b", 2, 1, "a tab"),
        ("a: !!python/object:os.system x", 1, 4, "the tag 'python/object:os.system'"),
        ("a: !!python/name:os.system ''", 1, 4, "the tag"),
        ("a: !!set {x}", 1, 4, "the tag"),
        ("a: !!binary eA==", 1, 4, "the tag 'binary'"),
        ("a: !!bool maybe", 1, 4, "does not match its tag 'bool'"),
        ("a: &x [*x]", 1, 8, "inside its own anchor"),
        ("&x a: *y", 1, 7, "without its anchor"),
        ("a: &x 1\nb: &x 2", 2, 4, "a duplicate anchor (&name)"),
        ("%YAML 3.0\n---\na", 1, 1, "not YAML"),
        ("{" * 5000, 1, 65, "nested more than 64 levels deep"),
        ("- " * 5000, 1, None, "nested more than 64 levels deep"),
    ],
)
def test_what_is_refused_and_where(text, line, column, message):
    problem = refused(text)
    assert message in problem.message
    assert problem.line == line
    assert column is None or problem.column == column


def test_aliases_cannot_multiply():
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    assert "more than 50000 values" in refused("\n".join(levels)).message


def test_large_texts_are_not_read():
    assert "longer than" in refused("a" * (MAX_BYTES + 1)).message


def test_several_documents_as_kubectl_reads_them():
    documents = parse_all("# first\n---\na: 1\n---\n---\n# nothing\n---\nb: 2\n...\n", "x.yaml")
    assert [(document.data, document.line) for document in documents] == [
        ({"a": 1}, 3),
        ({"b": 2}, 8),
    ]
    assert documents[1].place(("b",)) == (8, 4)


def test_a_document_says_what_is_wrong_with_a_field():
    error = parse(TEXT, "job.yaml").refuse(("run", "args", 1), "0.1 is too much", "lower it")
    assert str(error) == "job.yaml:5:7: run.args[1]: 0.1 is too much; lower it"
    assert str(Document({"a": 1}).refuse(("a",), "no", "")) == "line:1:1: a: no"


def test_json_with_escaped_surrogate_pairs_is_read_as_json():
    assert parse('{"\\ud83d\\ude00": "a\\ud83d\\ude00"}').data == {"\U0001f600": "a\U0001f600"}


def test_what_a_mapping_overrides_is_neither_built_nor_placed():
    many = "".join(f"  k{i}: {{x: 1}}\n" for i in range(2000))
    text = f"a: &a\n{many}b:\n  <<: *a\n{many}"
    document = parse(text)
    assert document.data["b"] == document.data["a"]
    assert document.place(("b", "k1", "x")) == (2005, 11)
    assert len(document.keys) == 2 + 4 * 2000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a {x: {<<: *a}}\n", "an alias inside its own anchor"),
        ("a: &a {x: 1}\nb:\n  <<: [" + "*a, " * 60_000 + "]\n", "more than 50000 values"),
    ],
)
def test_merges_and_values_are_counted(text, message):
    with pytest.raises(SpecError, match=message):
        parse(text)


@pytest.mark.parametrize("text", ["[1, 2, 3, 4]", "{a: 1, b: 2, c: 3}", "--- 1\n" * 5])
def test_a_file_of_too_many_keys_and_values_is_refused_before_it_is_built(monkeypatch, text):
    monkeypatch.setattr(reading, "_MAX_COMPOSED", 4)
    with pytest.raises(SpecError, match="more than 50000 values"):
        parse(text)
