"""One answer from an ensemble that was trained to give several: four ways, beside a classical ensemble.

python examples/one_answer.py          # about two minutes; the table of docs/one_answer.md
"""

from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

import mheads
from mheads.networks import NETWORKS

LOSSES = {
    "independent": (mheads.losses.independent(), 0),
    "MCL, k=1": (mheads.losses.mcl(k=1), 300),
    "MCL, k=2": (mheads.losses.mcl(k=2), 300),
    "MCL, k=1, and 0.3 cross-entropy": (mheads.losses.mcl(k=1, ce_weight=0.3), 0),
}


def mean(p: np.ndarray) -> np.ndarray:
    """Probabilities [M, N, C] -> answers [N]: the mean of the members."""
    return p.mean(0).argmax(-1)


def most_confident(p: np.ndarray) -> np.ndarray:
    """The answer of the member that is most sure of its own."""
    who = p.max(-1).argmax(0)
    return p.argmax(-1)[who, np.arange(p.shape[1])]


def stacked(p: np.ndarray, held_out: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A linear classifier on all members' log-probabilities, fitted on examples that no member was trained on."""

    def features(p: np.ndarray) -> np.ndarray:
        return np.log(p + 1e-6).transpose(1, 0, 2).reshape(p.shape[1], -1)

    return LogisticRegression(C=0.1, max_iter=2000).fit(features(held_out), y).predict(features(p))


def compare(seed: int, iterations: int) -> Iterator[tuple[str, list[float]]]:
    """For each loss: accuracy in percent of a member, the mean, the most confident, the stacked, and the Oracle."""
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 1, 8, 8).astype(np.float32)
    x, x_test, y, y_test = train_test_split(x, y, test_size=500, stratify=y, random_state=seed)
    x, x_held, y, y_held = train_test_split(x, y, test_size=300, stratify=y, random_state=seed)
    for name, (loss, pretrain) in LOSSES.items():
        net = mheads.TreeNet(NETWORKS["digits"], members=4, seed=seed)
        run = mheads.fit(
            net,
            loss,
            train=(x, y),
            test=(x_test, y_test),
            iterations=iterations,
            pretrain=pretrain * iterations // 500,
            normalize="mean_image",
            lr=0.02,
            weight_decay=0.005,
            schedule={"name": "multistep", "at": [iterations * 4 // 5]},
            seed=seed,
        )
        p, p_held = (run.predict(images).softmax(-1).numpy() for images in (x_test, x_held))
        answers = (mean(p), most_confident(p), stacked(p, p_held, y_held))
        right = [100 * float(np.mean(answer == y_test)) for answer in answers]
        yield name, [run.result.single, *right, run.result.oracle]


def main(seeds: int = 3, iterations: int = 500) -> None:
    found: dict[str, list[list[float]]] = {}
    for seed in range(seeds):
        for name, row in compare(seed, iterations):
            found.setdefault(name, []).append(row)
    print("| | one member | mean | most confident | stacked | Oracle |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, rows in found.items():
        print(f"| {name} | {' | '.join(f'{value:.1f}' for value in np.mean(rows, 0))} |")


if __name__ == "__main__":
    main()
