import re
from pathlib import Path

from k8sjob.checks.doctor import Verdict

ROOT = Path(__file__).resolve().parents[3]
MADE = re.compile(r"\b(?:(?:fine|unknown|warning|problem)\(|topic =)\s*\"([a-z-]+)\"")
PAGE = (ROOT / "docs/reference/doctor.md").read_text()


def test_every_topic_is_explained():
    sources = [*(ROOT / "k8sjob/checks/doctor").glob("*.py"), ROOT / "k8sjob/cli/doctor.py"]
    topics = {topic for path in sources for topic in MADE.findall(path.read_text())}
    cells = re.findall(r"^\| (`[^|]+) \|", PAGE, re.MULTILINE)
    explained = set(re.findall(r"`([a-z-]+)`", "".join(cells)))
    assert len(topics) > 20
    assert topics == explained


def test_every_verdict_is_explained():
    assert re.findall(r"^\| (ok|unknown|warning|problem) \|", PAGE, re.MULTILINE) == list(Verdict)
