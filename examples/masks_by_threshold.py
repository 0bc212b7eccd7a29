"""A list of masks from one network: its probability of the spot, cut at several levels.

The masks of the data set ambiguous_masks end at one of three radii. Members under Multiple Choice Learning learn a
radius each; one network gives a probability for each pixel, and the pixels above 5/6, 1/2 and 1/6 are three masks too.

mheads reproduce masks --only alone --trials 3                                  # some seconds
python examples/masks_by_threshold.py runs/reproduce/ambiguous_masks/alone-seed*
"""

import statistics
import sys

import numpy as np
import torch

import mheads
from mheads.problems.segmentation import SegmentationMetrics

MASKS = 3


def oracle_of_thresholds(run: mheads.Run) -> float:
    """The mean IoU, in percent, of the best of three masks for each image of the test set."""
    test = mheads.data.load("ambiguous_masks").test
    images = test.read(np.arange(len(test)), None).permute(0, 3, 1, 2)  # [N, C, H, W]
    background, spot = run.predict(images)[0].unbind(1)  # logits [N, H, W]
    levels = ((torch.arange(MASKS) + 0.5) / MASKS).logit()
    logits = (spot - background) - levels[:, None, None, None]  # [3, N, H, W]
    metrics = SegmentationMetrics(MASKS, classes=2)
    metrics.update(torch.stack([torch.zeros_like(logits), logits], 2), torch.as_tensor(test.targets))
    return float(metrics.result().oracle)


def main(folders: list[str]) -> None:
    oracles = [oracle_of_thresholds(mheads.load(folder)) for folder in folders]
    for folder, oracle in zip(folders, oracles, strict=True):
        print(f"{folder}: Oracle of {MASKS} thresholds {oracle:.2f} %")
    if len(oracles) > 1:
        error = statistics.stdev(oracles) / len(oracles) ** 0.5
        print(f"mean {statistics.fmean(oracles):.1f} ± {error:.1f} (standard error)")


if __name__ == "__main__":
    main(sys.argv[1:])
