"""`k8sjob fit`: the arithmetic, and what one process is measured to need."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from k8sjob.fitting.estimate import Measured, ModelBlock, gpu_memory, largest_batch, peak

LAST, FIRST = ModelBlock(40, 40, 70, outside=16), ModelBlock(20, 20, 60, outside=16)
ONE = Measured(batch=8, parameters=100, buffers=4, gradients=100, optimizer=200, inputs=8,
               activations=80, retained=150, step=0,
               blocks=(LAST, FIRST, ModelBlock(40, 40, 50, outside=40)))  # fmt: skip
TWICE = replace(ONE, batch=16, inputs=16, activations=150, retained=220)


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({}, 100 + 4 + 100 + 200 + 8 + 80),  # all buckets when activations are at their peak
        ({"copies": True}, 100 + 4 + 200 + 200 + 8 + 50),  # gradients and buckets
        ({"step": 90}, 100 + 4 + 100 + 200 + 8 + 90),  # what the optimizer makes in its step
    ],
)
def test_the_peak_of_ddp(changes, total):
    assert peak(replace(ONE, **changes), "ddp", 2)["total"] == total


def test_fsdp_divides_the_model_and_gathers_the_block_at_the_peak_and_the_next():
    found = peak(ONE, "fsdp", 4)
    assert (found["parameters"], found["optimizer"]) == (25, 50)
    assert found["gathered"] == 40 + 16 + 2 * 40 + 20  # outside of blocks, last block, the next
    assert (found["gradients"], found["activations"]) == (0, 70)
    assert peak(ONE, "fsdp", 4, reshard=False)["gathered"] == 100 + 16 + 20 + 40
    # Of the block before, what is sent is still there, and its part of the gradients.
    later = peak(
        replace(ONE, blocks=(LAST, FIRST._replace(activations=90), ONE.blocks[2])), "fsdp", 4
    )
    assert later["gathered"] == 40 + 16 + 2 * 20 + 40
    assert (later["gradients"], later["activations"]) == (40 // 4, 90)
    # A model without blocks is there whole at the end of the backward pass.
    whole = peak(replace(ONE, blocks=(ModelBlock(100, 100, 80, outside=100),)), "fsdp", 4)
    assert (whole["gathered"], whole["activations"]) == (200, 80)


def test_one_rank_shards_and_copies_nothing():
    assert peak(ONE, "fsdp", 1) == peak(ONE, "ddp", 1)


def test_two_measurements_give_every_batch_size():
    found = ONE.at(32, TWICE)
    assert (found.batch, found.inputs, found.activations) == (32, 32, 80 + 3 * 70)
    twice = replace(TWICE, blocks=(LAST._replace(activations=130), *ONE.blocks[1:]))
    assert [one.activations for one in ONE.at(32, twice).blocks] == [70 + 3 * 60, 60, 50]


def test_the_largest_batch_is_the_last_that_fits():
    def total(batch):
        return peak(ONE.at(batch, TWICE), "ddp", 2)["total"]

    assert [largest_batch(total, room) for room in (total(20), 100)] == [20, 0]


def test_memory_by_the_label_of_a_gpu():
    labels = ("NVIDIA-A100-SXM4-80GB", "NVIDIA-L40S", "Tesla-T4", "NVIDIA-H100-NVL")
    assert [gpu_memory(label) for label in labels] == [n * 10**9 for n in (80, 48, 16, 80)]
    assert gpu_memory("Vendor-X1") is None


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
x = torch.randn(512, 256)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1))
optimizer = torch.optim.Adam(model.parameters())
for (batch,) in DataLoader(TensorDataset(x), batch_size=32):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""


def fit(folder, script, *args):
    (folder / "main.py").write_text(script)
    words = [sys.executable, "-m", "k8sjob", "fit", "main.py", *args]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def fit_here(folder, *args):
    words = [sys.executable, "-m", "k8sjob", "fit", str(folder), *args]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.mark.dist
def test_parts_of_a_model_that_can_be_counted_by_hand(tmp_path):
    found = json.loads(fit(tmp_path, SCRIPT, "--nproc", "2", "-o", "json").stdout)
    weights = 4 * (256 * 1024 + 1024 + 1024 + 1)
    row = next(r for r in found["rows"] if (r["strategy"], r["batch"]) == ("ddp", 32))
    assert found["batch"] == 32
    assert row["parts"]["parameters"] == row["parts"]["gradients"] == weights
    assert row["parts"]["optimizer"] == pytest.approx(2 * weights, rel=0.001)
    assert row["parts"]["inputs"] == 32 * 256 * 4


@pytest.mark.dist
def test_a_strategy_that_divides_layers_is_measured_on_all_its_ranks():
    folder = Path(__file__).parents[2] / "manifests" / "torch-mesh"
    (row,) = fit_here(folder, "-o", "json")["rows"]
    weights = 4 * (256 * 64 + 256 + 64 * 256 + 64 + 64 * 10 + 10)  # half of `up` and `down`
    assert (row["strategy"], row["batch"]) == ("mesh", 32)
    assert row["parts"]["parameters"] == row["parts"]["gradients"] == weights
    assert row["parts"]["optimizer"] == pytest.approx(2 * weights, rel=0.001)
    assert 4 * weights < row["peak"] < 8 * weights


@pytest.mark.dist
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('nothing')", "main.py: no optimizer step was seen"),
        ("raise ValueError('my own')", "main.py:1: ValueError: my own"),
    ],
)
def test_a_script_that_cannot_be_measured(tmp_path, script, message):
    found = fit(tmp_path, script)
    assert found.returncode == 1
    assert found.stderr.count("error:") == 1
    assert message in found.stderr
