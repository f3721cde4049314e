"""A checkpoint has one form: any strategy, on any number of ranks, goes on from any other's."""

import pytest

pytestmark = pytest.mark.dist

OPTIONS = {"epochs": 3, "batch": {"global_batch": 8}}
DDP = {"strategy": "ddp"}
FSDP = {"strategy": "fsdp"}
LAYOUT = {"0.weight": ["model", None], "4.weight": [None, "model"]}
MESH = {"strategy": "mesh", "options": {"model": 2, "layout": LAYOUT}}

PIPELINE = {"strategy": "pipeline", "options": {"splits": ["4"], "micro_batches": 2}}


@pytest.fixture(scope="module")
def whole(run_once):
    return run_once(OPTIONS, world=1).result


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({**FSDP, "world": 2}, {**DDP, "world": 3}),
        ({**DDP, "world": 2}, {**FSDP, "world": 4}),
        ({**FSDP, "world": 4}, {**MESH, "world": 4}),
        ({**MESH, "world": 4}, {**PIPELINE, "world": 2}),
        ({**PIPELINE, "world": 4}, {**DDP, "world": 1}),
    ],
    ids=lambda ranks: f"{ranks['strategy']} x {ranks['world']}",
)
def test_the_curve_goes_on(start_ranks, tmp_path, whole, first, then):
    settings = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 5}
    killed = start_ranks({**OPTIONS, "kill": [1, 18]}, **settings, **first).finish()
    assert killed.told("checkpoint")[-1]["step"] == 15, killed.errors
    resumed = start_ranks(OPTIONS, restart=1, **settings, **then).finish()
    assert resumed.told("resumed")[0]["step"] == 15
    assert "random numbers (dropout, augmentation) do not" in resumed.told("warning")[0]["message"]
    assert resumed.result["losses"] == pytest.approx(whole["losses"], rel=1e-9)
    assert resumed.result["weights"] == pytest.approx(whole["weights"], rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("kind", [FSDP, MESH, PIPELINE], ids=lambda kind: kind["strategy"])
def test_with_dropout_the_resumed_is_the_undisturbed_bit_by_bit(
    start_ranks, run_ranks, tmp_path, kind
):
    options = {**OPTIONS, "dropout": 0.3, "norm": True}
    undisturbed = run_ranks(options, world=2, **kind).result
    settings = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every": 5, **kind}
    start_ranks({**options, "kill": [1, 18]}, world=2, **settings).finish()
    resumed = run_ranks(options, world=2, restart=1, **settings)
    assert resumed.told("resumed")[0]["step"] == 15
    assert resumed.result["weights"] == undisturbed["weights"]


def test_a_checkpoint_of_another_model_is_refused(start_ranks, run_ranks, tmp_path):
    settings = {"checkpoint_dir": str(tmp_path / "saved"), **FSDP}
    run_ranks({**OPTIONS, "epochs": 1}, world=2, **settings)
    other = start_ranks({**OPTIONS, "norm": True}, world=2, restart=1, **settings).finish()
    assert other.codes[0] == 1
    assert "does not fit this model and optimizer" in other.reasons[0]["message"]
