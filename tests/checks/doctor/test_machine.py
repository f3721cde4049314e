import tomllib
from pathlib import Path

import pytest

from k8sjob.checks.doctor import machine
from k8sjob.checks.doctor.machine import OLDEST_TORCH
from k8sjob.findings import Severity

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def test_the_oldest_torch_is_that_of_the_package():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert extras["run"][:1] == [f"torch>={'.'.join(map(str, OLDEST_TORCH))}"]


@pytest.mark.parametrize(
    ("torch", "verdict"),
    [("", Severity.WARNING), ("2.5.1", Severity.WARNING), ("2.10.0+cu128", Severity.OK)],
)
@pytest.mark.parametrize(("gpus", "text"), [([], "no GPU"), (["0", "1"], "2 GPUs")])
def test_jobs_on_this_machine(monkeypatch, torch, verdict, *, gpus, text):
    monkeypatch.setattr(machine, "installed_version", lambda _name: torch)
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    python, check, devices = machine.here()
    assert python.message.startswith("Python 3.")
    assert check.severity is verdict
    assert text in devices.message
