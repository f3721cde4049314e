"""Strategies with their settings have the loss curve of one process; without, see test_proof.py.

One launch for each number of ranks trains all of its cases.
"""

import shutil

import pytest

pytestmark = pytest.mark.dist
TOLERANCE = 1e-5
STEPS = 10

MODELS = {
    "digits": {"model": "digits"},
    "text": {"model": "text"},
    "clipped": {"model": "text", "options": {"clip_norm": 0.5}},
    "accumulated": {"model": "text", "batch": 8, "options": {"accumulate": 4}},
    "normed": {"model": "digits", "norm": True},
    "adam": {"model": "digits", "optimizer": ["AdamW", {"lr": 1e-3}]},
    # The last batch of 2 samples leaves two of four ranks with nothing.
    "uneven": {"model": "digits", "batch": 30, "samples": 92, "tail": "short"},
    # 13 batches, the last one smaller: the epoch ends with a window of one.
    "short window": {
        "model": "digits",
        "batch": 8,
        "samples": 100,
        "tail": "short",
        "options": {"accumulate": 4},
    },
}


def case(like, kind, **options):
    chosen = MODELS[like]
    return {**chosen, "kind": kind, "options": {**chosen.get("options", {}), **options}}


ROWS, COLUMNS = ["model", None], [None, "model"]
DIGITS = {"fc1.weight": ROWS, "fc1.bias": ["model"], "fc2.weight": COLUMNS}
TEXT = {
    r"block\d\.attention\.(query|key|value)\.weight": ROWS,
    r"block\d\.attention\.(query|key|value)\.bias": ["model"],
    r"block\d\.attention\.out\.weight": COLUMNS,
    r"block\d\.up\.weight": ROWS,
    r"block\d\.up\.bias": ["model"],
    r"block\d\.down\.weight": COLUMNS,
}


def mesh(like, model, layout=None, **options):
    layout = layout or (DIGITS if MODELS[like]["model"] == "digits" else TEXT)
    return case(like, "mesh", model=model, layout=layout, **options)


def pipeline(like, splits, **options):
    return case(like, "pipeline", splits=splits, **options)


TWO = {"digits": ["fc2"], "text": ["block1"]}
SET = [like for like in MODELS if like not in {"digits", "text", "normed", "short window"}]
PIPELINES = {
    **{f"pipeline {like}": pipeline(like, TWO[MODELS[like]["model"]]) for like in SET},
    "pipeline digits, gpipe": pipeline("digits", ["act.1"], schedule="gpipe", micro_batches=3),
    "pipeline text, four stages": pipeline("text", ["block0", "block1", "head"]),
}
FOUR = {
    **{f"mesh {like}": mesh(like, 2) for like in SET},
    **PIPELINES,
    **{f"{kind} {like}": case(like, kind) for kind in ("ddp", "fsdp") for like in SET},
    **{f"{kind} normed": case("normed", kind, sync_batchnorm=True) for kind in ("ddp", "fsdp")},
    "mesh normed": mesh("normed", 2, sync_batchnorm=True),
    "fsdp text, recomputed": case(
        "text", "fsdp", blocks=[r"block\d"], checkpoint_activations=True, reshard=False
    ),
    "fsdp uneven, weighted": {**case("uneven", "fsdp"), "weighted": True},
    "mesh uneven, weighted": {**mesh("uneven", 2), "weighted": True},
    "ddp short window": case("short window", "ddp"),
    "ddp clipped, recomputed": case("clipped", "ddp", checkpoint_activations=True),
    "mesh text, recomputed": mesh("text", 2, blocks=[r"block\d"], checkpoint_activations=True),
    "pipeline clipped, recomputed": pipeline("clipped", ["block1"], checkpoint_activations=True),
}
BF16 = {
    **{f"{kind} bf16": case("digits", kind, bf16=True) for kind in ("ddp", "fsdp")},
    "mesh bf16": mesh("digits", 2, bf16=True),
    "pipeline bf16": pipeline("digits", ["fc2"], bf16=True),
}
ONE_PROCESS = {
    "model_split clipped": case("clipped", "model_split", splits=["block1"]),
    "model_split accumulated": case("accumulated", "model_split", splits=["block1"]),
    "data_parallel clipped": case("clipped", "data_parallel"),
    "model_split clipped, recomputed": case(
        "clipped", "model_split", splits=["block1"], checkpoint_activations=True
    ),
    "model_split bf16": case("digits", "model_split", splits=["fc2"], bf16=True),
    "data_parallel bf16": case("digits", "data_parallel", bf16=True),
}
COMPILED = {
    "ddp digits, compiled": case("digits", "ddp", compile=True),
    "fsdp digits, compiled": case(  # the others block by block
        "digits", "fsdp", compile=True, checkpoint_activations=True
    ),
    "pipeline digits, compiled": pipeline("digits", ["fc2"], compile=True),
}
PART = {**TEXT, r"block\d\.up\.output": [None, None, "model"]}  # gelu and dropout see a part
DROPOUT = {"dropout": 0.3, "inner": 0.3, "steps": 5, "twice": True}
UNEVEN = {**DIGITS, "fc1.output": ["model", None]}  # a share of 15 samples is 8 and 7
DROPPED = {
    "mesh text, dropped": {**mesh("text", 2, PART), **DROPOUT},
    "mesh digits, dropped": {**mesh("digits", 2, UNEVEN), **DROPOUT, "batch": 30, "samples": 300},
}
WRONG = {
    "is divided and used as a whole": (
        mesh("text", 2, {"embed.places.weight": [None, "model"]}),
        "a tensor that strategy.layout divides was combined with a plain parameter",
    ),
    "does not divide": (
        mesh("digits", 4, {"out.bias": ["model"], "fc1.weight": ["model", None]}),
        "out.bias has 10 along dimension 0, which does not divide by mesh axis model=4; set",
    ),
    "is a synchronised layer's": (
        mesh("normed", 2, {"norm.weight": ["model"]}, sync_batchnorm=True),
        "norm.weight belongs to a batch normalization, which sync_batchnorm computes whole",
    ),
    "gives no such output": (
        mesh("digits", 2, {"fc1.output": ["model"]}),
        "fc1.output has 2 dimensions, and its layout ['model'] has 1",
    ),
}


def launch(run_once, world, cases):
    cases = {name: {"steps": STEPS, **case} for name, case in cases.items()}
    return run_once(cases, program="curves.py", world=world, limit=500).result


@pytest.fixture(scope="module")
def alone(run_once):
    return launch(run_once, 1, {**MODELS, "bf16": BF16["ddp bf16"], **ONE_PROCESS})


@pytest.fixture(scope="module")
def four(run_once):
    wrong = {name: wanted for name, (wanted, _) in WRONG.items()}
    return launch(run_once, 4, {**FOUR, **BF16, **DROPPED, **wrong})


def same(found, alone):
    assert "error" not in found, found
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4)
    assert found["names"] == alone["names"]
    for name, value in alone["evaluation"].items():
        assert found["evaluation"][name] == pytest.approx(value, abs=1e-4), name


def test_one_process_learns(alone):
    for found in map(alone.get, MODELS):
        assert len(found["losses"]) >= STEPS
        assert found["losses"][-1] < found["losses"][0]


def base(name):
    """The case of one process that a case must equal."""
    return name.partition(" ")[2].partition(",")[0]


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_have_the_curve_of_one(name, four, alone):
    same(four[name], alone[base(name)])


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process_has_the_same_curve_however_it_uses_its_devices(name, alone):
    found, plain = alone[name], alone[base(name)]
    assert "error" not in found, found
    for told in ("losses", "weights", "names", "evaluation"):
        assert found[told] == plain[told]


@pytest.fixture(scope="module")
def compiled(run_once, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("compiled"))
    # Vector instructions are tried out before they are used, which takes long.
    compiler = {"CACHE_DIR": folder, "COMPILE_THREADS": "1", "VEC_ISA_OK": "0"}
    env = {f"TORCHINDUCTOR_{name}": value for name, value in compiler.items()}
    cases = {name: {"steps": STEPS, **case} for name, case in COMPILED.items()}
    return run_once(cases, program="curves.py", env=env, limit=500).result


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile on a CPU needs g++")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_have_the_curve_of_one(name, compiled, alone):
    same(compiled[name], alone[base(name)])
    assert compiled[name]["graphs"] > 0


@pytest.mark.parametrize(
    "name",
    ["ddp clipped, recomputed", "ddp uneven", "mesh clipped", "mesh uneven", "pipeline clipped"],
)
def test_replicas_are_equal_bit_by_bit(name, four):
    of_part = dict(four[name]["marks"])
    assert len(of_part) == (1 if name.startswith("ddp") else 2)
    assert all(of_part[part] == mark for part, mark in four[name]["marks"])


@pytest.mark.parametrize(("name", "calls", "divided"), [("text", 3, 1), ("digits", 2, 0)])
def test_dropout_in_a_divided_output_differs_by_the_part(name, calls, divided, four):
    found = four[f"mesh {name}, dropped"]
    for call in range(calls):
        masks = [own[call::calls] for own in found["drawn"]]
        if call == divided:
            assert len({mark for own in masks for mark in own}) == sum(len(own) for own in masks)
        else:  # of whole outputs: one for each share of the data
            assert masks[0] == masks[1] != masks[2] == masks[3]


@pytest.mark.parametrize("name", DROPPED)
def test_replicas_are_equal_after_dropout_in_a_divided_output(name, four):
    assert len(set(map(tuple, four[name]["marks"]))) == 2
    assert four[f"{name} again"] == four[name]


@pytest.mark.parametrize("name", WRONG)
def test_a_layout_that_cannot_be_is_one_error(name, four):
    assert WRONG[name][1] in four[name]["error"]


@pytest.mark.parametrize("name", [*BF16, "bf16"])
def test_bfloat16_comes_close(name, four, alone):
    found, exact = {**four, **alone}[name]["losses"], alone["digits"]["losses"]
    assert found == pytest.approx(exact, abs=0.05)
    assert found != pytest.approx(exact, abs=TOLERANCE)


def test_a_rank_of_fsdp_holds_its_share(four, alone):
    assert alone["text"]["held"] == four["ddp clipped, recomputed"]["held"]
    assert four["fsdp clipped"]["held"] == pytest.approx(alone["text"]["held"] / 4, rel=0.01)
