"""The pages of the reference are what the code says."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from pages import PAGES, name

from k8sjob.runtime import Job, Run
from k8sjob.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]


def program(name):
    found = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["generate", "generate_cli", "generate_findings"])
def test_the_page_that_is_written_from_the_code_is_up_to_date(script):
    generate = program(script)
    assert generate.PAGE.read_text() == generate.page(), f"run: make docs ({script})"


def test_the_files_that_pages_show_are_up_to_date():
    filled = program("generate_shown").filled
    old = [name(page) for page in PAGES if filled(page.read_text()) != page.read_text()]
    assert old == [], "run: make docs"


def test_the_drawings_of_the_architecture_are_up_to_date():
    generate = program("generate_architecture")
    for drawing in generate.DRAWINGS:
        there = (generate.FOLDER / f"{drawing}.svg").read_text()
        assert there == generate.drawing(drawing), "run: make docs"


def test_the_picture_of_the_answers_shows_what_the_readme_shows():
    generate, shown = program("generate_picture"), re.compile(r"<text[^>]*>([^<]*)")
    there = (generate.FOLDER / "answers.svg").read_text()
    drawn = generate.picture(generate.answers(), "k8sjob")
    assert shown.findall(there) == shown.findall(drawn), "run: make docs"


def test_every_strategy_has_a_row_of_its_proof():
    page = (ROOT / "docs/reference/strategies.md").read_text()
    assert [kind for kind in STRATEGIES if f"\n| `{kind}`" not in page] == []


@pytest.mark.parametrize(("heading", "of"), [("Job", Job), ("Run", Run)])
def test_what_the_reference_of_the_runtime_names_exists(heading, of):
    page = (ROOT / "docs/reference/runtime.md").read_text()
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    names = {name for cell in cells for name in re.findall(r"`(\w+)[(`]", cell)}
    known = set(dir(of)) | set(re.findall(r"self\.(\w+)", inspect.getsource(of)))
    assert names
    assert names - known == set()
