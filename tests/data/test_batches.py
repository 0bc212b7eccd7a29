"""Batches: what each step reads, and how a batch is cut."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mheads import data
from mheads.data.batches import Batch, BatchStream, evaluation_batches
from mheads.data.splits import TargetRows
from mheads.distributed.planning.placement import Division, Placement
from mheads.trees.splitting.cut_sequential import ChainLayer
from mheads.trees.tree_spec import parse


def stream_of(seed=0, batch_size=8, n=30, inputs=None, **augmented):
    x = np.random.default_rng(1).integers(1, 255, (n, 1, 6, 6)).astype(np.uint8)
    loaded = data.from_arrays((x, np.arange(n) % 3), None, **augmented)
    return BatchStream(loaded, seed, batch_size, 3, None, inputs)


class Regions:
    """Examples with 0, 1, 2, 3, 0, ... rows each."""

    shape = (2,)

    def __len__(self):
        return 20

    def read(self, rows, seeds):
        return torch.from_numpy(rows.astype(np.float32))[:, None].expand(-1, 2)

    def read_targets(self, rows, seeds):
        counts = torch.from_numpy(rows % 4)
        owners = torch.from_numpy(rows).repeat_interleave(counts)
        return TargetRows(owners, {"where": owners * 10}, counts)


def regions_stream(sample_weights=None):
    loaded = SimpleNamespace(train=Regions(), preprocess=SimpleNamespace(has_mean_image=False))
    return BatchStream(loaded, 0, 6, 2, sample_weights)


def test_keys_that_break_ties_are_drawn_anew_in_every_step_of_every_seed():
    found = {(seed, step): stream_of(seed).read(step).ties for seed in (0, 1) for step in (0, 1, 7)}
    assert all(ties.shape == (3, 8) for ties in found.values())
    assert len({tuple(ties.flatten().tolist()) for ties in found.values()}) == len(found)
    again = stream_of(0)
    for step in (7, 0, 1):  # whatever was drawn before
        assert torch.equal(again.read(step).ties, found[0, step])


@pytest.mark.parametrize("augmented", [{"pad": 2}, {"mirror": True}], ids=str)
def test_an_example_looks_different_whenever_it_is_read(augmented):
    """Of a single example, every row of every step is a crop or mirror image of its own."""
    stream = stream_of(n=1, batch_size=16, **augmented)
    first, second = stream.read(0).inputs, stream.read(1).inputs
    assert not torch.equal(first, second)
    assert torch.equal(first, stream.read(0).inputs)
    assert len({tuple(image.flatten().tolist()) for image in first}) > 1


def test_any_step_may_be_asked_for_whatever_was_read_ahead():
    stream, plain = stream_of(), stream_of()
    for step in (0, 1, 5, 2, 2, 3):
        batch, expected = stream.batch(step), plain.read(step)
        assert torch.equal(batch.inputs, expected.inputs)
        assert torch.equal(batch.targets, expected.targets)
        assert torch.equal(batch.ties, expected.ties)
    stream.close()


def test_evaluation_reads_every_example_once_and_in_order():
    split = stream_of(n=25).data.train
    for rows, sizes in ((10, [10, 10, 5]), (25, [25]), (100, [25]), (24, [24, 1])):
        readers = evaluation_batches(split, None, rows)
        assert [len(reader) for reader in readers] == sizes
        found = torch.cat([reader().inputs for reader in readers])
        assert torch.equal(found, split.read(np.arange(25), None))


def test_a_cut_has_its_part_of_everything():
    """5 examples with 2, 0, 3, 1 and 2 rows; inputs are there from example 1 on."""
    counts = torch.tensor([2, 0, 3, 1, 2])
    batch = Batch(
        torch.arange(1, 5),
        torch.arange(8),
        lambda raw, dtype: raw,
        sample_weights=torch.arange(16).view(2, 8),
        ties=torch.arange(16, 32).view(2, 8),
        side={"where": torch.arange(80, 88)},
        first_input=1,
        counts=counts,
    )
    part = batch.cut(2, 4)  # rows 2 to 5
    assert part.inputs.tolist() == [2, 3]
    assert part.first_input == 0
    assert part.targets.tolist() == [2, 3, 4, 5]
    assert part.sample_weights.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert part.ties.tolist() == [[18, 19, 20, 21], [26, 27, 28, 29]]
    assert part.side["where"].tolist() == [82, 83, 84, 85]
    assert part.counts.tolist() == [3, 1]
    last = part.cut(1, 2)
    assert (last.inputs.tolist(), last.targets.tolist(), last.ties[0].tolist()) == ([3], [5], [21])


def test_the_sample_weights_of_an_example_is_that_of_all_its_rows():
    sample_weights = np.arange(40, dtype=np.float32).reshape(2, 20)
    batch = regions_stream(sample_weights).read(0)
    np.testing.assert_array_equal(batch.sample_weights.numpy(), sample_weights[:, batch.targets.numpy()])
    assert batch.sample_weights.shape == batch.ties.shape == (2, int(batch.counts.sum()))


def test_a_stream_of_some_inputs_has_them_at_their_place():
    whole, some = stream_of(pad=1).read(3), stream_of(pad=1, inputs=range(4, 8)).read(3)
    assert (some.first_input, len(some.inputs), len(some)) == (4, 4, 8)
    assert torch.equal(some.cut(5, 7).inputs, whole.cut(5, 7).inputs)
    assert torch.equal(some.targets, whole.targets)
    assert stream_of(inputs=range(0)).read(3).inputs is None


# Of several ranks.


def test_a_rank_needs_the_inputs_of_the_micro_batches_that_it_begins():
    tree = parse({"a": 2}, [ChainLayer(name, True, False) for name in "abc"])
    # 10 examples in 4 micro-batches: 3, 3, 2, 2.
    division = Division(Placement({"trunk": (0, 1), "a/0": (0,), "a/1": (1,)}, slots=2, replicas=2), 4)
    found = [division.inputs_needed(tree, rank, 10) for rank in range(5)]
    assert found == [range(3), range(3, 6), range(6, 8), range(8, 10), range(0)]
    apart = Division(Placement({"0": (0,), "1": (1,)}, slots=2), 4)
    assert [apart.inputs_needed(parse(2, [ChainLayer("a", True, False)]), r, 10) for r in (0, 1)] == [range(10)] * 2


def test_a_micro_batch_whose_inputs_are_elsewhere_has_none():
    batch = stream_of(inputs=range(4, 8)).read(0)
    assert batch.cut(0, 4).inputs is None
    assert torch.equal(batch.cut(4, 8).inputs, stream_of().read(0).inputs[4:8])


def test_alternating_mirrors_turn_each_example_in_every_other_epoch():
    """An example is as it is in one epoch and mirrored in the next, whichever comes first, however batches are cut."""
    seen = {}
    for batch_size in (5, 12):
        x = np.random.default_rng(1).integers(1, 255, (30, 1, 6, 6)).astype(np.uint8)
        loaded = data.from_arrays((x, np.arange(30)), None, mirror="alternating")
        stream = BatchStream(loaded, 3, batch_size, 1, None, alternating=True)
        turned = np.full((4, 30), -1)
        for step in range(120 // batch_size):
            batch = stream.read(step)
            for i, (image, row) in enumerate(zip(batch.inputs[..., 0].numpy(), batch.targets.tolist(), strict=True)):
                epoch = (step * batch_size + i) // 30
                turned[epoch, row] = np.array_equal(image, x[row, 0, :, ::-1])
                assert turned[epoch, row] or np.array_equal(image, x[row, 0])
        seen[batch_size] = turned
        assert (turned[0] != turned[1]).all()
        assert (turned[0] == turned[2]).all()
        assert (turned[1] == turned[3]).all()
        assert 6 < turned[0].sum() < 24
    assert (seen[5] == seen[12]).all()
