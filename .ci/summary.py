"""The failures of several runs of pytest, and one summary line of them all, as pytest writes it.

Where LOG-again is beside LOG, the tests that failed were run again, and what they did then counts.
"""

import re
import sys
from collections import Counter
from pathlib import Path

COUNT = re.compile(r"(\d+) (failed|passed|skipped|xfailed|xpassed|errors?|deselected|warnings?)\b")
ENDED = re.compile(r"^(?:=+ )?(?P<counts>\d+ .*?) in (?P<seconds>[\d.]+)s\b", re.MULTILINE)
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$")


def main(logs: list[str]) -> int:
    """Exit code 1 where a run has failures, or no summary."""
    total, seconds = Counter(), 0.0
    for log in map(Path, logs):
        counts, took, lines = result(log)
        again = log.with_name(f"{log.name}-again")
        if again.exists():
            repeated, more, later = result(again)
            passed = names(lines) - names(later) if repeated["passed"] else ()
            unstable = (f"UNSTABLE {name} failed, and passed when run again" for name in passed)
            lines = [lines[0], *unstable, *later]
            del counts["failed"], counts["error"]
            counts += repeated
            took += more
        print("\n".join(lines))
        total += counts
        seconds += took
    del total["deselected"]  # by the one, and run by the other
    many = {"error": "errors", "warning": "warnings"}
    named = (
        (number, many.get(name, name) if number > 1 else name) for name, number in total.items()
    )
    counts = ", ".join(f"{number} {name}" for number, name in named)
    print(f" {counts or 'no tests ran'} in {seconds:.2f}s ".center(100, "="))
    return 1 if total["failed"] + total["error"] else 0


def result(log: Path) -> tuple[Counter, float, list[str]]:
    """How many tests ended how, the seconds, and the lines that say so."""
    text = log.read_text(errors="replace")
    ends = list(ENDED.finditer(text))
    counts = Counter()
    for number, outcome in COUNT.findall(ends[-1]["counts"]) if ends else ():
        counts[outcome.removesuffix("s")] += int(number)
    failed = [line for line in text.splitlines() if FAILED.match(line)]
    if not ends:
        counts["error"] = 1
        failed += [f"make {log.name} ended before its tests did:", *text.splitlines()[-20:]]
    seconds = float(ends[-1]["seconds"]) if ends else 0
    return counts, seconds, [f"make {log.name}: {ends[-1][0] if ends else 'no summary'}", *failed]


def names(lines: list[str]) -> set[str]:
    """The tests that failed."""
    return {found[1] for line in lines if (found := FAILED.match(line))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
