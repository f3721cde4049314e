"""`python -P -m k8sjob.fitting.metering`: forks the ranks of each run, and measures their memory.

The options of a request are those of `measure`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from k8sjob.fitting.metering.meter import measure
from k8sjob.forking.ranks import run_rank, serve

if TYPE_CHECKING:
    from collections.abc import Callable


def _start(request: dict[str, Any], rank: int, port: int) -> None:
    def measured(script: Callable[[], Any]) -> int:
        file = Path(request["folder"], f"memory-{rank}.json")
        return measure(file, request["options"], script)

    run_rank(request, rank, port, measured)


if __name__ == "__main__":
    serve(_start)
