"""The pages of the reference are what the code says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_the_spec_is_up_to_date():
    found = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    generate = importlib.util.module_from_spec(found)
    found.loader.exec_module(generate)
    assert generate.PAGE.read_text() == generate.page(), "run: python docs/generate.py"
