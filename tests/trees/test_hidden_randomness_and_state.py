"""Networks that a tree would silently get wrong are refused; odd ones that it gets right are not."""

import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mheads import TreeNet, UserError, fit
from mheads.common import nested_values
from mheads.common.memory_layout import canonical
from mheads.networks import INPUT_SHAPES, NETWORKS
from mheads.networks.dropout import Dropout
from mheads.trees.splitting.list_cuts import list_cuts


class Plain(nn.Module):
    """What people write; subclasses do more."""

    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)

    def forward(self, x):
        return self.b(self.act(self.a(x)))


class ReluOfZero(Plain):
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.b.weight)
        nn.init.zeros_(self.b.bias)

    def forward(self, x):
        return F.relu(super().forward(x))


class ChangesItsInput(Plain):
    def forward(self, x):
        x += 1
        return super().forward(x)


class OnlyInTraining(Plain):
    def forward(self, x):
        return super().forward(x) * (0.5 if self.training else 1)


class OnlyInEvaluation(Plain):
    def forward(self, x):
        y = super().forward(x)
        return y if self.training else y.softmax(-1)


class Detaches(Plain):
    def forward(self, x):
        return self.b(self.act(self.a(x).detach()))


class ScalesGradients(Plain):
    def forward(self, x):
        h = self.act(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda d: 3 * d)
        return self.b(h)


class Counts(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class WeightOfItsOwn(Plain):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return super().forward(x) + self.shift


class SmallScores(Plain):
    """Scores so small that an absolute tolerance would take any for equal."""

    def __init__(self):
        super().__init__()
        for p in self.parameters():
            p.data.mul_(1e-6)

    def forward(self, x):
        return 2 * super().forward(x)


class OtherPrecision(Plain):
    def forward(self, x):
        return super().forward(x).double()


class TwoOutputs(Plain):
    def forward(self, x):
        y = super().forward(x)
        return y, y


class Called(Plain):
    def __call__(self, x):
        return super().__call__(x) + 1


def forward_on_the_instance():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    inside = net.forward
    net.forward = lambda x: inside(x).relu()
    return net


FOLLOWED = [ReluOfZero, ChangesItsInput, Detaches, WeightOfItsOwn, SmallScores, OtherPrecision, TwoOutputs]
HIDDEN = {
    OnlyInTraining: r"do not give what its forward gives.*_state.py, line \d+, in forward: `.* if self.training",
    OnlyInEvaluation: r"do not give what its forward gives.*cannot follow.*if self.training.*stages\(\)",
    ScalesGradients: r"do not give what its forward gives.*if h.requires_grad",
    Counts: r"do not give what its forward gives.*it assigns its buffer 'calls'",
    Called: r"children of .* do not give what its forward gives",
    forward_on_the_instance: r"children of .* do not give what its forward gives",
}


@pytest.mark.parametrize("factory", FOLLOWED)
def test_a_network_that_does_more_than_its_children_is_followed(factory):
    x = torch.randn(2, 4)
    net = TreeNet(factory, members=2, split="a")
    net.probe(x)
    reference = factory()
    reference.load_state_dict(net.member(1).state_dict())
    for got, expected in zip(nested_values.leaves(net(x)), nested_values.leaves(reference(x.clone())), strict=True):
        torch.testing.assert_close(got[1], expected)


@pytest.mark.parametrize("factory", HIDDEN)
def test_a_network_that_a_graph_does_not_show_is_refused_and_works_as_one_layer(factory):
    x = torch.randn(2, 4)
    with pytest.raises(UserError, match=HIDDEN[factory]):
        TreeNet(factory, members=2).probe(x)
    if factory is not Counts:  # it would do harm as a layer, too
        assert TreeNet(lambda: nn.Sequential(factory()), members=2).probe(x).shape == (2, 3)
    assert TreeNet(Plain, members=2, split="a").probe(x).shape == (2, 3)


class OwnSequential(nn.Sequential):
    pass


HOOKS = {
    "forward": lambda net: net.register_forward_hook(lambda module, args, output: 2 * output),
    "forward pre": lambda net: net.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "backward": lambda net: net.register_full_backward_hook(lambda module, d_in, d_out: None),
    "backward pre": lambda net: net.register_full_backward_pre_hook(lambda module, d_out: (2 * d_out[0],)),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("of", [nn.Sequential, OwnSequential])
def test_hooks_on_the_network_itself_are_refused(kind, of):
    def factory():
        net = of(nn.Linear(4, 4), nn.Linear(4, 3))
        HOOKS[kind](net)
        return net

    x = torch.randn(2, 4)
    with pytest.raises(UserError, match=r"hooks on the network itself.*nn\.Sequential\(net\)"):
        TreeNet(factory, members=2).probe(x)
    assert TreeNet(lambda: nn.Sequential(factory()), members=2).probe(x).shape == (2, 3)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_hook_on_all_modules_is_refused(kind):
    net = TreeNet(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), members=2)
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *args: None)
    try:
        with pytest.raises(UserError, match="hook on all modules"):
            net.probe(torch.randn(2, 4))
    finally:
        handle.remove()
    net.probe(torch.randn(2, 4))


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class CentredInTraining(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


class ScaledByNorm(nn.Module):
    def forward(self, x):
        return x / (1 + x.norm())


class GatedByZero(nn.Module):
    """The gate hides what it lets through."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x + self.gate * (x - x.mean(0))


class LastToFirst(nn.Module):
    def forward(self, x):
        return x + x.roll(1, 0)


def recurrent():
    """The batch taken for time."""
    return First(nn.LSTM(4, 4))


class First(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        return self.inside(x)[0]


MIXING = [
    Centred,
    CentredInTraining,
    ScaledByNorm,
    GatedByZero,
    LastToFirst,
    lambda: nn.Softmax(0),
    lambda: nn.Sequential(nn.Linear(4, 4), Centred()),
    recurrent,
]


@pytest.mark.parametrize("mixing", MIXING)
def test_a_layer_that_mixes_examples_is_refused_until_it_says_so(mixing):
    def factory(declared=False):
        layer = mixing()
        layer.batch_statistics = declared
        return nn.Sequential(OrderedDict(a=nn.Linear(4, 4), mix=layer, b=nn.Linear(4, 3)))

    for x in (torch.randn(2, 4), torch.zeros(2, 4), torch.randn(5, 4)):
        with pytest.raises(UserError, match=r"'mix'.*mixes examples.*batch_statistics = True"):
            TreeNet(factory, members=2).probe(x)
        net = TreeNet(lambda: factory(True), members=2)
        assert net.probe(x).shape == (len(x), 3)
        assert net.batch_statistics_layers() == ["0.mix", "1.mix"]


def test_a_layer_that_mixes_examples_is_named_after_batch_normalisation():
    def factory():
        return nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(4), a=nn.Linear(4, 4), mix=Centred(), b=nn.Linear(4, 3)))

    with pytest.raises(UserError, match="'mix'"):
        TreeNet(factory, members=2).probe(torch.randn(2, 4))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))

    def forward(self, x):
        return x + self.inside(x)


class PositiveScale(nn.Module):
    """A weight that must stay positive."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1e-3))

    def forward(self, x):
        if (self.scale <= 0).any():
            raise ValueError("the scale must be positive")
        return x * self.scale.log()


class Permute(nn.Module):
    def forward(self, x):
        return x.transpose(0, 1)


class Take(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        return x.mean(self.dim)


class Written(nn.Module):
    """A network written as a class, with batch normalisation, dropout and a layer that works in place."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.block = Residual()
        self.pool, self.flat = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.drop, self.fc = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x):
        x = self.block(self.conv(x.contiguous(memory_format=torch.channels_last)))
        return self.fc(self.drop(self.flat(self.pool(x))))


class Split(nn.Module):
    def forward(self, x):
        return {"left": x, "right": (x, x * 2)}


class Join(nn.Module):
    def forward(self, parts):
        return parts["left"] + parts["right"][0] * parts["right"][1]


def encoder(batch_first):
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=batch_first)


ODD = {
    "residual blocks": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), Residual(), nn.Flatten(), nn.Linear(144, 3)),
        torch.randn(2, 2, 6, 6),
    ),
    "a class with batch normalisation and dropout": (Written, torch.randn(2, 2, 6, 6)),
    "embeddings": (
        lambda: nn.Sequential(nn.Embedding(9, 4), First(nn.LSTM(4, 4, batch_first=True)), Take(1), nn.Linear(4, 3)),
        torch.randint(9, (2, 5)),
    ),
    "a class with embeddings": (
        lambda: OwnSequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(20, 3)),
        torch.randint(9, (2, 5)),
    ),
    "attention": (
        lambda: nn.Sequential(nn.Linear(4, 4), encoder(True), nn.Flatten(), nn.Linear(20, 3)),
        torch.randn(2, 5, 4),
    ),
    "sequence first": (
        lambda: nn.Sequential(nn.Linear(4, 4), Permute(), encoder(False), Take(0), nn.Linear(4, 3)),
        torch.randn(2, 5, 4),
    ),
    "weights that must be positive": (
        lambda: OwnSequential(nn.Linear(4, 4), PositiveScale(), nn.Linear(4, 3)),
        torch.randn(2, 4),
    ),
    "dicts and tuples": (
        lambda: OwnSequential(nn.Linear(4, 4), Split(), Join(), nn.Linear(4, 3)),
        torch.randn(2, 4),
    ),
    "instance and group normalisation": (
        lambda: nn.Sequential(nn.InstanceNorm2d(2), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(72, 3)),
        torch.randn(2, 2, 6, 6),
    ),
    "weight normalisation": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3)),
        torch.randn(2, 4),
    ),
    "one example": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.randn(1, 4)),
    "examples that are not finite": (
        lambda: OwnSequential(nn.Linear(4, 4), nn.Linear(4, 3)),
        torch.tensor([[0.0, torch.nan, torch.inf, 1.0], [1.0, 2.0, 3.0, 4.0]]),
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_networks_that_a_tree_gets_right_pass_and_are_left_as_they_were(name):
    factory, x = ODD[name]
    made = factory()
    always = TreeNet(lambda: made, members=1)  # one network, which a probe draws again
    for net in (TreeNet(factory, members=2), always):
        weights = {k: v.clone() for k, v in net.state_dict().items()}
        tensors = [id(v) for v in (*net.parameters(), *net.buffers())]
        modes = [m.training for m in net.modules()]
        given = x.clone()
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        state = torch.get_rng_state()
        assert net.probe(x).shape == (len(x), 3)
        assert torch.equal(torch.get_rng_state(), state)
        assert np.random.rand() == np.random.RandomState(1).rand()
        assert random.random() == random.Random(1).random()
        assert all(torch.equal(weights[k], v) for k, v in net.state_dict().items())
        assert [id(v) for v in (*net.parameters(), *net.buffers())] == tensors
        assert [m.training for m in net.modules()] == modes
        assert all(p.grad is None for p in net.parameters())
        assert torch.equal(x.nan_to_num(), given.nan_to_num())


def test_statistics_of_single_pixels_blow_up_no_rounding():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [(3, 2), (16, 2), (16, 2), *[(16, 1)] * 6]
            convs = (nn.Conv2d(inputs, 16, 3, stride=stride, padding=1) for inputs, stride in sizes)
            self.blocks = nn.Sequential(*(nn.Sequential(conv, nn.BatchNorm2d(16), nn.ReLU()) for conv in convs))
            self.flatten, self.out = nn.Flatten(), nn.Linear(16, 10)

        def forward(self, x):
            return self.out(self.flatten(self.blocks(x)))

    for seed in range(3):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        assert TreeNet(Deep, members=2, seed=seed).probe(canonical(x)).shape == (2, 10)


class TwoChildren(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)


class FailsOnTensors(TwoChildren):
    def forward(self, x):
        if type(x) is torch.Tensor:
            raise ValueError("no plain tensors")
        return self.b(x + self.a(x))


class DropsItself(TwoChildren):
    def forward(self, x):
        h = self.a(x)
        return self.b(F.dropout(h, 0.5, self.training) if h.dim() == 2 else h)


class OneBufferTwice(TwoChildren):
    batch_statistics = True

    def __init__(self):
        super().__init__()
        self.b = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        h = F.batch_norm(self.a(x), self.mean, self.var, training=True)
        return F.batch_norm(self.b(h + F.relu(h)), self.mean, self.var, training=True)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (FailsOnTensors, "the forward of FailsOnTensors fails with ValueError: no plain tensors"),
        (DropsItself, r"the forward of DropsItself draws random numbers itself \(F.dropout"),
        (OneBufferTwice, "layer 'a' of OneBufferTwice changes its buffer 'mean' .* which other layers use too"),
    ],
)
def test_a_forward_that_cannot_be_compared_is_refused(network, said):
    with pytest.raises(UserError, match=said):
        TreeNet(network, members=2).probe(torch.randn(3, 4))


def test_some_stages_of_a_tree_are_probed_as_the_whole():
    for name in ("trunk", "a/1"):
        net = TreeNet(Plain, members=2, split="a", only=[name])
        assert net.probe(torch.randn(2, 4)).shape == (2, 3)
        with pytest.raises(UserError, match="forward gives"):
            TreeNet(OnlyInTraining, members=2, split="a", only=[name]).probe(torch.randn(2, 4))


class Shrinks(nn.Dropout):
    """A dropout in name only."""

    def forward(self, x):
        return x * (1 - self.p)


class Noisier(nn.Dropout):
    def forward(self, x):
        return super().forward(x) + 1


def test_only_plain_dropout_is_replaced():
    def factory(layer):
        return lambda: nn.Sequential(OrderedDict(a=nn.Linear(4, 4), drop=layer, b=nn.Linear(4, 3)))

    x = torch.randn(2, 4)
    net = TreeNet(factory(Shrinks(0.25)), members=1)
    net.probe(x)
    member = net.member(0)
    torch.testing.assert_close(net(x)[0], member.b(0.75 * member.a(x)))
    hooked = nn.Dropout(0.5)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    for layer in (Noisier(0.5), hooked, nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)):
        with pytest.raises(UserError, match=r"'drop'.*global generator"):
            TreeNet(factory(layer), members=1).probe(x)
    for layer in (nn.Dropout(0.5), nn.Dropout1d(0.5), nn.Dropout2d(0.5), nn.Dropout3d(0.5)):
        assert type(TreeNet(factory(layer), members=1).member(0).drop) is Dropout
    assert TreeNet(factory(nn.Dropout(1.0)), members=1).probe(x).shape == (2, 3)


@pytest.mark.parametrize("draw", [np.random.rand, random.random, lambda: torch.rand(1).item()])
def test_numbers_from_any_global_generator_are_refused(draw):
    class Noise(nn.Module):
        def forward(self, x):
            return x + draw() if self.training else x

    with pytest.raises(UserError, match=r"'noise'.*global generator"):
        TreeNet(lambda: nn.Sequential(OrderedDict(a=nn.Linear(4, 3), noise=Noise())), members=2).probe(torch.ones(2, 4))


def test_layers_of_torch_that_drop_inside_are_named_with_what_to_do():
    def network(attention):
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        layer.self_attn.dropout = attention
        return nn.Sequential(OrderedDict(encoder=layer, out=nn.Linear(4, 3)))

    x = torch.randn(2, 5, 4)
    with pytest.raises(
        UserError, match=r"encoder\.self_attn is an nn\.MultiheadAttention .* set its attribute dropout to 0"
    ):
        TreeNet(lambda: network(0.1), members=2).probe(x)
    TreeNet(lambda: network(0.0), members=2).probe(x)  # other dropout in it is keyed


def test_a_change_in_place_that_leaves_no_version_is_found():
    class Sly(nn.Module):
        def forward(self, x):
            x.data.mul_(2)
            return x + 1

    with pytest.raises(UserError, match=r"'sly'.*in place"):
        TreeNet(lambda: nn.Sequential(OrderedDict(a=nn.Linear(4, 3), sly=Sly())), members=2).probe(torch.ones(2, 4))


class Keeps(nn.Module):
    def forward(self, x):
        self.kept = x
        return x


class Adds(nn.Module):
    """A skip connection behind the back of the network."""

    def __init__(self, source):
        super().__init__()
        self.source = [source]

    def forward(self, x):
        return x + self.source[0].kept


class Alternates(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + self.calls % 2)


def skipping():
    keeps = Keeps()
    return nn.Sequential(OrderedDict(a=nn.Linear(4, 4), keeps=keeps, b=nn.Linear(4, 4), odd=Adds(keeps)))


def alternating():
    return nn.Sequential(OrderedDict(a=nn.Linear(4, 4), odd=Alternates()))


@pytest.mark.parametrize("factory", [skipping, alternating])
def test_layers_that_remember_are_refused(factory):
    with pytest.raises(UserError, match=r"'odd'.*another batch runs in between"):
        TreeNet(factory, members=2).probe(torch.randn(2, 4))


def test_a_layer_that_changes_its_weights_as_it_runs_is_refused():
    def factory():
        return nn.Sequential(OrderedDict(words=nn.Embedding(9, 4, max_norm=0.1), b=nn.Linear(4, 3)))

    with pytest.raises(UserError, match=r"'words'.*changes its own weights"):
        TreeNet(factory, members=2).probe(torch.randint(9, (2, 5)))


def test_members_part_where_examples_come_first():
    def factory():
        return nn.Sequential(
            OrderedDict(a=nn.Linear(4, 4), turn=Permute(), b=nn.Linear(4, 4), back=Permute(), c=nn.Linear(4, 3))
        )

    x = torch.randn(2, 5, 4)
    assert TreeNet(factory, members=2, split="b").probe(x).shape == (2, 5, 3)
    with pytest.raises(UserError, match=r"split after layer 'turn'.*\(5, 2, 4\).*batch must be the first dimension"):
        TreeNet(factory, members=2, split="a").probe(x)


def test_a_hook_for_accumulated_gradients_is_refused_since_nobody_accumulates():
    def network():
        layer = nn.Linear(4, 3)
        layer.weight.register_post_accumulate_grad_hook(lambda p: None)
        return nn.Sequential(layer)

    with pytest.raises(UserError, match=r"0.weight of network has a hook .* use register_hook"):
        TreeNet(network, members=2).probe(torch.randn(2, 4))


def test_batches_of_one_are_refused_where_statistics_would_be_of_one_value():
    def flat():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))

    def images():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))

    x, y = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 10

    def trained(network, size):
        net = TreeNet(network, members=2)
        return fit(net, "mcl", train=(x, y), test=(x, y), iterations=2, batch_size=size).result.oracle

    with pytest.raises(UserError, match=r"layer '2' of .*of one example it has no statistics: use a larger batch"):
        trained(flat, 1)
    assert trained(flat, 2) >= 0 and trained(images, 1) >= 0


SMALL = {"resnet18": (3, 64, 64), "nin_ilsvrc": (3, 127, 127), "mlp": (5,)}  # shapes that cost less
ARGS = {"mlp": {"features": 5, "dropout": 0.5}, "vit": {"dropout": 0.1}, "text": {"dropout": 0.1}}


def examples_for(name):
    shape = SMALL.get(name) or INPUT_SHAPES[name]
    return torch.randint(50, (2, *shape)) if name == "text" else torch.randn(2, *shape)


@pytest.mark.parametrize("name", sorted(NETWORKS.keys() - {"fast_rcnn"}))  # regions know which rows belong together
def test_built_in_networks_pass_the_checks_that_their_start_skips(name):
    factory = NETWORKS[name]
    net = TreeNet(lambda: factory(**ARGS.get(name, {})), members=1)  # nobody knows the name of a lambda's network
    assert not net._is_built_in()
    net.probe(examples_for(name))


@pytest.mark.parametrize(("name", "args"), [("resnet20", {}), ("vit", {"depth": 1, "width": 6}), ("text", {})])
def test_every_cut_of_a_built_in_network_gives_what_its_forward_gives(name, args):
    def factory():
        return NETWORKS[name](**args)

    tree = 1
    for cut in reversed(list_cuts(factory, INPUT_SHAPES[name]).cuts):
        tree = {cut.name: [tree, 1]}
    assert TreeNet(factory, tree=tree).probe(examples_for(name)).shape[0] == 2


def test_a_built_in_network_that_was_changed_is_checked_like_any_other():
    net = TreeNet(NETWORKS["digits"], members=2)
    assert net._is_built_in()
    net.stages["0"].relu1 = Alternates()
    with pytest.raises(UserError, match="another batch runs in between"):
        net.probe(torch.randn(2, 1, 8, 8))
