import tomllib
from pathlib import Path

import pytest

from k8sjob.checks.doctor.machine import OLDEST_TORCH, Machine, client, here, look
from k8sjob.findings import Severity

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def test_the_oldest_torch_is_that_of_the_package():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert extras["run"][:1] == [f"torch>={'.'.join(map(str, OLDEST_TORCH))}"]


def test_this_machine():
    machine = look()
    assert machine.python.startswith("3.")
    assert machine.gpus >= 0


@pytest.mark.parametrize(
    ("machine", "chosen", "verdict", "detail"),
    [
        (Machine("3.11"), None, Severity.OK, "without kubectl"),
        (Machine("3.11", kubectl="v1.33.0"), "kubectl", Severity.OK, "kubectl v1.33.0"),
        (Machine("3.11", kubectl="v1.32.3"), "kubectl", Severity.WARNING, "2 minor releases"),
        (Machine("3.11", kubectl="of my own"), "kubectl", Severity.OK, "of my own"),
        (Machine("3.11"), "kubectl", Severity.ERROR, "not installed"),
    ],
)
def test_clients(machine, chosen, verdict, detail):
    check = client(machine, chosen, "v1.34.4")
    assert check.severity is verdict
    assert detail in check.message


@pytest.mark.parametrize(
    ("torch", "verdict"),
    [(None, Severity.WARNING), ("2.5.1", Severity.WARNING), ("2.10.0+cu128", Severity.OK)],
)
def test_jobs_on_this_machine(torch, verdict):
    _, check, _ = here(Machine("3.11", torch=torch))
    assert check.severity is verdict


def test_gpus_of_this_machine():
    assert "2 GPUs" in [*here(Machine("3.11", gpus=2))][-1].message
    assert "no GPU" in [*here(Machine("3.11"))][-1].message
