"""The documentation is executed: what a page shows is what happens. See tests/pages.py."""

import re

import pytest
from pages import KOREAN, PAGES, ROOT, Reader, blocks, name

LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")


def runs_something(page):
    return any(
        block["note"] not in {"not run", "needs"}
        and block["language"] in {"console", "python", "yaml"}
        for block in blocks(page)
    )


def marks(page):
    """What trains is no fast test; README and tutorial are essential all the same."""
    text = page.read_text()
    if "k8sjob run" not in text and "torch" not in text:
        return []
    first = page == ROOT / "README.md" or page.parent.name == "tutorial"
    return [pytest.mark.dist, *[pytest.mark.essential] * first]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=marks(page))
        for page in PAGES
        if page not in KOREAN and runs_something(page)
    ],
    ids=name,
)
def test_what_a_page_shows_is_what_happens(page, tmp_path):
    Reader(tmp_path / "reader").follow(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    broken = [
        target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ]
    assert not broken


@pytest.mark.parametrize("page", KOREAN, ids=name)
def test_a_korean_page_shows_what_the_english_one_shows(page):
    english = page.with_name(page.name.replace(".ko.md", ".md"))
    assert shown(page) == shown(english)


def shown(page):
    """The blocks that are run on an English page."""
    return [
        (block["language"], block["body"])
        for block in blocks(page)
        if block["language"] in {"console", "python", "yaml"}
    ]


def test_the_modules_that_explanations_name_are_there():
    for page in ROOT.glob("docs/explanation/*.md"):
        for file in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            found = (ROOT / file).exists() or (ROOT / "k8sjob" / file).exists()
            assert found or file in {"k8sjob.py", "main.py"}, (page, file)  # a user's files
