"""The failures of several runs of pytest, and one summary line of them all, as pytest writes it."""

import re
import sys
from collections import Counter
from pathlib import Path

COUNT = re.compile(r"(\d+) (failed|passed|skipped|xfailed|xpassed|errors?|deselected|warnings?)\b")
ENDED = re.compile(r"^(?:=+ )?(?P<counts>\d+ .*?) in (?P<seconds>[\d.]+)s\b", re.MULTILINE)


def main(logs: list[str]) -> int:
    """Exit code 1 where a run has failures, or no summary."""
    total, seconds = Counter(), 0.0
    for log in map(Path, logs):
        text = log.read_text(errors="replace")
        ends = list(ENDED.finditer(text))
        counts = Counter()
        for number, outcome in COUNT.findall(ends[-1]["counts"]) if ends else ():
            counts[outcome.removesuffix("s")] += int(number)
        failed = [line for line in text.splitlines() if re.match(r"(FAILED|ERROR) tests/", line)]
        if not ends:
            counts["error"] = 1
            failed += [f"make {log.name} ended before its tests did:", *text.splitlines()[-20:]]
        print("\n".join([f"make {log.name}: {ends[-1][0] if ends else 'no summary'}", *failed]))
        total += counts
        seconds += float(ends[-1]["seconds"]) if ends else 0
    del total["deselected"]  # by the one, and run by the other
    many = {"error": "errors", "warning": "warnings"}
    named = (
        (number, many.get(name, name) if number > 1 else name) for name, number in total.items()
    )
    counts = ", ".join(f"{number} {name}" for number, name in named)
    print(f" {counts or 'no tests ran'} in {seconds:.2f}s ".center(100, "="))
    return 1 if total["failed"] + total["error"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
