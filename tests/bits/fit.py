"""A built-in network, trained by `mheads.fit` into a folder: fit.py RUN [engine.stack=never].

`fit.py RUN --outputs=FILE.npz` writes what such a run answers."""

import inspect
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import mheads

# An import that fails would not do: an editable install offers this code's modules to the earlier version too.
if (Path(mheads.__file__).parent / "models").is_dir():  # as the room was called at first
    from mheads.models import MODELS as NETWORKS
else:
    from mheads.networks import NETWORKS

digits = load_digits()
x, y = digits.images[:240, None].astype(np.float32), digits.target[:240]
if __name__ == "__main__":
    run, option = Path(sys.argv[1]), sys.argv[2].split("=") if sys.argv[2:] else []
    if "--outputs" in option:
        np.savez(option[1], outputs=mheads.load(run).predict(x[200:]).numpy())
        sys.exit()
    more = {"stack": option[1]} if option else {}
    more["folder" if "folder" in inspect.signature(mheads.fit).parameters else "run"] = run  # as it was called at first
    net = mheads.TreeNet(NETWORKS["digits"], members=3, split="conv2")
    log = {"every": 4, "evaluate_every": 12, "checkpoint_every": 8}
    mheads.fit(net, mheads.losses.mcl(k=2), train=(x[:200], y[:200]), test=(x[200:], y[200:]), iterations=24,
               batch_size=40, lr=0.02, sampling="bagging", log=log, show=False, **more)  # fmt: skip
