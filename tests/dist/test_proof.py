"""Every strategy, in every shape, has the loss curve of one process; the page of it is made here.

`pytest tests/dist/test_proof.py --regenerate` writes docs/reference/strategies.md.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from k8sjob.strategies import STRATEGIES

pytestmark = pytest.mark.dist
PAGE = Path(__file__).resolve().parents[2] / "docs/reference/strategies.md"
TOLERANCE = 1e-5
TRAINERS_REACH = 0.5
NUMBER = re.compile(r"\d\.\d+(?:e[-+]\d\d)?")
TASKS = ("digits", "text")

ROWS, COLUMNS = ["model", None], [None, "model"]
LAYOUTS = {
    "digits": {"fc1.weight": ROWS, "fc1.bias": ["model"], "fc2.weight": COLUMNS},
    "text": {
        r"block\d\.attention\.(query|key|value)\.weight": ROWS,
        r"block\d\.attention\.(query|key|value)\.bias": ["model"],
        r"block\d\.attention\.(query|key|value)\.output": ["data", None, "model"],
        r"block\d\.attention\.out\.weight": COLUMNS,
        r"block\d\.up\.weight": ROWS,
        r"block\d\.up\.bias": ["model"],
        r"block\d\.up\.output": [None, None, "model"],
        r"block\d\.down\.weight": COLUMNS,
    },
}
BAGS, TABLES = {"digits": "bags", "text": "text"}, {"digits": ["bags"], "text": [r"embed\.letters"]}
KERAS = {"digits": "dense", "text": "text"}
PATHS = {  # a kernel of Keras is (inputs, outputs)
    "digits": {".*/fc1/kernel": COLUMNS, ".*/fc1/bias": ["model"], ".*/fc2/kernel": ROWS},
    "text": {
        ".*/(query|key|value)/kernel": [None, None, "model"],
        ".*/(query|key|value)/bias": [None, "model"],
        ".*/attention_output/kernel": [None, "model", None],
        "up/kernel": COLUMNS,
        "up/bias": ["model"],
        "up/output": ["data", None, "model"],
        "down/kernel": ROWS,
    },
}
ENV = {
    "curves.py": {},
    "keras_curves.py": {"KERAS_BACKEND": "torch"},
    "keras_mesh.py": {"KERAS_BACKEND": "jax"},
}


@dataclass(frozen=True)
class Row:
    """A strategy in one shape, on both tasks.

    Attributes:
        kind: the strategy.
        ranks: number of processes.
        copies: how many ranks have each part of the model.
        shares: the share of the data that each rank draws dropout masks for.
        shape: as the page calls it.
        own: the strategy's settings for each task.
        models: the program's model for each task.
        program: what trains it.
    """

    kind: str
    ranks: int
    copies: int
    shares: list
    shape: str = ""
    own: dict = field(default_factory=lambda: {task: {} for task in TASKS})
    models: dict = field(default_factory=lambda: dict(zip(TASKS, TASKS, strict=True)))
    program: str = "curves.py"

    @property
    def name(self):
        return f"{self.kind}, {self.shape}" if self.shape else self.kind

    @property
    def dropout(self):
        """Not of keras_mesh: test_keras_mesh.py has it, and JAX takes long to compile it."""
        return self.kind != "keras_mesh"

    def cases(self, tasks, **more):
        found = {
            f"{self.name}: {task}": {
                "kind": self.kind,
                "options": self.own[task],
                "model": self.models[task],
                **more,
            }
            for task in tasks
        }
        if not self.dropout or "text" not in tasks:
            return found
        random = {"steps": 5, "dropout": 0.3, "twice": True}
        return found | {f"{self.name}: dropout": {**found[f"{self.name}: text"], **random}}


def options(**each):
    """The settings for each task, of settings that name one value a task."""
    return {task: {name: values[task] for name, values in each.items()} for task in TASKS}


def mesh(data, model):
    own = options(model=dict.fromkeys(TASKS, model), layout=LAYOUTS)
    shares = [rank // model for rank in range(data * model)]
    return Row("mesh", data * model, data, shares, f"data {data} x model {model}", own)


def keras_mesh(data, model):
    own = options(model=dict.fromkeys(TASKS, model), layout=PATHS)
    shape, program = f"data {data} x model {model}", "keras_mesh.py"
    return Row("keras_mesh", data * model, data, [0], shape, own, KERAS, program)


def pipeline(schedule):
    splits = {"digits": ["fc2"], "text": ["block1"]}
    own = options(splits=splits, schedule=dict.fromkeys(TASKS, schedule))
    return Row("pipeline", 4, 2, [0, 1, 2, 3], f"2 stages, {schedule}", own)


SPLITS = options(splits={"digits": ["fc2", "out"], "text": ["block1"]})
SERVED = options(servers=dict.fromkeys(TASKS, 2), tables=TABLES)
PROOFS = [
    Row("ddp", 4, 4, [0, 1, 2, 3]),
    Row("keras", 2, 2, [0, 1], models=KERAS, program="keras_curves.py"),
    Row("fsdp", 4, 1, [0, 1, 2, 3]),
    *(mesh(4 // model, model) for model in (1, 2, 4)),
    *(keras_mesh(4 // model, model) for model in (1, 2, 4)),
    pipeline("1f1b"),
    pipeline("gpipe"),
    Row("model_split", 1, 1, [0], "on one device", own=SPLITS),
    Row("data_parallel", 1, 1, [0], "on one device"),
    Row("parameter_server", 4, 1, [0], "1 trainer, 2 servers", own=SERVED, models=BAGS),
]
NAMES = [row.name for row in PROOFS]
ESSENTIAL = [mesh(2, 2), keras_mesh(1, 2), pipeline("1f1b")]
ESSENTIAL += [row for row in PROOFS if row.kind not in {"mesh", "keras_mesh", "pipeline"}]
"""Each strategy once: what `make test` has of them."""
TRAINERS = {
    "kind": "parameter_server",
    "options": {"servers": 1},
    "model": "bags",
    "optimizer": ["AdamW", {"lr": 1e-2}],
    "steps": 80,
    "batch": 64,
}


def launch(run_once, program, world, cases, servers=0):
    settings = {"env": ENV[program]}
    if servers:
        settings |= {"strategy": "parameter_server", "options": {"servers": servers}}
    if program == "keras_mesh.py":
        settings["strategy"] = "keras_mesh"
    return run_once(cases, program=program, world=world, limit=500, **settings).result


def train(run_once, rows, tasks, **more):
    """Every case's result, by name; those of one process have the names of program and model."""
    found = {}
    for program in dict.fromkeys(row.program for row in rows):
        models = {row.models[task] for row in rows if row.program == program for task in tasks}
        kind = {} if program == "keras_mesh.py" else {"kind": "ddp"}
        single = {f"{program} {name}": {**kind, "model": name, **more} for name in sorted(models)}
        found |= launch(run_once, program, 1, single)
    for program, world, served in dict.fromkeys(map(_group, rows)):
        chosen = [row for row in rows if _group(row) == (program, world, served)]
        cases = {name: case for row in chosen for name, case in row.cases(tasks, **more).items()}
        found |= launch(run_once, program, world, cases, servers=2 if served else 0)
    return found


@pytest.fixture(scope="module")
def measured(run_once):
    found = train(run_once, PROOFS, TASKS)
    return found | launch(run_once, "curves.py", 4, {"two trainers": TRAINERS}, servers=1)


@pytest.fixture(scope="module")
def in_short(run_once):
    return train(run_once, ESSENTIAL, ["digits"], steps=8)


def _group(row):
    """What trains together."""
    return row.program, row.ranks, row.kind == "parameter_server"


def pair(row, task, measured):
    """(what the row trained, what one process did)"""
    found = measured[f"{row.name}: {task}"]
    assert "error" not in found, found
    return found, measured[f"{row.program} {row.models[task]}"]


def difference(row, task, measured, steps=20):
    """The largest of the differences of a step's loss."""
    found, alone = pair(row, task, measured)
    assert len(found["losses"]) == len(alone["losses"]) == steps
    return max(abs(one - other) for one, other in zip(*map(_losses, (found, alone)), strict=True))


def _losses(found):
    return found["losses"]


@pytest.mark.essential
@pytest.mark.parametrize("row", ESSENTIAL, ids=lambda row: row.name)
def test_every_strategy_once(row, in_short):
    found, alone = pair(row, "digits", in_short)
    assert alone["losses"][-1] < alone["losses"][0]
    assert difference(row, "digits", in_short, steps=8) <= TOLERANCE
    assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4)


def test_every_strategy_is_here():
    assert {row.kind for row in ESSENTIAL} == {row.kind for row in PROOFS} == set(STRATEGIES)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("row", PROOFS, ids=NAMES)
def test_the_curve_is_that_of_one_process(row, task, measured):
    found, alone = pair(row, task, measured)
    assert alone["losses"][-1] < alone["losses"][0]  # it does learn
    assert difference(row, task, measured) <= TOLERANCE
    assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-4)
    for name, value in alone["evaluation"].items():
        assert found["evaluation"][name] == pytest.approx(value, abs=1e-4), name


@pytest.mark.parametrize("row", PROOFS, ids=NAMES)
def test_replicas_are_equal_bit_by_bit(row, measured):
    for task in TASKS:
        found, _ = pair(row, task, measured)
        marks = found["marks"]
        if row.program == "keras_curves.py":
            marks = [(0, mark) for mark in marks]
        if row.kind == "fsdp":  # each rank has a part that no other has
            marks = list(enumerate(mark for _, mark in marks))
            assert len({mark for _, mark in marks}) == row.ranks
        for part in {part for part, _ in marks}:
            copies = [mark for of, mark in marks if of == part]
            assert len(copies) == row.copies
            assert len(set(copies)) == 1


@pytest.mark.parametrize("row", [row for row in PROOFS if row.dropout], ids=lambda row: row.name)
def test_dropout_differs_between_shares_and_not_between_runs(row, measured):
    found, again = (measured[f"{row.name}: dropout{which}"] for which in ("", " again"))
    assert found["losses"] != measured[f"{row.program} text"]["losses"][:5]
    if row.program == "curves.py":  # each rank has as many as its dropout layers were called
        calls = list(zip(*found["drawn"], strict=True))
        assert all(len(set(own)) == len(own) >= 2 * 2 * 5 for own in found["drawn"])
    else:
        calls = [found["drawn"]]
    for drawn in calls:
        assert [drawn.index(mark) for mark in drawn] == [row.shares.index(n) for n in row.shares]
    assert again == found


def test_two_trainers_learn_and_have_one_model(measured):
    found = measured["two trainers"]
    assert found["losses"][-1] < TRAINERS_REACH
    assert found["evaluation"]["eval_accuracy"] > 0.85
    (_, first), (_, second) = found["marks"]
    assert first == second


def test_the_page_says_what_is_measured(measured, request):
    text = page(measured)
    if request.config.getoption("--regenerate"):
        PAGE.write_text(text, encoding="utf-8")
    detail = PAGE.read_text(encoding="utf-8")
    remedy = f"run: pytest {Path(__file__).name} --regenerate"
    assert NUMBER.sub("#", detail) == NUMBER.sub("#", text), remedy
    differences = re.findall(r"\d\.\de[-+]\d\d", detail)
    assert len(differences) == len(TASKS) * len(PROOFS)
    assert max(map(float, differences)) <= TOLERANCE


HEAD = """\
<!-- Written by tests/dist/test_proof.py: pytest tests/dist/test_proof.py --regenerate -->
# The loss under each strategy

Each row, and a single process, trains for 20 steps of 32 samples with one seed, in single
precision and without dropout. The numbers are the largest difference between the losses of a step,
measured on a CPU over gloo; the tests fail above {tolerance:.0e}.

- *digits*: a perceptron on scikit-learn's 8 x 8 images; its loss falls from {digits[0]:.2f} to
  {digits[1]:.2f}.
- *text*: a transformer of two blocks that reads the description of these images letter by letter;
  its loss falls from {text[0]:.2f} to {text[1]:.2f}.
- Under `keras` and `keras_mesh` both are Keras models. `keras_mesh` runs on JAX, here without most
  of its compiler's optimizations. Under `parameter_server` the pixels of digits and the letters of
  text are looked up in tables on the servers.

| strategy | processes | digits | text | replicas, bit by bit | dropout |
|---|---|---|---|---|---|
"""
TAIL = """
- **Replicas**: ranks with the same part of the model have bit-identical parameters after the last
  step.
- **Dropout**: the number of different masks that the ranks draw. Ranks with the same samples draw
  the same mask, all others different ones, and a second run has the same numbers. JAX computes with
  the whole batch, so it draws the mask of one process.
- **Two trainers** of a parameter server update the tables asynchronously, so no two runs are equal.
  Their loss on digits falls below {reach} in 80 steps ({reached:.2f}), and both have the same
  model.

[Choose a strategy](../how-to/choose-strategy.md#what-is-proved) lists the other settings that are
tested.
"""


def page(measured):
    """docs/reference/strategies.md"""
    ends = {task: [measured[f"curves.py {task}"]["losses"][at] for at in (0, -1)] for task in TASKS}
    reached = measured["two trainers"]["losses"][-1]
    lines = [_line(row, measured) for row in PROOFS]
    head = HEAD.format(tolerance=TOLERANCE, **ends)
    return head + "".join(lines) + TAIL.format(reach=TRAINERS_REACH, reached=reached)


def _line(row, measured):
    masks = len(set(row.shares))
    cells = [
        f"`{row.kind}`{row.shape and f', {row.shape}'}",
        str(row.ranks),
        *(f"{difference(row, task, measured):.1e}" for task in TASKS),
        "a part on each"
        if row.kind == "fsdp"
        else f"{row.copies}, equal"
        if row.copies > 1
        else "1",
        f"{masks} mask{'s' * (masks > 1)}",
    ]
    return f"| {' | '.join(cells)} |\n"
