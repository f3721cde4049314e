"""Every strategy once, with the curve of one process: what `make test` has of them.

Shapes, settings and models are in test_proof.py and test_strategies.py.
"""

import pytest

from k8sjob.strategies import STRATEGIES

pytestmark = [pytest.mark.dist, pytest.mark.essential]
TOLERANCE = 1e-5
STEPS = 8
ROWS, COLUMNS = ["model", None], [None, "model"]
LAYOUT = {"fc1.weight": ROWS, "fc1.bias": ["model"], "fc2.weight": COLUMNS}
PATHS = {".*/fc1/kernel": COLUMNS, ".*/fc1/bias": ["model"], ".*/fc2/kernel": ROWS}
ENV = {
    "curves.py": {},
    "keras_curves.py": {"KERAS_BACKEND": "torch"},
    "keras_mesh.py": {"KERAS_BACKEND": "jax"},
}
MODELS = {"curves.py": ["digits", "bags"], "keras_curves.py": ["dense"], "keras_mesh.py": ["dense"]}
LAUNCHES = [  # (program, processes, {strategy: options})
    ("curves.py", 1, {"model_split": {"splits": ["fc2", "out"]}, "data_parallel": {}}),
    (
        "curves.py",
        4,
        {
            "ddp": {},
            "fsdp": {},
            "mesh": {"model": 2, "layout": LAYOUT},
            "pipeline": {"splits": ["fc2"]},
        },
    ),
    ("curves.py", 3, {"parameter_server": {"servers": 1}}),
    ("keras_curves.py", 2, {"keras": {}}),
    ("keras_mesh.py", 2, {"keras_mesh": {"model": 2, "layout": PATHS}}),
]
MODEL = {"parameter_server": "bags", "keras": "dense", "keras_mesh": "dense"}
PROGRAM = {kind: program for program, _, kinds in LAUNCHES for kind in kinds}


@pytest.fixture(scope="module")
def trained(run_once):
    """What each strategy has trained, by its name, and one process, by program and model."""

    def launch(program, world, cases, **settings):
        for case in cases.values():
            case["steps"] = STEPS
        if program == "keras_mesh.py":
            settings["strategy"] = "keras_mesh"
        return run_once(cases, program=program, world=world, env=ENV[program], **settings).result

    found = {}
    for program, models in MODELS.items():
        found |= launch(program, 1, {(f"{program} {name}"): {"model": name} for name in models})
    for program, world, kinds in LAUNCHES:
        cases = {
            kind: {"kind": kind, "options": options, "model": MODEL.get(kind, "digits")}
            for kind, options in kinds.items()
        }
        served = {"strategy": "parameter_server", "options": kinds.get("parameter_server")}
        found |= launch(program, world, cases, **(served if served["options"] else {}))
    return found


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_curve_is_that_of_one_process(kind, trained):
    found, alone = trained[kind], trained[f"{PROGRAM[kind]} {MODEL.get(kind, 'digits')}"]
    assert "error" not in found, found
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert alone["losses"][-1] < alone["losses"][0]
    assert found["weights"] == pytest.approx(alone["weights"], rel=1e-4)
