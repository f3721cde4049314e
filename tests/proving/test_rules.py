"""What programs do not show of the rules: limits of rounding, and what a proof says it compared."""

import json
from dataclasses import replace

import pytest

from k8sjob.errors import BackendError
from k8sjob.proving.proof import Layout, _proof
from k8sjob.proving.rules import Evidence, first_difference, not_compared, notes
from k8sjob.proving.rules.evaluation import _printed
from k8sjob.proving.trace import Evaluation, TracedRun
from k8sjob.spec import JobSpec


def vector(*values):
    """A tensor of three elements, as the recorder writes it."""
    return [sum(v * v for v in values), *values]


def scaled(sketch, factor):
    return [sketch[0] * factor**2, *[v * factor for v in sketch[1:]]]


OWN = (vector(1.0, 2.0, 4.0), vector(3.0, -2.0, 1.0))
MEAN, WEIGHT = vector(2.0, 0.0, 2.5), vector(1.0, 1.0, 1.0)
MODEL = {"kind": "model", "wrapper": "", "norms": [], "sharded": False, "dtype": [], "weights": {},
         "buffers": {}}  # fmt: skip
DONE = {"kind": "end", "how": "done"}
RAISED = {"kind": "end", "how": "error", "type": "KeyError", "message": "x", "where": "m.py:2"}


def step(at, grad, local, **changes):
    lists = ("samples", "inputs", "draws", "host", "training")
    about = {"kind": "step", "optimizer": 0, "step": at, "names": ["weight"], "sizes": [4]}
    about |= {"options": [{"lr": 0.1}, {"clip": []}], "before": [WEIGHT], "after": [WEIGHT]}
    about |= {"local": [local], "grads": [grad], "buffers": {}, "losses": [1.0]}
    flags = dict.fromkeys(("autocast", "reduced", "alone"), False)
    return about | {name: [] for name in lists} | flags | changes


def ranks(steps=1, end=DONE):
    return [[MODEL, *(step(at, MEAN, own) for at in range(steps)), end] for own in OWN]


def alone(*steps):
    return [[MODEL, *steps, DONE]]


ONE = step(0, MEAN, MEAN, sizes=[8])


@pytest.fixture
def evidence(tmp_path):
    def of(**runs):
        read = {}
        for name, records in runs.items():
            (tmp_path / name).mkdir(exist_ok=True)
            for rank, events in enumerate(records):
                text = "".join(json.dumps(event) + "\n" for event in events)
                (tmp_path / name / f"trace-{rank}.jsonl").write_text(text)
            answer = {"ranks": len(records), "hung": False, "places": {}, "failed": {}}
            read[name] = TracedRun.read(tmp_path / name, answer)
        return Evidence(**read)

    return of


def strayed(gaps, drift):
    """Two steps in which the one process's gradient differs by these, its weights by `drift`."""
    first, second = (scaled(MEAN, 1 + gap) for gap in gaps)
    after = [vector(1.0 + drift, 1.0, 1.0)]
    later = step(1, second, second, sizes=[8], before=after, after=after)
    return {"many": ranks(2), "alone": alone(step(0, first, first, sizes=[8], after=after), later)}


@pytest.mark.parametrize(
    ("gaps", "drift", "faulty"),
    [
        ((0, 0), 0, False),
        ((5e-3, 0.02), 1e-4, False),  # a maximum was another one, and then the weights
        ((0, 0.02), 0, True),
        ((0, 0.02), 1e-2, True),  # no gradient explains the weights
        ((0.05, 0), 0, True),
        ((5e-3, 0.2), 1e-4, True),
    ],
)
def test_rounding_grows_with_the_weights_that_it_has_changed(evidence, gaps, drift, faulty):
    difference = first_difference(evidence(**strayed(gaps, drift)))
    assert (difference is not None) is faulty, difference


def test_a_proof_says_from_where_on_only_large_differences_count(evidence):
    assert evidence(**strayed((5e-3, 0), 1e-4)).loose is None
    found = evidence(**strayed((5e-3, 0), 1e-3))
    assert found.loose == 1
    proof = _proof(found, Layout(1, 2), Layout(1, 2))
    assert "; from step 1 on, only large differences count" in proof.message


@pytest.mark.parametrize(
    ("replicas", "nproc", "ran"),
    [
        ({}, None, "1 node x 2 processes"),
        ({}, 3, "1 node x 3 processes"),
        ({"workers": 1}, None, "2 nodes x 1 process"),
        ({"workers": 3, "nproc_per_node": 2}, None, "4 nodes x 2 processes"),
        ({"workers": 15, "nproc_per_node": 8}, None, "2 nodes x 2 processes"),
        ({"nproc_per_node": 16}, None, "1 node x 2 processes"),
        ({"nproc_per_node": 16}, 12, "1 node x 12 processes"),
    ],
)
def test_the_layout_of_a_job_is_its_own_or_a_smaller_one_of_the_same_kind(replicas, nproc, ran):
    spec = JobSpec(name="j", image="n:1", run={"script": "main.py"}, replicas=replicas)
    assert str(Layout.of(spec, nproc)) == ran


def test_a_restart_that_fails_on_one_process_only_is_a_note(evidence):
    many = ranks()
    many[0][-1:] = [{"kind": "snapshot", "step": 1, "folder": ""}, DONE]
    found = evidence(many=many, alone=alone(ONE), resumed=ranks(0), moved=[[RAISED]])
    assert first_difference(found) is None
    assert "KeyError" in next(notes(found))
    assert any("restart" in part for part in not_compared(found))  # it reads no checkpoint
    assert not [*notes(replace(found, resumed=found.moved))]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sizes": [6]}, "it has 6 samples and the ranks together 8"),
        ({"losses": [1.0] * 3}, "it has 3 backward passes and each rank 1"),
    ],
)
def test_what_cannot_be_compared_has_a_reason(evidence, changes, reason):
    found = evidence(many=ranks(), alone=alone(ONE | changes))
    assert found.compared == (0, f"at step 0 {reason}")


@pytest.mark.parametrize(
    ("many", "one", "differing"),
    [
        ("Elapsed: 6", "Elapsed: 3", 0),
        ("took 0:00:06", "took 0:00:03", 0),
        ("6 sec, 0.5", "3 sec, 0.5", 0),
        ("acc 0.5 minimum 0.1", "acc 0.9 minimum 0.1", 1),
        ("loss 0.5 secret 0.1", "loss 0.9 secret 0.1", 1),
    ],
)
def test_times_are_no_results_of_an_evaluation(many, one, differing):
    of_ranks = Evaluation(1, text=many)
    assert len([*_printed(of_ranks, Evaluation(1, text=one), of_ranks, [])]) == differing


def test_a_proof_of_nothing_is_none(evidence):
    with pytest.raises(BackendError, match="none can be compared with one process: there are 0"):
        _proof(evidence(many=ranks(), alone=alone()), Layout(1, 2), Layout(1, 2))


def test_one_of_two_gradients_that_is_divided_once_more(evidence):
    many, names = ranks(), {"names": ["first", "second"]}
    for rank, (_, event, _) in enumerate(many):
        event.update(names, local=[OWN[rank], scaled(OWN[1 - rank], 2)], grads=[MEAN, MEAN])
    both = [MEAN, scaled(MEAN, 2)]
    single = alone(ONE | names | {"local": both, "grads": both})
    assert first_difference(evidence(many=many, alone=single)).cause == "gradient-averaged-twice"


def test_a_script_that_starts_another_number_of_processes(evidence):
    proof = _proof(evidence(many=ranks(), alone=alone(ONE)), Layout(1, 3), Layout(1, 3))
    assert (proof.equal, proof.processes, proof.layout) == (True, 2, "1 node x 2 processes")
    assert "the script starts 2 itself" in proof.message


def test_a_proof_says_which_steps_were_compared(evidence):
    proof = _proof(evidence(many=ranks(2), alone=alone(ONE)), Layout(16, 8), Layout(1, 2))
    assert (proof.equal, proof.steps) == (True, 1)
    assert "16 nodes x 8 processes" in proof.not_compared[0]
    assert "the ranks agree over 2 steps, and there are 1 steps with one process" in proof.message
