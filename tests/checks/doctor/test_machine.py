import tomllib
from pathlib import Path

import pytest
from healthy import the

from k8sjob.checks.doctor.machine import CLIENTS, OLDEST_TORCH, Machine, client, here, look
from k8sjob.findings import Severity

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"


def test_the_ranges_are_those_of_the_package():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert extras["cluster"][:1] == [f"kubernetes>={CLIENTS.start},<{CLIENTS.stop}"]
    assert extras["run"][:1] == [f"torch>={'.'.join(map(str, OLDEST_TORCH))}"]


def test_this_machine():
    machine = look()
    assert machine.python.startswith("3.")
    assert machine.gpus >= 0


@pytest.mark.parametrize(
    ("machine", "chosen", "verdict", "detail"),
    [
        (Machine("3.11", kubernetes="37.0.2"), None, Severity.OK, "kubernetes 37.0.2"),
        (Machine("3.11", kubernetes="34.1.0"), None, Severity.WARNING, "tested with 35 to 37"),
        (Machine("3.11", kubernetes="38.0.0"), "python", Severity.WARNING, "tested with 35 to 37"),
        (Machine("3.11", kubectl="v1.34.4"), "python", Severity.OK, "is not installed"),
        (Machine("3.11", kubectl="v1.34.4"), None, Severity.OK, "kubectl v1.34.4"),
        (Machine("3.11", kubernetes="37.0.2", kubectl="v1.33.0"), "kubectl", Severity.OK, "v1.33"),
        (Machine("3.11", kubectl="v1.32.3"), None, Severity.WARNING, "2 minor releases"),
        (Machine("3.11", kubectl="of my own"), None, Severity.OK, "of my own"),
        (Machine("3.11"), None, Severity.ERROR, "neither"),
    ],
)
def test_clients(machine, chosen, verdict, detail):
    check = the(client(machine, chosen, "v1.34.4"))
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
