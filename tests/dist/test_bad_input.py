"""What a user gets wrong, under each strategy: one clear error, or the result of one process.

Settings that are wrong by themselves are in tests/test_strategies.py, layouts in tests/runtime.
"""

import pytest

pytestmark = pytest.mark.dist
TOLERANCE = 1e-5
BELOW = "global_batch=3 is below the number of ranks, 4: some would have nothing to do"
BELOW_TWO = "global_batch=1 is below the number of ranks, 2: some would have nothing to do"
TWO_STAGES = "embed.letters.weight and head.letters.weight are one parameter, in stages 0, 1"
ONE_BLOCK = "block0.norm1.weight and block1.norm1.weight are one parameter, in stages 0, 1"
TWO_LAYERS = "embed.letters.weight is a parameter of other layers too"

CASES = {  # each for five steps of one process
    "tied": {"model": "text", "tied": True},
    "shared": {"model": "text", "shared": True},
    "small batch": {"model": "digits", "batch": 3},
    "few samples": {"model": "digits", "batch": 8, "samples": 3, "tail": "short"},
}
BAGS = {"model": "bags", "unpicklable": True, "steps": 5}
SPLITS = {"digits": ["fc2"], "text": ["block1"]}
ROWS, COLUMNS = ["model", None], [None, "model"]
LAYOUTS = {
    "digits": {"fc1.weight": ROWS, "fc2.weight": COLUMNS},
    "text": {r"(embed|head)\.letters\.weight": COLUMNS, r"block\d\.up\.weight": ROWS},
}
REFUSED = {
    **{f"{kind}: small batch": BELOW for kind in ("ddp", "fsdp")},
    **{f"{kind}: tied": TWO_STAGES for kind in ("pipeline", "model_split")},
    **{f"{kind}: shared": ONE_BLOCK for kind in ("pipeline", "model_split")},
    "parameter_server: tied": TWO_LAYERS,
    "parameter_server, two trainers: tied": TWO_LAYERS,
    "parameter_server, two trainers: batch of one": BELOW_TWO,
}


def settings(kind, model):
    return {
        "mesh": {"model": 2, "layout": LAYOUTS[model]},
        "pipeline": {"splits": SPLITS[model]},
        "model_split": {"splits": SPLITS[model]},
        "parameter_server": {"servers": 1, "tables": [r"embed\.letters"]},
    }.get(kind, {})


def cases(kinds, names=CASES):
    return {
        f"{kind}: {name}": {
            **CASES[name],
            "steps": 5,
            "kind": kind,
            "options": settings(kind, CASES[name]["model"]),
        }
        for kind in kinds
        for name in names
    }


FOUR = cases(["ddp", "fsdp", "mesh", "pipeline"])
FOUR["mesh: tied, of which the layout has one"] = {
    **FOUR["mesh: tied"],
    "options": {"model": 2, "layout": {"head.letters.bias": ["model"]}},
}
for kind in ("mesh", "pipeline"):
    FOUR[f"{kind}: batch of one"] = {**FOUR[f"{kind}: small batch"], "batch": 1}
    REFUSED[f"{kind}: batch of one"] = BELOW_TWO
ONE = cases(["model_split", "data_parallel"])
SERVED = cases(["parameter_server"], ["tied"])
SERVED["parameter_server: unpicklable"] = {
    **BAGS,
    "kind": "parameter_server",
    "options": {"servers": 1},
}
TWO_TRAINERS = {
    "parameter_server, two trainers: tied": SERVED["parameter_server: tied"],
    "parameter_server, two trainers: batch of one": {
        **SERVED["parameter_server: unpicklable"],
        "batch": 1,
    },
}
LEARNING = {**SERVED["parameter_server: unpicklable"], "steps": 20}


@pytest.fixture(scope="module")
def results(run_once):
    def launch(world, chosen, **more):
        return run_once(chosen, program="curves.py", world=world, **more).result

    alone = {name: {**case, "steps": 5} for name, case in CASES.items()}
    alone["unpicklable"] = BAGS
    serving = {"strategy": "parameter_server", "options": {"servers": 1}}
    return {
        **launch(1, {**alone, **ONE}),
        **launch(4, FOUR),
        **launch(3, SERVED, **serving),
        **launch(4, {**TWO_TRAINERS, "two trainers": LEARNING}, **serving),
    }


@pytest.mark.parametrize("name", {**FOUR, **ONE, **SERVED, **TWO_TRAINERS})
def test_one_clear_error_or_the_right_result(name, results):
    found, alone = results[name], results.get(name.partition(": ")[2].partition(",")[0])
    if name in REFUSED:
        assert REFUSED[name] in found["error"]
        return
    assert "error" not in found, found
    assert len(found["losses"]) == 5
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4)


def test_two_trainers_learn_by_a_loss_that_nothing_can_pickle(results):
    found = results["two trainers"]  # each steps the tables, so that no two runs are equal
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    (_, first), (_, second) = found["marks"]
    assert first == second


def test_a_world_that_no_shape_fits_is_reported_by_every_rank(start_ranks):
    pipeline = {"strategy": "pipeline", "options": {"splits": ["fc2"]}}
    outcome = start_ranks({"case": {}}, program="curves.py", world=3, **pipeline).finish()
    detail = "3 ranks do not divide by 1 split + 1 = 2 stages"
    assert 0 not in outcome.codes
    assert all(detail in reason["message"] for reason in outcome.reasons), outcome.reasons
