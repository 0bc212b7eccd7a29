"""What a network and a loss are: which changes are refused on resuming, and which do not count."""

import functools
import importlib
import json
import textwrap

import numpy as np
import pytest
import torch
import user_networks
from helpers.commands import TINY, ranks, weights
from torch import nn

import mheads as package
from mheads.common import fingerprint
from mheads.common.errors import UserError

X, Y = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32), np.arange(60) % 3
QUICK = {"train": (X, Y), "test": (X, Y), "iterations": 3, "batch_size": 20, "workers": 1, "show": False}

NETWORK = """
    from torch import nn

    WIDTH = 8

    def activation():
        return nn.Tanh()

    class Scale(nn.Module):
        \"\"\"Multiplies.\"\"\"

        def forward(self, x):
            return 2 * x  # twice

    def small():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), activation(), Scale(), nn.Linear(WIDTH, 10))
"""
LOSS = """
    import torch
    from mheads.losses import Loss, LossValue, cross_entropies

    SHARPNESS = 1.0
    OPTIONS = {"power": [1, 1]}
    shift = 0.0

    def weighted(losses):
        return losses * SHARPNESS ** OPTIONS["power"][0] + shift

    def mine():
        factor = 1.0

        def function(outputs, y, sample_weights, ties):
            losses = cross_entropies(outputs, y)
            return LossValue(factor * weighted(losses).sum(), torch.ones_like(losses), losses.detach())

        return Loss("mine", function)
"""
TRAIN = ["train", "digits", "model=edited_nets:small", "loss.name=edited_losses:mine", "members=2", "data.limit=50"]
TRAIN += ["optim.batch_size=10", "optim.iterations=2"]


@pytest.fixture
def edited(mheads, tmp_path, monkeypatch):
    """Trains in the folder `run` with the code of this moment: `edited(old, new)` replaces text in it first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = {"edited_nets": textwrap.dedent(NETWORK), "edited_losses": textwrap.dedent(LOSS)}

    def train(old="", new="", options=()):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text.replace(old, new) if old else text)
            monkeypatch.delitem(__import__("sys").modules, name, raising=False)
        importlib.invalidate_caches()
        monkeypatch.setattr("sys.dont_write_bytecode", True)  # two edits within a second would find the old one
        return mheads(*TRAIN, *options, "--run", "run")

    assert train().code == 0
    return train


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("WIDTH = 8", "WIDTH = 9", ["layer 1: Linear(in_features=64, out_features=8", "out_features=9", "WIDTH"]),
        ("2 * x", "3 * x", ["source of edited_nets:Scale changed", "- ", "return 2 * x", "return 3 * x"]),
        ("nn.Tanh()", "nn.ReLU()", ["layer 2: Tanh() there, ReLU() now", "source of edited_nets:activation"]),
        ("SHARPNESS = 1.0", "SHARPNESS = 2.0", ["SHARPNESS in edited_losses:weighted: 1.0 there, 2.0 now"]),
        ("[1, 1]", "[1, 2]", ["OPTIONS in edited_losses:weighted"]),
        ("shift = 0.0", "shift = 0.5", ["shift in edited_losses:weighted: 0.0 there, 0.5 now"]),
        ("losses * SHARP", "losses**2 * SHARP", ["source of edited_losses:weighted changed"]),
        ("factor = 1.0", "factor = 3.0", ["factor in edited_losses:mine.<locals>.function: 1.0 there, 3.0 now"]),
        ("factor * weighted", "weighted", ["source of edited_losses:mine.<locals>.function changed"]),
    ],
)
def test_edited_code_is_refused_with_what_changed(edited, tmp_path, old, new, parts):
    before = weights(tmp_path / "run")
    for options in ([], ["optim.iterations=3"]):  # a finished run is not returned, nor resumed
        done = edited(old, new, options)
        assert done.code == 2, done.out
        assert "holds a run of other code" in done.err
        for part in parts:
            assert part in done.err
    assert weights(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# twice", "# doubled, as the paper says"),
        ('"""Multiplies."""', '"""Multiplies by two,\n    in two lines."""\n'),
        ("    return nn.Tanh()", "\n\n    return  nn.Tanh( )"),
        ("WIDTH = 8\n", "WIDTH = 8\nUNUSED = 3\n\n\ndef unused():\n    return UNUSED\n"),
    ],
)
def test_comments_docstrings_layout_and_what_is_not_used_may_change(edited, old, new):
    done = edited(old, new)
    assert done.code == 0, done.err
    assert "nothing to do" in done.out


def small(width=5):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def make(**options):
    return package.TreeNet(small, members=2, **options)


def test_a_fit_with_another_seed_or_start_of_the_net_is_refused(tmp_path):
    run = package.fit(make(), folder=tmp_path / "run", **QUICK)
    with pytest.raises(UserError, match="seed of the network: 0 there, 1 now"):
        package.fit(make(seed=1), folder=run.folder, **QUICK)
    changed = make()
    with torch.no_grad():
        changed.member(0)[0].weight += 1
    with pytest.raises(UserError, match="weights that training starts from differ"):
        package.fit(changed, folder=run.folder, **QUICK)
    again = package.fit(make(), folder=run.folder, **QUICK)
    assert again.summary == run.summary


def test_a_net_that_was_trained_in_a_folder_finds_it_finished_and_goes_on_in_it(tmp_path):
    net = make()
    run = package.fit(net, folder=tmp_path / "run", **QUICK)
    trained = fingerprint.weights(net.state_dict())
    assert package.fit(net, folder=tmp_path / "run", **QUICK).summary == run.summary
    assert fingerprint.weights(net.state_dict()) == trained
    # In another folder it starts from the trained weights; back in the first, that one is still its own.
    with pytest.warns(UserWarning, match="an earlier fit left in this net: build a new TreeNet"):
        other = package.fit(net, folder=tmp_path / "other", **QUICK)
    assert fingerprint.weights(other.net.state_dict()) != trained
    assert package.fit(net, folder=tmp_path / "run", **QUICK).summary == run.summary
    assert fingerprint.weights(net.state_dict()) == trained
    loaded = package.load(tmp_path / "run", small)
    longer = package.fit(loaded.net, folder=tmp_path / "run", **(QUICK | {"iterations": 5}))
    straight = package.fit(make(), **(QUICK | {"iterations": 5}))
    assert fingerprint.weights(longer.net.state_dict()) == fingerprint.weights(straight.net.state_dict())
    with torch.no_grad():
        net.member(0)[0].weight += 1  # by hand
    with pytest.raises(UserError, match="starts from differ"):
        package.fit(net, folder=tmp_path / "other", **QUICK)


@pytest.mark.parametrize(
    ("one", "other", "part"),
    [
        (lambda: small(4), lambda: small(5), "layer 0: Linear"),
        (functools.partial(small, width=4), functools.partial(small, width=5), "width in arguments of"),
        (small, user_networks.Plain, "layer"),
    ],
)
def test_networks_of_lambdas_and_partials_are_told_apart(one, other, part):
    def of(factory):
        return {"network": package.TreeNet(factory, members=1).identity, "loss": {"code": {}}}

    assert fingerprint.differences(of(one), of(one)) == []
    assert any(part in line for line in fingerprint.differences(of(one), of(other)))
    assert json.loads(json.dumps(of(one))) == of(one)


def test_what_a_loss_holds_and_counts():
    """Weights in a closure are part of it; a counter is not."""

    def make(class_weights):
        calls = 0

        def function(outputs, y, sample_weights, ties):
            nonlocal calls
            calls += 1
            return class_weights

        return function

    def of(*values):
        return fingerprint.code(make(torch.tensor(values)))

    first = make(torch.tensor([1.0, 2.0]))
    before = fingerprint.code(first)
    first(None, None, None, None)
    assert fingerprint.code(first) == before == of(1.0, 2.0)
    assert of(1.0, 3.0) != before
    [entry] = before.values()
    assert "calls" not in entry["values"]
    assert "nonlocal calls" in "\n".join(entry["source"])


def changes(before, after):
    """What resuming would say of a loss whose code was `before` and is `after` now."""
    there, now = ({"network": {"code": {}}, "loss": {"code": code}} for code in (before, after))
    return fingerprint.differences(there, now)


class Options:
    def __init__(self, power):
        self.power = power
        self.calls = 0

    def loss(self, outputs, y, sample_weights, ties):
        self.calls += 1
        return self.power


def test_what_an_object_is_made_with_counts_and_what_it_counts_does_not():
    def closure(options):
        return lambda *args: options.loss(*args)

    for of in (lambda options: options.loss, closure):
        one, other = Options(1), Options(2)
        before = fingerprint.code(of(one))
        one.loss(None, None, None, None)
        assert fingerprint.code(of(one)) == before
        lines = changes(before, fingerprint.code(of(other)))
        assert lines == ["power in a tests.common.test_fingerprint:Options: 1 there, 2 now"]


def test_code_without_a_source_is_told_apart_by_what_it_does():
    def of(text):
        names = {"__name__": "typed_in"}
        exec(text, names)
        return fingerprint.code(names["f"])

    assert of("def f(x):\n    return x + 1") == of("def f(x):\n    'Adds.'\n    return x + 1  # one")
    lines = changes(of("def f(x):\n    return x + 1"), of("def f(x):\n    return x + 2"))
    assert lines == ["source of typed_in:f changed"]


def test_another_version_of_python_is_compared_by_source():
    [(name, entry)] = fingerprint.code(small).items()
    there = {name: {**entry, "code": "2.7 0123456789abcdef"}}
    assert changes(there, {name: entry}) == []
    changed = {name: {**there[name], "source": [*entry["source"], "    pass"]}}
    assert len(changes(changed, {name: entry})) == 1
    assert changes(fingerprint.code(functools.partial(small, 3)), fingerprint.code(functools.partial(small, 3))) == []


def test_ranks_know_the_whole_network_and_resume_what_one_process_began(tmp_path, mheads):
    run = tmp_path / "run"
    command = ["train", "digits", *TINY, "log.keep=9", "--run", run]
    assert mheads(*command, "optim.iterations=6").code == 0
    before = (run / "identity.json").read_bytes()
    done = ranks(2, *command, "optim.iterations=8")
    assert [one.code for one in done] == [0, 0], done[0].err + done[1].err
    assert "resuming at iteration 6 of 8" in done[0].out
    assert (run / "identity.json").read_bytes() == before
