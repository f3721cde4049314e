"""job.fit trains as model.fit does in one process, and leaves equal ranks behind."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

pytestmark = pytest.mark.dist
TOLERANCE = 1e-5
TORCH = {"KERAS_BACKEND": "torch"}
FIT = {"program": "keras_fit.py", "env": TORCH}

ALIKE = {  # 100 samples in batches of 32: the last one has 4
    "plain": {},
    "under ddp": {"kind": "ddp"},
    "momentum": {"optimizer": ["SGD", {"learning_rate": 0.1, "momentum": 0.9}]},
    "clipped": {"optimizer": ["AdamW", {"learning_rate": 3e-3, "global_clipnorm": 0.5}]},
    "accumulated": {"batch": 25, "optimizer": ["Adam", {"gradient_accumulation_steps": 2}]},
    "weighted": {"weighted": True},
    "weighted by class": {"class_weight": True},
    "split": {"samples": 120, "fit": {"validation_split": 0.2}},
    "uneven": {"samples": 101, "batch": 26, "tail": "short"},  # the last one has 23: 12 and 11
    "a layer in two places": {"model": "shared"},
    "an unpicklable loss": {"unpicklable": True},
}
OWN = {
    "conv": {"model": "conv", "twice": True},
    "ranked": {"ranked": True},
    "stopped by all": {"callbacks": ["stop"], "epochs": 9},
    "stopped by one": {"callbacks": ["stop on one"], "epochs": 9},
    "stopped by one's function": {"callbacks": ["stop on one by a function"], "epochs": 9},
    "stopped by one at the end": {"callbacks": ["stop on one at the end"], "epochs": 9},
}
WRONG = {
    "fsdp": ({"kind": "fsdp"}, "strategy.kind: fsdp, but Sequential is a Keras model; use keras"),
    "clip_norm": (
        {"options": {"clip_norm": 1.0}},
        "strategy.clip_norm: 1.0, but job.fit() leaves the step to Keras; use global_clipnorm",
    ),
    "torch": ({"model": "torch"}, "takes a keras.Model, not a Linear; torch models: job.prepare"),
    "not compiled": ({"optimizer": [None, {}]}, "Sequential is not compiled: call model.compile("),
    "a sum": ({"loss": {"reduction": "sum"}}, 'the loss of Sequential has reduction="sum"'),
    "too short": (
        {"samples": 97, "tail": "short"},
        'tail="short" leaves some ranks without a sample in the last step',
    ),
    "a small batch": ({"batch": 1}, "global_batch=1 is below the number of ranks, 2: some would"),
    "a backup": ({"callbacks": ["backup"]}, "job.fit() saves and resumes by itself; remove it"),
    "a generator": ({"data": "generator"}, "takes arrays, or a data set whose items are samples"),
    "steps": ({"fit": {"steps_per_epoch": 3}}, "job.fit(steps_per_epoch=): an epoch is all of"),
    "an epoch": ({"fit": {"initial_epoch": 1}}, "job.fit(initial_epoch=): it resumes by itself"),
    "two optimizers": ({"model": "two"}, "differs between the ranks: something other"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def run_alone(run_once):
    return run_once(ALIKE, world=1, **FIT)


@pytest.fixture(scope="module")
def alone(run_alone):
    return run_alone.result


@pytest.fixture(scope="module")
def run_two(run_once, folder):
    saved = {"saved": {"callbacks": ["save"], "folder": str(folder)}}
    wrong = {name: case for name, (case, _) in WRONG.items()}
    return run_once({**ALIKE, **OWN, **saved, **wrong}, **FIT)


@pytest.fixture(scope="module")
def two(run_two):
    return run_two.result


@pytest.mark.parametrize("name", ALIKE)
def test_two_ranks_fit_as_one(name, two, alone):
    found, wanted = two[name], alone[name]
    assert "error" not in found, found
    names = {"loss", "accuracy", "top3", "val_loss", "val_accuracy", "val_top3"}
    assert set(found["history"]) == names
    for metric, values in wanted["history"].items():
        assert len(values) == 2
        assert found["history"][metric] == pytest.approx(values, abs=TOLERANCE), metric
    assert wanted["history"]["loss"][1] < wanted["history"]["loss"][0]
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-4)


@pytest.mark.parametrize("name", [*ALIKE, *OWN])
def test_ranks_are_equal_bit_by_bit(name, two):
    for what in ("marks", "states", "histories"):
        assert len(set(two[name][what])) == 1, what


def test_a_prediction_has_each_sample_once_in_its_place(two):
    assert two["plain"]["predicted"] == [[1, 10], [3, 10]]
    assert two["plain"]["apart"] < TOLERANCE


def test_the_norm_is_that_of_one_process_and_the_slowest_is_named(run_two, run_alone):
    run_two.check_costs(run_alone)


def test_dropout_differs_between_ranks_and_not_between_runs(two):
    assert len(set(two["conv"]["drawn"])) == 2
    assert two["conv again"] == two["conv"]


def test_weights_of_classes_are_those_of_samples(two, alone):
    for name, values in alone["weighted"]["history"].items():
        assert two["weighted by class"]["history"][name] == pytest.approx(values, abs=TOLERANCE)


def test_a_metric_of_ones_own_is_aggregated_as_it_says(two):
    assert two["ranked"]["history"]["ranked"] == [300 + 15 + 1] * 2
    assert two["ranked"]["history"]["val_ranked"] == [300 + 15 + 1] * 2


def test_a_decision_is_taken_by_all_ranks(two):
    assert len(two["stopped by all"]["history"]["loss"]) == 2  # nothing is better by 9
    for name in ("stopped by one", "stopped by one's function", "stopped by one at the end"):
        assert len(two[name]["history"]["loss"]) == 1, name


def test_only_rank_0_writes_a_model_of_keras_own(two, folder):
    assert "error" not in two["saved"], two["saved"]
    (file,) = folder.iterdir()
    assert file.name == "rank-0.keras"
    with zipfile.ZipFile(file) as archive:
        optimizer = json.loads(archive.read("config.json"))["compile_config"]["optimizer"]
    assert optimizer["module"].startswith("keras.")
    assert optimizer["class_name"] == "Adam"


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_one_error(name, two):
    assert WRONG[name][1] in two[name]["error"]


def test_keras_computes_where_the_rank_does(run_once, alone):
    # What Keras were to put on its own default device would have no values.
    elsewhere = {**TORCH, "KERAS_TORCH_DEVICE": "meta"}
    found = run_once({"plain": {}}, world=1, **{**FIT, "env": elsewhere}).result
    assert found["plain"] == alone["plain"]


def test_a_fit_that_was_stopped_continues_from_the_last_epoch(run_ranks, start_ranks, tmp_path):
    def case(epochs, *callbacks):
        return {"case": {"model": "conv", "epochs": epochs, "callbacks": callbacks}}

    whole = run_ranks(case(4), checkpoint_dir=str(tmp_path / "whole"), **FIT).result["case"]
    parts = {"checkpoint_dir": str(tmp_path / "parts"), **FIT}
    run_ranks(case(2), **parts)
    rest = run_ranks(case(4), **parts)
    assert rest.told("resumed")[0]["epoch"] == 2
    assert rest.result["case"]["history"] == whole["history"]  # of all four epochs
    for what in ("marks", "states", "drawn"):
        assert rest.result["case"][what] == whole[what]


def test_a_second_model_does_not_take_the_checkpoint_of_the_first(run_ranks, tmp_path):
    found = run_ranks({"first": {}, "second": {}}, checkpoint_dir=str(tmp_path), **FIT).result
    assert "error" not in found["first"]
    assert "job.fit() has trained another model in this session" in found["second"]["error"]


def test_a_signal_stops_all_ranks(start_ranks, tmp_path):
    endless = {"case": {"epochs": 100_000, "callbacks": ["slow"]}}
    ranks = start_ranks(endless, checkpoint_dir=str(tmp_path / "saved"), **FIT)
    ranks.await_event("checkpoint")
    ranks.signal(1)
    outcome = ranks.finish()
    assert outcome.codes == [143, 143]
    assert outcome.told("stopping")[0]["signal"] == "SIGTERM"


PARTS = """
from unittest.mock import MagicMock
import torch
from k8sjob.runtime.keras.callback import JobCallback
from k8sjob.runtime.keras.model_fit import _Weighted
one_hot = torch.eye(2)
for targets in ((one_hot,), (torch.arange(2), torch.ones(2)), (one_hot, torch.full((2,), 0.5))):
    data = torch.utils.data.TensorDataset(torch.zeros(2, 3), *targets)
    print(float(_Weighted(data, {1: 3.0})[1][2]))
callback = MagicMock(history={}, _context=MagicMock())
JobCallback.on_epoch_end(callback, 0, {"f1": torch.tensor([0.5, 1.0]), "loss": 2.0})
print(callback.history)
"""


def test_weights_of_classes_and_a_metric_of_several_numbers():
    words, env = [sys.executable, "-c", PARTS], {**os.environ, **TORCH}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["3.0", "3.0", "1.5"]
    assert done.stdout.split("\n")[3] == "{'f1': [[0.5, 1.0]], 'loss': [2.0]}"
