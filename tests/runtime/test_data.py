from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from k8sjob.proving.recording.sketch import join, padding
from k8sjob.runtime.data import Feed, ShardSampler, move, strided


def samplers(count, world, **options):
    return [ShardSampler(range(count), rank=r, world_size=world, **options) for r in range(world)]


def epoch(shards, epoch_number=0, steps=None):
    """The samples of an epoch, global batch by global batch, and how many each rank had."""
    batches = []
    for sampler in shards:
        sampler.set_epoch(epoch_number)
    for number, group in enumerate(zip(*(list(s.shards()) for s in shards), strict=True)):
        if number == steps:
            break
        assert len({(share.start, share.end, share.closes) for share in group}) == 1
        batches.append(
            [
                (sampler.indices(share) if share.count else [])
                for sampler, share in zip(shards, group, strict=True)
            ]
        )
        for sampler in shards:
            sampler.advance()
    return batches


def flat(batches):
    return [sample for batch in batches for share in batch for sample in share]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@given(count=st.integers(1, 300), batch=st.integers(1, 40), seed=st.integers(0, 5))
def test_every_sample_is_seen_and_only_the_padding_twice(world, count, batch, seed):
    seen = Counter(flat(epoch(samplers(count, world, batch_size=batch, seed=seed))))
    assert set(seen) == set(range(count))
    assert sum(seen.values()) - count == -(-count // world) * world - count


@given(
    count=st.integers(1, 200),
    world=st.integers(1, 7),
    shuffle=st.booleans(),
    number=st.integers(0, 3),
)
def test_padding_is_that_of_the_stock_sampler(count, world, shuffle, number):
    for rank, ours in enumerate(samplers(count, world, batch_size=3, shuffle=shuffle, seed=2)):
        stock = DistributedSampler(range(count), world, rank, shuffle=shuffle, seed=2)
        stock.set_epoch(number)
        ours.set_epoch(number)
        assert list(ours) == list(stock)
        assert len(ours) == len(stock)


@given(
    count=st.integers(1, 300),
    global_batch=st.integers(6, 40),
    phases=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=4),
    last=st.integers(1, 6),
    tail=st.sampled_from(["short", "drop", "pad"]),
)
def test_an_epoch_continues_with_any_number_of_ranks(count, global_batch, phases, last, tail):
    assume(tail != "drop" or count >= global_batch)
    state, seen = None, []
    for world, steps in [*phases, (last, None)]:
        shards = samplers(count, world, global_batch=global_batch, tail=tail)
        for sampler in shards:
            if state:
                sampler.load_state_dict(state)
        seen += flat(epoch(shards, steps=steps))
        assert len({sampler.offset for sampler in shards}) == 1
        state = shards[0].state_dict()
    often = Counter(seen)
    if tail == "drop":
        assert set(often.values()) <= {1}
        assert len(often) == count // global_batch * global_batch
    else:
        assert set(often) == set(range(count))
        largest = max(world for world, _ in [*phases, (last, None)])
        assert sum(often.values()) - count <= (0 if tail == "short" else largest - 1)


@given(count=st.integers(1, 200), batch=st.integers(4, 30), world=st.integers(1, 4))
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks(count, batch, world):
    alone = epoch(samplers(count, 1, global_batch=batch, tail="short"))
    many = epoch(samplers(count, world, global_batch=batch, tail="short"))
    assert [sorted(flat([b])) for b in alone] == [sorted(flat([b])) for b in many]


@given(
    count=st.integers(1, 200),
    global_batch=st.integers(7, 30),
    world=st.integers(1, 7),
    accumulate=st.integers(1, 5),
    tail=st.sampled_from(["short", "pad"]),
)
def test_scales_weigh_every_sample_of_a_window_alike(count, global_batch, world, accumulate, tail):
    shards = samplers(count, world, global_batch=global_batch, accumulate=accumulate, tail=tail)
    window, windows = [], 0
    for group in zip(*(s.shards() for s in shards), strict=True):
        window += group
        if group[0].closes:
            weights = [share.scale / share.count / world for share in window if share.count]
            assert sum(share.scale / world for share in window) == pytest.approx(1)
            assert weights == pytest.approx([weights[0]] * len(weights))
            window, windows = [], windows + 1
    assert not window
    assert windows == shards[0].steps()


def test_a_rank_without_samples_stands_in_with_no_weight():
    idle = samplers(5, 4, batch_size=1, tail="short")[3]
    *_, last = idle.shards()
    assert (last.count, last.scale) == (0, 0.0)
    assert len(idle.indices(last)) == 1
    assert idle.leaves_out()
    assert not samplers(5, 4, batch_size=1, tail="pad")[3].leaves_out()


def test_a_new_epoch_begins_at_its_beginning():
    sampler = samplers(100, 1, batch_size=10)[0]
    sampler.advance(3)
    sampler.set_epoch(0)
    assert len(sampler) == 70  # still this epoch
    sampler.set_epoch(1)
    assert len(sampler) == 100


def pass_over(sampler):
    """One epoch of a loop of one's own; the number of its batches."""
    batches = 0
    for _ in DataLoader(range(100), batch_size=10, sampler=sampler):
        sampler.advance()
        batches += 1
    return batches


@pytest.mark.parametrize("again", [lambda _: None, lambda s: s.set_epoch(0)], ids=["no", "same"])
def test_an_epoch_that_is_over_is_not_iterated_again(again):
    sampler = samplers(100, 1, batch_size=10)[0]
    assert pass_over(sampler) == 10
    again(sampler)
    with pytest.raises(RuntimeError, match=r"epoch 0 of this sampler is over: .*set_epoch"):
        pass_over(sampler)
    sampler.set_epoch(1)
    assert pass_over(sampler) == 10


def test_a_run_saved_at_the_end_of_an_epoch_resumes_with_the_next():
    sampler, resumed = samplers(100, 1, batch_size=10)[0], samplers(100, 1, batch_size=10)[0]
    pass_over(sampler)
    resumed.load_state_dict(sampler.state_dict())
    resumed.set_epoch(0)
    assert pass_over(resumed) == 0
    with pytest.raises(RuntimeError, match="is over"):
        pass_over(resumed)  # no set_epoch: not every epoch may be empty
    resumed.set_epoch(1)
    assert pass_over(resumed) == 10


def test_more_advances_than_batches_are_refused():
    sampler = samplers(100, 1, batch_size=20)[0]
    with pytest.raises(RuntimeError, match="once for each batch of 20 samples"):
        pass_over(sampler)  # its loader takes 10: a state saved there would skip samples


def test_mid_epoch_state_of_other_data_is_refused():
    sampler = samplers(100, 1, batch_size=10)[0]
    state = {"epoch": 1, "offset": 30, "samples": 90, "seed": 0}
    with pytest.raises(ValueError, match="90 samples and seed 0, now there are 100"):
        sampler.load_state_dict(state)
    sampler.load_state_dict({**state, "offset": 0})
    assert sampler.epoch == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4, "global_batch": 8}, "exactly one of the two"),
        ({}, "exactly one of the two"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"global_batch": 2}, "below the number of ranks, 3"),
        ({"global_batch": 3, "max_ranks": 4}, "below the 4 ranks that this elastic job may"),
        ({"batch_size": 4, "tail": "wrap"}, "tail='wrap'"),
        ({"batch_size": 4, "accumulate": 0}, "accumulate=0"),
        ({"batch_size": 4, "tail": "drop"}, "leaves no batch: .* 10 samples, .* together take 12"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        samplers(10, 3, **options)


def test_an_empty_data_set_is_refused():
    with pytest.raises(ValueError, match="is empty"):
        samplers(0, 1, batch_size=1)
    with pytest.raises(ValueError, match="is empty"):
        strided([], 0, 1, 4)


def test_a_data_set_without_length_is_refused():
    with pytest.raises(TypeError, match="generator has no length"):
        ShardSampler((n for n in range(3)), rank=0, world_size=1, batch_size=1)


@given(count=st.integers(1, 100), world=st.integers(1, 7), batch=st.integers(1, 20))
def test_evaluation_sees_each_sample_exactly_once(count, world, batch):
    ranks = [strided(range(count), rank, world, batch) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    seen = [sample for batches in ranks for one in batches for sample in one]
    assert sorted(seen) == list(range(count))


def feed(workers=0, **settings):
    data = torch.utils.data.TensorDataset(torch.arange(20))
    settings = {"batch_size": 4, **settings, "loader_options": {"num_workers": workers}}
    ranks = {"rank": 1, "world_size": 2, "accumulate": 1, "seed": 0, "on_gpu": False}
    return Feed(data, settings, **ranks), data, settings


def test_the_loader_gives_what_the_sampler_says_and_leaves_the_random_numbers_alone():
    one, data, settings = feed()
    shares = list(one.sampler.shards())
    before = torch.get_rng_state()
    batches = [batch[0].tolist() for batch in one.loader(shares)]
    assert batches == [one.sampler.indices(share) for share in shares]
    assert torch.equal(before, torch.get_rng_state())
    assert one.serves(data, settings)
    assert not one.serves(data, {**settings, "batch_size": 5})


def test_batches_move_with_their_shape():
    device = torch.device("meta")
    batch = {"a": torch.ones(2), "b": [torch.ones(1), "text"], "c": (torch.ones(3),)}
    moved = move(batch, device)
    assert moved["a"].device == moved["b"][0].device == moved["c"][0].device == device
    assert moved["b"][1] == "text"
    assert type(moved["c"]) is tuple
    assert move(batch, torch.device("cpu")) is batch


def padded(samples):
    """A picture for each sample, and words that are padded with 9."""
    words = [torch.tensor(words) for _, words in samples]
    return {
        "pictures": [picture for picture, _ in samples],
        "words": torch.nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=9),
    }


@pytest.mark.parametrize("channels", [1, 3])
def test_prove_joins_padded_batches_beside_lists_of_samples(channels):
    samples = [(torch.zeros(channels, 4 + at, 4), [1] * (at + 1)) for at in range(8)]
    pads = padding(samples, padded)
    joined = join([padded(samples[:4]), padded(samples[4:])], [4, 4], iter(pads))
    assert [*map(len, joined["pictures"])] == [channels] * 8
    assert torch.equal(joined["words"], padded(samples)["words"])


@pytest.mark.parametrize("drawn", [[2, 0], np.array([2, 0]), torch.tensor([2, 0])])
def test_a_sampler_draws_numbers_of_any_kind(drawn):
    sampler = samplers(3, 1, batch_size=2, sampler=drawn)[0]
    assert list(sampler) == [2, 0]


class Short(list):
    def __len__(self):
        return 9


@pytest.mark.parametrize("drawn", [[[2, 0]], torch.tensor([[2, 0]]), Short([2, 0])])
def test_a_sampler_of_batches_or_of_another_length_is_refused(drawn):
    with pytest.raises(TypeError, match="must draw single indices"):
        list(samplers(3, 1, batch_size=1, sampler=drawn)[0])
