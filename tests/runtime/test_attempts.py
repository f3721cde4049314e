"""When a failure is the one before it again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k8sjob.contract import ExitCode, Reason
from k8sjob.runtime.attempts import repeats

KILLED = Reason(137, rank=1, type="Signal", step=40)
HUNG = Reason(ExitCode.HUNG, rank=0, where="main.py:3", culprits=(1,), step=7)


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        (None, KILLED, False),
        (KILLED, replace(KILLED, time=9.0, message="another"), True),
        (KILLED, replace(KILLED, step=41), False),
        (KILLED, replace(KILLED, rank=0), False),
        (KILLED, replace(KILLED, exit_code=139), False),
        (replace(KILLED, step=-1), replace(KILLED, step=-1), False),
        (HUNG, replace(HUNG, rank=3), True),
        (HUNG, replace(HUNG, culprits=(2,)), False),
        (HUNG, replace(HUNG, where="main.py:4"), False),
        (replace(HUNG, step=-1), replace(HUNG, step=-1), True),
        *(
            (
                Reason(code, step=3, where="main.py:3"),
                Reason(code, step=3, where="main.py:3"),
                False,
            )
            for code in (ExitCode.PEER_LOST, ExitCode.STOPPED)
        ),
    ],
)
def test_same_ranks_same_place_same_step(before, now, same):
    assert repeats(before, now) is same
