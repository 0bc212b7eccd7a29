"""What a loss or a network says of itself is looked at before it trains, and in a loop of one's own."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mheads
from mheads import TreeNet, UserError, fit, losses
from mheads.losses import Loss, LossValue
from mheads.losses.check_promises import check_promises

X = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
Y = np.arange(40) % 3
WEIGHTS = np.random.default_rng(1).uniform(0.5, 1.5, size=(3, 40)).astype(np.float32)


def linear():
    return nn.Linear(6, 3)


def trained(loss, **kwargs):
    net = TreeNet(linear, members=3)
    fit(net, loss, train=(X, Y), test=(X, Y), iterations=3, lr=0.1, show=False, **kwargs)
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def entropies(outputs, y):
    return torch.stack([F.cross_entropy(o, y, reduction="none") for o in outputs])


def with_best(outputs, y, sample_weights, ties, others=0.0):
    """The best member learns, and the others by a part of it."""
    found = entropies(outputs, y)
    best = F.one_hot(found.argmin(0), len(found)).T.to(found)
    total = ((best + others) * found * (1 if sample_weights is None else sample_weights)).sum()
    return LossValue(total, best, found)


def leaking(outputs, y, sample_weights, ties):
    return with_best(outputs, y, sample_weights, ties, others=0.1)


def all_learn(outputs, y, sample_weights, ties):
    found = entropies(outputs, y)
    weights = torch.ones_like(found) if sample_weights is None else sample_weights
    return LossValue((weights * found).sum(), weights, found)


def away_from_the_mean(outputs, y):
    """Negative correlation: of one member alone it is the cross-entropy, and for equal members too."""
    return entropies(outputs, y) - 0.5 * (outputs - outputs.mean(0)).square().mean(-1)


def twice(outputs, y, sample_weights, ties):
    return entropies(outputs, y) * (1 if sample_weights is None else sample_weights)


def without_sample_weights(outputs, y):
    return all_learn(outputs, y, None, None)


@pytest.mark.parametrize(
    ("loss", "kwargs", "said"),
    [
        (Loss("mine", leaking, winners=1), {}, "promises winners=1.*gives gradients to members whose assignment is 0"),
        (Loss("mine", all_learn, winners=2), {}, "promises winners=2.*assigns more"),
        (Loss("mine", away_from_the_mean, separable=True), {}, "promises separable=True"),
        (Loss("mine", twice), {"sampling": WEIGHTS}, "counts the sample weights twice"),
        (Loss("mine", without_sample_weights), {"sampling": WEIGHTS}, "does not look at the sample weights"),
        (Loss("mine", without_sample_weights), {"weights": WEIGHTS[0]}, "does not look at the sample weights"),
    ],
)
def test_a_loss_that_breaks_its_promise_is_refused(loss, kwargs, said):
    with pytest.raises(UserError, match=said):
        trained(loss, **kwargs)


@pytest.mark.parametrize(
    ("mine", "known", "kwargs"),
    [
        (Loss("mine", with_best, winners=1), losses.mcl(k=1), {"sampling": WEIGHTS}),
        (Loss("mine", all_learn), losses.independent(), {"sampling": WEIGHTS}),
        (Loss("mine", entropies, separable=True), losses.independent(), {"weights": WEIGHTS[0]}),
        (Loss("mine", twice), losses.independent(), {}),  # there are no sample weights to count
        (Loss("mine", without_sample_weights), losses.independent(), {}),
    ],
)
def test_one_that_keeps_it_trains_as_the_known_one_does(mine, known, kwargs):
    found, expected = trained(mine, **kwargs), trained(known, **kwargs)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def who_may(outputs, y, sample_weights, ties):
    """Of sample weights that are 0 or 1 this is enough."""
    found = entropies(outputs, y)
    may = torch.ones_like(found) if sample_weights is None else (sample_weights > 0).to(found)
    return LossValue((may * found).sum(), may, found)


def test_to_ask_who_may_learn_is_to_look_at_the_sample_weights():
    assert trained(Loss("mine", who_may), sampling=(WEIGHTS > 1).astype(np.float32))


def test_losses_whose_networks_give_scores_are_those_that_teach_them():
    assert losses.WITH_SCORES == ("scored", "mixture_density")
    assert [name for name, make in losses.LOSSES.items() if make().learns_variances] == ["mixture_density"]


KNOWN = [make() for name, make in losses.LOSSES.items() if name not in losses.WITH_SCORES]
BY_WINS = [losses.LOSSES[known.name](normalize="wins") for known in KNOWN if "normalize" in known.options]


@pytest.mark.parametrize("loss", [*KNOWN, *BY_WINS], ids=lambda loss: f"{loss.name} {loss.options}")
def test_the_losses_that_there_are_keep_theirs(loss):
    outputs, y = torch.randn(8, 5), torch.arange(8) % 5
    for iteration in (0, 40, 99):
        (found,) = check_promises(loss.at(iteration, 100, 4), outputs, y, 4, weighted=not loss.averaged)
        assert found.shape == (4, 32, 5) and found.isfinite().all()  # the examples, again and again
        assert found.any(2).any(0).all()  # each teaches somebody


def test_a_schedule_may_say_the_loss_of_one_member():
    x, y = X, X[:, :3] * 2
    ends = {}
    for name, loss in {
        "scheduled": Loss("mine", losses.mcl(k=1).function, schedule=lambda i, n, m: losses.mcl(k=1, base_loss="mae")),
        "mae": losses.mcl(k=1, base_loss="mae"),
        "mse": losses.mcl(k=1),
    }.items():
        net = TreeNet(linear, members=2)
        fit(net, loss, train=(x, y), test=(x, y), iterations=4, lr=0.1, show=False)
        ends[name] = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert torch.equal(ends["scheduled"], ends["mae"]) and not torch.allclose(ends["mae"], ends["mse"])


def test_a_schedule_needs_iterations():
    with pytest.raises(UserError, match=r"evolving changes over training: at\(\) needs 1 iteration or more, not 0"):
        losses.evolving().at(0, 0, 3)


@pytest.mark.parametrize("loss", [losses.mcl(), losses.independent(), losses.score_averaged(), losses.relaxed()])
def test_without_a_problem_numbers_are_not_taken_for_soft_labels(loss):
    outputs = torch.randn(2, 8, 3)
    soft = torch.rand(8, 3).softmax(1)
    assert loss(outputs, soft).total.isfinite()
    for y in (torch.randn(8, 3), torch.ones(8, 3), torch.rand(8)):
        with pytest.raises(UserError, match=r"not probabilities of classes.*base_loss='mse'.*base_loss='bce'"):
            loss(outputs, y)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int16])
def test_labels_are_integers_of_any_kind(dtype):
    outputs, y = torch.randn(2, 8, 3), torch.arange(8) % 3
    assert torch.equal(losses.mcl()(outputs, y.to(dtype)).total, losses.mcl()(outputs, y).total)


class Subtracts(nn.Module):
    """Writes into what it is given."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x):
        x -= 5.0
        return self.l(x)


def writes_late():
    return nn.Sequential(nn.Linear(6, 6), Subtracts(), nn.Linear(6, 3))


def writes_first():
    return nn.Sequential(Subtracts(), nn.Linear(6, 3))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("factory", "split", "layer"), [(writes_late, "0", "1"), (writes_first, None, "0")])
def test_in_a_loop_of_ones_own_no_layer_writes_into_what_others_get(factory, split, layer, grad):
    net = TreeNet(factory, members=3, split=split)
    said = f"layer '{layer}' .*changes its input in place"
    with torch.set_grad_enabled(grad), pytest.raises(UserError, match=said):
        net(torch.from_numpy(X))
    with pytest.raises(UserError, match=said):
        mheads.evaluate(net, (X, Y))


def test_what_nobody_else_gets_may_be_written_into():
    net = TreeNet(writes_late, members=3)  # into what the layer before it gives
    found = net(torch.from_numpy(X))
    for m in range(3):
        assert torch.equal(found[m], net.member(m)(torch.from_numpy(X)))


def test_models_from_elsewhere_do_not_see_what_the_others_wrote():
    models = [writes_first(), writes_first()]
    alone = [mheads.evaluate([model], (X, Y)).members[0] for model in models]
    assert mheads.evaluate(models, (X, Y)).members == alone


class Sign(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Follows(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.c = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.c(self.n(self.a(x)).relu())


class StraightThrough(Follows):
    def forward(self, x):
        return self.c(Sign.apply(self.a(x)))


class Unlearned(Follows):
    def forward(self, x):
        with torch.no_grad():
            h = self.n(self.a(x))
        return self.c(h.relu())


@pytest.mark.parametrize("network", [StraightThrough, Unlearned])
@pytest.mark.parametrize("split", [None, "a"])
def test_a_graph_that_lost_a_part_is_noticed_in_a_loop_of_ones_own(network, split):
    net = TreeNet(network, members=2, split=split)
    with pytest.raises(UserError, match="do not give what its forward gives"):
        net(torch.from_numpy(X))


def test_the_first_call_compares_and_changes_nothing():
    x = torch.from_numpy(X)
    net, again = TreeNet(Follows, members=2, split="a"), TreeNet(Follows, members=2, split="a")
    before = torch.get_rng_state()
    found = net(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(m.running_mean, n.running_mean) is False for m, n in zip(norms(net), norms(again), strict=True)
    )
    again._unsure = False  # as after the comparison
    assert torch.equal(again(x), found)
    assert all(torch.equal(m.running_mean, n.running_mean) for m, n in zip(norms(net), norms(again), strict=True))


def norms(net):
    return [m for m in net.modules() if isinstance(m, nn.BatchNorm1d)]


def test_where_nothing_can_be_compared_a_tree_still_answers():
    x = torch.from_numpy(X)
    expected = TreeNet(Follows, members=2).eval()(x)
    one = TreeNet(Follows, members=2).eval()
    assert torch.allclose(one(x[:1]), expected[:, :1], atol=1e-6)  # statistics need two
    with torch.inference_mode():
        assert torch.allclose(TreeNet(Follows, members=2).eval()(x), expected, atol=1e-6)
    lost = pickle.loads(pickle.dumps(TreeNet(lambda: Follows(), members=2).eval()))
    assert torch.equal(lost(x), expected)
    net = TreeNet(Follows, members=2).eval()
    weights = dict(net.named_parameters())
    found = torch.func.grad(lambda w: torch.func.functional_call(net, w, (x,)).sum())(weights)
    copied = copy.deepcopy(net)
    copied(x).sum().backward()
    assert all(torch.allclose(found[name], p.grad, atol=1e-5) for name, p in copied.named_parameters())


def test_networks_in_a_list_are_no_factory():
    with pytest.raises(UserError, match=r"not of a list: mheads.evaluate\(\[a, b\], test\)"):
        TreeNet([linear(), linear()])


def test_weights_of_fewer_members_say_how_many():
    with pytest.raises(UserError, match="they are of 2 members, and there are 4 here"):
        TreeNet(linear, members=4).copy_weights(TreeNet(linear, members=2))


def test_short_runs_are_logged_often_enough_for_a_curve():
    run = fit(TreeNet(linear, members=2), train=(X, Y), test=(X, Y), iterations=40, show=False)
    assert len(run.history.steps) == 20
