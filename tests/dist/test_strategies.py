"""Every strategy has the loss curve of one process: 20 steps, float32, at one seed.

One launch for each number of ranks trains all of its cases.
"""

import pytest

pytestmark = pytest.mark.dist
TOLERANCE = 1e-5

MODELS = {
    "digits": {"model": "digits"},
    "text": {"model": "text"},
    "clipped": {"model": "text", "options": {"clip_norm": 0.5}},
    "accumulated": {"model": "text", "batch": 8, "options": {"accumulate": 4}},
    "adam": {"model": "digits", "optimizer": ["AdamW", {"lr": 1e-3}]},
    "uneven": {"model": "digits", "batch": 30, "samples": 101, "tail": "short"},
}


def case(like, kind, **options):
    chosen = MODELS[like]
    return {**chosen, "kind": kind, "options": {**chosen.get("options", {}), **options}}


FOUR = {
    **{f"fsdp {like}": case(like, "fsdp") for like in MODELS},
    "fsdp text, recomputed": case(
        "text", "fsdp", blocks=[r"block\d"], checkpoint_activations=True, reshard=False
    ),
    "ddp clipped, recomputed": case("clipped", "ddp", checkpoint_activations=True),
}
RANDOM = {
    f"{kind} dropped": {**case("text", kind), "steps": 5, "dropout": 0.3, "twice": True}
    for kind in ("ddp", "fsdp")
}
TIED = {"fsdp tied": {**case("text", "fsdp"), "tied": True, "steps": 5}}
BF16 = {f"{kind} bf16": case("digits", kind, bf16=True) for kind in ("ddp", "fsdp")}


def launch(run_once, world, cases):
    return run_once(cases, program="curves.py", world=world).result


@pytest.fixture(scope="module")
def alone(run_once):
    return launch(run_once, 1, {**MODELS, "tied": {**MODELS["text"], "tied": True, "steps": 5}})


@pytest.fixture(scope="module")
def four(run_once):
    return launch(run_once, 4, {**FOUR, **RANDOM, **TIED, **BF16})


def same(found, alone):
    assert "error" not in found, found
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4)
    assert found["names"] == alone["names"]
    for name, value in alone["evaluation"].items():
        assert found["evaluation"][name] == pytest.approx(value, abs=1e-4), name


def test_one_process_learns(alone):
    for found in map(alone.get, MODELS):
        assert len(found["losses"]) >= 20
        assert found["losses"][-1] < found["losses"][0]


def base(name):
    """The case of one process that a case must equal."""
    return name.partition(" ")[2].partition(",")[0]


@pytest.mark.parametrize("name", {**FOUR, **TIED})
def test_four_ranks_have_the_curve_of_one(name, four, alone):
    same(four[name], alone[base(name)])


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_differs_between_shares_and_not_between_runs(name, four):
    first, again = four[name], four[f"{name} again"]
    assert len(set(first["drawn"])) == 4
    assert again == first


@pytest.mark.parametrize("name", BF16)
def test_bfloat16_comes_close(name, four, alone):
    found, exact = four[name]["losses"], alone["digits"]["losses"]
    assert found == pytest.approx(exact, abs=0.05)
    assert found != pytest.approx(exact, abs=TOLERANCE)


def test_a_rank_of_fsdp_holds_its_share(four, alone):
    assert alone["text"]["held"] == four["ddp clipped, recomputed"]["held"]
    assert four["fsdp text"]["held"] == pytest.approx(alone["text"]["held"] / 4, rel=0.01)
