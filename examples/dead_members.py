"""Members that win nothing learn nothing. Which loss brings them back, where plain MCL loses many?

The members begin far from the targets, which are moved by 3 and not normalised: whichever member comes near first wins
everything. A member is dead if it comes closest on less than 1 % of the test examples.

python examples/dead_members.py          # three seeds, about ten minutes; prints a table
"""

from functools import partial
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import mheads
from mheads.losses import annealed, evolving, mcl, relaxed
from mheads.networks.mlp import mlp

WAYS: dict[str, tuple[mheads.losses.Loss, dict[str, Any]]] = {
    "mcl": (mcl(k=1), {}),
    "mcl after pretraining": (mcl(k=1), {"pretrain": 200}),
    "mcl, k=2": (mcl(k=2), {}),
    "mcl, ce_weight 0.1": (mcl(k=1, ce_weight=0.1), {}),
    "mcl, normalize wins": (mcl(k=1, normalize="wins"), {}),
    "relaxed, epsilon 0.05": (relaxed(epsilon=0.05), {}),
    "relaxed, epsilon 0.2": (relaxed(epsilon=0.2), {}),
    "evolving": (evolving(), {}),
    "annealed": (annealed(relative=True, temperature=0.5, floor=0.001), {}),
}


def moved(name: str) -> tuple[Any, Any]:
    """A generated set, its targets moved by 3: training and test examples."""
    data = mheads.data.load(name)
    splits = (data.train, data.test)
    return tuple((split.read(np.arange(len(split)), None).numpy(), split.targets + 3) for split in splits)


def digits() -> tuple[Any, Any]:
    x, y = load_digits(return_X_y=True)
    x, mixed = (x / 16).astype(np.float32), np.random.default_rng(0).permutation(len(x))
    return (x[mixed[:1400]], y[mixed[:1400]]), (x[mixed[1400:]], y[mixed[1400:]])


SETS = {
    "two roots, M=5": (partial(moved, "two_roots"), partial(mlp, 1, 1, [50, 50]), 5),
    "three futures, M=6": (partial(moved, "three_futures"), partial(mlp, 2, 24, [50, 50]), 6),
    "digits, M=10": (digits, partial(mlp, 64, 10, [50, 50]), 10),
}


def main(iterations: int = 600, seeds: int = 3) -> dict[str, int]:
    """Prints, for each loss, the dead members and the mean distortion (Oracle, for digits); returns the dead."""
    dead: dict[str, int] = {}
    print(f"{'':24}" + "".join(f"{name:>24}" for name in SETS))
    for way, (loss, options) in WAYS.items():
        cells, dead[way] = [], 0
        for load, network, members in SETS.values():
            train, test = load()
            count, measured = 0, []
            for seed in range(seeds):
                net = mheads.TreeNet(network, members=members, split="fc1", seed=seed)
                run = mheads.fit(
                    net, loss, train=train, test=test, iterations=iterations, lr=0.003, optimizer="adamw",
                    schedule="cosine", batch_size=100, seed=seed, stack="auto", show=False,
                    log={"every": iterations, "evaluate_every": 0, "idle_after": 10**6}, **options,
                )  # fmt: skip
                owned = np.sum(run.result.ownership, 1)
                count += int((owned < 0.01 * owned.sum()).sum())
                measured.append(getattr(run.result, "distortion", run.result.oracle))
            dead[way] += count
            cells.append(f"{count} of {members * seeds}, {np.mean(measured):.4g}")
        print(f"{way:24}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
    return dead


if __name__ == "__main__":
    main()
