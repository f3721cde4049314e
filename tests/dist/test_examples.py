"""The examples of the strategies train, as their job.yaml says, to a stated accuracy."""

from dataclasses import asdict
from pathlib import Path

import pytest

from k8sjob.spec import load

pytestmark = pytest.mark.dist
MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
# What the examples' trainings come to: a metric, and its limit.
LEARNT = {
    "transformer-fsdp": ("test_loss", 2.95),
    "torch-mesh": ("test_loss", 0.35),
    "pipeline": ("test_loss", 0.5),
    "parameter-server": ("test_loss", 0.9),
    "model-split": ("test_loss", 0.5),
    "accumulate": ("test_loss", 0.6),
    "sync-batchnorm": ("test_loss", 0.5),
    "data-parallel": ("test_loss", 0.5),
}


@pytest.mark.parametrize("name", LEARNT)
def test_an_example_learns(run_ranks, tmp_path, name):
    spec = load(MANIFESTS / name / "job.yaml")
    settings = {**asdict(spec.runtime_config), "checkpoint_dir": str(tmp_path / "saved")}
    program = MANIFESTS / name / "main.py"
    outcome = run_ranks(program=program, limit=400, world=spec.world_size, **settings)
    assert outcome.told("started")[0]["strategy"] == spec.strategy.kind
    metric, limit = LEARNT[name]
    assert outcome.told("metrics")[-1][metric] < limit, outcome.told("metrics")


@pytest.mark.parametrize("name", LEARNT)
def test_an_example_is_short(name):
    assert len((MANIFESTS / name / "main.py").read_text().splitlines()) <= 60
