"""Data of the cases, made with numpy and the digits that scikit-learn brings."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits

NET = """
name: "lines"
layer {{ name: "data" type: "HDF5Data" top: "data" top: "label" hdf5_data_param {{ source: "{train}" batch_size: 20 }}
  include {{ phase: TRAIN }} }}
layer {{ name: "data" type: "HDF5Data" top: "data" top: "label" hdf5_data_param {{ source: "{test}" batch_size: 20 }}
  include {{ phase: TEST }} }}
layer {{ name: "conv" type: "Convolution" bottom: "data" top: "conv" param {{ lr_mult: 1 }} param {{ lr_mult: 2 }}
  convolution_param {{ num_output: 6 kernel_size: 3 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "pool" type: "Pooling" bottom: "conv" top: "pool"
  pooling_param {{ pool: MAX kernel_size: 2 stride: 2 }} }}
layer {{ name: "relu" type: "ReLU" bottom: "pool" top: "pool" }}
layer {{ name: "ip" type: "InnerProduct" bottom: "pool" top: "ip"
  inner_product_param {{ num_output: 10 weight_filler {{ type: "gaussian" std: 0.1 }} }} }}
layer {{ name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" }}
"""
SOLVER = """
net: "{net}" base_lr: 0.01 momentum: 0.9 weight_decay: 0.0005 lr_policy: "inv" gamma: 0.01 power: 0.75
max_iter: 24 display: 4 test_interval: 12 test_iter: 2 snapshot: 8 random_seed: 3
"""


def write(folder: Path) -> None:
    """Everything that the cases read, into a folder; the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    x, y = digits.images[:300, None].astype(np.float32) / 16, digits.target[:300].astype(np.int64)
    test = {"x_test": x[240:], "x_train": x[:240]}
    labels = np.stack([y % 2, y > 4, y % 3 == 0], 1).astype(np.uint8)
    pixels = (x[:, 0] > 0.3).astype(np.int64) + (x[:, 0] > 0.7)
    soft = np.eye(10, dtype=np.float32)[y] * 0.8 + 0.02
    for name, targets in {"labels": labels, "pixels": pixels, "soft": soft}.items():
        np.savez(folder / f"{name}.npz", **test, y_train=targets[:240], y_test=targets[240:])
    for part, rows in {"train": slice(0, 240), "test": slice(240, 300)}.items():
        with h5py.File(folder / f"{part}.h5", "w", track_order=True) as file:
            file["data"], file["label"] = x[rows], y[rows].astype(np.float32)
        (folder / f"{part}.txt").write_text(f"{folder / f'{part}.h5'}\n")
    net = folder / "net.prototxt"
    net.write_text(NET.format(train=folder / "train.txt", test=folder / "test.txt"))
    (folder / "solver.prototxt").write_text(SOLVER.format(net=net))
