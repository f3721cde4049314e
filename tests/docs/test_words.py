"""Words that must not come back: private words of earlier versions, and constructions that only a
translation would use. The right-hand side is what to write instead.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    r"anew": "again, or recreated",
    r"said aloud": "with a message",
    r"(is|are|was|be) said|has said": "is reported, or a message says",
    r"told": "is reported, or a message says",
    r"(go|goes|going|gone|went) on": "continues",
    r"ended well|ends well": "succeeded",
    r"mid-epoch": "within an epoch",
    r"without a word": "silently",
    r"to be had": "available",
    r"what to do where not": "how to fix what is missing",
    r"last[ _]words": "termination message",
    r"lookouts?": "StopCoordinator",
    r"pulses?": "HeartbeatMonitor",
    r"belongings": "ownership",
    r"strays?": "orphans",
    r"neighbou?r(s|ing)?": "p2p, stages, or adjacent",
    r"voices?": "what it is: output, a message",
    r"knock(s|ed|ing)?": "connect",
    r"blam(e|es|ed|ing)": "cause",
    r"favou?r(s|ed|able)?": "prefer",
    r"inwords": "ExplainedErrors",
    r"stor(y|ies)": "JobSummary",
    r"speakers?": "LinePrinter",
    r"funnel": "merge",
    r"own_state": "state",
    r"parted": "sharded",
    r"(processes|ranks|nodes|replicas|group)( that| who| have| had| did not)* (met|meet)": "joined",
    r"take (it|them) out": "remove",
    r"could not be got": "could not be obtained",
    r"what became of": "what happened to, or a noun",
    r"names those": "shows the existing ones",
    r"(is|are) there twice": "is duplicated",
    r"an? (file|key|field|job|loop) of (its|their|your) own": "its own ..., or another ...",
    r"is no (name|number|field|selector|path|port|string|tensor|quantity)": "is not a ...",
    r"one an? (event|GPU|line|rank|replica)": "one per ...",
    r"\w*(colour|behaviour|licence|labelled(?!by))\w*": "color, behavior, license, labeled",
    r"\w*(normal|serial|initial)is[ea]\w*": "-ize, -ization",
    r"class (Share|Wire|Patience|Hello|Truth)": "BatchShard, HttpClient, RetryPolicy, RankInfo",
}
BANNED = re.compile(rf"(?<![a-z])(?:{'|'.join(WORDS)})(?![a-z])", re.IGNORECASE)
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("k8sjob/**/*.py"),
    *ROOT.glob("k8sjob/ui/static/*.[jh]*"),
    *ROOT.glob("templates/**/*"),
]


def text(page):
    """A page; of the changelog, the newest section."""
    whole = page.read_text()
    return "## ".join(whole.split("\n## ")[:2]) if page.name == "CHANGELOG.md" else whole


def test_no_page_or_module_has_a_banned_word():
    found = [
        f"{page.relative_to(ROOT)}:{number}: {match[0]}"
        for page in PAGES
        if page.is_file() and not page.name.endswith(".ko.md") and "uPlot" not in page.name
        for number, line in enumerate(text(page).splitlines(), 1)
        for match in BANNED.finditer(line)
    ]
    assert found == []


@pytest.mark.parametrize("line", ["the last words", "def _told(self):", "4 processes met: ddp"])
def test_the_search_finds_parts_of_identifiers_and_of_lines(line):
    assert BANNED.search(line)
