"""The documentation site: built without a warning, which a broken link would be."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("furo", reason="needs furo: pip install --group docs")
    argv = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", ROOT / "docs/site"]
    argv += [ROOT / "docs", tmp_path]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {page.relative_to(tmp_path).as_posix() for page in tmp_path.rglob("*.html")}
    sources = [path.relative_to(ROOT / "docs") for path in ROOT.glob("docs/**/*.md")]
    assert {path.with_suffix(".html").as_posix() for path in sources} < pages
    first = (tmp_path / "index.html").read_text()
    assert "한국어" in first
    sidebar = re.findall(r'href="how-to/([\w-]+)\.html"', first[first.index("sidebar-tree") :])
    named = [sidebar.index(page) for page in ("own-script", "submit", "adopt", "from-ddp")]
    assert named == sorted(named)  # as the first page has them, and ported tutorials by themselves
    loaded = r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(?:https?:)?//'
    assert not [page for page in pages if re.search(loaded, (tmp_path / page).read_text())]
    index = re.search(r"\{.*\}", (tmp_path / "searchindex.js").read_text())[0]
    assert "how-to/own-script.ko" in json.loads(index)["docnames"]
