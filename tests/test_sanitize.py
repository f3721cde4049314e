import json
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k8sjob.sanitize import safe_json, safe_line, safe_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("한글 🚀 naïve", "한글 🚀 naïve"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Hhome", "home"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]52;c;Y2xpcGJvYXJk\x1b\\after", "after"),
        ("\x1b]8;;file:///etc/passwd\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1;2|dcs\x1b\\after", "after"),
        ("\x9d0;title\x9cafter", "after"),
        ("\x9b31mred", "red"),
        ("\x1bcreset", "reset"),
        ("\x1b(0line", "line"),
        ("a\u00adb\u2060c\u3164d\ufe01e\U000e0150f\U0001d173", "abcdef"),
        ("e\u0301" + "\u0302" * 9 + "a", "e\u0301\u0302\u0302\u0302a"),
        ("กี่" + "\u0e47" * 9 + "a", "กี่\u0e47\u0e47a"),
        ("a" + "\u0489\u05b0\u0301\u200d\U0001d165" * 99, "a\u0489\u05b0\u0301\u200d"),
        ("👩🏽\u200d❤\ufe0f\u200d💋\u200d👨🏻 שָׁ", "👩🏽\u200d❤\ufe0f\u200d💋\u200d👨🏻 שָׁ"),
        ("\x90one\x90two\x9cthree", "onethree"),
        ("bell\x07 back\b\b nul\0 del\x7f", "bell back nul del"),
        ("\x1b]0;never ended", "0;never ended"),
        ("a\u202egnp.exe\u202c", "agnp.exe"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("tags\U000e0041\U000e007f", "tags"),
        ("a\u2028b", "ab"),
        ("a\tb", "a   b"),
        ("two\nlines", "two lines"),
        ("  10%\r  50%\r 100%", " 100%"),
        ("done\r\n", "done"),
        ("half \ud83d pair", "half \ufffd pair"),
        ("\x1b[1\x1b[31mnested", "1nested"),
        ("\x1b\x1b[31mtwice", "twice"),
        ("::stop-commands::token", ": :stop-commands::token"),
        (" \t\u3000::set-env name=A::b", "    \u3000: :set-env name=A::b"),
        ("\x1b[0K10%\r\ufeff:\u200b:error file=a::b", ": :error file=a::b"),
        ("##[add-path]/tmp and ##vso[task.x]", "# #[add-path]/tmp and # #vso[task.x]"),
        ("##\u200bvso[a] ###teamcity[b]", "# #vso[a] ## #teamcity[b]"),
        ("section_start:1:a[collapsed=true]\r\x1b[0Khidden", "hidden"),
        ("\x1b[0Ktravis_fold:start:a\r", "travis_fold:start:a"),
        ("::1 is a host, std::vector<a::b> a class, ## [a](b) a title", None),
    ],
)
def test_what_a_terminal_must_not_act_on_is_taken_out(text, shown):
    assert safe_line(text) == (text if shown is None else shown)


INTRODUCERS = ["\x90", "\x98", "\x9b", "\x9d", "\x1b]", "\x1bP", "\x1b[", "\x1b[0", "\x9d\x1b"]


@pytest.mark.parametrize("begun", INTRODUCERS)
def test_strings_that_are_begun_and_never_ended_are_removed_in_linear_time(begun):
    assert "\x1b" not in safe_line(begun * 300_000)  # minutes where each is looked for to the end
    assert safe_line(begun * 300_000 + "\x1b[0mend").endswith("end")


def test_text_keeps_its_lines():
    assert safe_text("one\r\n\x1b[1mtwo\nthree") == "one\ntwo\nthree"


ACTIVE = "\x1b\x9b\x9d\x90[]0;31mPX^_\\\x07\r\n\u202e\u2066\x00"


@given(st.text(alphabet=st.one_of(st.sampled_from(ACTIVE), st.characters(codec=None))))
@example("\x1b\x1b[[31m31m")
@example("\x1b]\x1b]0;a\x07")
def test_nothing_acts_whatever_is_written(text):
    shown = safe_line(text)
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
    assert not re.search("[\u061c\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]", shown)
    assert safe_line(shown) == shown
    shown.encode()


PARTS = ["::", ":", "#", "##", "[", "]", "vso", "error", " ", "\t", "\n", "\r", "\u200b", "\x1b[0K"]


@given(st.lists(st.sampled_from(PARTS)).map("".join))
def test_no_ci_finds_a_command(text):
    for line in safe_text(text).splitlines():
        assert not re.match(r"\s*::[a-z].*::", line)
        assert not re.search(r"##\w*\[", line)


def test_json_holds_no_command_and_the_same_text():
    data = {"::error::": ["##vso[a]", "###[b]", "##", '\\##"#']}
    assert not re.search("##|^::", safe_json(data, indent=0), re.MULTILINE)
    assert json.loads(safe_json(data)) == data


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"])))
def test_printable_ascii_stays_as_it_is(text):
    assert safe_line(text) == text or "##" in text or "::" in text
