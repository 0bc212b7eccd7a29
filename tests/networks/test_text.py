"""Texts: rows of tokens, from arrays, datasets and files, through the text network to files for elsewhere."""

import importlib.util
import signal

import numpy as np
import pytest
import torch
from helpers.commands import Running, assert_same_run, process, ranks  # noqa: F401  # Running: see conftest.py
from torch import nn

import mheads as package
from mheads import TreeNet, UserError, losses
from mheads.networks import NETWORKS
from mheads.trees.splitting.list_cuts import list_cuts

RNG = np.random.default_rng(0)
X = RNG.integers(1, 20, (240, 12))
X[np.arange(12) >= RNG.integers(3, 13, 240)[:, None]] = 0  # from 3 to 12 tokens each
Y = (X == 7).any(1).astype(np.int64)
SMALL = {"tokens": 20, "length": 14, "width": 8, "heads": 2}
QUICK = {"iterations": 3, "batch_size": 40, "lr": 0.05}


def small():
    return NETWORKS["text"](**SMALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "run"
    net = TreeNet(small, members=3, split="block0")
    return package.fit(net, losses.mcl(k=1), train=(X[:200], Y[:200]), test=(X[200:], Y[200:]), folder=folder, **QUICK)


def test_a_text_is_encoded_as_torchs_own_layers_do():
    torch.manual_seed(0)
    net = small().double().eval()
    own = nn.TransformerEncoderLayer(8, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True, dtype=torch.float64)
    tokens = torch.from_numpy(X[:9])
    h = net.embedding.tokens.weight[tokens] + net.embedding.places[:12]
    for block in (net.block0, net.block1):
        names = {
            "self_attn.in_proj_weight": block.qkv.weight, "self_attn.in_proj_bias": block.qkv.bias,
            "self_attn.out_proj.weight": block.out.weight, "self_attn.out_proj.bias": block.out.bias,
            "linear1.weight": block.up.weight, "linear1.bias": block.up.bias,
            "linear2.weight": block.down.weight, "linear2.bias": block.down.bias,
            "norm1.weight": block.norm1.weight, "norm1.bias": block.norm1.bias,
            "norm2.weight": block.norm2.weight, "norm2.bias": block.norm2.bias,
        }  # fmt: skip
        own.load_state_dict(names)
        h = own.train()(h, src_key_padding_mask=tokens == 0)  # in training it takes no fast path of its own
    h = net.norm((h, None))[0]
    means = torch.stack([row[row_tokens != 0].mean(0) for row, row_tokens in zip(h, tokens, strict=True)])
    torch.testing.assert_close(net(tokens), net.head(means), rtol=1e-10, atol=1e-12)


def test_padding_neither_attends_nor_counts():
    net = small().double().eval()
    tokens = torch.from_numpy(X[:6])
    longer = torch.cat([tokens, torch.zeros(6, 2, dtype=torch.int64)], 1)
    torch.testing.assert_close(net(longer), net(tokens), rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        net.embedding.tokens.weight[0] = 100.0  # whatever padding is said to mean
        net.embedding.places[3:] += 50.0
    three = tokens.clone()
    three[:, 3:] = 0
    torch.testing.assert_close(net(three), net(three[:, :3]), rtol=1e-12, atol=1e-14)
    assert net(torch.zeros(2, 5, dtype=torch.int64)).isfinite().all()  # a text without a token


def test_it_is_cut_after_the_embedding_and_after_each_block(mheads):
    found = list_cuts(small, (12,))
    assert [cut.name for cut in found.cuts] == ["embedding", "block0", "block1", "norm"]
    assert found.cuts[0].crossing == ((12, 8), (12,))
    for cut in found.cuts:
        net = TreeNet(small, members=4, split=cut.name)
        assert net.num_parameters() == cut.above.parameters + 4 * cut.below.parameters
    assert "block1" in mheads("cuts", "text").out


def as_int32(x, y):
    return x.astype(np.int32), y


FORMS = {
    "int32": as_int32,
    "tensors": lambda x, y: (torch.from_numpy(x), torch.from_numpy(y)),
    "lists": lambda x, y: (x.tolist(), y.tolist()),
    "pairs": lambda x, y: list(zip(x.astype(np.int32), y, strict=True)),
    "dataset": lambda x, y: torch.utils.data.Subset(list(zip(x.astype(np.int32), y, strict=True)), range(len(x))),
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_every_form_go_to_the_network_as_they_are(form, trained):
    data = package.data.from_arrays(FORMS[form](X[:200], Y[:200]), FORMS[form](X[200:], Y[200:]))
    raw = data.train.read(np.arange(5), None)
    assert raw.dtype == torch.int64
    assert torch.equal(data.preprocess(raw, torch.float32), torch.from_numpy(X[:5]))
    assert str(data.seen) == "tokens from 0 to 19"
    if form == "dataset":
        again = package.fit(
            TreeNet(small, members=3, split="block0"), losses.mcl(k=1),
            train=FORMS[form](X[:200], Y[:200]), test=FORMS[form](X[200:], Y[200:]), **QUICK,
        )  # fmt: skip
        assert all(map(torch.equal, again.net.state_dict().values(), trained.net.state_dict().values()))


def test_a_run_of_texts_answers_as_its_members_do(trained):
    expected = torch.stack([trained.member(m)(X[:9]) for m in range(3)])
    torch.testing.assert_close(trained.predict(X[:9]), expected)
    result = package.evaluate([trained.member(m) for m in range(3)], (X[200:], Y[200:]))
    assert result.members == pytest.approx(trained.result.members, abs=1e-3)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (
            X,
            {"normalize": "mean_std"},
            "normalize=mean_std .* are for numbers, but the examples are tokens",
        ),
        (X, {"scale": 2.0}, "scale=2.0 are for numbers"),
        (
            X,
            {"pad": 2},
            "pad=2 and mirror=False are for images, but an example is 12 numbers or tokens; give pad=0 and "
            "mirror=False$",
        ),
        (X, {"mirror": True}, "mirror=True are for images"),
        (X - 3, {}, "row 0 holds the token -[123]; give tokens from 0 on, 0 for padding"),
        (X + 1, {}, "layer 'embedding' .*index out of range.* holds tokens from 1 to 20; integers are tokens"),
        (X, {"test": (X + 1, Y)}, "layer 'embedding' .*index out of range.* holds tokens from 0 to 20"),
        (X, {"test": (X / 2, Y)}, "training examples are tokens from 0 to 19 but test examples floats from 0 to 9.5"),
        (np.concatenate([X, X], 1), {}, "24 tokens are more than the length of 14"),
    ],
)
def test_what_is_not_for_tokens_is_refused(given, options, said):
    with pytest.raises(UserError, match=said):
        package.fit(TreeNet(small, members=2), train=(given, Y), **{**QUICK, **options})


def test_integers_for_a_network_of_numbers_are_refused_with_the_remedy():
    with pytest.raises(UserError, match=r"'fc1' .*tokens from 0 to 19; integers are tokens, and numbers"):
        package.fit(TreeNet(lambda: NETWORKS["mlp"](12, 2), members=2), train=(X, Y), **QUICK)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (X / 2, "floats from 0 to 9.5, but training saw tokens from 0 to 19; give tokens, as int64"),
        (X.astype(np.uint8), "uint8 from 0 to 19, but training saw tokens"),
        (X + 1, "tokens from 1 to 20, but .*never saw tokens above that range, so replace them"),
        (X - 1, "holds the token -1"),
        (X[:, :5], r"shape \[5\], but the run was trained on \[12\]"),
    ],
)
def test_what_a_run_of_texts_does_not_know_is_refused(trained, x, said):
    with pytest.raises(UserError, match=said):
        trained.predict(x)


@pytest.mark.parametrize("args", [{"width": 9}, {"heads": 0}, {"tokens": 0}, {"depth": 0}])
def test_sizes_that_make_no_network_are_refused(args):
    with pytest.raises(UserError, match=r"text: width=.* must be a multiple of heads=.* must be above 0"):
        NETWORKS["text"](**args)


ONNX = pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs the extra onnx")


@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=ONNX)])
def test_a_file_for_elsewhere_gives_the_answers_of_the_run(trained, suffix, tmp_path):
    path = trained.export(tmp_path / f"text{suffix}", "members")
    for rows in (1, 5, 40):
        if suffix == ".pt2":
            found = torch.export.load(path).module()(torch.from_numpy(X[:rows]))
        else:
            import onnxruntime

            found = torch.from_numpy(onnxruntime.InferenceSession(path).run(None, {"examples": X[:rows]})[0])
        torch.testing.assert_close(found, trained.predict(X[:rows]), rtol=1e-5, atol=1e-5)


RECIPE = [
    "model=text", *(f"model_args.{key}={value}" for key, value in SMALL.items()), "model_args.dropout=0.1", "members=3",
    "split=block0", "loss=mcl", "sampling=bagging", "optim.batch_size=32", "optim.iterations=12", "optim.lr=0.05",
    "engine.micro_batches=4", "log.every=1", "log.evaluate_every=4", "log.checkpoint_every=3",
]  # fmt: skip


def test_a_recipe_of_texts_gives_the_same_bits_for_workers_ranks_and_a_kill(tmp_path, mheads):
    np.savez(tmp_path / "texts.npz", x_train=X[:200], y_train=Y[:200], x_test=X[200:], y_test=Y[200:])
    args = ["train", "digits", *RECIPE, f"data={{name: npz, path: {tmp_path}/texts.npz}}"]
    one = tmp_path / "one"
    assert (done := mheads(*args, "engine.workers=1", "--run", one)).code == 0, done.err
    assert mheads(*args, "engine.workers=2", "--run", tmp_path / "two").code == 0
    assert_same_run(one, tmp_path / "two")
    assert all(done.code == 0 for done in ranks(3, *args, "--run", tmp_path / "three"))
    assert_same_run(one, tmp_path / "three")
    killed = process(*args, "--run", tmp_path / "killed", stop=(signal.SIGKILL, "os.rename", "00000009"))
    assert killed.code == -signal.SIGKILL
    assert mheads(*args, "--run", tmp_path / "killed").code == 0
    assert_same_run(one, tmp_path / "killed")

    np.savez(tmp_path / "new.npz", x=X[:4])
    np.savetxt(tmp_path / "new.csv", X[:4], fmt="%d", delimiter=",")
    for name in ("new.npz", "new.csv"):
        asked = mheads("predict", one, tmp_path / name, "-o", tmp_path / f"{name}-outputs.npz")
        assert asked.code == 0, asked.err
        with np.load(tmp_path / f"{name}-outputs.npz") as file:
            torch.testing.assert_close(torch.from_numpy(file["outputs"]), package.load(one).predict(X[:4]))
    refused = mheads("predict", one, tmp_path / "picture.png")
    assert refused.code == 2 and "not on images" in refused.err
    assert mheads("export", one, "-o", tmp_path / "one.pt2").code == 0
    planned = mheads("plan", "digits", *args[2:], "--ranks", "2")
    assert planned.code == 0, planned.err
