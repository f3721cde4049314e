import tomllib
from pathlib import Path

import pytest
from healthy import the

from k8sjob.checks.doctor.check import Verdict
from k8sjob.checks.doctor.machine import CLIENTS, OLDEST_TORCH, Machine, client, here, look

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
        (Machine("3.11", kubernetes="37.0.2"), None, Verdict.OK, "kubernetes 37.0.2"),
        (Machine("3.11", kubernetes="34.1.0"), None, Verdict.WARNING, "tested with 35 to 37"),
        (Machine("3.11", kubernetes="38.0.0"), "python", Verdict.WARNING, "tested with 35 to 37"),
        (Machine("3.11", kubectl="v1.34.4"), "python", Verdict.PROBLEM, "not installed"),
        (Machine("3.11", kubectl="v1.34.4"), None, Verdict.OK, "kubectl v1.34.4"),
        (Machine("3.11", kubernetes="37.0.2", kubectl="v1.33.0"), "kubectl", Verdict.OK, "v1.33"),
        (Machine("3.11", kubectl="v1.32.3"), None, Verdict.WARNING, "2 minor releases"),
        (Machine("3.11", kubectl="of my own"), None, Verdict.OK, "of my own"),
        (Machine("3.11"), None, Verdict.PROBLEM, "neither"),
    ],
)
def test_clients(machine, chosen, verdict, detail):
    check = the(client(machine, chosen, "v1.34.4"))
    assert check.verdict is verdict
    assert detail in check.seen


@pytest.mark.parametrize(
    ("torch", "verdict"),
    [(None, Verdict.WARNING), ("2.5.1", Verdict.WARNING), ("2.10.0+cu128", Verdict.OK)],
)
def test_jobs_on_this_machine(torch, verdict):
    _, check, _ = here(Machine("3.11", torch=torch))
    assert check.verdict is verdict


def test_gpus_of_this_machine():
    assert "2 GPUs" in [*here(Machine("3.11", gpus=2))][-1].seen
    assert "no GPU" in [*here(Machine("3.11"))][-1].seen
