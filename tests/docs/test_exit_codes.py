"""docs/reference/exit-codes.md tells all codes of the contract, and what becomes of each."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from k8sjob.contract import ExitCode, Reason
from k8sjob.runtime.agent.attempt import retryable

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/exit-codes.md").read_text()


def table(heading):
    """The rows of the table that begins with this heading, as lists of cells."""
    block = re.search(rf"^\| {heading} .*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|\n").split("|")] for row in block[1].splitlines()]


def test_every_code_of_the_contract_is_there():
    rows = table(r"Code \| Name")
    assert [(int(row[0]), row[1]) for row in rows] == [(code, code.name) for code in ExitCode]


def test_what_is_repeated_is_what_the_agent_repeats():
    """Except after a stop, which it was asked for."""
    for code, name, _, here, policy in table(r"Code \| Name"):
        assert (policy == "recreated") == retryable(int(code)), name
        assert (here == "restarts") == (retryable(int(code)) and name != "STOPPED"), name


def test_signals_have_their_numbers():
    for code, name, _ in table(r"Code \| Signal"):
        assert int(code) == 128 + signal.Signals[name]


def test_the_example_is_a_reason():
    text = re.search(r"```json\n(.*)\n```", PAGE)[1]
    assert json.loads(Reason.decode(text).encode()) == json.loads(text)
