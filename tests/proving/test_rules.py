"""The causes, from records that are written by hand: what two ranks and one process did."""

import json
from dataclasses import replace

import pytest

from k8sjob.errors import BackendError
from k8sjob.proving.proof import Layout, _accumulates_for_all, _proof
from k8sjob.proving.rules import Evidence, first_difference, not_compared, notes
from k8sjob.proving.rules.evaluation import _printed
from k8sjob.proving.trace import Evaluation, TracedRun
from k8sjob.spec import JobSpec

RATE = 0.1


def vector(*values):
    """A tensor of three elements, as the prover writes it."""
    return [sum(v * v for v in values), *values]


def scaled(sketch, factor):
    return [sketch[0] * factor**2, *[v * factor for v in sketch[1:]]]


OWN = (vector(1.0, 2.0, 4.0), vector(3.0, -2.0, 1.0))
MEAN = vector(2.0, 0.0, 2.5)


def batch(samples, index=0, number=0):
    event = {"kind": "batch", "loader": 1, "number": number, "index": index, "size": len(samples)}
    return {**event, "ids": samples, "raw": samples, "digests": samples}


def begin(number=0, **changes):
    about = {
        "length": 16,
        "batches": 2,
        "batch_size": 4,
        "drop_last": False,
        "iterable": False,
        "sampler": "DistributedSampler",
        "replicas": 2,
        "data": 7,
        "own": 7,
        "epochs": {},
        "shuffles": True,
    }
    return {"kind": "pass", "loader": 1, "number": number, **about, **changes}


def over(number=0):
    return {"kind": "over", "loader": 1, "number": number}


def backward(loss=1.0, **more):
    return {"kind": "backward", "loss": loss, "autocast": False, "step": 0, "kept": False, **more}


def step(at, grad, local, *, rate=RATE, before=None, after=None, buffers=None):
    weight = vector(1.0, 1.0, 1.0)
    return {
        "kind": "step",
        "optimizer": 0,
        "step": at,
        "rates": [rate],
        "names": ["weight"],
        "before": [before or weight],
        "local": [local],
        "grads": [grad],
        "after": [after or weight],
        "buffers": buffers or {},
    }


def model(weight=None, norms=()):
    weights = {"weight": weight or vector(1.0, 1.0, 1.0)}
    event = {"kind": "model", "number": 0, "wrapper": "", "norms": list(norms), "sharded": False}
    return {**event, "dtype": ["torch.float32"], "weights": weights}


DONE = {"kind": "end", "how": "done", "steps": 1}
SHARDS = ([0, 2, 4, 6], [1, 3, 5, 7])


def many(grads=(MEAN, MEAN), own=OWN, shards=SHARDS, more=((), ()), **options):
    """The records of two ranks that do one step."""
    return [
        [
            model(),
            begin(batches=1, length=8),
            batch(shards[rank]),
            backward(),
            *more[rank],
            step(0, grads[rank], own[rank], **options),
            over(),
            DONE,
        ]
        for rank in range(2)
    ]


def one(grad=MEAN, loss=1.0, **options):
    return [[model(), batch([*range(8)]), backward(loss), step(0, grad, grad, **options), DONE]]


@pytest.fixture
def evidence(tmp_path):
    def read(name, ranks, **answer):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for rank, events in enumerate(ranks):
            first = [] if any(event["kind"] == "pass" for event in events) else [begin()]
            text = "".join(json.dumps(event) + "\n" for event in [*first, *events])
            (folder / f"trace-{rank}.jsonl").write_text(text)
        return TracedRun.read(folder, {"ranks": len(ranks), "hung": False, "places": {}, **answer})

    def made(ranks, single=None, again=None, **answer):
        return Evidence(
            read("many", ranks, **answer),
            read("one", single) if single else None,
            read("again", again) if again else None,
        )

    return made


@pytest.fixture
def cause(evidence):
    def found(*runs, **answer):
        difference = first_difference(evidence(*runs, **answer))
        return difference and str(difference.cause)

    return found


def test_equal(cause):
    assert cause(many(), one(), many()) is None


@pytest.mark.parametrize(
    ("ranks", "single", "expected"),
    [
        (many(shards=([0, 1, 2, 3], [0, 1, 2, 3])), one(), "sampler-not-sharded"),
        (many(shards=([0, 1, 2, 3], [3, 4, 5, 6])), one(), "sampler-overlap"),
        (many(shards=([0, 1, 2, 3], [4, 5])), one(), "sampler-overlap"),
        (many(grads=OWN), one(), "gradient-not-averaged"),
        (many(grads=[scaled(MEAN, 2)] * 2), one(), "gradient-not-averaged"),
        (many(grads=[scaled(MEAN, 0.5)] * 2), one(), "gradient-averaged-twice"),
        (many(grads=[vector(1.25, 1.0, 2.25)] * 2), one(), "gradient-clipping-local"),
        (many(), one(scaled(MEAN, 2), loss=2.0), "loss-scaling"),
        (many(), one(scaled(MEAN, 3)), "gradient-clipping-local"),
        (many(), one(vector(1.5, 1.0, 3.25)), "loss-scaling"),  # 3/4 and 1/4 of OWN
        (many(rate=0.2), one(), "learning-rate-scaled"),
    ],
)
def test_a_cause_is_known_by_what_was_recorded(cause, ranks, single, expected):
    assert cause(ranks, single) == expected


def strayed(gaps, drift):
    """Two steps in which the one process's gradient differs by these, its weights by `drift`."""
    weights = vector(1.0, 1.0, 1.0), vector(1.0 + drift, 1.0, 1.0)
    ranks = many()
    for rank, events in enumerate(ranks):
        events[1] |= {"batches": 2, "length": 16}
        events[-2:-2] = [
            batch([8 + at for at in SHARDS[rank]], index=1),
            backward(step=1),
            step(1, MEAN, OWN[rank]),
        ]
    grads = [scaled(MEAN, 1 + gap) for gap in gaps]
    single = one(grads[0], after=weights[1])
    single[0][-1:-1] = [
        batch([*range(8, 16)], index=1),
        backward(step=1),
        step(1, grads[1], grads[1], before=weights[1], after=weights[1]),
    ]
    return ranks, single


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
    difference = first_difference(evidence(*strayed(gaps, drift)))
    assert (difference is not None) is faulty, difference


def test_a_proof_says_from_where_on_only_large_differences_count(evidence):
    assert evidence(*strayed((5e-3, 0), 1e-4)).loose is None
    found = evidence(*strayed((5e-3, 0), 1e-3))
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


LOST = {"how": "error", "type": "RuntimeError", "message": "Connection closed", "where": "m.py:9"}


def test_a_killed_rank_comes_before_those_that_lost_it(evidence):
    ranks = many()
    for events, end in zip(ranks, ([{"kind": "end"} | LOST], []), strict=True):
        events[-1:] = end
    difference = first_difference(evidence(ranks, failed={"1": -9}))
    assert (difference.cause, difference.rank, difference.step) == ("error", 1, 1)
    assert "SIGKILL" in difference.message


@pytest.mark.parametrize(("resumed", "moved"), [(True, True), (False, False), (True, False)])
def test_a_restart_that_fails(evidence, tmp_path, resumed, moved):
    ranks = many()
    ranks[0][-1:] = [{"kind": "snapshot", "step": 1, "folder": ""}, DONE]
    raised = {"kind": "end", "how": "error", "type": "KeyError", "message": "x", "where": "m.py:2"}
    runs = {}
    for name, size, ends in (("resumed", 2, resumed), ("moved", 1, moved)):
        (tmp_path / name).mkdir()
        for rank in range(size):
            text = json.dumps(DONE if ends else raised) + "\n"
            (tmp_path / name / f"trace-{rank}.jsonl").write_text(text)
        answer = {"ranks": size, "hung": False, "places": {}}
        runs[name] = TracedRun.read(tmp_path / name, answer)
    found = replace(evidence(ranks, one(), many()), **runs)
    difference = first_difference(found)
    where = difference and (difference.cause, difference.step, difference.rank)
    assert where == (None if resumed else ("checkpoint-incomplete", 1, 0))
    assert any("KeyError" in text for text in notes(found)) is (resumed and not moved)
    restart = [part for part in not_compared(found) if "restart" in part]
    assert bool(restart) is resumed  # it reads no checkpoint


def test_samples_that_fill_up_the_last_batch_are_a_note_beside_a_difference(evidence):
    ranks = many(shards=([0, 2, 4, 6], [1, 3, 5, 0]))
    for events in ranks:  # a loop that knows how many batches there are asks for no more
        events[1] = begin(batches=1, length=7)
        events.remove(over())
    repeated = evidence(ranks, one())
    assert first_difference(repeated) is None
    assert "drop_last=True" in next(notes(repeated))
    for events in ranks:
        events[1] |= {"sampler": "ShardSampler"}
    assert 'tail="short"' in next(notes(evidence(ranks, one())))
    faulty = evidence(ranks, one(scaled(MEAN, 2), loss=2.0))
    assert first_difference(faulty).cause == "loss-scaling"
    assert [*notes(faulty)]
    for events in ranks:  # a sample is on no rank, so it is no padding
        events[1] |= {"length": 8}
    assert first_difference(evidence(ranks, one())).cause == "sampler-overlap"


def test_weights_that_differ_when_training_begins(cause):
    ranks = many()
    ranks[1][0] = model(vector(1.0, 1.0, 2.0))
    assert cause(ranks, one()) is None  # made equal since, as by DDP after a first pass
    ranks[1][-3]["before"] = [vector(1.0, 1.0, 2.0)]
    assert cause(ranks, one()) == "model-init-differs"


def twice(samples, *, then=(), **about):
    """The records of two ranks that have the same samples in two passes."""
    about = {"length": 8, "batches": 1} | about
    return [
        [
            model(),
            begin(**about),
            batch(samples[rank]),
            backward(),
            step(0, MEAN, OWN[rank]),
            over(),
            begin(1, **about | dict(then)),
            batch(samples[rank], number=1),
            backward(),
            step(1, MEAN, OWN[rank]),
            over(1),
            DONE,
        ]
        for rank in range(2)
    ]


def test_the_same_order_in_the_next_pass(cause):
    assert cause(twice(([6, 0, 4, 2], [1, 7, 5, 3]))) == "sampler-not-reseeded"


@pytest.mark.parametrize(
    ("then", "iterable", "expected"),
    [
        ({}, True, None),
        ({"epochs": {"epoch": 1}}, True, "sampler-not-reseeded"),
        ({"epochs": {"epoch": 1}}, False, None),  # it changes no sample
        ({"epochs": {"epoch": 1}, "data": 8}, False, "sampler-not-reseeded"),
    ],
)
def test_an_epoch_that_persistent_workers_do_not_see(cause, then, iterable, expected):
    samples, epochs = ([0, 2, 4, 6], [1, 3, 5, 7]), {"epoch": 0}
    assert cause(twice(samples, then=then, iterable=iterable, epochs=epochs)) == expected


def test_the_same_masks_on_all_ranks(cause):
    drawn = [{"kind": "draw", "name": "dropout", "digest": 5}]
    assert cause(many(more=(drawn, drawn)), one()) == "dropout-seed"


def test_two_equal_runs_that_differ(cause):
    assert cause(many(), one(), many(shards=([0, 2, 4, 1], [6, 3, 5, 7]))) == "non-determinism"


def test_a_hang_names_the_places(cause):
    assert cause(many(), hung=True, places={"0": "main.py:3 in f"}) == "hang"


@pytest.mark.parametrize(("weight", "expected"), [(0.5, "last-batch"), (1, None)])
def test_a_batch_that_the_other_rank_has_not(cause, weight, expected):
    def rank(parts, grads):
        yield from (model(), begin(length=6))
        for at, (part, grad) in enumerate(zip(parts, grads, strict=True)):
            yield from (batch(part, at), backward(), step(at, grad, OWN[0]))
        yield from (over(), DONE)

    first = rank(([0, 2], [4, 5]), (OWN[0], scaled(OWN[0], weight)))
    assert cause([[*first], [*rank(([1, 3],), (OWN[0],))]]) == expected


def test_a_sampler_over_a_data_set_of_each_rank(cause):
    ranks = many(shards=([0, 2, 4, 6], [0, 2, 4, 6]))
    for rank, events in enumerate(ranks):
        events[1] = begin(batches=1, length=8, data=rank, own=rank)
        events[2] |= {"digests": [one + 100 * rank for one in events[2]["digests"]]}
    assert cause(ranks, one()) == "sampler-overlap"
    for events in ranks:
        events[1]["own"] = None
    assert cause(ranks, one()) is None


def test_weights_that_differ_only_once_the_training_runs(cause):
    ranks = many()
    ranks[1][-3]["after"] = [vector(1.0, 1.0, 2.0)]
    assert cause(ranks, one()) == "rank-dependent-model"
    ranks[1][-3]["before"] = [vector(1.0, 1.0, 2.0)]
    assert cause(ranks, one()) == "rank-dependent-model"


def test_a_loss_that_is_divided_and_shown_whole(cause):
    assert cause(many(), one(scaled(MEAN, 2), loss=1.0)) == "gradient-averaged-twice"


def test_gradients_that_one_rank_does_not_clear(cause):
    ranks = many()
    ranks[1][3] = backward(kept=True)
    assert cause(ranks, one()) == "accumulation"


def test_reduced_by_hand_after_ddp(cause):
    reduce = {"kind": "collective", "name": "all_reduce", "before": None, "after": None}
    ranks = many(grads=[scaled(MEAN, 2)] * 2)
    for events in ranks:
        events[0] = {**events[0], "wrapper": "DistributedDataParallel"}
        events.insert(4, reduce)
    assert cause(ranks, one()) == "gradient-averaged-twice"


def test_an_error_on_all_ranks_is_the_cause(cause):
    failed = {"kind": "end", "how": "error", "type": "RuntimeError", "where": "main.py:3"}
    ranks = [
        [*events[:-1], {**failed, "message": "unused parameters"}] for events in many(grads=OWN)
    ]
    assert cause(ranks) == "error"


def test_what_can_be_compared_with_one_process(evidence):
    everything = evidence(many(), one())
    assert (everything.common, everything.compared) == (1, (1, ""))


@pytest.mark.parametrize(
    ("single", "reason"),
    [
        ([[model(), DONE]], "there are 0 steps"),
        (
            [[batch([*range(6)]), backward(), step(0, MEAN, MEAN), DONE]],
            "at step 0 it has 6 samples and the ranks together 8",
        ),
        (
            [[*[backward()] * 3, step(0, MEAN, MEAN), DONE]],
            "at step 0 it has 3 backward passes and each rank 1",
        ),
    ],
)
def test_what_cannot_be_compared_has_a_reason(evidence, single, reason):
    assert evidence(many(), single).compared == (0, reason)


@pytest.mark.parametrize(("passes", "accumulates"), [(0, False), (1, False), (2, True)])
def test_one_process_accumulates_if_it_does_the_passes_of_all_ranks(evidence, passes, accumulates):
    rank = [[model(), *[backward()] * min(passes, 1), step(0, MEAN, MEAN), DONE]]
    single = [[model(), *[backward()] * passes, step(0, MEAN, MEAN), DONE]]
    found = evidence(rank * 2, single)
    assert _accumulates_for_all(found.single, found.many) is accumulates


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
    ranks = Evaluation(1, text=many)
    assert len([*_printed(ranks, Evaluation(1, text=one), ranks, [])]) == differing


def test_a_proof_of_nothing_is_none(evidence):
    with pytest.raises(BackendError, match="none can be compared with one process: there are 0"):
        _proof(evidence(many(), [[model(), DONE]]), Layout(1, 2), Layout(1, 2))


def test_ranks_that_draw_with_replacement_may_have_the_same_sample(cause):
    shards = ([0, 2, 2, 6], [2, 3, 5, 3])
    ranks, same = many(shards=shards), many(shards=(shards[0], shards[0]))
    for events in (*ranks, *same):
        events[1] |= {"replicas": None, "sampler": "WeightedRandomSampler"}
    assert cause(ranks, one()) is None
    assert cause(same, one()) == "sampler-not-sharded"


@pytest.mark.parametrize(
    ("alone", "expected"),
    [([0.9, 1.0, 0.7], None), ([0.9, 1.0, 0.8], "gradient-not-averaged")],
)
def test_weights_that_are_averaged_after_the_step(cause, alone, expected):
    begun, average = vector(1.0, 1.0, 1.0), vector(0.9, 1.0, 0.7)
    ranks = [
        [
            model(),
            *(backward(), step(0, OWN[rank], OWN[rank], after=OWN[rank])),
            *(backward(), step(1, OWN[rank], OWN[rank], before=average, after=OWN[rank])),
            DONE,
        ]
        for rank in range(2)
    ]
    steps = [step(0, MEAN, MEAN, before=begun), step(1, MEAN, MEAN, before=vector(*alone))]
    single = [[model(), backward(), steps[0], backward(), steps[1], DONE]]
    assert cause(ranks, single) == expected
    ranks[1][-2]["before"] = [OWN[1]]  # the ranks' weights stay unequal
    assert cause(ranks, single) == "gradient-not-averaged"


@pytest.mark.parametrize(("workers", "expected"), [(2, None), (1, "dropout-seed")])
def test_random_numbers_of_workers_after_the_first_batch_of_each(cause, workers, expected):
    drawn = {"drawn": [[2, 5, 6]]}
    ranks = [
        [
            model(),
            begin(workers=workers),
            *(batch(part[:2]) | drawn, backward(), step(0, MEAN, MEAN)),
            *(batch(part[2:], 1) | drawn, backward(), step(1, MEAN, MEAN)),
            DONE,
        ]
        for part in SHARDS
    ]
    assert cause(ranks) == expected


def test_one_of_two_gradients_that_is_divided_once_more(cause):
    ranks = many()
    for rank, events in enumerate(ranks):
        events[-3] |= {
            "names": ["first", "second"],
            "local": [OWN[rank], scaled(OWN[1 - rank], 2)],
            "grads": [MEAN, MEAN],  # of the second: half of its mean
        }
    single = one()
    both = [MEAN, scaled(MEAN, 2)]
    single[0][-2] |= {"names": ["first", "second"], "local": both, "grads": both}
    assert cause(ranks, single) == "gradient-averaged-twice"


def test_a_script_that_starts_another_number_of_processes(evidence):
    proof = _proof(evidence(many(), one()), Layout(1, 3), Layout(1, 3))
    assert (proof.equal, proof.processes, proof.layout) == (True, 2, "1 node x 2 processes")
    assert "the script starts 2 itself" in proof.message


def test_a_proof_says_which_steps_were_compared(evidence):
    ranks = many()
    for events in ranks:
        events[-1:] = [backward(), step(1, MEAN, MEAN), DONE]
    proof = _proof(evidence(ranks, one()), Layout(16, 8), Layout(1, 2))
    assert (proof.equal, proof.steps) == (True, 1)
    assert "16 nodes x 8 processes" in proof.not_compared[0]
    assert "the ranks agree over 2 steps, and there are 1 steps with one process" in proof.message
