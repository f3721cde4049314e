"""A Keras model under the strategy keras has the curve of one process, and equal ranks."""

from dataclasses import asdict
from pathlib import Path

import pytest

from k8sjob.spec import load

pytestmark = pytest.mark.dist
TOLERANCE = 1e-5
TORCH = {"KERAS_BACKEND": "torch"}
MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
KERAS_ADAM = {"optimizer": ["keras", "Adam", {"learning_rate": 3e-3}]}

ALIKE = {
    "plain": {},
    "an optimizer of keras": KERAS_ADAM,
    "constrained": {"constraint": "non_neg", **KERAS_ADAM},
    "under ddp": {"kind": "ddp"},
    "penalised": {"penalty": "l2"},
    "clipped": {"options": {"clip_norm": 0.5}},
    "accumulated": {"batch": 8, "options": {"accumulate": 4}},
    "uneven": {"batch": 30, "samples": 101, "tail": "short"},
    "by name": {"model": "named"},
    "a layer in two places": {"model": "shared"},
    "an unpicklable loss": {"unpicklable": True},
}
OWN = {
    "bf16": {"options": {"bf16": True}},
    "normalized": {"model": "conv"},
    "dropped": {"model": "conv", "dropout": 0.3, "steps": 5, "twice": True},
    "dropped by a seed": {"dropout": 0.3, "steps": 5, "twice": True},
}
WRONG = {
    "fsdp": ({"kind": "fsdp"}, "strategy.kind: fsdp, but Sequential is a Keras model; use keras"),
    "compile": ({"kind": "ddp", "options": {"compile": True}}, "strategy.compile: not for a Keras"),
    "torch": ({"model": "plain"}, "strategy.kind: keras, but Sequential is not a Keras model"),
    "inside": ({"model": "inside"}, "a torch module with Keras layers inside"),
    "a constraint": (
        {"constraint": "non_neg"},
        "fc1/kernel has a constraint, which Adam of torch",
    ),
    "a schedule": (
        {"schedule": True, **KERAS_ADAM},
        "scheduler: an optimizer of Keras has its own",
    ),
    "unbuilt": ({"model": "unbuilt"}, "has no weights to train yet: begin it with keras.Input"),
}


@pytest.fixture(scope="module")
def run_alone(run_once):
    return run_once({**ALIKE, **OWN}, program="keras_curves.py", world=1, env=TORCH)


@pytest.fixture(scope="module")
def alone(run_alone):
    return run_alone.result


@pytest.fixture(scope="module")
def run_three(run_once):
    cases = {**ALIKE, **OWN, **{name: case for name, (case, _) in WRONG.items()}}
    return run_once(cases, program="keras_curves.py", world=3, env=TORCH)


@pytest.fixture(scope="module")
def three(run_three):
    return run_three.result


@pytest.mark.parametrize("name", ALIKE)
def test_three_ranks_have_the_curve_of_one(name, three, alone):
    found, wanted = three[name], alone[name]
    assert "error" not in found, found
    assert wanted["losses"][-1] < wanted["losses"][0]
    if name != "accumulated":  # there each batch of 8 stands for itself
        assert len(found["losses"]) == 20
    assert found["losses"] == pytest.approx(wanted["losses"], abs=TOLERANCE)
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-4)
    for metric, value in wanted["evaluation"].items():
        assert found["evaluation"][metric] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("name", [*ALIKE, *OWN])
def test_ranks_are_equal_bit_by_bit(name, three):
    assert len(set(three[name]["marks"])) == 1


def test_the_norm_is_that_of_one_process_and_the_slowest_is_named(run_three, run_alone):
    run_three.check_costs(run_alone)


def test_a_regulariser_is_in_the_loss(alone):
    assert alone["penalised"]["losses"][0] > alone["plain"]["losses"][0] + 0.1
    assert alone["penalised"]["weights"] != pytest.approx(alone["plain"]["weights"], rel=1e-3)


def test_an_optimizer_of_keras_is_used_as_such(alone):
    found, plain = alone["an optimizer of keras"], alone["plain"]
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-3)  # epsilon stands elsewhere
    assert alone["constrained"]["weights"] != pytest.approx(plain["weights"], rel=1e-2)


def test_running_statistics_are_those_of_all_ranks(three, alone):
    found, wanted = three["normalized"], alone["normalized"]
    assert set(wanted["statistics"]) == {"moving_mean", "moving_variance"}
    # The mean of thirds is the whole's; variances of thirds lack what lies between their means.
    close = {name: pytest.approx(value, rel=0.05) for name, value in wanted["statistics"].items()}
    assert found["statistics"] == close
    assert wanted["statistics"]["moving_variance"] != pytest.approx(2.0, abs=0.1)  # 4 ones
    assert found["losses"][-1] < 0.7 * found["losses"][0]


@pytest.mark.parametrize("name", ["dropped", "dropped by a seed"])
def test_dropout_differs_between_ranks_and_not_between_runs(name, three):
    first, again = three[name], three[f"{name} again"]
    assert len(set(first["drawn"])) == 3
    assert again == first


def test_dropout_is_on_only_in_training(alone):
    assert alone["dropped"]["drawn"] != alone["normalized"]["drawn"]
    assert alone["dropped"]["losses"][0] != pytest.approx(alone["normalized"]["losses"][0], abs=0.1)


def test_bfloat16_comes_close(three, alone):
    found, exact = three["bf16"]["losses"], alone["plain"]["losses"]
    assert found == pytest.approx(exact, abs=0.05)
    assert found != pytest.approx(exact, abs=TOLERANCE)


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_one_error(name, three):
    assert WRONG[name][1] in three[name]["error"]


def test_keras_computes_where_the_rank_does(run_once, alone):
    # What Keras were to put on its own default device would have no values.
    elsewhere = {**TORCH, "KERAS_TORCH_DEVICE": "meta"}
    case = {"normalized": OWN["normalized"]}
    found = run_once(case, program="keras_curves.py", world=1, env=elsewhere).result
    assert found["normalized"] == alone["normalized"]


def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(run_ranks, tmp_path):
    def train(folder, epochs):
        sizes = {"samples": 192, "batch": 64, "steps": None, "epochs": epochs}
        case = {"model": "conv", "dropout": 0.3, **sizes, **KERAS_ADAM}
        folder = str(tmp_path / folder)
        started = {"program": "keras_curves.py", "env": TORCH, "checkpoint_dir": folder}
        return run_ranks({"case": case}, **started)

    whole = train("whole", 4).result["case"]
    train("parts", 2)
    rest = train("parts", 4)
    assert rest.told("resumed")[0]["epoch"] == 2
    assert rest.result["case"]["losses"] == whole["losses"][6:]
    for what in ("marks", "drawn", "evaluation"):
        assert rest.result["case"][what] == whole[what]


def test_the_example_of_fit_learns_and_is_short(run_ranks, tmp_path):
    program = MANIFESTS / "keras-fit/main.py"
    assert len(program.read_text().splitlines()) <= 60
    spec = load(MANIFESTS / "keras-fit/job.yaml")
    settings = {**asdict(spec.runtime_config), "checkpoint_dir": str(tmp_path / "saved")}
    outcome = run_ranks(program=program, limit=400, world=spec.world_size, env=TORCH, **settings)
    assert outcome.told("metrics")[-1]["val_accuracy"] > 0.85, outcome.told("metrics")
