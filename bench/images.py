"""What an edited line costs until it is in the registry, and until it trains: one run, one page.

    python bench/images.py [--rounds 7] [--steps 5]

Runs bench/push.py and bench/sdk.py, which say what is needed, and writes bench/results-images.json
and the tables of docs/reference/images.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import sdk

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/reference/images.md"
MARK = "<!-- measured: bench/images.py -->\n"


def pushes(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """What bench/push.py measures, in a network of its own."""
    argv = [sys.executable, str(Path(__file__).with_name("push.py")), "--rounds", str(rounds)]
    return json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)


def shown(row: dict[str, float]) -> str:
    """The cells of one way."""
    network = row["network"] / 1e6
    sent = f"{network:,.0f} MB" if network >= 10 else f"{network:.2f} MB"
    seconds = f"{row['seconds']:.2f} | {row['least']:.2f} | {row['cpu']:.2f}"
    return f"{seconds} | {sent} | {row['megabytes']:.0f} MB"


def tables(results: dict) -> str:
    """The results in Markdown."""
    lines = [f"Load {results['load']['before']:.0f} before, {results['load']['after']:.0f} after."]
    for label, rows in results["pushes"].items():
        lines += [
            "",
            f"| {label} | Median seconds | Min. seconds | CPU seconds | Network | Memory |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        lines += [f"| {way} | {shown(row)} |" for way, row in rows.items()]
    lines += ["", "| Time after the command | Job submitted | First step |", "|---|---|---|"]
    lines += [
        f"| {way} | {row['submitted']:.1f} s | {row['first step']:.1f} s |"
        for way, row in results["steps"].items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    load = {"before": os.getloadavg()[0]}
    results = {"load": load, "pushes": pushes(asked.rounds), "steps": sdk.measure(asked.steps)}
    load["after"] = os.getloadavg()[0]
    target = Path(__file__).with_name("results-images.json")
    target.write_text(json.dumps(results, indent=2) + "\n")
    head, mark, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{head}{mark}{tables(results)}")


if __name__ == "__main__":
    main()
