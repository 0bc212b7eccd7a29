"""Corrupts the test images of CIFAR-10: each once, by a corruption and a severity from 1 to 5 that a fixed seed draws.

pip install imagecorruptions "scikit-image<0.20" "numpy<2" "setuptools<81"   # in an environment of its own
python examples/corrupt_images.py corrupted.npz
mheads eval RUN --shifted data.name=npz --shifted data.path=corrupted.npz

The corruptions are those of Hendrycks and Dietterich (2019) as the package imagecorruptions (Michaelis et al., 2019)
computes them, for images of any size: the figures are not those of CIFAR-10-C.
"""

import sys
from pathlib import Path

import numpy as np

import mheads


def corrupt(images: np.ndarray, seed: int = 0) -> np.ndarray:
    """Images [N, H, W, 3] in uint8, each corrupted once; all corruptions and severities come equally often."""
    from imagecorruptions import corrupt, get_corruption_names

    kinds = [(name, severity) for name in get_corruption_names("common") for severity in range(1, 6)]
    drawn = np.random.default_rng(seed).permutation(np.arange(len(images)) % len(kinds))
    np.random.seed(seed)  # from which the corruptions draw
    return np.stack(
        [
            corrupt(image, corruption_name=kinds[i][0], severity=kinds[i][1])
            for image, i in zip(images, drawn, strict=True)
        ]
    ).astype(np.uint8)


def main(path: Path) -> None:
    data = mheads.data.load("cifar10")
    images, labels = data.test.read(np.arange(len(data.test)), None).numpy(), data.test.targets
    np.savez_compressed(
        path, x_test=corrupt(images).transpose(0, 3, 1, 2), y_test=labels, classes=np.array(data.problem.classes)
    )
    print(f"{len(images):,} images written to {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
