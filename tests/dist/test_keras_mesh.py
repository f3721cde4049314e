"""keras_mesh: what job.fit, its checkpoints and its errors are under keras.distribution."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from k8sjob.contract import ExitCode

pytestmark = pytest.mark.dist
JAX = {"KERAS_BACKEND": "jax"}
TORCH = {"KERAS_BACKEND": "torch"}
FIT = {"program": "keras_mesh.py", "env": JAX, "strategy": "keras_mesh"}
WIDE = {".*/fc1/kernel": [None, "model"], ".*/fc1/bias": ["model"]}
WIDE_SHARED = {"fc1/kernel": [None, "model"], "fc1/bias": ["model"]}
FSDP = {".*/fc1/kernel": ["data", "model"]}  # 64 inputs along data, too

ALIKE = {  # 100 samples in batches of 32: the last one has 4; 101 to evaluate: 2 x 50 and 1
    "conv": {"model": "conv"},  # the statistics are those of the whole batch
    "along both": {"largest": True},
    "shared, unpicklable loss": {"model": "shared", "unpicklable": True},
    # The mask of dropout is one of the whole batch. This is the model that is saved last.
    "dense": {"penalty": "l2", "constraint": "unit_norm", "dropout": 0.5},
}
COMMON = {"epochs": 2, "evaluate": True}
SHAPE = {
    "conv": {"model": 2, "layout": {".*/dense/kernel": ["model", None]}},
    "along both": {"model": 2, "layout": FSDP},
    "shared, unpicklable loss": {"model": 2, "layout": WIDE_SHARED},
    "dense": {"model": 2, "layout": WIDE},
}
WRONG = {
    "no such name": (
        {"options": {"model": 2, "layout": {"fc1/kernel": [None, "model"]}}},
        (
            "strategy.layout: 'fc1/kernel' matches no parameter and no output;"
            " valid names: sequential/fc1/kernel"
        ),
    ),
    "other dimensions": (
        {"options": {"model": 2, "layout": {".*/fc1/kernel": ["model"]}}},
        "sequential/fc1/kernel has 2 dimensions, and its layout ['model'] has 1",
    ),
    "does not divide": (
        {"options": {"model": 4, "layout": {".*/fc2/kernel": [None, "model"]}}},
        (
            "sequential/fc2/kernel has 10 along dimension 1, which does not divide by mesh axis"
            " model=4; set model to 1, 2, 5, 10, or write null"
        ),
    ),
    "odd batches": (
        {"options": {"model": 1}, "batch": 30},
        "leave batches that do not divide by mesh axis data=4; set global_batch to 28 or 32",
    ),
    "made before": ({"early": True}, "was made before `with runtime.session()`"),
    "another distribution": ({"ours": False}, "keras.distribution was set by the script"),
    "job.prepare": ({"fit": False}, "keras_mesh leaves the step to Keras: compile the model"),
    "ModelCheckpoint": ({"callbacks": ["checkpoint"]}, "ModelCheckpoint: no rank has the whole"),
    "several steps at once": ({"at_once": 2}, "is compiled with steps_per_execution=2"),
    "the best weights": (
        {"callbacks": ["best"], "options": {"model": 2, "layout": WIDE}},
        "EarlyStopping(restore_best_weights=True): no rank has the whole model",
    ),
    "another suffix": ({"save": "digits.h5"}, "under a name that ends with .keras"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def alone(run_once):
    cases = {name: {**COMMON, **case} for name, case in ALIKE.items()}
    return run_once(cases, world=1, **FIT).result


@pytest.fixture(scope="module")
def four(run_once, folder):
    saved = str(folder / "digits.keras")
    cases = {
        name: {**COMMON, **case, "options": SHAPE[name], "save": saved}
        for name, case in ALIKE.items()
    }
    wrong = {name: {"epochs": 1, **case} for name, (case, _) in WRONG.items()}
    return run_once({**cases, **wrong}, world=4, limit=300, **FIT).result


@pytest.mark.parametrize("name", ALIKE)
def test_four_ranks_fit_as_one(name, four, alone):
    found, wanted = four[name], alone[name]
    assert "error" not in found, found
    names = {"loss", "accuracy", "largest"} if name == "along both" else {"loss", "accuracy"}
    assert set(found["history"]) == names | {f"val_{one}" for one in names}
    for metric, values in wanted["history"].items():
        assert found["history"][metric] == pytest.approx(values, abs=1e-5), metric
    assert wanted["history"]["loss"][1] < wanted["history"]["loss"][0]
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-4)
    assert max(found["sizes"]) < wanted["sizes"][0]  # each has a part


@pytest.mark.parametrize("name", ALIKE)
def test_the_same_pieces_have_the_same_bits(name, four):
    marks = four[name]["marks"]
    if name == "along both":  # no two ranks have the same piece
        assert len({mark for _, mark in marks}) == 4
    else:
        assert len({tuple(one) for one in marks}) == 2


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_one_error(name, four):
    assert WRONG[name][1] in four[name]["error"]


def test_the_saved_model_is_a_plain_one(four, folder):
    assert [file.name for file in folder.iterdir()] == ["digits.keras"]
    program = (
        "import keras, sys; m = keras.models.load_model(sys.argv[1]);"
        " m.summary(); print(m.optimizer.name)"
    )
    argv = [sys.executable, "-c", program, str(folder / "digits.keras")]
    env = {**os.environ, "KERAS_BACKEND": "torch"}  # what it was trained with does not matter
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "adam"


def fit(epochs, *callbacks, model=2, layout=WIDE):
    options = {"model": model, "layout": layout}
    return {"case": {"epochs": epochs, "callbacks": callbacks, "options": options}}


@pytest.fixture(scope="module")
def undisturbed(run_once):
    return run_once(fit(4), world=2, **FIT).result["case"]


@pytest.fixture(scope="module")
def half(run_once, tmp_path_factory):
    """(the folder of its checkpoints, a fit of half the epochs)"""
    folder = tmp_path_factory.mktemp("half")
    return folder, run_once(fit(2), world=2, checkpoint_dir=str(folder), **FIT)


@pytest.mark.parametrize("then", [2, 1], ids=["the same mesh", "another mesh"])
def test_a_fit_continues_from_the_pieces_of_the_last_epoch(
    then, half, run_ranks, tmp_path, undisturbed
):
    folder, first = half
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["step-00000004", "step-00000008"]
    assert first.told("checkpoint")[-1]["epoch"] == 2
    going_on = fit(4, model=then, layout=WIDE if then > 1 else {})
    rest = run_ranks(going_on, checkpoint_dir=str(tmp_path), world=2, **FIT)
    assert rest.told("resumed")[0]["epoch"] == 2
    found = rest.result["case"]
    assert "error" not in found, found
    assert found["losses"] == pytest.approx(undisturbed["losses"], abs=1e-6)
    if then == 2:
        assert found["marks"] == undisturbed["marks"]


def test_a_signal_stops_all_ranks(start_ranks, tmp_path):
    ranks = start_ranks(fit(100_000, "slow"), checkpoint_dir=str(tmp_path), world=2, **FIT)
    ranks.await_event("checkpoint")
    ranks.signal(1)
    outcome = ranks.finish()
    assert outcome.codes == [143, 143]
    assert outcome.told("stopping")[0]["signal"] == "SIGTERM"


def test_a_rank_that_hangs_in_its_samples_is_named(start_ranks):
    stuck = {"case": {"stuck": True, "options": {"model": 1}}}
    outcome = start_ranks(stuck, world=2, hang_timeout=10.0, **FIT).finish()
    assert outcome.codes == [ExitCode.HUNG, ExitCode.HUNG]
    assert all(reason["culprits"] == [1] for reason in outcome.reasons), outcome.reasons


def test_a_lost_rank_ends_the_others_as_a_lost_peer(start_ranks):
    ranks = start_ranks(fit(100_000, "slow"), world=2, **FIT)
    ranks.await_event("progress")
    ranks.signal(1, signal.SIGKILL)
    outcome = ranks.finish()
    assert outcome.codes[1] == -signal.SIGKILL
    assert outcome.reasons[0]["type"] == "PeerLost"


def test_rank_0_lost_ends_the_others(start_ranks):
    ranks = start_ranks(fit(100_000, "slow"), world=2, **FIT)
    ranks.await_event("progress")
    ranks.signal(0, signal.SIGKILL)
    outcome = ranks.finish(timeout=30)
    assert outcome.codes[0] == -signal.SIGKILL
    assert outcome.codes[1] in {-signal.SIGABRT, ExitCode.PEER_LOST}  # JAX's own, or before it


def test_another_backend_than_the_jobs_is_refused(start_ranks):
    outcome = start_ranks({}, **{**FIT, "env": TORCH}).finish()
    assert "Keras computes with torch, and strategy.kind: keras_mesh with jax" in str(
        outcome.reasons[0]
    )
