"""Networks that are no row of children, cut into trees: against the uncut network and plain autograd."""

import copy
import pickle
import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.commands import Running, assert_same_run, process, ranks  # noqa: F401  # Running: see conftest.py
from helpers.one_step import engine_gradients
from helpers.residual_networks import Block, Checks, DenseNet, ResNet, Tokens, UNet, ViT, group_resnet
from torch import nn

import mheads
from mheads import TreeNet, UserError, losses
from mheads.common.memory_layout import canonical
from mheads.data.batches import Batch
from mheads.engine.engine_options import EngineOptions
from mheads.engine.stages import StageFacts
from mheads.engine.tape import AutogradTape, Context, RecomputingTape, record
from mheads.engine.threads import ThreadsEngine
from mheads.trees.identical_members import are_parted_by_dropout
from mheads.trees.splitting.cut_network import make_chain
from mheads.trees.splitting.graph_chain import GraphStage
from mheads.trees.splitting.list_cuts import list_cuts

IMAGES = torch.randn(14, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TOKENS = torch.randint(12, (14, 7), generator=torch.Generator().manual_seed(0))
# Without dropout, whose masks a network outside an engine cannot know.
NETWORKS = {
    "resnet": (partial(ResNet, drop=0.0), ["bn1", "layer1.0", "layer2", "layer4"], ("layer1", "layer2.0")),
    "group": (partial(group_resnet, drop=0.0), ["conv1", "layer1.0", "layer4"], ("layer1", "layer3")),
    "unet": (partial(UNet, pixels=False), ["stem.0", "down1", "up", "refine"], ("down1", "join")),
    "dense": (DenseNet, ["features", "dense1.2", "transition"], ("dense1.2", "transition")),
    "vit": (partial(ViT, drop=0.0), ["patch", "cls", "places", "blocks.0", "blocks.2", "norm"], ("places", "blocks.1")),
    "tokens": (Tokens, ["blocks.0", "blocks.1"], ("blocks.0", "blocks.1")),
}
LOSSES = {
    "independent": losses.independent(),
    "averaged": losses.prob_averaged(),
    "mcl k=1": losses.mcl(k=1),
    "mcl k=2": losses.mcl(k=2),
}


def inputs_of(name):
    return TOKENS if name == "tokens" else IMAGES


def uncut(net, factory):
    """The members as networks of the user's own class, with the weights of the tree by name."""
    found = []
    for m in range(net.num_members):
        network = factory().to(net.dtype).train(net.training)
        network.load_state_dict(net.member(m).state_dict(), strict=True)
        found.append(network)
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_a_cut_tree_gives_what_the_uncut_networks_give_and_keeps_names(name):
    factory, splits, (above, below) = NETWORKS[name]
    names, x = list(factory().state_dict()), inputs_of(name)
    for tree in (2, *({split: 2} for split in splits), {above: [{below: 2}, 1]}):
        net = TreeNet(factory, tree=tree).double()
        for node in net.tree.nodes.values():
            assert isinstance(net.stage(node.name), GraphStage)
        for training in (True, False):
            net.train(training)
            references = uncut(net, factory)
            torch.testing.assert_close(net(x), torch.stack([r(x) for r in references]), rtol=1e-11, atol=1e-11)
            for m, reference in enumerate(references):  # running statistics among them
                found = net.member(m).state_dict()
                assert sorted(found) == sorted(names)
                for key, tensor in reference.state_dict().items():
                    torch.testing.assert_close(found[key], tensor, rtol=1e-11, atol=1e-11)
    assert net.probe(x[:2]).shape == (2, 3 if name == "unet" else 10)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_equal_plain_autograd_through_the_uncut_networks(name, loss):
    factory, splits, (above, below) = NETWORKS[name]
    x, rule = inputs_of(name), LOSSES[loss]
    for tree in (2, {splits[1]: 3}, {above: [{below: 2}, 1]}):
        net = TreeNet(factory, tree=tree, seed=3).double().train()
        members = net.num_members
        batch = batch_of(x, members, 3)
        references = uncut(net, factory)
        value = rule(torch.stack([r(x) for r in references]), batch.targets, None, batch.ties)
        (value.total / len(x)).backward()
        parts = 1 if net.batch_statistics_layers() else 3
        report, got = engine_gradients(net, rule, batch, micro_batches=parts)
        assert report.loss == pytest.approx(value.mean.item(), rel=1e-10)
        for node in net.tree.nodes.values():
            named = [key for key, _ in net.stage(node.name).named_parameters()]
            for key, gradient in zip(named, got[node.name], strict=True):
                terms = [references[m].get_parameter(key).grad for m in node.members]
                expected = sum(torch.zeros_like(gradient) if t is None else t for t in terms)
                torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)


def batch_of(x, members, classes):
    generator = torch.Generator().manual_seed(1)
    targets, ties = torch.randint(classes, (len(x),), generator=generator), torch.rand(members, len(x))
    return Batch(x, targets, lambda raw, dtype: canonical(raw.to(dtype) if raw.is_floating_point() else raw), ties=ties)


@pytest.mark.parametrize("factory", [group_resnet, ViT, ResNet])
def test_any_number_of_workers_gives_the_same_bits_with_dropout_in_the_graph(factory):
    found = []
    for workers in (1, 2, 4):
        net = TreeNet(factory, tree={"blocks.0" if factory is ViT else "layer2": 3})
        batch = batch_of(IMAGES.float(), 3, 10)
        parts = 1 if factory is ResNet else 4
        found.append(engine_gradients(net, losses.mcl(k=1), batch, workers=workers, micro_batches=parts))
    for report, gradients in found[1:]:
        assert report.loss == found[0][0].loss
        for name, expected in found[0][1].items():
            assert all(map(torch.equal, gradients[name], expected))
    state = torch.get_rng_state()
    engine_gradients(net, losses.independent(), batch, micro_batches=1)
    assert torch.equal(torch.get_rng_state(), state)  # dropout drew from keys of its own


RUN = [
    "members=3", "loss=mcl", "data.limit=120", "optim.batch_size=24", "optim.iterations=10", "optim.lr=0.01",
    "log.every=1", "log.evaluate_every=5", "log.checkpoint_every=4",
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        ["model=helpers.residual_networks:ResNet", "split=layer2.0"],
        ["model=helpers.residual_networks:ViT", "split={blocks.0: [{blocks.1: 2}, 1]}", "engine.micro_batches=4"],
    ],
    ids=["resnet", "vit"],
)
def test_workers_ranks_and_a_kill_give_the_same_bits(options, tmp_path):
    train = ("train", "digits", *options, *RUN, "--quiet", "--folder")
    assert process(*train, tmp_path / "one", "engine.workers=1").code == 0
    for done in ranks(3, *train, tmp_path / "ranks"):
        assert done.code == 0, done.err
    killed = process(
        *train, tmp_path / "killed", "engine.workers=4", stop=(signal.SIGKILL, "os.rename", "step-00000008")
    )
    assert killed.code == -signal.SIGKILL
    resumed = process(*train, tmp_path / "killed", "engine.workers=2")
    assert resumed.code == 0, resumed.err
    for other in ("ranks", "killed"):
        assert_same_run(tmp_path / "one", tmp_path / other)


def test_functional_dropout_belongs_to_the_branches_and_parts_members():
    net = TreeNet(ResNet, members=2, split="layer4")
    assert net.tree.nodes["trunk"].layers[-1] == "layer4"
    assert net.tree.nodes["layer4/0"].layers == ("dropout", "fc")
    assert are_parted_by_dropout(net, 0, 1)
    assert not are_parted_by_dropout(TreeNet(ViT, members=2, split="norm"), 0, 1)


def test_mcl_recomputes_the_rows_that_learn_and_batch_statistics_see_whole_batches():
    x = canonical(torch.randn(12, 1, 8, 8))
    for factory, kind in ((group_resnet, RecomputingTape), (ResNet, AutogradTape)):
        net = TreeNet(factory, members=4)
        context = Context(("test",), 12, {}, False)
        assert type(record(StageFacts.of(net.stage("0")), x, context, None, share=0.25)) is kind
        assert bool(net.batch_statistics_layers()) == (factory is ResNet)
    with pytest.raises(UserError, match=r"0\.bn1 needs the statistics of the whole batch"):
        ThreadsEngine(net, EngineOptions(1, 2))


def test_strided_pointwise_convolutions_of_few_channels_are_computed_safely_and_alike():
    for groups, bias in ((1, True), (2, False)):
        plain = nn.Conv2d(4, 8, 1, stride=(2, 3), bias=bias, groups=groups).double()
        (safe,) = TreeNet(nn.Sequential(plain), members=1).member(0)
        assert type(safe) is not nn.Conv2d and repr(safe) == repr(plain)
        x = torch.randn(3, 4, 7, 9, dtype=torch.float64, requires_grad=True)
        d = torch.randn_like(plain(x))
        got, expected = (torch.autograd.grad(layer(x), [x, *layer.parameters()], d) for layer in (safe, plain))
        torch.testing.assert_close(safe(x), plain(x))
        torch.testing.assert_close(got, expected)
    for other in (nn.Conv2d(16, 8, 1, 2), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, 2), nn.Conv2d(4, 8, 1, 2, padding=1)):
        assert type(TreeNet(nn.Sequential(other), members=1).member(0)[0]) is nn.Conv2d


def test_a_graph_can_be_copied_pickled_and_trained_by_name():
    net = TreeNet(ViT, members=2, split="blocks.0")
    x = IMAGES.float()
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other.eval()
        assert torch.equal(other(x), net.eval()(x))
        with torch.no_grad():
            other.member(0).get_parameter("blocks.0.mlp.0.weight").add_(1)
        assert not torch.equal(other(x), net(x))
    trained = ViT()
    run = mheads.fit(
        TreeNet(ViT, members=2, split="blocks.1.attention"),
        train=(x.numpy(), np.arange(14) % 10),
        iterations=1,
        batch_size=4,
        init=trained.state_dict(),
    )
    assert list(run.net.stages) == ["trunk", "blocks-1-attention/0", "blocks-1-attention/1"]
    deeper = TreeNet(ViT, members=2, split="patch")
    deeper.copy_weights(run.net)
    assert torch.equal(deeper.eval()(x), run.net.eval()(x))
    forked = TreeNet(trained, members=3, split="norm").eval()
    torch.testing.assert_close(forked(x)[2], trained.eval()(x))


class Deep(nn.Module):
    """As long as ConvNeXt is: each layer is followed by functions, and each node of the graph holds the next."""

    def __init__(self, depth=60):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = x + F.gelu(block(x)).permute(1, 0).permute(1, 0).reshape(x.size(0), -1) / 9
        return x


def test_a_deep_graph_can_be_copied_averaged_and_pickled():
    net, x = TreeNet(Deep, members=2, split="blocks.7"), torch.randn(5, 6)
    expected = net(x)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    longer = TreeNet(partial(Deep, 300), members=1, split="blocks.1")  # pickle goes deeper before it gives up
    assert torch.equal(pickle.loads(pickle.dumps(longer))(x), longer(x))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), averaged.module):
        assert torch.equal(other(x), expected)
        assert torch.equal(other.member(1)(x), expected[1])  # of stages that were not made before
        earlier = TreeNet(Deep, members=2, split="blocks.3")
        earlier.copy_weights(other)
        assert torch.equal(earlier(x), expected)
        with torch.no_grad():
            other.member(0).get_parameter("blocks.0.weight").add_(1)
        assert torch.equal(net(x), expected) and not torch.equal(other(x), expected)
    averaged.update_parameters(net)
    torch.testing.assert_close(copy.deepcopy(net.member(0))(x), expected[0])


def test_nested_layers_of_a_plain_sequence_are_cut_by_their_path():
    def factory():
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 3))

    net = TreeNet(factory, members=2, split="0.0")
    assert [list(stage.state_dict()) for stage in net.stages.values()] == [
        ["0.0.weight", "0.0.bias"],
        *[["0.2.weight", "0.2.bias", "1.weight", "1.bias"]] * 2,
    ]
    net.probe(torch.randn(2, 4))
    assert not isinstance(TreeNet(factory, members=2, split="0").stage("trunk"), GraphStage)


def test_checks_constants_and_lists_of_parameters_are_followed():
    for split in ("a", "scales.0"):
        net = TreeNet(Checks, members=2, split=split)
        net.probe(torch.randn(2, 4))
        (_, reference), x = uncut(net, Checks), torch.randn(5, 4)
        got, expected = net(x), reference(x)
        torch.testing.assert_close(got["scores"][1], expected["scores"])
        torch.testing.assert_close(got["sums"][0][1], expected["sums"][0])
        with pytest.raises(
            AssertionError, match=r"residual_networks.py, line \d+: a check of the network does not hold"
        ):
            net(torch.randn(5, 3))


# What is refused.

REFUSED = {
    (ResNet, "layer1.0.conv1"): r"cannot be split at 'layer1.0.conv1': the connection from relu after 'bn1' to add in "
    r"'layer1.0' passes it by; the nearest cuts are 'bn1' before it and 'layer1.0' after it",
    (UNet, "down2"): r"from 'down1.3' to cat after 'up' passes it by; .* 'down1' before it and 'up' after it",
    (DenseNet, "dense1.1"): r"from 'features.0' to cat .* 'features' before it and 'dense1.2' after it",
    (ResNet, "layer1.0.relu"): r"'layer1.0.relu': it has no parameters",
    (ResNet, "fc"): r"'fc' leaves no layer with parameters to the members",
    (ResNet, "layer9"): r"'layer9' is not a layer of ResNet; layers with parameters: conv1, bn1, layer1.0, layer1",
}


@pytest.mark.parametrize(("factory", "split"), REFUSED)
def test_a_cut_that_is_none_is_refused_with_the_connection_and_the_nearest_cuts(factory, split):
    with pytest.raises(UserError, match=REFUSED[factory, split]):
        TreeNet(factory, members=2, split=split)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(torch.tanh(self.again(self.first(x)))))


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = self.a(x)
        if x.sum() > 0:
            x = x.relu()
        return self.b(x)


class Reshapes(Decides):
    def forward(self, x):
        return super().forward(x.flatten(1))


class Doubts(Decides):
    """Decides by what it is given, but always in the same way."""

    def forward(self, x):
        x = self.a(x)
        if x.abs().max() < 1e9:
            x = x.relu()
        return self.b(x)


class Around(nn.Module):
    """A network with a part that cannot be followed, which stays whole."""

    def __init__(self):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 4), Doubts(), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.part(x + self.first(x))))


class Sized(nn.Module):
    """The size of the input goes to the end."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 2, 3, 2, 1), nn.Conv2d(2, 3, 1)

    def forward(self, x):
        rows, _, height, width = x.shape
        return F.interpolate(self.b(self.a(x)), size=(height, width)).view(rows, 3, -1).mean(-1)


class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.a(x) * 2
        return self.b(h + torch.rand_like(h))


class Mixes(Noise):
    def forward(self, x):
        h = self.a(x) * 2
        return self.b(h - h.mean(0))


class MixesAndSaysSo(Mixes):
    batch_statistics = True


class AsksForTheType(Noise):
    def forward(self, x):
        return self.b(self.a(x) * 2 if isinstance(x, torch.Tensor) else self.a(x) * 3)


def test_weights_that_are_used_twice_stay_together():
    assert [layer.name for layer in make_chain(Tied()).layers] == ["first", "last"]
    with pytest.raises(UserError, match=r"'again': first.weight is used both up to there and after it"):
        TreeNet(Tied, members=2, split="again")
    net = TreeNet(Tied, members=2, split="first")
    assert net.probe(torch.randn(2, 4)).shape == (2, 3)


def test_control_flow_on_data_is_refused_with_its_line_and_stays_whole_inside_another_network():
    with pytest.raises(UserError, match=r"test_traced_graph.py, line \d+, in forward: `if x.sum\(\) > 0:`.*stages\(\)"):
        TreeNet(Decides, members=2, split="a").probe(torch.randn(2, 4))
    with pytest.raises(UserError, match=r"'a.x' is not a layer.*only its children are layers.*`if x.sum\(\) > 0:`"):
        TreeNet(Decides, members=2, split="a.x")
    with pytest.raises(UserError, match=r"layer 'a' .* fails on .* only its children are layers.*`if x.sum\(\) > 0:`"):
        TreeNet(Reshapes, members=2).probe(torch.randn(2, 2, 2))
    net = TreeNet(Around, members=2, split="part")
    assert [layer.name for layer in net.layers] == ["first", "part", "last"]
    net.probe(torch.randn(2, 4))


def test_a_size_that_goes_past_a_cut_is_named():
    with pytest.raises(
        UserError,
        match=r"'a': .* from size 3 of the input .*size 2 .*it cannot be split anywhere",
    ):
        TreeNet(Sized, members=2, split="a")
    assert TreeNet(Sized, members=2).probe(torch.randn(2, 1, 8, 8)).shape == (2, 3)


class Steps(nn.Module):
    """Examples [B, L, 3]; how many steps there are is asked of a tensor whose first dimension they are."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        steps = x.transpose(0, 1).shape[0]
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))).sum(1) / steps)


def test_a_first_size_that_is_not_the_number_of_examples_is_not_taken_for_it():
    for steps in (2, 5):  # two is also the number of examples that a tree is tried on
        x = torch.randn(2, steps, 3)
        with pytest.raises(
            UserError, match=r"^Steps, split at 'a', does not give .* size 0 \(x.shape\[0\]\) that goes"
        ):
            TreeNet(Steps, members=2, split="a").probe(x)
        TreeNet(Steps, members=2, split="b").probe(x)
        TreeNet(Steps, members=2).probe(x)
    assert [cut.name for cut in list_cuts(Steps, (5, 3)).cuts] == ["b"]


class SinglePixel(nn.Module):
    """Batch normalisation of one pixel: of two examples, little but rounding errors goes back through it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 4)
        self.convs = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in self.convs)
        self.out = nn.Linear(32, 2)

    def forward(self, x):
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.out(x.flatten(1))


def test_rounding_that_statistics_of_few_values_magnify_is_no_difference():
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )
    for seed in range(6):
        net = TreeNet(SinglePixel, members=2, split="stem", seed=seed)
        assert net.probe(x).shape == (2, 2)  # not refused, and of each example two scores
        whole = TreeNet(SinglePixel, members=2, seed=seed).eval()
        torch.testing.assert_close(net.eval()(x)[0], whole(x)[0])


def test_what_a_layer_must_not_do_is_refused_inside_a_graph():
    x = torch.randn(3, 4)
    for factory, said in {
        Noise: r"layer 'a' of Noise draws random numbers",
        Mixes: r"layer 'a' of Mixes mixes examples",
        AsksForTheType: r"AsksForTheType .* do not give what its forward gives.*a graph does not show",
    }.items():
        with pytest.raises(UserError, match=said):
            TreeNet(factory, members=2).probe(x)
    net = TreeNet(MixesAndSaysSo, members=2, split="a")
    net.probe(x)
    assert net.batch_statistics_layers() == ["trunk.a", "a/0.b", "a/1.b"]


def test_networks_that_differ_are_not_run_by_the_graph_of_the_first():
    class Scaled(Noise):
        def __init__(self):
            super().__init__()
            self.scale = float(torch.rand(()))

        def forward(self, x):
            return self.b(self.a(x) * self.scale)

    with pytest.raises(UserError, match=r"builds networks that differ: itself is .*scale="):
        TreeNet(Scaled, members=2)


class Says(Decides):
    """How it is a chain, since nobody else can tell."""

    def __init__(self):
        super().__init__()
        self.decide, self.drop = Positive(), nn.Dropout(0.2)

    def forward(self, x):
        return self.b(self.drop(self.decide(self.a(x))))

    def stages(self):
        return {"body": nn.Sequential(self.a, self.decide), "drop": self.drop, "head": self.b}


class Positive(nn.Module):
    batch_statistics = True

    def forward(self, x):
        return x.relu() if x.sum() > 0 else x


def test_a_network_says_itself_how_it_is_a_chain():
    net = TreeNet(Says, members=2, split="body")
    assert net.probe(torch.randn(4, 4)).shape == (4, 3)
    assert list(net.stage("trunk").state_dict()) == ["a.weight", "a.bias"]
    assert net.tree.nodes["body/1"].layers == ("drop", "head")
    (reference, _), x = uncut(net.eval(), Says), torch.randn(5, 4)
    torch.testing.assert_close(net(x)[0], reference(x))


def test_stages_that_are_none_are_refused():
    def saying(what):
        return type("Said", (Says,), {"stages": what})

    for what, said in {
        (lambda self: [self.a, self.b]): r"stages\(\) of Said gives .*Linear.*return a dict, or pairs",
        (lambda self: {}): r"stages\(\) of Said gives nothing",
        (lambda self: {"a": nn.Linear(4, 3)}): r"gives in 'a' a Linear that is no module inside the network",
        (lambda self: {"a": self.a, "b": self.a}): r"uses a.weight in more than one stage",
    }.items():
        with pytest.raises(UserError, match=said):
            TreeNet(saying(what), members=2)
    wrong = saying(lambda self: {"a": self.a, "b": self.b})
    with pytest.raises(UserError, match="do not give what its forward gives"):
        TreeNet(wrong, members=2).probe(torch.randn(2, 4))


def test_networks_run_in_other_threads_while_one_is_followed():
    stop, errors = threading.Event(), []
    other, x = Block(2, 2), torch.randn(2, 2, 4, 4)

    def run():
        while not stop.is_set():
            try:
                other(x)
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(3):
        TreeNet(ResNet, members=1)
    stop.set()
    thread.join()
    assert not errors


class Encoded(nn.Module):
    """A block of torch.nn's own with dropout deep inside, between functions."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.encoder(x.squeeze(1)).mean(1))


def test_dropout_deep_inside_a_block_does_not_make_networks_differ():
    net = TreeNet(Encoded, members=2)
    assert net.probe(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    assert TreeNet(Encoded, members=3, split="encoder").num_members == 3
