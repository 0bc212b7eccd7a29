"""mheads in a notebook: each `# %%` is a cell. Runs in a few seconds, needs no download."""

# %% Data: any arrays will do. Here, 8 x 8 handwritten digits.
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

import mheads

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 1, 8, 8).astype(np.float32) / 16
train, test = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])


# %% A network of your own: any module whose children, one after the other, are the network.
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.hidden = nn.Linear(108, 32)
        self.relu2 = nn.ReLU()
        self.scores = nn.Linear(32, 10)

    def forward(self, x):
        x = self.pool(self.relu(self.conv(x)))
        return self.scores(self.relu2(self.hidden(self.flatten(x))))


# %% Four members that share their first layer; each example teaches only the member that does best on it.
net = mheads.TreeNet(Small, members=4, split="conv")
run = mheads.fit(net, mheads.losses.mcl(k=1), train=train, test=test, iterations=200, lr=0.05, batch_size=64)
print(f"members        {'  '.join(f'{accuracy:.1f}' for accuracy in run.result.members)} %")
print(f"Ensemble-Mean  {run.result.ensemble_mean:.1f} %")
print(f"Oracle         {run.result.oracle:.1f} %")

# %% Who owns which digit.
picture = Path(tempfile.mkdtemp()) / "ownership.png"
run.plot_ownership().savefig(picture)
print(f"ownership      {picture}")

# %% What each member says about new images: scores [members, images, classes].
outputs = run.predict(test[0][:5])
print(f"outputs        {list(outputs.shape)}")

# %% The same measures for models that were trained elsewhere, in any way.
torch.manual_seed(0)
models = [nn.Sequential(nn.Flatten(), nn.Linear(64, 10)) for _ in range(3)]
x, y = torch.from_numpy(train[0]), torch.from_numpy(train[1])
for model in models:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
elsewhere = mheads.evaluate(models, test)
print(f"three plain models: Ensemble-Mean {elsewhere.ensemble_mean:.1f} %, Oracle {elsewhere.oracle:.1f} %")
