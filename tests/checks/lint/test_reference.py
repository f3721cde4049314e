"""Each check has a row in docs/reference/lint.md, and finds its example in examples.md."""

import re
from pathlib import Path

import pytest

from k8sjob.checks.lint import CHECKS, lint

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/lint.md"
SECTION = re.compile(r"^### ([\w-]+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^(?:<!-- file: (\S+) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SUFFIXES = {"yaml": "yaml", "python": "py"}
UNSILENCED = {"invalid-document", "script-syntax", "unknown-ignore"}
"""What cannot be parsed has no comments, and a wrong comment is not cured by another."""
EXAMPLES = (Path(__file__).parent / "examples.md").read_text()
SECTIONS = dict(SECTION.findall(EXAMPLES))
JOB = BLOCK.search(EXAMPLES)[3]


def changed(text, diff):
    """The text after a diff, whose hunks are where their old lines are first."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        assert old in text
        text = text.replace(old, "".join(line[1:] for line in lines if line[0] in " +"), 1)
    return text


def written(section, folder, *, corrected=False):
    """Write the section's files, and return the one to read."""
    blocks = BLOCK.findall(section)
    diffs = [body for _, language, body in blocks if language == "diff"]
    _, language, text = blocks[0]
    if language == "diff":
        language, text = "yaml", changed(JOB, diffs.pop(0))
    if corrected:
        text = changed(text, diffs[0]) if diffs else JOB
    for name, _, body in blocks:
        if name:
            (folder / name).write_text(body)
    file = folder / f"{'good' if corrected else 'found'}.{SUFFIXES[language]}"
    file.write_text(text)
    return file


def test_every_check_has_its_row_and_its_example():
    rows = re.findall(
        r"^\| `([\w-]+)` \| (\w+) \| [^|]+ \| (.+) \|$", PAGE.read_text(), re.MULTILINE
    )
    assert rows == [(check.id, str(check.severity), check.why) for check in CHECKS.values()]
    assert all(name == check.id for name, check in CHECKS.items())
    # What takes a minute is no example.
    assert SECTIONS.keys() == CHECKS.keys() - {"script-unfinished"}


@pytest.mark.parametrize("name", SECTIONS)
def test_the_example_is_found_as_the_page_says(name, tmp_path):
    section = SECTIONS[name]
    found = lint(written(section, tmp_path))
    assert {finding.id for finding in found} == {name}
    assert {finding.severity for finding in found} == {CHECKS[name].severity}
    detail = [str(finding).replace(f"{tmp_path}/", "") for finding in found]
    shown = next(body for _, language, body in BLOCK.findall(section) if language == "text")
    assert len(detail) == len(shown.splitlines())
    for line, pattern in zip(detail, shown.splitlines(), strict=True):
        assert re.fullmatch(re.escape(pattern).replace(r"\.\.\.", ".*"), line), line


@pytest.mark.parametrize("name", SECTIONS)
def test_the_correction_is_not_found(name, tmp_path):
    assert lint(written(SECTIONS[name], tmp_path, corrected=True)) == []


@pytest.mark.parametrize("name", sorted(SECTIONS.keys() - UNSILENCED))
def test_a_comment_silences_it(name, tmp_path):
    section = SECTIONS[name]
    entry = written(section, tmp_path)
    found = lint(entry)
    file = Path(found[0].source)
    lines = file.read_text().splitlines()
    for line in {finding.line for finding in found}:
        lines[line - 1] += f"  # k8sjob: ignore[restart-policy-typo, {name}]"
        if file.suffix == ".py":
            lines[line - 1] = lines[line - 1].replace("restart-policy-typo, ", "")
    file.write_text("\n".join(lines) + "\n")
    assert lint(entry) == []
