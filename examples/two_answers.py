"""Two right answers to one question: y is +sqrt(x) or -sqrt(x), each half of the time.

One network that is taught by the squared error can only learn the mean of both, which is never right. Two members under
Multiple Choice Learning share the answers out.

python examples/two_answers.py          # some seconds; writes two_answers.png
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import nn

import mheads


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def examples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs from 0 to 1 and one of the two roots of each, float32 [N, 1] both."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 1, (count, 1)).astype(np.float32)
    return x, np.where(rng.random((count, 1)) < 0.5, 1, -1).astype(np.float32) * np.sqrt(x)


def train(members: int, iterations: int, seed: int) -> mheads.Run:
    net = mheads.TreeNet(network, members=members, seed=seed)
    return mheads.fit(
        net,
        mheads.losses.mcl(k=1, base_loss="mse"),
        train=examples(2000, seed=1),
        test=examples(500, seed=2),
        iterations=iterations,
        optimizer="adamw",
        lr=0.01,
        schedule="cosine",
        seed=seed,
    )


def draw(one: mheads.Run, two: mheads.Run) -> Figure:
    x, y = examples(500, seed=2)
    line = np.linspace(0, 1, 400, dtype=np.float32)[:, None]
    figure = Figure(figsize=(6, 4), dpi=150, layout="constrained")
    panel = figure.subplots()
    panel.plot(x, y, "o", color="0.8", markersize=5, label="examples")
    panel.plot(line, one.predict(line)[0], color="#D55E00", label=f"one network: error {one.result.oracle:.3f}")
    for m, (outputs, colour) in enumerate(zip(two.predict(line), ("#0072B2", "#009E73"), strict=True)):
        panel.plot(line, outputs, color=colour, label=f"member {m} of two")
    panel.set_title(f"the better of two members: error {two.result.oracle:.3f}", fontsize=9)
    panel.set(xlabel="x", ylabel="y")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=8)
    return figure


def main(iterations: int = 1500, picture: Path = Path("two_answers.png"), seed: int = 0) -> float:
    """How many times nearer the better of two members comes than one network, by the root mean square error."""
    one, two = (train(members, iterations, seed) for members in (1, 2))
    draw(one, two).savefig(picture)
    ratio = one.result.oracle / two.result.oracle
    print(f"one network: {one.result.oracle:.4f}; the better of two: {two.result.oracle:.4f}, {ratio:.1f} times less")
    return ratio


if __name__ == "__main__":
    main()
