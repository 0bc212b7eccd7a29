"""Members that share all hidden layers and scale the input, each by a vector of its own."""

import numpy as np
import pytest
import torch
from torch import nn

import mheads
from mheads import TreeNet, UserError
from mheads.networks import NETWORKS
from mheads.networks.member_scaling import OwnCopy, ScaledCopies

ROWS = 24


def network():
    return NETWORKS["mlp"](5, outputs=2, hidden=[7, 6], member_scaling=3)


def tree(split="fc2"):
    return TreeNet(lambda: network().double(), members=3, split=split, seed=4)


def inputs():
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plain_outputs(weights, x):
    """The three networks one by one, from the weights of the tree: [3, B, 2]."""
    answers = []
    for m in range(3):
        h = x * weights["stages.trunk.scale.weight"][m]
        for layer in ("fc1", "fc2"):
            h = torch.relu(h @ weights[f"stages.trunk.{layer}.weight"].T + weights[f"stages.trunk.{layer}.bias"])
        answers.append(h @ weights[f"stages.fc2/{m}.out.weight"].T + weights[f"stages.fc2/{m}.out.bias"])
    return torch.stack(answers)


def test_scales_start_as_signs_that_differ_between_members():
    scales = NETWORKS["mlp"](50, member_scaling=4).scale.weight
    assert scales.shape == (4, 50) and set(scales.flatten().tolist()) == {-1.0, 1.0}
    assert len(scales.unique(dim=0)) == 4


def test_the_copies_are_shared_and_the_choice_of_one_is_not():
    net = tree()
    assert [name for name, _ in net.stage("trunk").named_children()] == ["scale", "fc1", "relu1", "fc2", "relu2"]
    assert [[name for name, _ in net.stage(f"fc2/{m}").named_children()] for m in range(3)] == [["own", "out"]] * 3
    assert [int(net.stage(f"fc2/{m}").own.index) for m in range(3)] == [0, 1, 2]
    dropped = NETWORKS["mlp"](5, hidden=[7], member_scaling=3, dropout=0.5)
    assert [*dict(dropped.named_children())] == ["scale", "fc1", "relu1", "own", "drop1", "out"]


def test_outputs_and_gradients_are_those_of_the_networks_one_by_one():
    net, x = tree(), inputs()
    with torch.no_grad():
        net.get_parameter("stages.trunk.scale.weight").mul_(torch.linspace(0.5, 2, 15).view(3, 5))
    weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    expected = plain_outputs(weights, x)
    outputs = net(x)
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
    factors = torch.randn_like(expected)
    (outputs * factors).sum().backward()
    (expected * factors).sum().backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("stack", ["never", "always"])
def test_training_takes_the_steps_of_a_plain_loop(stack):
    net, x = tree(), inputs()
    y = torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)
    weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        (plain_outputs(weights, x) - y).square().mean((1, 2)).sum().backward()
        optimizer.step()
    data = (x.numpy(), y.numpy())
    run = mheads.fit(net, "independent", train=data, test=data, iterations=4, batch_size=ROWS, lr=0.05,
                     optimizer="sgd", momentum=0.0, weight_decay=0.0, normalize="none", stack=stack)  # fmt: skip
    for name, parameter in run.net.named_parameters():  # data are float32
        torch.testing.assert_close(parameter.detach(), weights[name].detach(), rtol=1e-6, atol=1e-7, msg=name)


def test_a_split_further_up_gives_members_layers_of_their_own():
    net, x = tree("fc1"), inputs()
    for m in range(3):
        stage = net.stage(f"fc1/{m}")
        h = torch.relu(net.stage("trunk").fc1(x * net.stage("trunk").scale.weight[m]))
        torch.testing.assert_close(net(x)[m], stage.out(torch.relu(stage.fc2(h))), rtol=1e-12, atol=1e-12)


class Residual(nn.Module):
    """What is traced, since its forward does more than call its children."""

    def __init__(self):
        super().__init__()
        self.scale, self.own = ScaledCopies(5, 3), OwnCopy(3)
        self.fc1, self.fc2, self.out = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = torch.relu(self.fc1(self.scale(x)))
        return self.out(self.own(h + torch.relu(self.fc2(h))))


def test_in_a_traced_network_members_take_their_own_copies_too():
    net, x = TreeNet(Residual, members=3, split="fc2", seed=4), inputs().float()
    assert net.probe(x).shape == (ROWS, 2)
    trunk = net.stage("trunk")
    for m, leaf in enumerate(net.tree.leaves):
        h = torch.relu(trunk.fc1(x * trunk.scale.weight[m]))
        torch.testing.assert_close(net(x)[m], net.stage(leaf.name).out(h + torch.relu(trunk.fc2(h))))


def test_members_keep_their_copies_when_others_go_or_come():
    net, x = tree(), inputs()
    outputs = net(x)
    assert torch.equal(net.keep([2, 0])(x), outputs[[2, 0]])
    assert torch.equal(net.member(1)(x), outputs[1])
    more = net.with_members(2, at="fc2")
    assert torch.equal(more(x)[:3], outputs)
    assert [int(more.stage(f"fc2/{m}").own.index) for m in (3, 4)] == [0, 1]  # there are three scales, used again
    assert torch.equal(net.with_members(1, at="fc2", like=2)(x)[3], outputs[2])


def test_linear_members_scale_their_inputs_as_well():
    """Without hidden layers each member is one layer behind its own scale."""
    net = TreeNet(lambda: NETWORKS["mlp"](5, outputs=2, hidden=[], member_scaling=3), 3, tree="scale", seed=0)
    x, trunk = torch.randn(4, 5), net.stage("trunk")
    for member, output in enumerate(net(x)):
        last = net.stage(f"scale/{member}").out
        assert torch.allclose(output, (x * trunk.scale.weight[member]) @ last.weight.T + last.bias)


def test_a_run_is_saved_opened_and_exported(tmp_path, mheads):
    """By the command line, as any other network, with scores."""
    import mheads as package

    args = ["model=mlp", "model_args={features: 10, hidden: [8, 8], member_scaling: 4}", "members=4", "split=fc2"]
    done = mheads("train", "diabetes", *args, "loss=scored", "optim.iterations=20", "-f", tmp_path / "run")
    assert done.code == 0, done.err
    run = package.load(tmp_path / "run")
    x = np.random.default_rng(0).normal(size=(7, 10)).astype(np.float32)
    expected = run.predict(x)
    assert expected.shape[:2] == (4, 7) and len(np.unique(expected[:, 0], axis=0)) == 4
    assert mheads("eval", tmp_path / "run").code == 0
    done = mheads("export", tmp_path / "run", "-o", tmp_path / "run.pt2")  # compares the file with the run
    assert done.code == 0, done.err


def test_a_split_below_the_copies_is_an_error():
    def below():
        return nn.Sequential(ScaledCopies(5, 3), nn.Linear(5, 4), OwnCopy(3), nn.Linear(4, 4), nn.Linear(4, 2))

    with pytest.raises(UserError, match="all members take the copy of member 0: split above that layer"):
        TreeNet(below, members=3, split="3")
    assert TreeNet(below, members=3, split="1").num_members == 3
    assert TreeNet(below, members=1).num_members == 1


def test_a_number_that_cannot_be_is_an_error():
    with pytest.raises(UserError, match="member_scaling=-1: give the number of members"):
        NETWORKS["mlp"](5, member_scaling=-1)
    assert isinstance(NETWORKS["mlp"](5)[0], nn.Linear)
