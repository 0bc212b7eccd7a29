"""Tapes: the backward of some rows against autograd, for every layer that allows it and for those that do not."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from mheads.common.memory_layout import canonical
from mheads.common.modules import trainable
from mheads.engine import row_backward
from mheads.engine.rows import Rows
from mheads.engine.stages import StageFacts
from mheads.engine.tape import AutogradTape, Context, RecomputingTape, SlicedTape, record
from mheads.networks import NETWORKS
from mheads.networks.dropout import Dropout, keyed_masks
from mheads.trees.splitting.cut_sequential import SequentialStage

LAYERS = {
    "conv": lambda: nn.Conv2d(6, 4, 3, padding=1),
    "conv strided, grouped, no bias": lambda: nn.Conv2d(6, 4, 3, stride=2, groups=2, bias=False),
    "conv dilated": lambda: nn.Conv2d(6, 4, 3, dilation=2, padding=2),
    "relu": nn.ReLU,
    "max pool": lambda: nn.MaxPool2d(3, 2, ceil_mode=True),
    "max pool padded": lambda: nn.MaxPool2d(3, 1, padding=1),
    "average pool": lambda: nn.AvgPool2d(3, 2, ceil_mode=True),
    "average pool padded": lambda: nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
    "global pool": lambda: nn.AdaptiveAvgPool2d(1),
    "lrn": lambda: nn.LocalResponseNorm(5, alpha=0.5, beta=0.75),
    "lrn of even size": lambda: nn.LocalResponseNorm(4, alpha=0.5, beta=0.75, k=2.0),
    "dropout": lambda: Dropout(0.4),
    "channelwise dropout": lambda: Dropout(0.4, channelwise=True),
    "identity": nn.Identity,
    "flatten": nn.Flatten,
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6 * 7 * 7, 5)),
}


def context(rows: int, **options) -> Context:
    return Context((0, "test"), rows, {}, input_gradient=options.pop("input_gradient", True), **options)


def gradients_by_autograd(stage, x, d_output):
    x = x.clone().requires_grad_()
    with keyed_masks((0, "test"), len(x)):
        y = stage(x)
    return y.detach(), torch.autograd.grad(y, [x, *stage.parameters()], d_output, allow_unused=True)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("learning", ["all", "some", "none"])
def test_sliced_backward_equals_autograd(name, learning):
    stage = SequentialStage(OrderedDict(layer=LAYERS[name]())).double()
    assert row_backward.supports(stage)
    x = canonical(torch.randn(30, 6, 7, 7, dtype=torch.float64))
    tape = SlicedTape(StageFacts.of(stage), x, context(30))
    d_output = torch.randn_like(tape.output)
    learn = {"all": torch.ones(30), "some": torch.arange(30) % 3 == 0, "none": torch.zeros(30)}[learning].bool()
    d_output[~learn] = 0
    y, (d_x, *expected) = gradients_by_autograd(stage, x, d_output)
    got_x, got = tape.backward(d_output, learn)
    close(tape.output, y)
    close(got_x, d_x)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        close(a, b)


@pytest.mark.parametrize("kind", [AutogradTape, RecomputingTape])
def test_other_stages_take_back_the_rows_that_learn(kind):
    stage = SequentialStage(
        OrderedDict(a=nn.Conv2d(6, 4, 3), act=nn.GELU(), drop=Dropout(0.3), flat=nn.Flatten())
    ).double()
    assert not row_backward.supports(stage)
    x = canonical(torch.randn(30, 6, 7, 7, dtype=torch.float64))
    tape = kind(StageFacts.of(stage), x, context(30))
    d_output = torch.randn_like(tape.output)
    learn = torch.arange(30) % 4 == 1
    d_output[~learn] = 0
    y, (d_x, *expected) = gradients_by_autograd(stage, x, d_output)
    got_x, got = tape.backward(d_output, learn)
    close(tape.output, y)
    close(got_x, d_x)
    for a, b in zip(got, expected, strict=True):
        close(a, b)


def test_the_kind_of_tape_follows_from_layers_and_shares():
    known = SequentialStage(OrderedDict(a=nn.Linear(4, 4), r=nn.ReLU()))
    other = SequentialStage(OrderedDict(a=nn.Linear(4, 4), g=nn.GELU()))
    norm = SequentialStage(OrderedDict(a=nn.Linear(4, 4), n=nn.BatchNorm1d(4)))
    x = torch.randn(16, 4)
    assert type(record(StageFacts.of(known), x, context(16))) is SlicedTape
    assert type(record(StageFacts.of(other), x, context(16), share=0.25)) is RecomputingTape
    assert type(record(StageFacts.of(other), x, context(16), share=0.75)) is AutogradTape
    assert type(record(StageFacts.of(norm), x, context(16), share=0.25)) is AutogradTape


def test_a_hooked_layer_runs_as_a_module():
    stage = SequentialStage(OrderedDict(a=nn.Linear(4, 4)))
    stage.a.register_forward_hook(lambda module, args, output: None)
    assert not row_backward.supports(stage)


def test_a_layer_used_twice_is_left_to_autograd():
    layer = nn.Linear(4, 4)
    assert not row_backward.supports(SequentialStage(OrderedDict(a=layer, b=layer)))
    relu = nn.ReLU()
    assert row_backward.supports(SequentialStage(OrderedDict(a=nn.Linear(4, 4), r=relu, b=nn.Linear(4, 4), s=relu)))


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    prune.remove(prune.l1_unstructured(layer, "weight", 0.5), "weight")
    assert [name for name, _ in layer.named_parameters()] == ["bias", "weight"]
    return layer


def with_more() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_parameter("unused", nn.Parameter(torch.randn(4)))
    layer.add_module("spare", nn.Linear(4, 4))
    return layer


def without_bias_at_first() -> nn.Module:
    layer = nn.Linear(4, 4, bias=False)
    layer.bias = nn.Parameter(torch.randn(4))
    layer.weight.requires_grad_(False)
    return layer


@pytest.mark.parametrize("odd", [pruned, with_more, without_bias_at_first])
@pytest.mark.parametrize("learning", ["all", "some"])
def test_gradients_go_to_their_parameters_wherever_these_stand(odd, learning):
    stage = SequentialStage(OrderedDict(a=odd(), r=nn.ReLU(), b=nn.Linear(4, 4), c=odd())).double()
    assert row_backward.supports(stage)
    x = torch.randn(20, 4, dtype=torch.float64)
    learn = torch.arange(20) % (1 if learning == "all" else 4) == 0
    tape = SlicedTape(StageFacts.of(stage), x, context(20))
    d_output = torch.randn_like(tape.output) * learn[:, None]
    parameters = trainable(stage)
    y = stage(x)
    expected = torch.autograd.grad(y, parameters, d_output, allow_unused=True)
    _, got = tape.backward(d_output, learn)
    assert [g is None for g in got] == [g is None for g in expected]
    for a, b in zip(got, expected, strict=True):
        if b is not None:
            close(a, b)


def test_a_weight_that_is_no_parameter_is_left_to_autograd():
    layer = nn.Linear(4, 4)
    made = nn.Parameter(torch.randn(4, 4))
    del layer.weight
    layer.weight = made * 2
    assert not row_backward.supports(SequentialStage(OrderedDict(a=layer)))


@pytest.mark.parametrize("first", [nn.Identity, nn.Flatten, lambda: Dropout(0.0), nn.ReLU])
@pytest.mark.parametrize("shape", [(12, 4), (12, 4, 1, 1), (12, 1, 2, 2)], ids=str)
def test_relu_in_place_never_overwrites_what_others_need(first, shape):
    """Layers that give what they got, or a view of it, give nothing away: x is also that of the siblings."""
    layers = OrderedDict(f=first(), r=nn.ReLU(), g=nn.Flatten(), a=nn.Linear(4, 4), s=nn.ReLU(), t=nn.ReLU())
    stage = SequentialStage(layers)
    x = canonical(torch.randn(shape))
    before = x.clone()
    tape = SlicedTape(StageFacts.of(stage), x, context(12))
    assert torch.equal(x, before)
    assert torch.equal(tape.output, stage(x))


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU])
def test_forward_rows_and_learning_rows_combine(act):
    """Of layers that are known, and of others, which are computed again for the rows that learn."""
    layers = OrderedDict(a=nn.Conv2d(6, 4, 3), act=act(), drop=Dropout(0.5), flat=nn.Flatten(), b=nn.Linear(100, 3))
    stage = SequentialStage(layers).double()
    x = canonical(torch.randn(40, 6, 7, 7, dtype=torch.float64))
    seen = torch.arange(40) % 2 == 0
    learn = torch.arange(40) % 4 == 2
    tape = record(StageFacts.of(stage), x, context(40), Rows.where(seen), share=0.25)
    d_output = torch.randn(40, 3, dtype=torch.float64) * learn[:, None]
    y, (d_x, *expected) = gradients_by_autograd(stage, x, d_output)
    got_x, got = tape.backward(d_output, learn)
    close(tape.output[seen], y[seen])
    assert tape.output[~seen].abs().sum() == 0
    close(got_x, d_x)
    for a, b in zip(got, expected, strict=True):
        close(a, b)


@pytest.mark.parametrize("name", ["cifar10_quick", "nin_cifar100", "digits"])
def test_the_papers_networks_are_made_of_known_layers(name):
    shape = {"digits": (1, 8, 8)}.get(name, (3, 32, 32))
    stage = SequentialStage(OrderedDict(NETWORKS[name]().named_children())).double()
    assert row_backward.supports(stage)
    x = canonical(torch.randn(8, *shape, dtype=torch.float64))
    tape = SlicedTape(StageFacts.of(stage), x, context(8))
    learn = torch.arange(8) < 3
    d_output = torch.randn_like(tape.output) * learn[:, None]
    _, (d_x, *expected) = gradients_by_autograd(stage, x, d_output)
    got_x, got = tape.backward(d_output, learn)
    close(got_x, d_x)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


def test_caffenet_and_the_large_nin_are_made_of_known_layers():
    with torch.device("meta"):
        for name in ("caffenet", "nin_ilsvrc"):
            assert row_backward.supports(SequentialStage(OrderedDict(NETWORKS[name]().named_children())))


def test_the_first_layer_is_not_asked_for_an_input_gradient():
    stage = StageFacts.of(SequentialStage(OrderedDict(a=nn.Linear(4, 3))))
    for kind in (SlicedTape, AutogradTape, RecomputingTape):
        d_input, gradients = kind(stage, torch.randn(8, 4), context(8, input_gradient=False)).backward(torch.ones(8, 3))
        assert d_input is None
        assert len(gradients) == 2


@pytest.mark.parametrize("wanted", [False, True])
def test_of_known_layers_all_but_the_first_are_asked_for_one(monkeypatch, wanted):
    step, asked = row_backward.STEPS[nn.Linear], []

    def watched(layer, x, owned):
        y, backward = step(layer, x, owned)
        return y, lambda d_y, pick, input_gradient: asked.append(input_gradient) or backward(d_y, pick, input_gradient)

    monkeypatch.setitem(row_backward.STEPS, nn.Linear, watched)
    stage = SequentialStage(OrderedDict(a=nn.Linear(4, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 2)))
    SlicedTape(StageFacts.of(stage), torch.randn(8, 4), context(8, input_gradient=wanted)).backward(torch.ones(8, 2))
    assert asked == [True, True, wanted]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_pooling_in_two_passes_gives_the_same_maxima(height, width, kernel, stride, ceil_mode):
    assume(kernel <= min(height, width))
    x = canonical(torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height * width)))
    expected = nn.functional.max_pool2d(x, kernel, stride, ceil_mode=ceil_mode)
    got = row_backward.max_pool_values(x, [kernel, kernel], [stride, stride], ceil_mode)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_without_backward_equal_those_of_the_module(name):
    stage = SequentialStage(OrderedDict(first=nn.Identity(), layer=LAYERS[name](), relu=nn.ReLU())).double().eval()
    x = canonical(torch.randn(12, 6, 7, 7, dtype=torch.float64))
    before = x.clone()
    with torch.inference_mode():
        close(row_backward.outputs(stage, x), stage(x))
    assert torch.equal(x, before)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_group_norm_may_be_the_first_layer_that_learns(frozen):
    """Torch's backward of one on a CPU ends the process where images are channels last and their gradient is unused."""
    layers = OrderedDict(conv=nn.Conv2d(6, 4, 3).requires_grad_(False)) if frozen else OrderedDict()
    stage = SequentialStage(OrderedDict(**layers, norm=nn.GroupNorm(2, 4 if frozen else 6), relu=nn.ReLU())).double()
    x = torch.randn(5, 6, 7, 7, dtype=torch.float64)
    y = stage(x.requires_grad_())
    d_output = torch.randn_like(y)
    expected = torch.autograd.grad(y, trainable(stage), d_output)
    tape = record(StageFacts.of(stage), x.detach(), context(5, input_gradient=False))
    d_input, gradients = tape.backward(d_output)
    assert isinstance(tape, AutogradTape) and d_input is None
    for ours, theirs in zip(gradients, expected, strict=True):
        close(ours, theirs)
