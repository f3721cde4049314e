"""Words that must not come back: private words of earlier versions, and constructions that only a
translation would use. The right-hand side is what to write instead.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    r"anew": "again, or recreated",
    r"said aloud": "with a message",
    r"(is|are) told": "is reported, or a message says",
    r"goes on": "continues",
    r"mid-epoch": "within an epoch",
    r"without a word": "silently",
    r"to be had": "available",
    r"last words": "termination message",
    r"lookouts?": "StopCoordinator",
    r"belongings": "ownership",
    r"strays": "orphans",
    r"funnel": "merge",
    r"take (it|them) out": "remove",
    r"could not be got": "could not be obtained",
    r"what became of": "what happened to, or a noun",
    r"names those": "shows the existing ones",
    r"is no (name|number|field|selector|path|port|string|tensor|quantity)": "is not a ...",
    r"one an? (event|GPU|line|rank|replica)": "one per ...",
}
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("k8sjob/**/*.py"),
    *ROOT.glob("templates/**/*"),
]


def test_no_page_or_module_has_a_banned_word():
    banned = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
    found = [
        f"{page.relative_to(ROOT)}:{number}: {match[0]}"
        for page in PAGES
        if page.is_file() and page.name != "CHANGELOG.md" and not page.name.endswith(".ko.md")
        for number, line in enumerate(page.read_text().splitlines(), 1)
        for match in banned.finditer(line)
    ]
    assert found == []
