"""Guided backprop, the images that it is shown on, and who responds how much."""

import copy
import warnings
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import user_networks
from matplotlib.image import imread
from PIL import Image
from sklearn.datasets import load_digits
from torch import fx, nn

import mheads as package
from mheads.common.progress import Silent
from mheads.config import read as configs
from mheads.data.readers.digits_images import read_digits
from mheads.networks import INPUT_SHAPES, NETWORKS
from mheads.report.figures.saliency_maps import saliency_figure, scale_maps
from mheads.report.saliency import Energy, Saliency, choose, explain, guided_backprop
from mheads.runs.folder import RunFolder
from mheads.training.loop import train_config

RELUS = {
    "module": nn.ReLU(),
    "module in place": nn.ReLU(inplace=True),
    "F.relu": F.relu,
    "F.relu in place": lambda x: F.relu(x, inplace=True),
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "method": lambda x: x.relu(),
    "method in place": lambda x: x.relu_(),
}
QUICK = ("optim.iterations=60", "log.evaluate_every=0")


class Two(nn.Module):
    """Two layers, with one ReLU that is called twice."""

    def __init__(self, relu):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 20).double(), nn.Linear(20, 4).double()
        self.relu = relu

    def forward(self, x):
        return self.second(self.relu(self.first(self.relu(x))))


@pytest.mark.parametrize("kind", RELUS)
def test_only_positive_gradients_pass_a_relu_however_it_is_called(kind):
    network, x = Two(RELUS[kind]), torch.randn(5, 6).double()
    before = x.clone()
    found = guided_backprop(network, x, [3, 0, 1, 1, 2])
    first, bias, second = (p.detach().numpy() for p in (*network.first.parameters(), network.second.weight))
    for i, target in enumerate([3, 0, 1, 1, 2]):
        hidden = first @ np.maximum(x[i].numpy(), 0) + bias
        back = first.T @ (np.maximum(second[target], 0) * (hidden > 0))
        np.testing.assert_allclose(found[i], np.maximum(back, 0) * (x[i].numpy() > 0), atol=1e-14)
    assert x.equal(before)
    assert found.abs().max() > 0.1


def by_captum(network, x, target):
    captum = pytest.importorskip("captum.attr", reason="captum, which ours is compared with, is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the hooks that it sets
        return captum.GuidedBackprop(network).attribute(x.clone().requires_grad_(), target=target).detach()


class Followed(fx.Tracer):
    def is_leaf_module(self, module, name):
        return super().is_leaf_module(module, name) or isinstance(module, package.Dropout)


def with_modules(network):
    """The network with a module for each ReLU, which captum asks for."""
    graph = Followed().trace(network)
    made = fx.GraphModule(network, graph)
    for i, node in enumerate(graph.nodes):
        if node.op == "call_function" and node.target is F.relu:
            made.add_submodule(f"relu{i}", nn.ReLU())
            node.op, node.target, node.args, node.kwargs = "call_module", f"relu{i}", node.args[:1], {}
    made.recompile()
    return made


SMALLER = {"nin_ilsvrc": (3, 96, 96), "resnet18": (3, 64, 64), "mlp": (10,)}  # where the network takes any size


OTHERS = ("text", "fast_rcnn", "pixels")  # of tokens, regions and maps


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in OTHERS])
def test_guided_backprop_equals_that_of_captum_on_every_network(name):
    args = {"mlp": {"features": 10, "outputs": 3}, "vit": {"depth": 2}}.get(name, {})
    network = package.TreeNet(lambda: NETWORKS[name](**args), members=1).member(0)
    if name == "airbench":  # whose first filters are zeros until data have been seen
        torch.nn.init.normal_(network.whiten.weight, generator=torch.Generator().manual_seed(1))
    shape = SMALLER.get(name) or INPUT_SHAPES[name]
    x = torch.randn(2 if name != "caffenet" else 1, *shape, generator=torch.Generator().manual_seed(0))
    found = guided_backprop(network, x, 2)
    expected = by_captum(with_modules(network.eval()), x, 2)
    plain = torch.autograd.grad(network(start := x.clone().requires_grad_())[:, 2].sum(), start)[0]
    largest = expected.abs().max()
    assert largest > 0
    assert (found - expected).abs().max() <= 1e-6 * largest
    assert ((found - plain).abs().max() > 0.01 * largest) == (name not in ("vit", "airbench"))  # without a ReLU


def test_each_member_of_a_tree_has_the_map_of_that_network_alone():
    net = package.TreeNet(NETWORKS["resnet20"], members=2, split="layer2.0")  # inside a block's row: cut in a graph
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = [guided_backprop(net.member(m), x, [1, 7]) for m in range(2)]
    for m in range(2):
        alone = NETWORKS["resnet20"]()
        alone.load_state_dict(net.member(m).state_dict())
        expected = by_captum(with_modules(alone.eval()), x, torch.tensor([1, 7]))
        torch.testing.assert_close(found[m], expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    assert not found[0].allclose(found[1])


@pytest.mark.parametrize("layer", ["conv1", "relu2", "ip1"])
def test_the_strongest_unit_of_a_layer_is_explained(layer):
    network = package.TreeNet(NETWORKS["digits"], members=1).member(0)
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    upto = nn.Sequential(*list(network)[: list(dict(network.named_children())).index(layer) + 1], nn.Flatten())
    units = upto(x).argmax(1)
    expected = by_captum(upto, x, units)
    assert expected.abs().amax((1, 2, 3)).min() > 0
    torch.testing.assert_close(guided_backprop(network, x, layer=layer), expected)


def test_a_layer_is_seen_before_the_next_one_writes_into_it():
    torch.manual_seed(0)
    network = nn.Sequential(OrderedDict(a=nn.Linear(4, 6), b=nn.ReLU(inplace=True), c=nn.Linear(6, 2)))
    x = torch.randn(5, 4)
    with torch.no_grad():
        network.a.bias -= 100  # nothing passes the ReLU
        units = network.a(x).argmax(1)
    assert guided_backprop(network, x, layer="a").equal(network.a.weight[units])


def test_the_network_is_left_as_it_was():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 3)
    )
    network[1].eval()
    network[5].weight.requires_grad_(False)
    before, modes = copy.deepcopy(network.state_dict()), [m.training for m in network.modules()]
    x = torch.randn(4, 1, 8, 8)
    expected = guided_backprop(copy.deepcopy(network).eval(), x, 1)
    with torch.inference_mode():
        assert guided_backprop(network, x, 1).equal(expected)
    guided_backprop(network, x, layer="0")
    with pytest.raises(package.UserError):
        guided_backprop(network, x, 7)
    assert [m.training for m in network.modules()] == modes
    assert all(p.grad is None for p in network.parameters())
    assert not any(m._forward_hooks or m._backward_hooks for m in network.modules())
    assert all(value.equal(before[key]) for key, value in network.state_dict().items())


def test_threads_do_not_see_each_other():
    network = package.TreeNet(NETWORKS["digits"], members=1).member(0).eval()
    xs = torch.randn(8, 2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    alone = [guided_backprop(network, x, layer="conv2") for x in xs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: guided_backprop(network, x, layer="conv2"), xs))
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other)


class Silenced(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach()).detach()


@pytest.mark.parametrize(
    ("network", "x", "asked", "words"),
    [
        (nn.Linear(3, 4), torch.zeros(2, 3), {}, "give either a target.* or a layer"),
        (nn.Linear(3, 4), torch.zeros(2, 3), {"target": 1, "layer": "a"}, "give either a target.* or a layer"),
        (nn.Linear(3, 4), torch.zeros(2, 3), {"target": 4}, "target=4: give a class from 0 to 3"),
        (nn.Linear(3, 4), torch.zeros(2, 3), {"target": [1, 2, 3]}, "one for each of the 2 examples"),
        (nn.Linear(3, 4), torch.zeros(2, 3), {"target": 0.5}, "target=0.5: give a class"),
        (nn.Conv2d(1, 2, 1), torch.zeros(2, 1, 3, 3), {"target": 1}, "not a score for each class"),
        (nn.Linear(3, 4), torch.zeros(2, 3, dtype=torch.int64), {"target": 1}, "tokens have no gradient"),
        (Silenced(3, 4), torch.zeros(2, 3), {"target": 1}, "Silenced gives no gradient"),
        (
            user_networks.Plain(),
            torch.zeros(2, 64),
            {"layer": "third"},
            "no layer 'third': .* flatten, first, relu, second",
        ),
        (NETWORKS["resnet20"](), torch.zeros(1, 3, 8, 8), {"layer": "x"}, "layer1, .* in them, such as layer1.0"),
        (Two(nn.Sequential()), torch.zeros(2, 6).double(), {"layer": ""}, "there is no layer ''"),
    ],
)
def test_what_cannot_be_explained_is_said(network, x, asked, words):
    with pytest.raises(package.UserError, match=words):
        guided_backprop(network, x, **asked)


def test_a_layer_that_is_never_called_is_said():
    member = package.TreeNet(NETWORKS["resnet20"], members=2, split="layer2.0").member(0)
    with pytest.raises(package.UserError, match=r"layer 'layer2.1' is not called.*, such as layer2.1.bn2"):
        guided_backprop(member, torch.zeros(1, 3, 8, 8), layer="layer2.1")
    assert guided_backprop(member, torch.ones(1, 3, 8, 8), layer="layer2.1.conv1").shape == (1, 3, 8, 8)


def test_images_of_highest_response_are_chosen_from_all_classes():
    responses = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    classes = np.array([0, 0, 0, 1, 1, 2])
    assert choose(responses, [classes], 3).tolist() == [0, 3, 5]
    assert choose(responses, [classes], 4).tolist() == [0, 1, 3, 4]
    assert choose(responses[::-1].copy(), [classes[::-1].copy()], 1).tolist() == [5]
    assert choose(responses, [classes], 99).tolist() == [0, 1, 2, 3, 4, 5]
    members = np.array([0, 0, 1, 0, 1, 1])
    assert choose(responses, [classes, members], 2).tolist() == [0, 4]  # another class and another member
    assert choose(responses, [np.array([0, 0, 0, 0, 0, 1])], 3).tolist() == [0, 1, 5]


def test_energy_is_that_of_owners_and_of_the_mean_other():
    energies = np.array([[4.0, 1.0, 9.0], [1.0, 6.0, 9.0], [3.0, 2.0, 9.0]])
    energy = Energy.of(energies, np.array([0, 1, -1]))
    assert (energy.owner, energy.others, energy.examples) == (5.0, 1.75, 2)
    assert energy.ratio == 5 / 1.75
    assert Energy.of(np.array([[2.0], [0.0]]), np.array([0])).ratio == float("inf")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A short run of MCL, and one of standard members."""
    folder = tmp_path_factory.mktemp("runs")
    for name, overrides in (("mcl", ["loss.name=mcl", "loss.k=1"]), ("standard", ["members=2", "optim.iterations=40"])):
        train_config(configs.load("digits", [*QUICK, *overrides]), RunFolder(folder / name), Silent())
    return {name: package.load(folder / name) for name in ("mcl", "standard")}


@pytest.fixture(scope="module")
def explained(runs):
    return explain(runs["mcl"], count=5, beside=runs["standard"], sample=100)


def test_the_owner_responds_more_than_other_members(explained, runs):
    assert explained.sample.examples == 100
    assert explained.sample.ratio > 2
    assert explained.energy.ratio > 2
    assert explain(runs["standard"], count=2, sample=50).sample.ratio < 2  # all have learned all classes


def test_maps_and_probabilities_are_those_of_the_members(explained, runs):
    run, other = runs["mcl"], runs["standard"]
    outputs, targets = package.outputs_of(run)
    probabilities = outputs.double().softmax(-1)
    response = probabilities.mean(0)[torch.arange(len(targets)), targets]
    best = [max((r, -i) for i, r in enumerate(response.tolist()) if targets[i] == c) for c in range(10)]
    rows = [-i for _, i in sorted(best, reverse=True)[:5]]
    assert explained.classes == [str(targets[i].item()) for i in rows]
    owners = torch.nn.functional.cross_entropy(
        outputs.double().permute(1, 2, 0), targets[:, None].expand(-1, 4), reduction="none"
    ).argmin(1)
    assert explained.owners.tolist() == [owners[i].item() + 1 for i in rows]  # after the column of the other run
    raw = read_digits()[1].read(np.array(rows), None).permute(0, 3, 1, 2).numpy()
    for column, member in ((0, other.member(0)), *((m + 1, run.member(m)) for m in range(4))):
        expected = guided_backprop(member, raw, targets[rows])
        np.testing.assert_allclose(explained.maps[column], expected, atol=1e-6 * expected.abs().max())
        p = member(raw).detach().double().softmax(-1)[range(5), targets[rows]]
        np.testing.assert_allclose(explained.probabilities[column], p, atol=1e-6)
    np.testing.assert_allclose(explained.images[..., 0], raw[:, 0] / 16)


def test_by_member_every_member_has_its_images(runs):
    found = explain(runs["mcl"], count=4, by="member", sample=0)
    assert sorted(found.owners.tolist()) == [0, 1, 2, 3]
    assert len(set(found.classes)) == 4
    assert found.sample is None


def test_arrays_of_ones_own_are_explained(runs):
    rng = np.random.default_rng(0)
    x, y = rng.integers(17, size=(6, 1, 8, 8)).astype(np.uint8), np.array([3, 3, 3, 5, 5, 5])
    found = package.saliency.explain(runs["mcl"], (x, y), count=2, sample=3)
    assert sorted(found.classes) == ["3", "5"]
    assert found.sample.examples == 3


def test_members_with_scores_and_side_inputs_are_explained():
    rng = np.random.default_rng(0)
    x, y, shift = rng.random((30, 2, 4, 4), np.float32), np.arange(30) % 3, rng.random((30, 5), np.float32)
    layers = {"flatten": nn.Flatten(), "a": nn.Linear(32, 5), "shift": user_networks.Shift(), "b": nn.ReLU()}
    factory = package.with_scores(lambda: nn.Sequential(OrderedDict(**copy.deepcopy(layers), c=nn.Linear(5, 3))))
    data = (x, y, {"shift": shift})
    run = package.fit(package.TreeNet(factory, members=2), "scored", train=data, test=data, iterations=2)
    found = explain(run, data, count=30, beside=run)
    weight, bias = (run.net.member(1).get_parameter(f"a.{key}").detach().numpy() for key in ("weight", "bias"))
    out = run.net.member(1).get_parameter("c.weight").detach().numpy()
    assert found.maps.shape == (3, 30, 2, 4, 4)
    np.testing.assert_array_equal(found.maps[0], found.maps[1])
    np.testing.assert_array_equal(found.probabilities[0], found.probabilities[1])
    i = np.abs(x[:, 0] - ((x.max() - x.min()) * found.images[7, ..., 0] + x.min())).sum((1, 2)).argmin()  # the image
    hidden = weight @ x[i].ravel() + bias + shift[i]
    expected = weight.T @ (np.maximum(out[int(found.classes[7])], 0) * (hidden > 0))
    np.testing.assert_allclose(found.maps[2, 7].ravel(), expected, rtol=1e-4, atol=1e-6)


def test_a_row_is_drawn_on_one_scale_and_its_owner_marked(explained):
    figure = explained.figure()
    panels = np.array(figure.axes).reshape(5, 6)
    assert [panel.get_title() for panel in panels[0]] == [
        "image",
        "standard\nmember 0",
        *(f"member {m}" for m in range(4)),
    ]
    for i, row in enumerate(panels):
        assert row[0].get_xlabel() == explained.classes[i]
        largest = np.percentile(np.abs(explained.maps[:, i]), 99.5)
        for k, panel in enumerate(row[1:]):
            shown = np.clip(0.5 + 0.5 * explained.maps[k, i, 0] / largest, 0, 1)
            np.testing.assert_allclose(panel.images[0].get_array(), shown)
            owns = k == explained.owners[i]
            assert panel.get_xlabel() == f"{100 * explained.probabilities[k, i]:.0f} %" + (", owner" if owns else "")
            assert panel.spines["top"].get_visible() == owns
    assert "Grey is zero" in figure.get_supxlabel()
    assert np.all(scale_maps(np.zeros((2, 4, 4, 1))) == 0.5)


def test_of_many_members_those_that_own_are_shown():
    rng = np.random.default_rng(0)
    images, maps = rng.random((2, 4, 6, 3)), rng.normal(size=(30, 2, 3, 4, 6))
    columns = [f"member {m}" for m in range(30)]
    classes, ones, owners = ["$\\frac{", "a name of twenty chars"], np.ones((30, 2)), np.array([29, 17])
    found = Saliency(images, classes, maps, columns, ones, owners, Energy(1, 1, 2), None, True)
    figure = found.figure()
    figure.canvas.draw()
    panels = np.array(figure.axes).reshape(2, -1)
    assert [panel.get_title() for panel in panels[0][-2:]] == ["member 17", "member 29"]
    assert [panel.get_xlabel() for panel in panels[0][-2:]] == ["100 %", "100 %, owner"]
    assert panels[1][0].get_xlabel() == "a name of t…"
    assert "9 of 30 networks are shown" in figure.get_supxlabel()
    assert saliency_figure(
        images, ["a", "b"], maps[:1].transpose(0, 1, 3, 4, 2), ["one"], np.ones((1, 2)), np.array([-1, -1])
    )


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 90), (900, 2)])
def test_images_of_any_shape_give_a_picture_that_can_be_seen(height, width):
    images = np.random.default_rng(0).random((3, height, width, 1))
    figure = saliency_figure(images, list("abc"), images[None], ["one"], np.ones((1, 3)), np.full(3, -1))
    figure.draw_without_rendering()
    shown = [panel.get_window_extent() for panel in figure.axes]
    assert all(30 <= box.width <= 200 and 30 <= box.height <= 500 for box in shown)


def test_the_command_writes_a_figure_and_says_the_energy(mheads, runs):
    mcl, standard = runs["mcl"].folder, runs["standard"].folder
    done = mheads("saliency", mcl, "--beside", standard, "--count", 3, "--sample", 40, "--layer", "conv2")
    assert done.code == 0, done.err
    assert "times the energy of the others, on the 3 images shown" in done.out
    assert "times the energy of the others, on 40 examples that training evaluated on" in done.out
    assert done.out.splitlines()[-1] == str(mcl / "saliency.png")
    picture = imread(mcl / "saliency.png")
    assert 600 <= picture.shape[1] <= 1000
    assert np.ptp(picture[..., :3]) > 0.5
    done = mheads("saliency", mcl, "--count", 1, "--sample", 0, "--layer", "conv1")
    assert "no ReLU comes before conv1: its maps are plain gradients" in done.out


def test_images_are_explained_for_the_class_that_the_ensemble_answers(mheads, runs, tmp_path):
    pixels = load_digits().images[1500]
    Image.fromarray((pixels * 255 / 16).round().astype(np.uint8)).save(tmp_path / "small.png")
    Image.fromarray((pixels * 255 / 16).round().astype(np.uint8)).resize((40, 40)).save(tmp_path / "large.png")
    mcl = runs["mcl"].folder
    done = mheads("saliency", mcl, tmp_path / "small.png", "-o", tmp_path / "a.svg")
    assert done.code == 0, done.err
    assert "on the image shown" in done.out
    assert "on 500" not in done.out
    assert "the class that the ensemble answers" in (tmp_path / "a.svg").read_text()
    done = mheads("saliency", mcl, tmp_path / "large.png", "-o", tmp_path / "b.png")
    assert (done.code, "give --resize to scale it" in done.err) == (2, True)
    assert mheads("saliency", mcl, tmp_path / "large.png", "--resize", "-o", tmp_path / "b.png").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--layer", "conv9"), "no layer 'conv9': the layers are conv1, relu1"),
        (("--by", "nobody"), "--by nobody: there are ensemble and member"),
        (("-o", "a.jpg"), "give a file that ends in .png, .svg or .pdf"),
        (("-o", "no_such_folder/a.png"), "there is no folder no_such_folder"),
        (("nothing.png",), "there is no image nothing.png"),
        (("--beside", "nothing"), "nothing is not a run folder"),
    ],
)
def test_mistakes_are_said_and_nothing_is_written(mheads, runs, arguments, words):
    (runs["standard"].folder / "saliency.png").unlink(missing_ok=True)
    done = mheads("saliency", runs["standard"].folder, *arguments)
    assert (done.code, words in done.err) == (2, True), done.err
    assert not (runs["standard"].folder / "saliency.png").exists()


def test_runs_without_images_or_classes_or_data_are_refused(mheads, runs, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.random((20, 64), np.float32), np.arange(20) % 10
    pictures = rng.random((20, 1, 8, 8), np.float32)
    image = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    for name, network, data, words in (
        ("vectors", nn.Linear(64, 10), (x, y), "shape (64,), not on images"),
        ("numbers", nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), (pictures, y / 10), "is regression"),
        ("arrays", image, (pictures, y), "mheads.report.saliency.explain(run, (x, y))"),
    ):
        net = package.TreeNet(lambda network=network: copy.deepcopy(network), members=1)
        run = package.fit(net, train=data, test=data, iterations=1, folder=tmp_path / name)
        with pytest.raises(package.UserError) as caught:
            explain(run)
        assert words in str(caught.value)
    found = explain(run, data, count=2)
    assert not found.guided
    assert found.energy is None  # there are no others
    assert found.owners.tolist() == [-1, -1]
    np.testing.assert_allclose(
        found.maps[0][:, 0].reshape(2, 64), run.net.member(0)[1].weight.detach()[[int(c) for c in found.classes]]
    )
    assert "Plain gradients" in found.figure().get_supxlabel()
    two = package.fit(package.TreeNet(image, members=1), train=(pictures, y), classes=list("abcdefghij"), iterations=1)
    with pytest.raises(package.UserError, match="have different classes"):
        explain(runs["mcl"], beside=two)


def test_an_unfinished_run_is_explained_as_far_as_it_is(mheads, runs, tmp_path):
    folder = tmp_path / "run"
    config = configs.load("digits", ["optim.iterations=2", "members=2", "data.limit=40", "optim.batch_size=10"])
    train_config(config, RunFolder(folder), Silent())
    for name in ("model.safetensors", "result.json"):
        (folder / name).unlink()
    done = mheads("saliency", folder, "--count", 2)
    assert done.code == 0, done.err
    assert "model.safetensors is missing, and this is the checkpoint of iteration 2 of 2" in " ".join(done.out.split())
