"""Text and numbers of a job or a cluster, made harmless for a terminal.

Whoever writes a log line must not be able to move the cursor, set the window's title, fill the
clipboard, hide text or show it in another order.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from typing import Any, Final

# Expressions as texts: `re` compiles each when it is first needed, which few commands do.
# Any introducer ends a control string, as in a terminal. So no character is looked at more than
# twice, however many strings are begun and never ended.
_SEQUENCES: Final = r"""
    (?: \x1b\[ | \x9b ) [0-?]*+ [\ -/]*+ [@-~]                    # CSI: colors, cursor, modes
  | (?: \x1b\] | \x9d ) [^\x07\x1b\x80-\x9f]*+ (?: \x07 | \x1b\\ | \x9c )  # OSC: title, link
  | (?: \x1b[PX^_] | [\x90\x98\x9e\x9f] )                        # DCS, SOS, PM, APC
    [^\x1b\x80-\x9f]*+ (?: \x1b\\ | \x9c )
  | \x1b [\ -/]*+ [0-~]                                           # all other escapes
    """
_INVISIBLE: Final = (
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but the tab and the newline
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0"  # fill no place
    "\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"  # order of writing, zero width
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # line breaks that are none, byte order marks, annotations
    "\ufe00-\ufe0e\U000e0000-\U000e0fff"  # variants and tags: a second text nobody sees
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # of shorthand and of notes
    "]"
)
_SIGNS: Final = r"[^\w\s\x00-\u02ff\u2100-\u2bff]{5,}"
"""Runs in which marks may stack; a regular expression knows no class of marks alone. The blocks and
arrows of progress bars are left out."""
_MOST_MARKS: Final = 4
"""Of one letter; with more than any language has, they would cover the lines around."""
_MARKS: Final = frozenset({"Mn", "Me", "Cf"})
"""Categories of what is drawn over the character before it, or not at all."""
# GitHub and its relatives act on a line that begins with `::NAME ...::`, Azure, TeamCity and older
# runners on `##[`, `##vso[` or `##teamcity[` anywhere in it. What GitLab and Travis act on needs a
# control sequence.
_LEADING_COMMAND: Final = r"\A(\s*+:)(?=:[A-Za-z].*::)"
_INNER_COMMAND: Final = r"#(?=#\w*\[)"
_SURROGATES: Final = "[\ud800-\udfff]"


def safe_line(text: str) -> str:
    r"""The text as one printable line, as a terminal would have left it.

    Control sequences and characters that act without being seen are removed; of a line that was
    written over (`\r`, as progress bars do) the last version stays; line breaks become spaces.
    Commands to a CI, as `::error::` and `##vso[...]`, get a space that makes them plain text.
    """
    if not (text.isascii() and text.isprintable()):  # as few lines are
        text = re.sub(_SEQUENCES, "", text, flags=re.VERBOSE)
        if "\r" in text:
            text = next((part for part in reversed(text.split("\r")) if part.strip("\n")), "")
        text = re.sub(_SURROGATES, "\ufffd", re.sub(_INVISIBLE, "", text))
        text = re.sub(_SIGNS, _with_few_marks, text).replace("\n", " ").expandtabs(4)
    if "##" in text:
        text = re.sub(_INNER_COMMAND, "# ", text)
    return re.sub(_LEADING_COMMAND, r"\1 ", text) if "::" in text else text


def _with_few_marks(signs: re.Match[str]) -> str:
    shown, marks = list[str](), 0
    for sign in signs[0]:
        is_mark = unicodedata.combining(sign) or unicodedata.category(sign) in _MARKS
        marks = marks + 1 if is_mark else 0
        if marks <= _MOST_MARKS:
            shown.append(sign)
    return "".join(shown)


def safe_text(text: str) -> str:
    r"""The same for text of several lines; `\r\n` counts as one line break."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(safe_line(line) for line in lines)


def safe_json(data: Any, **options: Any) -> str:
    """The data as JSON by json.dumps, in which no CI finds a command; see safe_line."""
    return json.dumps(data, **options).replace("##", r"#\u0023")


def flat(data: dict[str, Any]) -> dict[str, str | float]:
    """The numbers and texts of a JSON object, harmless; nested ones are left out."""
    values: dict[str, str | float] = {}
    for key, value in data.items():
        if isinstance(value, bool | str):
            values[text(key)] = text(value)
        elif (as_number := real(value)) is not None:
            values[text(key)] = as_number
    return values


def text(value: object) -> str:
    """A value as one harmless line; empty for None."""
    return "" if value is None else safe_line(str(value))


def real(value: object) -> float | None:
    """A JSON number as a float, or None; integers that no float holds become infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def integer(value: object) -> int | None:
    """A JSON number as an int, or None."""
    as_float = real(value)
    return int(as_float) if as_float is not None and abs(as_float) < 2**53 else None
