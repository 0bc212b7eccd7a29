"""How people train an ensemble today: each peer does one SGD step of M networks on one batch.

All start from the same weights with the same rate, momentum, decay and per-layer multipliers, so that their weights
after a step can be compared with ours before anything is timed.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = list[dict[str, Tensor]]  # the state of each member
RATE, MOMENTUM, DECAY = 0.001, 0.9, 0.004


def groups(named: Sequence[tuple[str, Tensor]], bias_rate: float = 2.0) -> list[dict[str, Any]]:
    """Parameter groups with Caffe's multipliers unless said otherwise: biases learn twice as fast."""
    weights = [p for name, p in named if not name.endswith("bias")]
    biases = [p for name, p in named if name.endswith("bias")]
    return [{"params": weights, "lr": RATE}, {"params": biases, "lr": bias_rate * RATE}]


def sgd(named: Sequence[tuple[str, Tensor]], bias_rate: float = 2.0) -> torch.optim.SGD:
    return torch.optim.SGD(groups(named, bias_rate), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)


def duplicate(net: nn.Module, memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    """A copy of a network in the given memory format."""
    made: nn.Module = copy.deepcopy(net).to(memory_format=memory_format)  # type: ignore[call-overload]
    return made


class Peer:
    """One way to do a step; `weights` gives the weights after it."""

    def __init__(self, step: Callable[[], Any], weights: Callable[[], Weights]) -> None:
        self.step, self.weights = step, weights


def states(nets: Sequence[nn.Module]) -> Callable[[], Weights]:
    return lambda: [dict(net.named_parameters()) for net in nets]


def plain_loop(members: Sequence[nn.Module], x: Tensor, y: Tensor, bias_rate: float = 2.0) -> Peer:
    """A loop over M modules as people write it: contiguous tensors, torch's own threads."""
    nets = [duplicate(net) for net in members]
    return Peer(_loop_step(nets, nets, x.contiguous(), y, bias_rate), states(nets))


def channels_last_loop(members: Sequence[nn.Module], x: Tensor, y: Tensor, bias_rate: float = 2.0) -> Peer:
    """The plain loop in channels-last."""
    nets = [duplicate(net, torch.channels_last) for net in members]
    return Peer(_loop_step(nets, nets, x.contiguous(memory_format=torch.channels_last), y, bias_rate), states(nets))


def compiled_loop(members: Sequence[nn.Module], x: Tensor, y: Tensor) -> Peer:
    """torch.compile of the channels-last loop's networks."""
    nets = [duplicate(net, torch.channels_last) for net in members]
    fast = [torch.compile(net) for net in nets]
    return Peer(_loop_step(nets, fast, x.contiguous(memory_format=torch.channels_last), y), states(nets))


def _loop_step(
    nets: Sequence[nn.Module], callables: Sequence[Any], x: Tensor, y: Tensor, bias_rate: float = 2.0
) -> Callable[[], None]:
    optimizers = [sgd(list(net.named_parameters()), bias_rate) for net in nets]

    def step() -> None:
        for net, optimizer in zip(callables, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    return step


def vmapped(members: Sequence[nn.Module], x: Tensor, y: Tensor) -> Peer:
    """torch.func: stacked weights, vmap over the members."""
    params, buffers = torch.func.stack_module_state([copy.deepcopy(net) for net in members])
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    base = copy.deepcopy(members[0]).to("meta")
    optimizer = sgd(list(params.items()))
    x = x.contiguous()

    def loss(p: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(base, (p, b), (x,)), y)

    def step() -> None:
        optimizer.zero_grad()
        torch.func.vmap(loss)(params, buffers).sum().backward()
        optimizer.step()

    return Peer(step, lambda: [{k: p[m] for k, p in params.items()} for m in range(len(members))])


class _Grouped(nn.Module):
    """M networks as one: the members' channels side by side, in grouped convolutions and batched products."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.m = len(members)
        self.layers: list[tuple[str, nn.Module]] = list(members[0].named_children())
        self.params = nn.ParameterDict()
        first = True
        self.shared_input = ""
        for name, layer in self.layers:
            for kind, _ in layer.named_parameters():
                parts = [dict(net.named_parameters())[f"{name}.{kind}"].detach() for net in members]
                joined = torch.cat(parts) if isinstance(layer, nn.Conv2d) else torch.stack(parts)
                self.params[f"{name}:{kind}"] = nn.Parameter(joined.contiguous())
            if isinstance(layer, nn.Conv2d) and first:
                self.shared_input, first = name, False

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                weight, bias = self.params[f"{name}:weight"], self.params[f"{name}:bias"]
                # The first layer sees one input for all members: that is a plain, wider convolution.
                split = 1 if name == self.shared_input else self.m
                x = F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, split * layer.groups)
            elif isinstance(layer, nn.Flatten):
                x = x.reshape(len(x), self.m, -1).transpose(0, 1)
            elif isinstance(layer, nn.Linear):
                weight, bias = self.params[f"{name}:weight"], self.params[f"{name}:bias"]
                x = torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))
            else:
                x = layer(x)
        return x

    def states(self) -> Weights:
        def of(m: int, p: Tensor, conv: bool) -> Tensor:
            return p.chunk(self.m)[m] if conv else p[m]

        kinds = {name: isinstance(layer, nn.Conv2d) for name, layer in self.layers}
        return [
            {k.replace(":", "."): of(m, p, kinds[k.split(":")[0]]) for k, p in self.params.items()}
            for m in range(self.m)
        ]


def grouped(members: Sequence[nn.Module], x: Tensor, y: Tensor) -> Peer:
    """Grouped convolutions."""
    net = _Grouped(members)
    optimizer = sgd(list(net.params.items()))
    x = x.contiguous()

    def step() -> None:
        optimizer.zero_grad()
        outputs = net(x)
        F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), y.repeat(net.m), reduction="sum").div(len(y)).backward()
        optimizer.step()

    return Peer(step, net.states)


def torchensemble_voting(members: Sequence[nn.Module], x: Tensor, y: Tensor) -> Peer:
    """torchensemble's VotingClassifier: its own per-epoch function, on a loader of one batch."""
    from torchensemble.voting import _parallel_fit_per_epoch

    nets = [duplicate(net) for net in members]
    optimizers = [sgd(list(net.named_parameters())) for net in nets]
    loader = [(x.contiguous(), y)]
    criterion = nn.CrossEntropyLoss()
    device = torch.device("cpu")

    def step() -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it reports the first batch of each epoch
            for i, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                _parallel_fit_per_epoch(loader, net, None, optimizer, criterion, i, 0, 100, device, True)

    return Peer(step, states(nets))


def torchensemble_fusion(members: Sequence[nn.Module], x: Tensor, y: Tensor) -> Peer:
    """torchensemble's FusionClassifier: the step of its fit, on scores averaged over the members."""
    from torchensemble import FusionClassifier

    ensemble = FusionClassifier(estimator=nn.Linear(1, 1), n_estimators=len(members), cuda=False)
    nets = [duplicate(net) for net in members]
    ensemble.estimators_ = nn.ModuleList(nets)
    optimizer = sgd([(f"{i}.{name}", p) for i, net in enumerate(nets) for name, p in net.named_parameters()])
    criterion = nn.CrossEntropyLoss()
    x = x.contiguous()

    def step() -> None:
        optimizer.zero_grad()
        criterion(ensemble._forward(x), y).backward()
        optimizer.step()

    return Peer(step, states(nets))
