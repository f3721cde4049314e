"""Every way to feed data, on 2 and 3 ranks, ends with the weights of an own loop in one process."""

import re

import pytest

pytestmark = pytest.mark.dist
TOLERANCE = 1e-14  # in float64; weights are about 1
ALIKE = {
    "a generator": {},
    "read by workers": {"workers": 2},
    "accumulated": {"accumulate": 3, "workers": 2},
    "an IterableDataset": {"feed": "lines"},
    "divided by its workers": {"feed": "lines", "workers": 2},
    "ready batches": {"feed": "ready"},
    "ready batches, accumulated": {"feed": "ready", "accumulate": 2},
    "unequal shares": {"feed": "sharded"},
    "unequal shares, accumulated": {"feed": "sharded", "accumulate": 2},
    "drop_last": {"feed": "dropped"},
    "a sampler": {"feed": "sampler"},
    "a finished optimizer": {"optimizer": "finished"},
    "tokens": {"weigh": True},
    "tokens, accumulated": {"weigh": True, "accumulate": 2},
    "tokens of unequal shares": {"weigh": True, "feed": "sharded"},
}
WRONG = {
    "apart": ({"feed": "apart"}, "reads other data than share 0.*sharded=True"),
    "used up": ({"feed": "used up"}, "only one pass, make it again in each epoch"),
}


@pytest.mark.parametrize("world", [2, 3])
def test_the_weights_are_those_of_an_own_loop(world, run_ranks):
    forgotten = {"forgotten": {"weigh": "forgotten"}}
    cases = {**ALIKE, **forgotten, **{name: case for name, (case, _) in WRONG.items()}}
    outcome = run_ranks(cases, program="feeds.py", world=world)
    results = outcome.result
    apart = {name: results[name].get("apart", results[name]) for name in ALIKE}
    assert all(isinstance(each, float) and each < TOLERANCE for each in apart.values()), apart
    for name, (_, message) in WRONG.items():
        assert re.search(message, results[name].get("error", "")), results[name]
    warnings = [told["message"] for told in outcome.told("warning")]
    assert sum("ignore_index" in text for text in warnings) == 1
    assert results["forgotten"]["apart"] > 1e-3  # what the warning is about
