"""Networks, losses, sample weights and data that no recipe has: right, or refused in words."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import mheads
from mheads.common.errors import UserError
from mheads.data.python_data import from_arrays
from mheads.losses import Loss, cross_entropies, mcl, prob_averaged

ROWS = np.random.default_rng(0)
X = ROWS.normal(size=(200, 5)).astype(np.float32)
Y = np.arange(200) % 10
DATA = {"train": (X, Y), "test": (X, Y), "show": False}


def small():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 10))


def after(*layers):
    return lambda: nn.Sequential(nn.Linear(5, 8), *(layer() for layer in layers), nn.Linear(8, 10))


# What the log says.


@pytest.mark.filterwarnings("ignore:iteration 100. the Oracle")  # what is learned is random
def test_losses_of_members_are_means_over_their_examples_however_few_a_batch_has():
    sample_weights = np.zeros((2, 200))
    sample_weights[0, :20] = sample_weights[1] = 1
    options = {"iterations": 200, "batch_size": 2, "lr": 1e-9, "log": {"every": 200}}
    run = mheads.fit(mheads.TreeNet(small, members=2), sampling=sample_weights, **DATA, **options)
    wanted = cross_entropies(run.predict(X), torch.tensor(Y))
    logged = run.history.steps[-1]["member_losses"]
    assert logged[0] == pytest.approx(wanted[0, :20].mean().item(), abs=0.15)  # whose batches mostly hold none
    assert logged[1] == pytest.approx(wanted[1].mean().item(), abs=0.05)


# A tree in a loop of one's own.


class Deciding(nn.Module):
    """torch.fx cannot follow it; its children in a row are not all that it does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.a(x)
        if x.sum() > -1e9:
            h = torch.relu(h)
        return self.b(h)


class Asking(Deciding):
    """torch.fx cannot follow it either; its children in a row are all."""

    def forward(self, x):
        assert x.sum() < 1e9
        return self.b(self.a(x))


def test_a_tree_that_is_not_the_network_is_refused_when_it_is_first_called():
    net = mheads.TreeNet(Deciding, members=2)
    for _ in range(2):
        with pytest.raises(UserError, match="Deciding run one after the other do not give what its forward gives"):
            net(torch.from_numpy(X))
    net = mheads.TreeNet(Asking, members=2)
    state = torch.get_rng_state()
    found = net(torch.from_numpy(X))
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(found[0], net.network()(torch.from_numpy(X)))


# Layers.


class ByPlace(nn.Module):
    """The positions of another layout: along the batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.sin(torch.arange(500.0)[:, None] * torch.arange(1, 9)))

    def forward(self, x):
        return x + self.positions[: x.size(0)]


class ByNumber(nn.Module):
    def forward(self, x):
        return x / x.shape[0]


@pytest.mark.parametrize("layer", [ByPlace, ByNumber])
def test_a_layer_that_looks_at_places_or_numbers_of_rows_is_refused(layer):
    with pytest.raises(UserError, match=r"layer '1' of .* at another place in the batch, or in a batch of"):
        mheads.fit(mheads.TreeNet(after(layer), members=2), iterations=2, **DATA)


class Within(nn.Module):
    """Positions along the sequence, which comes first on the way."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 3)
        self.register_buffer("positions", torch.arange(5.0)[:, None, None])

    def forward(self, x):
        return (self.inner(x.t()[..., None]) + self.positions).transpose(0, 1).flatten(1)


def test_positions_within_an_example_are_fine_and_so_are_rows_that_stand_elsewhere_on_the_way():
    net = mheads.TreeNet(lambda: nn.Sequential(Within(), nn.Linear(15, 10)), members=2)
    assert mheads.fit(net, iterations=2, **DATA).result.members
    time_first = mheads.TreeNet(
        lambda: nn.Sequential(nn.Unflatten(1, (5, 1)), First(), nn.GRU(1, 6), Last(), nn.Linear(6, 10)), members=2
    )
    assert mheads.fit(time_first, iterations=2, **DATA).result.members


class First(nn.Module):
    def forward(self, x):
        return x.transpose(0, 1)


class Last(nn.Module):
    def forward(self, x):
        return x[0][-1]


def test_gradients_that_depend_on_how_often_a_token_occurs_are_refused():
    def factory():
        return nn.Sequential(nn.Embedding(20, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(12, 3))

    x, y = ROWS.integers(20, size=(60, 3)), np.arange(60) % 3
    with pytest.raises(UserError, match=r"layer '0' of .*scale_grad_by_freq"):
        mheads.fit(mheads.TreeNet(factory, members=2), train=(x, y), test=(x, y), show=False)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x).mean(1)))


def test_sparse_gradients_of_a_graph_are_learned():
    x, y = ROWS.integers(20, size=(60, 3)), np.arange(60) % 3
    run = mheads.fit(mheads.TreeNet(Sparse, members=2), train=(x, y), test=(x, y), iterations=3, show=False)
    assert run.result.members


@dataclass
class Out:
    logits: torch.Tensor


class Giving(nn.Linear):
    def __init__(self, wrap):
        super().__init__(8, 10)
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(super().forward(x))


@pytest.mark.parametrize(("wrap", "said"), [(Out, "an? Out"), (lambda x: (x, None), "None")])
def test_outputs_that_are_no_tensors_are_told_by_their_type(wrap, said):
    net = mheads.TreeNet(lambda: nn.Sequential(nn.Linear(5, 8), Giving(wrap)), members=2)
    with pytest.raises(UserError, match=f"layer '1' of .* gives {said}: layers give tensors"):
        mheads.fit(net, **DATA)


# Precision.


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.view_as_complex(torch.randn(3, 2)))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.w, n=5)


def test_complex_weights_are_refused_with_what_to_do():
    with pytest.raises(UserError, match=r"0\.w is complex, .*view_as_complex"):
        mheads.TreeNet(lambda: nn.Sequential(Spectrum(), nn.Linear(5, 10)), members=2)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 10).double()

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)).double())


def test_layers_may_each_have_a_precision():
    net = mheads.TreeNet(Mixed, members=2)
    assert mheads.fit(net, iterations=3, **DATA).result.members
    assert {p.dtype for p in net.parameters()} == {torch.float32, torch.float64}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.t = nn.Linear(5, 10), nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return self.a(x) * self.t


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_the_count_of_steps_of_a_scalar_keeps_its_digits(optimizer, tmp_path):
    def run(folder, iterations):
        net = mheads.TreeNet(lambda: Scaled().bfloat16(), members=1)
        options = {"optimizer": optimizer, "lr": 0.01, "batch_size": 4, "folder": tmp_path / folder}
        return mheads.fit(net, iterations=iterations, log={"evaluate_every": 0, "every": 300}, **options, **DATA)

    run("stopped", 261)
    stopped, whole = run("stopped", 266), run("whole", 266)
    for one, other in zip(stopped.net.parameters(), whole.net.parameters(), strict=True):
        assert torch.equal(one, other)


# Losses.


class Focal(nn.Module):
    def __init__(self, gamma, weights=None):
        super().__init__()
        self._gamma = gamma
        self.register_buffer("weights", torch.ones(10) if weights is None else weights, persistent=False)

    def forward(self, outputs, y):
        losses = cross_entropies(outputs, y)
        return self.weights[y] * losses * (1 - (-losses).exp()) ** self._gamma


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: Loss("focal", m), lambda m: mcl(k=1, base_loss=m)])
@pytest.mark.parametrize("other", [Focal(3.0), Focal(1.0, torch.arange(10.0))])
def test_a_run_does_not_go_on_with_another_module_for_a_loss(wrap, other, tmp_path):
    def run(module, iterations):
        net = mheads.TreeNet(small, members=2)
        return mheads.fit(net, wrap(module), iterations=iterations, folder=tmp_path / "run", **DATA)

    run(Focal(1.0), 3)
    with pytest.raises(UserError, match="Focal"):
        run(other, 5)
    assert run(Focal(1.0), 5).result.members


def of_the_mean(outputs, y):
    losses = cross_entropies(outputs, y)
    return losses * (losses.detach() / losses.detach().mean(1, keepdim=True))


def the_mean_itself(outputs, y):
    losses = cross_entropies(outputs, y)
    return losses.mean(1, keepdim=True).expand_as(losses)


@pytest.mark.parametrize("loss", [of_the_mean, mcl(k=1, base_loss=the_mean_itself)])
def test_a_loss_that_looks_at_the_whole_batch_is_refused_until_it_says_so(loss):
    with pytest.raises(UserError, match=r"looks at the whole batch .*whole_batch ?= ?True"):
        mheads.fit(mheads.TreeNet(small, members=2), loss, iterations=2, **DATA)
    said = Loss("said", of_the_mean, whole_batch=True)
    assert mheads.fit(mheads.TreeNet(small, members=2), said, iterations=2, micro_batches=1, **DATA).result.members


def test_floats_that_are_no_classes_are_not_called_numbers():
    soft = np.full((200, 10), 0.1, np.float32)
    data = {"train": (X, soft), "test": (X, soft), "problem": "soft_labels", "show": False}
    for loss in (prob_averaged(), mheads.losses.confident()):
        with pytest.raises(UserError, match="soft labels or several"):
            mheads.fit(mheads.TreeNet(small, members=2), loss, **data)


# What is given.


@pytest.mark.parametrize("k", ["1", 1.5, True, None])
def test_k_is_a_whole_number(k):
    with pytest.raises(UserError, match=r"loss\.k must be a whole number"):
        mcl(k=k)
    assert mcl(k=np.int64(2)).winners == 2


@pytest.mark.parametrize("members", ["2", 2.0, True])
def test_members_is_a_whole_number(members):
    with pytest.raises(UserError, match="members must be a whole number"):
        mheads.TreeNet(small, members=members)


def test_a_number_for_a_split_is_not_taken_for_members_where_layers_have_numbers(tmp_path):
    for members in (2, 4):
        with pytest.raises(UserError, match=r'the layer 2 is split="2", in quotes'):
            mheads.TreeNet(small, members=members, split=2)
    assert mheads.TreeNet(small, members=3, split="0").tree.roots[0].layers[0] == "0"
    mheads.fit(mheads.TreeNet(small, members=2), iterations=2, folder=tmp_path / "run", **DATA)
    assert mheads.load(tmp_path / "run", small).net.num_members == 2  # whose config says split: 2


def test_sample_weights_of_a_wrong_shape_are_told_as_they_were_given():
    with pytest.raises(UserError, match=r"sample weights of shape \[3, 200\], but there are 2 members and 150"):
        mheads.fit(
            mheads.TreeNet(small, members=2), train=(X, Y), validation=50, sampling=np.ones((3, 200)), show=False
        )


def test_volumes_are_told_how_they_go():
    x = np.zeros((20, 2, 3, 4, 5), np.float32)
    with pytest.raises(UserError, match=r"nn.Unflatten\(1, \(2, 3, 4, 5\)\)"):
        mheads.fit(mheads.TreeNet(small, members=2), train=(x, np.arange(20) % 2), show=False)


# Surgery.


def test_what_is_frozen_stays_frozen_in_trees_that_are_made_of_a_tree():
    net = mheads.TreeNet(small, members=3, split="0")
    net.freeze(["trunk", "0/1"])
    more = net.with_members(1, at="0")
    assert more.frozen == ("trunk", "0/1")
    before = {name: t.clone() for name, t in more.state_dict().items()}
    mheads.fit(more, iterations=3, **DATA)
    changed = {name.split(".")[1] for name, t in more.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {"0/0", "0/2", "0/3"}
    assert net.keep([1, 2]).frozen == ("trunk", "0/0")
    alone = net.keep([0])
    assert alone.frozen == ("0", "1") or alone.frozen == ("0",)  # what is left of the trunk, by its layers
    assert not alone.stage("trunk").get_parameter("0.weight").requires_grad
    assert alone.stage("trunk").get_parameter("2.weight").requires_grad
    alone.freeze([])
    assert all(p.requires_grad for p in alone.parameters())


def test_layers_that_are_frozen_by_name_or_by_hand_stay_so():
    net = mheads.TreeNet(small, members=2)
    net.freeze(["2"])
    net.stage("0").get_parameter("0.bias").requires_grad_(False)
    one = net.keep([0])
    assert [name for name, p in one.named_parameters() if p.requires_grad] == ["stages.trunk.0.weight"]
    one.freeze([])
    assert not one.stage("trunk").get_parameter("0.bias").requires_grad
    assert one.stage("trunk").get_parameter("2.bias").requires_grad


def test_a_part_of_a_stage_that_others_learn_is_not_frozen_without_a_word():
    def deep():
        return nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)), nn.Linear(5, 10))

    net = mheads.TreeNet(deep, tree={"0": [{"1": 2}, 1]})
    net.freeze(["0/0"])  # the layer 1 of members 0 and 1
    assert net.keep([0, 1]).frozen == ("1",) or net.keep([0, 1]).frozen == ("trunk",)
    with pytest.raises(UserError, match=r"0/0 are frozen, and 1 would be in a part of a stage"):
        net.keep([0, 2])
    net.freeze([])
    assert net.keep([0, 2]).num_members == 2


def test_a_test_set_of_another_kind_than_the_training_set_is_refused():
    """It would be scaled as the training examples are, and measure nothing."""
    x = np.random.default_rng(0).integers(0, 256, (60, 4)).astype(np.uint8)
    y = np.arange(60) % 2
    floats = (x / 255).astype(np.float32)
    for train, test in ((x, floats), (floats, x)):
        with pytest.raises(UserError, match=r"training examples are .* but test examples .* in the same way"):
            from_arrays((train, y), (test, y))
    assert from_arrays((x, y), (floats, y), validation=10).held_out  # where the test set is not asked
    with pytest.warns(UserWarning, match="test examples: floats from 0 to 255, but training saw floats from 0 to 1"):
        from_arrays((floats, y), (255 * floats, y))


def test_labels_are_checked_where_they_stand_before_any_are_held_out():
    x, pixels = np.zeros((100, 4), np.float32), np.zeros((40, 1, 5, 5), np.float32)
    y = np.arange(100) % 3
    y[73] = -1
    with pytest.raises(UserError, match="example 73 has label -1"):
        from_arrays((x, y), None, hold_out=0)
    classes = np.arange(1000).reshape(40, 5, 5) % 3
    classes[7, 0, 0] = -1
    for held in ({"hold_out": 0}, {"validation": 5}):
        with pytest.raises(UserError, match="pixels of example 7 have the class -1"):
            from_arrays((pixels, classes), None, **held)


def test_a_label_that_is_no_class_number_does_not_fill_the_memory():
    y = np.arange(20) % 2
    y[3] = 10**9
    with pytest.raises(UserError, match=r"a label is 1000000000, which would make 1,000,000,001 classes: .*regression"):
        from_arrays((np.zeros((20, 4), np.float32), y), None)


def test_sample_weights_of_all_examples_may_be_a_list():
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), np.arange(40) % 2
    sample_weights = np.random.default_rng(0).integers(1, 3, (2, 40))
    runs = [
        mheads.fit(mheads.TreeNet(lambda: nn.Linear(4, 2), 2), train=(x, y), iterations=2, sampling=given)
        for given in (sample_weights, sample_weights.tolist())
    ]
    assert runs[0].result == runs[1].result
