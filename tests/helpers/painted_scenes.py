"""Painted scenes in the layout of PASCAL VOC: boxes of three colours on grey, with proposals near and far."""

import numpy as np
from PIL import Image

COLOURS = {"red": (200, 40, 40), "green": (40, 170, 60), "blue": (50, 60, 210)}


def paint(root, count=12, seed=0, sizes=((64, 48), (48, 60), (72, 72)), test=4):
    """Writes scenes, the last `test` of them for testing, and proposals.npz; returns the folder."""
    generator = np.random.default_rng(seed)
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    names, proposals = [f"{i:06}" for i in range(count)], {}
    for i, name in enumerate(names):
        width, height = sizes[i % len(sizes)]
        pixels = generator.integers(110, 150, (height, width, 3)).astype(np.uint8)
        objects, near = [], []
        for half in range(1 + i % 2):
            colour = list(COLOURS)[generator.integers(3)]
            w, h = generator.integers(14, width // 2 - 2), generator.integers(14, height - 4)
            left, top = half * width // 2 + generator.integers(2), generator.integers(0, height - h)
            pixels[top : top + h, left : left + w] = COLOURS[colour]
            box = np.array([left, top, left + w - 1, top + h - 1])
            objects.append((colour, box))
            near.append(box + generator.integers(-4, 5, (12, 4)))
        far = generator.integers(0, [width - 12, height - 12], (10, 2))
        boxes = np.concatenate([*near, np.concatenate([far, far + generator.integers(8, 12, (10, 2))], 1)])
        proposals[name] = np.clip(boxes, 0, [width - 1, height - 1] * 2)
        Image.fromarray(pixels).save(root / "JPEGImages" / f"{name}.png")
        annotate(root, name, [(colour, box + 1) for colour, box in objects], width, height)
    (root / "ImageSets/Main/trainval.txt").write_text("\n".join(names[: count - test]) + "\n")
    (root / "ImageSets/Main/test.txt").write_text("".join(f"{name}  1\n" for name in names[count - test :]))
    np.savez(root / "proposals.npz", **proposals)
    return root


def annotate(root, name, objects, width, height):
    """Objects as (class, box counted from 1) or (class, box, difficult)."""
    said = "".join(
        f"<object><name>{kind}</name><difficult>{int(bool(rest and rest[0]))}</difficult><bndbox><xmin>{box[0]}</xmin>"
        f"<ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"
        for kind, box, *rest in objects
    )
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    (root / "Annotations" / f"{name}.xml").write_text(f"<annotation>{size}{said}</annotation>")


def keys(root, **more):
    """Config keys that train a small detector on painted scenes."""
    given = {
        "model_args": "{base: 'user_networks:little', classes: 3}", "freeze": "[]", "data.path": root,
        "data.regions.objects": "[red, green, blue]", "data.regions.proposals": root / "proposals.npz",
        "data.regions.short_side": 96, "data.regions.long_side": 120, "data.regions.per_image": 24,
        "data.normalize": "mean_std", "data.scale": "auto", "members": 3, "split": "conv2", "optim.iterations": 8,
        "optim.lr": 0.05, "optim.schedule.name": "constant", "log.every": 1, "log.checkpoint_every": 4,
        "log.evaluate_every": 4, **more,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in given.items()]
