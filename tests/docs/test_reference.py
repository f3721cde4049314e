"""The pages of the reference are what the code says."""

import importlib.util
from pathlib import Path

from k8sjob.compat import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_the_spec_is_up_to_date():
    found = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    generate = importlib.util.module_from_spec(found)
    found.loader.exec_module(generate)
    assert generate.PAGE.read_text() == generate.page(), "run: python docs/generate.py"


def test_every_strategy_has_a_row_of_its_proof():
    page = (ROOT / "docs/reference/strategies.md").read_text()
    assert [kind for kind in STRATEGIES if f"\n| `{kind}`" not in page] == []
