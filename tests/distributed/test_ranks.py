"""The ranks engine: the same bits for any number of ranks, placement, replicas and readers."""

import pytest
from commands import assert_same_run, process, ranks

# Everything that carries state or chance: dropout, accumulation, bagging where the loss allows it.
COMMON = [
    "digits", "model=networks:with_dropout", "members=4", "data.limit=150", "optim.batch_size=16",
    "optim.accumulate=2", "optim.iterations=6", "optim.lr=0.02", "optim.weight_decay=0.001", "engine.micro_batches=2",
    "log.every=2", "log.evaluate_every=3", "log.checkpoint_every=4",
]  # fmt: skip
RECIPES = {
    "independent": ["sampling=bagging"],
    "tree": ["split=conv", "sampling=bagging"],
    "nested tree": ["split={conv: [{hidden: 2}, 2]}", "sampling=bagging"],
    "score-averaged": ["split=conv", "loss=score_averaged"],
    "probability-averaged": ["loss=prob_averaged", "split={conv: [{hidden: 2}, 2]}"],
    "MCL k=1": ["split=conv", "loss=mcl", "sampling=bagging"],
    "MCL k=2": ["split={conv: [{hidden: 2}, 2]}", "loss=mcl", "loss.k=2", "pretrain=2"],
}
# Roots and their children spread in a way that no rule would choose.
EXPLICIT = {
    "independent": "placement={0: 2, 1: 0, 2: 1, 3: 0}",
    "tree": "placement={trunk: 1, conv/0: 2, conv/1: 0, conv/2: 0, conv/3: 1}",
    "nested tree": "placement={trunk: 2, conv/0: 0, conv/0/hidden/0: 1, conv/0/hidden/1: 0, conv/1: 1, conv/2: 0}",
}
SPREAD = {
    "2 ranks": (2, []),
    "3 ranks": (3, []),
    "5 ranks": (5, []),
    "3 ranks, explicit": (3, ["explicit"]),
    "3 ranks, auto": (3, ["placement=auto"]),
    "2 replicas": (2, ["replicas"]),
    "2 replicas of 2 ranks, root reads": (4, ["replicas of 2", "data.reader=root"]),
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The run of each recipe in one process, made when it is first asked for."""
    made = {}

    def run(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("one") / "run"
            done = process("train", *COMMON, *RECIPES[name], "--run", made[name])
            assert done.code == 0, done.err
        return made[name]

    return run


def shape(recipe):
    return "nested tree" if "{" in recipe[0] + recipe[-1] else "tree" if "split=conv" in recipe else "independent"


def arguments(name, options):
    kind = next(k for k in (name, shape(RECIPES[name])) if k in EXPLICIT)
    roots = {"independent": ["0", "1", "2", "3"]}.get(kind, ["trunk"])
    leaves = {"independent": "3", "tree": "conv/3", "nested tree": "conv/2"}[kind]
    known = {
        "explicit": EXPLICIT[kind],
        "replicas": f"placement={{{', '.join(f'{r}: 0' for r in roots)}}}",
        "replicas of 2": f"placement={{{', '.join(f'{r}: 0' for r in roots if r != leaves)}, {leaves}: 1}}",
    }
    return [known.get(option, option) for option in options]


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("name", RECIPES)
def test_ranks_give_the_bits_of_one_process(name, spread, one_process, tmp_path):
    size, options = SPREAD[spread]
    done = ranks(size, "train", *COMMON, *RECIPES[name], *arguments(name, options), "--run", tmp_path / "run")
    assert [d.code for d in done] == [0] * size, "\n".join(d.err for d in done)
    assert_same_run(tmp_path / "run", one_process(name))
    assert "Ensemble-Mean" in done[0].out
    assert all(d.out == "" for d in done[1:]), "only rank 0 speaks"
