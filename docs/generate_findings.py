"""Writes docs/reference/findings.md from the code: `python docs/generate_findings.py`."""

import re
from pathlib import Path

from k8sjob.checks.lint import CHECKS
from k8sjob.findings import INVALID
from k8sjob.observe.diagnose import Cause
from k8sjob.proving.rules.evidence import Fault

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "findings.md"
TOPIC = re.compile(r'\b(?:(?:fine|unknown|warning|problem)\(|topic =)\s*"([a-z -]+)"')
HEAD = """\
<!-- Written by docs/generate_findings.py from the code; change the names there. -->
# Findings by their ids

The names by which programs recognize findings in the [JSON](json.md) of each command. Later
versions add names, and never change what one means. A name is unique in its list only.
"""


def page() -> str:
    """The whole page."""
    doctor = [*(ROOT / "k8sjob/checks/doctor").glob("*.py"), ROOT / "k8sjob/cli/doctor.py"]
    topics = [name for file in doctor for name in TOPIC.findall(file.read_text(encoding="utf-8"))]
    lists = {
        "Errors of a job.yaml\n\n`id` of `validate`; [all texts](errors.md)": [INVALID],
        "Checks of lint\n\n`id` of `lint`, `ruleId` in SARIF; [reasons](lint.md)": CHECKS,
        "Topics of doctor\n\n`topic` of `doctor`; [what is checked](doctor.md)": topics,
        "Causes of why\n\n`cause` of `why` and of events; [meanings](states.md#findings)": Cause,
        "Causes of prove\n\n`cause` of `prove`; [what was seen](prove.md)": Fault,
    }
    rows = {heading: "`, `".join(sorted({*names})) for heading, names in lists.items()}
    return HEAD + "".join(f"\n## {heading}.\n\n`{row}`\n" for heading, row in rows.items())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
