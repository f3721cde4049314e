import re
from pathlib import Path
from typing import get_args

import pytest

import k8sjob
from k8sjob.spec import Strategy
from k8sjob.strategies import (
    STRATEGIES,
    Shape,
    conflicts,
    processes_per_node,
    serving,
)


def fields(*args, **kwargs):
    return [".".join(conflict.path) for conflict in conflicts(*args, **kwargs)]


ONE, EIGHT, THREE = Shape(1, 1), Shape(2, 4), Shape(3, 1)
SPLIT = {"splits": ["fc2"]}
DIVIDED = {"fc.weight": ["model", None]}
TWO = {"model": 2, "layout": {".*/dense/kernel": [None, "model"]}}
NO_PATTERNS = "is not a list of names or regular expressions; leave it out for"
MESHES = [
    ({"model": 3, "layout": DIVIDED}, "model", "2 nodes x 4 processes = 8 ranks do not divide"),
    ({"layout": {"fc.weight": ["rows"]}}, "layout", "is not a mapping of names or regular"),
    ({"layout": {"fc.weight": ["model", "model"]}}, "layout", "is not a mapping of names"),
    ({"layout": 3}, "layout", "leave it out for {}"),
]
# What no job.yaml can say, or no row of docs/reference/errors.md, which is run.
CONFLICTS = [
    ("ddp", {"acumulate": 2}, ONE, "strategy.acumulate", "did you mean 'accumulate'"),
    ("ddp", {"accumulate": 0}, ONE, "strategy.accumulate", "0 is less than 1"),
    ("ddp", {"accumulate": True}, ONE, "strategy.accumulate", "True is not a whole"),
    ("ddp", {"sync_batchnorm": 1}, ONE, "strategy.sync_batchnorm", "true or false"),
    ("ddp", {}, Shape(0, 1), "replicas", "0 nodes x 1 process = 0 ranks"),
    ("ddp", {"clip_norm": 0}, ONE, "strategy.clip_norm", "0 is not a number above 0; leave it out"),
    ("ddp", {"clip_norm": "1"}, ONE, "strategy.clip_norm", "'1' is not a number above 0"),
    ("ddp", {"blocks": "0"}, ONE, "strategy.blocks", f"'0' {NO_PATTERNS}"),
    ("ddp", {"blocks": ["a", "["]}, ONE, "strategy.blocks", f"['a', '['] {NO_PATTERNS}"),
    ("ddp", {"blocks": ["a{99999999999}"]}, ONE, "strategy.blocks", NO_PATTERNS),
    ("ddp", {"blocks": ["(?a)(?u)x"]}, ONE, "strategy.blocks", NO_PATTERNS),
    ("ddp", {"blocks": ["(" * 999]}, ONE, "strategy.blocks", NO_PATTERNS),
    ("ddp", {"blocks": ["x" * 5000]}, ONE, "strategy.blocks", NO_PATTERNS),
    ("model_split", SPLIT, Shape(1, 2, 2), "replicas.nproc_per_node", "2 GPUs one process"),
    ("model_split", SPLIT, Shape(1, 2), "replicas.nproc_per_node", "not 1 node x 2 processes"),
    ("parameter_server", {"servers": 0}, THREE, "strategy.servers", "0 is less than 1"),
    *(
        (kind, given, EIGHT, f"strategy.{field}", detail)
        for kind in ("mesh", "keras_mesh")
        for given, field, detail in MESHES
    ),
    ("keras_mesh", TWO, THREE, "strategy.model", "by mesh axis model=2; set it to 1, 3"),
    ("keras_mesh", {**TWO, "data": 2}, THREE, "strategy.data", "= 3 ranks; remove data"),
    ("pipeline", {**SPLIT, "schedule": "zb"}, EIGHT, "strategy.schedule", "'zb' is not 1f1b or"),
]


@pytest.mark.parametrize(("kind", "given", "shape", "field", "detail"), CONFLICTS)
def test_settings_and_shapes_that_conflict(kind, given, shape, field, detail):
    (conflict,) = conflicts(kind, given, shape)
    assert ".".join(conflict.path) == field
    assert detail in str(conflict)


@pytest.mark.parametrize(
    ("backend", "shape", "detail"),
    [
        ("nccl", Shape(1, 2, gpus=0), "a node has 0 for 2"),
        ("mpi", ONE, "not built into torch"),
        ("tcp", ONE, "removed from torch"),
        ("glo", ONE, "did you mean 'gloo'"),
    ],
)
def test_backends_that_conflict(backend, shape, detail):
    (conflict,) = conflicts("ddp", {}, shape, backend=backend)
    assert conflict.path == ("strategy", "backend")
    assert detail in str(conflict)


def test_a_plain_job_has_no_conflicts():
    shape = Shape(nnodes=4, nproc_per_node=2, gpus=2)
    assert conflicts("ddp", {"accumulate": 2, "sync_batchnorm": True}, shape) == []
    assert conflicts("ddp", {}, shape, backend="nccl") == []
    assert conflicts("ddp", {}, Shape(1, 1), backend="gloo") == []
    assert shape.world_size == 8
    assert str(shape) == "4 nodes x 2 processes = 8 ranks"


def test_an_unknown_strategy_is_named_with_those_there_are():
    (close,) = conflicts("DPP", {}, Shape(1, 1))
    (far,) = conflicts("horovod", {}, Shape(1, 1))
    assert str(close) == "strategy.kind: 'DPP' is not a strategy; did you mean 'ddp'?"
    assert far.next_step == f"valid kinds: {', '.join(STRATEGIES)}"


def test_everything_is_reported_at_once():
    shape = Shape(1, 2, gpus=4, master_gpus=1)
    assert fields("ddp", {"accumulate": 0}, shape, backend="mpi") == [
        "strategy.accumulate",
        "replicas.nproc_per_node",
        "resources.master.gpus",
        "strategy.backend",
    ]


def test_the_spec_has_the_tables_strategies_and_settings():
    assert get_args(Strategy.model_fields["kind"].annotation) == tuple(STRATEGIES)
    settings = {name: option for row in STRATEGIES.values() for name, option in row.options.items()}
    fields = {name: field.default for name, field in Strategy.model_fields.items()}
    del fields["kind"], fields["backend"]
    assert fields == {name: option.default for name, option in settings.items()}


@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_a_setting_has_one_meaning_in_all_strategies(kind):
    for name, option in STRATEGIES[kind].options.items():
        others = [row.options[name] for row in STRATEGIES.values() if name in row.options]
        assert all(other is option for other in others)


@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_every_strategy_has_its_module(kind):
    table = (Path(k8sjob.__file__).parent / "runtime/strategies/__init__.py").read_text()
    home = re.search(rf'"{kind}": \("([\w.]+)", "(\w+)"\)', table)
    module, function = home.groups() if home else (f"strategies.{kind}", "prepare")
    source = Path(k8sjob.__file__).parent / f"runtime/{module.replace('.', '/')}.py"
    assert kind == "keras_mesh" or f"def {function}(" in source.read_text()  # one has job.fit alone


def test_one_process_drives_all_gpus_of_its_node():
    assert conflicts("model_split", SPLIT, Shape(1, 1, 2)) == []
    assert conflicts("data_parallel", {}, Shape(1, 1, 8)) == []
    assert [processes_per_node(kind, 8) for kind in ("ddp", "model_split")] == [8, 1]
    assert processes_per_node("ddp", 0) == 1


def test_a_master_that_serves_has_no_gpus_and_processes_of_its_own():
    assert conflicts("parameter_server", {}, Shape(3, 2, gpus=2, master_gpus=0)) == []
    assert serving("parameter_server", {"servers": 3}) == 4
    assert serving("ddp", {}) == serving("nothing", {}) == 0
    assert serving("parameter_server", {"servers": "many"}) == 0


def test_jax_has_no_backend_of_a_process_group():
    shape = Shape(1, 2, gpus=2)
    (conflict,) = conflicts("keras_mesh", TWO, shape, backend="nccl")
    assert conflict.path == ("strategy", "backend")
    assert conflict.message == "JAX uses NCCL directly, and the process group uses gloo"
    assert conflicts("keras_mesh", TWO, shape, backend="gloo") == []


@pytest.mark.parametrize(
    ("kind", "setting"), [(kind, name) for kind, row in STRATEGIES.items() for name in row.lacks]
)
def test_a_setting_that_a_strategy_lacks_is_refused_with_the_reason(kind, setting):
    value = {"accumulate": 2, "clip_norm": 1.0, "blocks": ["a"]}.get(setting, True)
    broken = conflicts(kind, {setting: value}, Shape(1, 1))
    (conflict,) = (each for each in broken if each.path == ("strategy", setting))
    assert f"strategy {kind} has no setting {setting}; " in conflict.message
    assert conflict.next_step == f"leave it out: {STRATEGIES[kind].lacks[setting]}"


def test_the_page_of_strategies_says_which_has_which_setting():
    page = Path(__file__).parents[1] / "docs/how-to/choose-strategy.md"
    section = page.read_text().partition("## Settings for steps and layers")[2]
    told = {}
    for line in section.partition("\n## ")[0].splitlines():
        if line.startswith("| `"):
            setting, _, under = line.strip("| ").split(" | ")
            named = set(re.findall(r"`(\w+)`", under))
            told[setting.strip("`")] = STRATEGIES.keys() - named if "all but" in under else named
    # The table has what ddp takes; blocks is explained below it.
    assert told.keys() == STRATEGIES["ddp"].options.keys() - {"blocks"}, page
    for setting, kinds in told.items():
        assert kinds == {kind for kind, row in STRATEGIES.items() if setting in row.options}
