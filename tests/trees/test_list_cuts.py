"""`mheads cuts`: where a network can be split, and what lies on either side."""

import numpy as np
import pytest
import torch
from helpers.residual_networks import Tokens, UNet, ViT
from torch import nn

from mheads import TreeNet
from mheads.engine.cost import costs_on
from mheads.networks import cifar10_quick
from mheads.trees.multiply_adds import multiply_adds
from mheads.trees.splitting.list_cuts import Part, list_cuts

VIT = "helpers.residual_networks:ViT"


def test_parameters_and_multiply_adds_are_those_counted_by_hand():
    found = list_cuts(UNet, (1, 8, 8))
    assert [cut.name for cut in found.cuts] == [
        "stem.0", "stem.1", "stem", "down1.0", "down1.1", "down1", "up", "join.0", "join.1", "join", "refine",
    ]  # fmt: skip
    down1 = next(cut for cut in found.cuts if cut.name == "down1")
    stem, double = 1 * 2 * 9 + 2 * 2, 2 * 2 * 9 + 2 * 2  # products of a pixel
    assert down1.above == Part((20 + 4 + 6) + (38 + 4 + 6), 64 * (stem + double))
    assert down1.crossing == ((2, 8, 8),)
    assert all(cut.above + cut.below == found.whole for cut in found.cuts)
    assert down1.share(2) == pytest.approx(
        (
            (down1.above.parameters + 2 * down1.below.parameters) / (2 * found.whole.parameters),
            (down1.above.multiply_adds + 2 * down1.below.multiply_adds) / (2 * found.whole.multiply_adds),
        )
    )


def test_every_cut_can_be_split_at_and_has_the_parameters_that_it_says():
    for factory, shape in ((ViT, (1, 8, 8)), (Tokens, (7,)), (cifar10_quick, (3, 32, 32))):
        found = list_cuts(factory, shape)
        for cut in found.cuts:
            for name in (cut.name, *cut.also):
                net = TreeNet(factory, members=4, split=name, only=())
                assert net.num_parameters() == cut.above.parameters + 4 * cut.below.parameters
                assert cut.share()[0] == net.num_parameters() / net.num_independent_parameters()


def test_children_that_share_a_weight_are_not_cut_apart():
    def tied():
        layer = nn.Linear(4, 4)
        return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 2))

    assert [(cut.above.parameters, cut.below.parameters) for cut in list_cuts(tied, (4,)).cuts] == [(20, 10)]


def test_attention_counts_as_the_products_that_it_is():
    net = TreeNet(lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)), members=1)
    projections, attention = 5 * 8 * (3 * 8 + 8 + 2 * 16), 2 * 5 * 5 * 8
    assert costs_on(net, torch.zeros(1, 5, 8))["trunk"].forward == projections + attention
    assert torch.backends.mha.get_fastpath_enabled()


def test_recurrent_layers_count_as_the_products_that_they_are():
    for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)):
        net = TreeNet(lambda kind=kind: nn.Sequential(kind(6, 7, batch_first=True)), members=1)
        assert multiply_adds(net.stage("trunk").eval(), torch.zeros(2, 5, 6))[0] == 5 * gates * 7 * (6 + 7)


def test_the_command_shows_a_line_for_each_cut(mheads):
    shown = mheads("cuts", "cifar10_quick")
    assert shown.code == 0
    assert "cifar10_quick: 145,578 parameters, 12.4 M multiply-adds" in shown.out
    (conv2,) = (line.split() for line in shown.out.splitlines() if line.strip().startswith("conv2"))
    assert conv2 == ["conv2", "28,064", "9.01", "M", "117,514", "3.34", "M", "32x8x8", "0.86", "0.45"]
    assert "blocks.3 " in mheads("cuts", VIT, "depth=5", "--shape", "1,8,8").out
    (whole,) = mheads("cuts", "tests.trees.test_traced_graph:Sized", "--shape", "1,8,8").out.strip().splitlines()[1:]
    assert whole.startswith("it cannot be split anywhere")


def test_the_command_takes_the_network_and_the_shape_of_examples_from_a_recipe(mheads, tmp_path):
    """A hidden layer of 5 has 3 x 5 + 5 parameters above the cut and 5 x 2 + 2 below."""
    np.savez(tmp_path / "x.npz", x_train=np.zeros((4, 3), np.float32))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "model: mlp\nmodel_args: {features: 3, outputs: 2, hidden: [5]}\n"
        f"data: {{name: npz, path: {tmp_path / 'x.npz'}}}\n"
    )
    shown = mheads("cuts", recipe)
    assert "mlp: 32 parameters, 25 multiply-adds" in shown.out, shown.err
    assert "fc1 20 15 12 10 5" in " ".join(shown.out.split())
    assert "mlp: 62 parameters" in mheads("cuts", recipe, "model_args.hidden=[10]").out
    assert "mlp: 1,441 parameters" in mheads("cuts", "diabetes").out
    refused = mheads("cuts", recipe, "hiden=[10]")
    assert refused.code == 2 and f"{recipe}: unknown key 'hiden'" in refused.err
    refused = mheads("cuts", recipe, "data.path=gone.npz")
    assert refused.code == 2 and "the shape of an example of 'npz' is not known" in refused.err


def test_the_command_says_what_it_lacks(mheads):
    for args, said in {
        (VIT,): f"the shape of an example of {VIT} is not known: give --shape",
        (VIT, "--shape", "a,b"): "--shape a,b is not the shape of an example",
        (VIT, "--shape", "1,-8,8"): "--shape 1,-8,8 is not the shape of an example",
        (
            VIT,
            "--shape",
            "3,8,8",
        ): "an example was taken to be of shape (3, 8, 8): --shape says another",
        (
            VIT,
            "deep=3",
            "--shape",
            "1,8,8",
        ): f"model_args = {{'deep': 3}} do not fit {VIT}",
        (VIT, "deep", "--shape", "1,8,8"): "is not key=value",
    }.items():
        refused = mheads("cuts", *args)
        assert refused.code == 2 and said in refused.err
