"""One case of the memory benchmark; run as a process of its own, because a peak never falls.

python -m mheads.bench.memory LOSS MEMBERS
"""

from __future__ import annotations

import json
import sys

from mheads.common.device import peak_memory


def peak_mb() -> float:
    return peak_memory() / 2**20


def main(loss_name: str, members: int) -> None:
    from benchmarks.ours import Ours
    from mheads import losses

    warm = Ours(1, losses.independent(), rows=8)  # the libraries' own buffers do not count
    warm.step()
    warm.engine.close()
    ours = Ours(members, losses.LOSSES[loss_name]())
    before = peak_mb()
    for _ in range(3):
        ours.step()
    ours.engine.close()
    state = 2 * 4 * ours.net.num_parameters() / 2**20  # gradients and momentum; the weights are there before
    print(json.dumps({"peak_mb": round(peak_mb(), 1), "beyond_state_mb": round(peak_mb() - before - state, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
