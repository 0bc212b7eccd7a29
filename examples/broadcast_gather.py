"""A network of your own over three processes, with Broadcast and Gather as layers.

    torchrun --nproc-per-node 3 examples/broadcast_gather.py

The trunk is on rank 0, one branch on each rank; rank 0 averages their scores and computes the loss.
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from mheads.distributed import Broadcast, Gather

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)

broadcast, gather = Broadcast(root=0, ranks=[0, 1, 2]), Gather(root=0, ranks=[0, 1, 2])
trunk = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
branch = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
optimizer = torch.optim.SGD([*trunk.parameters(), *branch.parameters()] if rank == 0 else branch.parameters(), lr=0.1)

digits = load_digits()
x, y = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target)
for step in range(101):
    optimizer.zero_grad()
    rows = slice(step * 16 % 1600, step * 16 % 1600 + 100)
    if rank == 0:
        outputs = gather(branch(broadcast(trunk(x[rows]))))
        loss = nn.functional.cross_entropy(torch.stack(outputs).mean(0), y[rows])
        if step % 25 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
    else:
        loss = gather(branch(broadcast()))  # a placeholder: its backward waits for the gradient of this rank's scores
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
