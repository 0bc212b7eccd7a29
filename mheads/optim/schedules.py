"""Schedules of the learning rate by name: factories whose annotated arguments are options of a config.

Each makes a function of (iteration, iterations) that gives the factor on the first learning rate. To add one, write its
factory and its line in `SCHEDULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from mheads.common.options import Section, make_section, one_of, option, select_options

Factor = Callable[[int, int], float]

Gamma = Annotated[float, Field(gt=0, description="the factor")]
Growth = Annotated[float, Field(gt=0, description="how fast it falls")]
Every = Annotated[int, Field(ge=1, description="multiply by gamma every n iterations")]
Middle = Annotated[int, Field(ge=1, description="where the middle is")]
At = Annotated[list[int], Field(description="multiply by gamma at these iterations")]
Power = Annotated[float, Field(description="(1 + gamma i)^-power")]
PolyPower = Annotated[float, Field(description="(1 - i / iterations)^power")]
Slope = Annotated[float, Field(description="1 / (1 + exp(-slope (i - every))), falling if it is below 0")]
Window = Annotated[int, Field(ge=1, description="compare the mean loss of the last n iterations with the n before")]
Threshold = Annotated[float, Field(ge=0, lt=1, description="the relative drop that counts as progress")]


def constant() -> Factor:
    return lambda i, n: 1.0


def step(every: Every = 1000, gamma: Gamma = 0.1) -> Factor:
    return lambda i, n: _power(gamma, i // every)


def multistep(at: At = [], gamma: Gamma = 0.1) -> Factor:  # noqa: B006 (it is only read)
    return lambda i, n: gamma ** sum(i >= one for one in at)


def cosine() -> Factor:
    return lambda i, n: 0.5 * (1 + math.cos(math.pi * min(1.0, i / n)))


def exp(gamma: Gamma = 0.1) -> Factor:
    return lambda i, n: _power(gamma, i)


def inv(gamma: Growth = 0.1, power: Power = 1.0) -> Factor:
    return lambda i, n: _power(1 + gamma * i, -power)


def poly(power: PolyPower = 1.0) -> Factor:
    return lambda i, n: _power(1 - min(1.0, i / n), power)


def sigmoid(every: Middle = 1000, slope: Slope = 0.01) -> Factor:
    return lambda i, n: 0.5 * (1 + math.tanh(slope * (i - every) / 2))  # which does not overflow


class Plateau:
    """Multiplies by gamma when the mean loss of a window is no better than that of the window before."""

    def __init__(self, gamma: Gamma = 0.1, window: Window = 20000, threshold: Threshold = 0.01) -> None:
        self.gamma, self.window, self.threshold = gamma, window, threshold
        self.drops = 0
        self.total, self.count = 0.0, 0  # of the losses since the window began
        self.previous: float | None = None  # the mean loss of the window before

    def __call__(self, iteration: int, iterations: int) -> float:
        return self.gamma**self.drops

    def observe(self, loss: float) -> None:
        self.total, self.count = self.total + loss, self.count + 1
        if self.count < self.window:
            return
        mean = self.total / self.count
        self.total, self.count = 0.0, 0
        if self.previous is not None and mean > (1 - self.threshold) * self.previous:
            self.drops += 1
            self.previous = None  # a new window at the new learning rate
        else:
            self.previous = mean


def plateau(gamma: Gamma = 0.1, window: Window = 20000, threshold: Threshold = 0.01) -> Factor:
    return Plateau(gamma, window, threshold)


Stretch = Callable[[dict[str, Any], float], dict[str, Any]]


@dataclass(frozen=True)
class ScheduleEntry:
    """`make` is the factory. `ends`: the learning rate depends on where training ends, so that a run with more
    iterations is another run. `stretch`: the options that give the same curve over a part of the iterations."""

    make: Callable[..., Factor]
    ends: bool = False
    stretch: Stretch = lambda options, part: {}


def part_of(count: int, part: float) -> int:
    """A part of a number of iterations, one at least."""
    return max(1, round(part * count))


def _stretch_exp(options: dict[str, Any], part: float) -> dict[str, Any]:
    power = math.log(options["gamma"]) / part
    return {"gamma": math.exp(min(max(power, -700.0), 700.0))}  # which stays a number above 0


SCHEDULES: dict[str, ScheduleEntry] = {
    "constant": ScheduleEntry(constant),
    "step": ScheduleEntry(step, stretch=lambda options, part: {"every": part_of(options["every"], part)}),
    "multistep": ScheduleEntry(
        multistep, stretch=lambda options, part: {"at": [part_of(at, part) for at in options["at"]]}
    ),
    "cosine": ScheduleEntry(cosine, ends=True),
    "plateau": ScheduleEntry(plateau, stretch=lambda options, part: {"window": part_of(options["window"], part)}),
    "exp": ScheduleEntry(exp, stretch=_stretch_exp),
    "inv": ScheduleEntry(inv, stretch=lambda options, part: {"gamma": options["gamma"] / part}),
    "poly": ScheduleEntry(poly, ends=True),
    "sigmoid": ScheduleEntry(
        sigmoid,
        stretch=lambda options, part: {"every": part_of(options["every"], part), "slope": options["slope"] / part},
    ),
}
FACTORIES = {name: entry.make for name, entry in SCHEDULES.items()}


class ScheduleSection(Section):
    """The keys that every schedule has."""

    name: Annotated[str, one_of(SCHEDULES, "a schedule")] = option(
        "constant", f"how the learning rate changes: {', '.join(SCHEDULES)}"
    )
    warmup: int = option(0, "rise linearly over the first n iterations", ge=0)

    @property
    def entry(self) -> ScheduleEntry:
        return SCHEDULES[self.name]

    @property
    def options(self) -> dict[str, Any]:
        return select_options(self, self.entry.make)


if TYPE_CHECKING:
    ScheduleOptions = ScheduleSection
else:
    ScheduleOptions = make_section("ScheduleOptions", ScheduleSection, FACTORIES)


class Schedule:
    """The learning rate of each iteration; only the plateau rule remembers anything."""

    def __init__(self, options: ScheduleSection, lr: float, iterations: int) -> None:
        self.lr, self.iterations, self.warmup = lr, iterations, options.warmup
        self.factor = options.entry.make(**options.options)

    def rate(self, iteration: int, until: float = 1.0) -> float:
        """The learning rate of an iteration; of parameters that learn in a part of the iterations alone, `until`."""
        iterations = self.iterations if until == 1 else part_of(self.iterations, until)
        if until < 1 and iteration >= iterations:
            return 0.0
        rate = self.lr * self.factor(iteration, iterations)
        if iteration < self.warmup:
            rate *= (iteration + 1) / self.warmup
        return rate

    def observe(self, loss: float) -> None:
        """Takes in the training loss of an iteration."""
        if isinstance(self.factor, Plateau):
            self.factor.observe(loss)

    def state(self) -> dict[str, Any]:
        remembered = self.factor if isinstance(self.factor, Plateau) else Plateau()
        return {key: getattr(remembered, key) for key in REMEMBERED}

    def load_state(self, state: dict[str, Any]) -> None:
        if isinstance(self.factor, Plateau):
            for key in REMEMBERED:
                setattr(self.factor, key, state[key])


REMEMBERED = ("drops", "total", "count", "previous")  # in state.json of a checkpoint, whatever the schedule


def _power(base: float, exponent: float) -> float:
    """base ^ exponent; a learning rate that grows beyond all numbers is infinite, which the loss then shows."""
    try:
        return float(base**exponent)
    except (OverflowError, ZeroDivisionError):
        return math.inf
