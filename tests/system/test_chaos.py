"""Random faults, a few of them, by seeds that play them again: the whole run is bench/chaos.py."""

import subprocess
import sys
from pathlib import Path

import pytest
from needs import lacking

CHAOS = Path(__file__).resolve().parents[2] / "bench/chaos.py"
REASON = lacking("chaos")

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(bool(REASON), reason=f"{REASON}: networks and disks go away"),
]


@pytest.mark.parametrize("seed", [100])
def test_jobs_end_with_the_curve_of_one_that_nobody_touched(seed):
    argv = [sys.executable, str(CHAOS), "4", str(seed)]
    played = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=1100)
    assert played.returncode == 0, played.stdout + played.stderr
    assert "the same curve" in played.stdout
    failed = [line for line in played.stdout.splitlines() if ": failed: " in line]
    # A node cannot train again once the others have ended well: a fault in the last second.
    assert all(" had ended with exit code 0" in line for line in failed), played.stdout
