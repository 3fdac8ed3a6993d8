"""Memory and seconds of a whole model's step, from those of a few of its layers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...config import Config
from ...memory.chain_plan import ChainPlan, Costs, may_leave
from ...passes.planning.cost_model import Cost
from ...passes.planning.devices import Device
from ...reporting.report import Report
from ...runtime.memory_simulation import simulate
from .fake_steps import FakeStep, StreamedStep, checkpointed_step, fake_device
from .layer_stacks import Stack, checkpointed, stack_of
from .plan_levels import Level, levels_of
from .sources import PlannedModel
from .step_memory import StepMemory
from .training import SteadyBytes, freeze, state_of

Progress = Callable[[str], None]
# bytes per second and direction between a GPU and its host, sustained: PCIe of generation 3, 4 and 5
HOST_LINK = {7: 12e9, 8: 25e9, 9: 50e9, 10: 50e9, 12: 50e9}


@dataclass(frozen=True)
class Setting:
    """A step to plan for.

    batch, tokens  sequences, and tokens of each
    dtype          of the weights; None leaves them as the source has them
    trained        see `training.freeze`
    optimizer      a name of `training.OPTIMIZERS`
    shards         devices that share weights, gradients and the optimizer's state
    chunk_size     tokens per chunk; None lets each sweep choose
    """

    source: PlannedModel
    device: Device
    tokens: int
    batch: int = 1
    dtype: torch.dtype | None = None
    trained: str = "full"
    optimizer: str = "adamw"
    shards: int = 1
    chunk_size: int | None = None

    def model(self) -> tuple[nn.Module, tuple, dict]:
        """Build the whole model on ``meta``, ready to train, and its inputs."""
        model, args, kwargs = self.source.make(self.batch, self.tokens)
        dtype = self.dtype or self.source.dtype
        model = model if dtype is None else model.to(dtype)
        freeze(model, stack_of(model), self.trained)
        return model, args, kwargs

    @functools.cached_property
    def stack(self) -> Stack | None:
        return stack_of(self.source.make(self.batch, self.tokens)[0])

    @functools.cached_property
    def state(self) -> SteadyBytes:
        return state_of(self.model()[0], self.stack, self.optimizer, self.shards)

    @property
    def config(self) -> Config:
        """The options of a step that streams."""
        name = self.device.name if self.device.kind == "cuda" else None
        return Config(device=name, chunk_size=self.chunk_size)

    def depths(self) -> tuple[int, ...]:
        return (0,) if self.stack is None else self.stack.depths()

    def step(self, layers: int, checkpoint: bool = False) -> FakeStep:
        """Build the step of a model of ``layers`` layers, or of all if there is no stack."""
        model, args, kwargs = self.model()
        if self.stack is not None:
            self.stack.shortened(model, layers)
            if checkpoint:
                checkpointed(model, self.stack)
        rows = self.batch * self.tokens
        return FakeStep.of(model, args, kwargs, rows, fake_device(self.device))

    def periods_missing(self) -> int:
        """Count the periods of the stack that the deeper of the simulated models lacks."""
        if self.stack is None:
            return 0
        return (self.stack.depth - self.depths()[-1]) // self.stack.period


@dataclass(frozen=True)
class Prediction:
    """Memory and seconds of a step.

    name     of the way to run it
    peak     bytes above weights and gradients
    seconds  by the cost model, None where they are not known
    cost     the same, term by term
    options  of ``torch.compile`` that choose this way
    host     bytes of layer inputs that wait in host memory
    """

    name: str
    peak: int
    seconds: float | None
    cost: Cost | None = None
    options: tuple[tuple[str, object], ...] = ()
    host: int = 0


def checkpointing(setting: Setting, progress: Progress) -> Prediction:
    """Estimate plain checkpointing of every layer, or of none where there is no stack. Raises the errors of
    eager autograd on fake tensors."""
    measured = []
    for layers in setting.depths():
        progress(f"eager, {layers} layers checkpointed" if layers else "eager")
        measured.append(checkpointed_step(setting.step(layers, checkpoint=True), setting.device))
    (less, little), (more, much) = measured[0], measured[-1]
    missing = setting.periods_missing()
    memory = more.deeper(missing * (more.saved - less.saved))
    cost = much + (much + little * -1) * missing
    name = "eager" if setting.stack is None else "checkpointing"
    return Prediction(name, memory.peak, cost.seconds, cost)


class Streaming:
    """All plans of one setting. A step is compiled for one or two depths, and simulated by each plan asked
    for. Raises ValueError if nothing streams."""

    def __init__(self, setting: Setting, progress: Progress):
        self.setting, self.progress = setting, progress
        self.steps = []
        for layers in setting.depths():
            progress(f"compiling {layers} layers" if layers else "compiling")
            self.steps.append(StreamedStep(setting.step(layers), setting.config))
        self.deepest = self.steps[-1]
        self.missing = setting.periods_missing()

    @functools.cached_property
    def added(self) -> slice:
        """The regions of the deeper model that the other lacks: those of one period."""
        less, more = ([signature(c) for c in step.plans.costs] for step in (self.steps[0], self.deepest))
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(less, more)))
        return slice(same, same + len(more) - len(less))

    @functools.cached_property
    def levels(self) -> list[Level]:
        return levels_of(self.deepest.plans.costs)

    @functools.cached_property
    def default(self) -> Prediction:
        """The default plan: layer inputs wait on the device, and no other value is kept."""
        return self.predicted("streambp", lambda step: plan_of(step), self.growth(plan_of))

    @functools.cached_property
    def offloaded(self) -> Prediction:
        """The plan whose layer inputs wait in host memory."""
        growth = self.growth(offloading)
        return self.predicted("streambp, offload", offloading, growth, (("offload", True),))

    @functools.cached_property
    def rounded(self) -> Prediction:
        """The plan whose layer inputs wait in 8 bits a number: gradients are not exact."""
        growth = self.growth(rounding)
        return self.predicted("streambp, 8 bits", rounding, growth, (("lossy", True),))

    def shorter(self, part: int) -> Prediction:
        """Estimate the offloaded plan with chunks whose widest moment takes ``1 / part`` of the default
        bytes."""

        def plan(step: StreamedStep) -> ChainPlan:
            widest = max(c.widest for c in step.plans.costs)
            return offloading(step).with_chunks(max(1, widest // part))

        return self.predicted(f"streambp, offload, chunks 1/{part}", plan, self.growth(offloading))

    def keeping(self, count: int) -> Prediction:
        """Estimate the plan that keeps the first ``count`` levels of values in all layers."""

        def plan(step: StreamedStep) -> ChainPlan:
            counts = [sum(i in level.regions for level in self.levels[:count]) for i in self.regions()]
            return plan_of(step).keeping(counts)

        kept = sum(level.bytes_in(self.regions()[self.added]) for level in self.levels[:count])
        return self.predicted(f"streambp, {count} kept", plan, self.growth(plan_of) + kept)

    def regions(self) -> range:
        return range(len(self.deepest.plans.costs))

    def growth(self, plan: Callable[[StreamedStep], ChainPlan]) -> int:
        """Compute the bytes that one more period saves by a plan."""
        if not self.missing:
            return 0
        saved = []
        for step, layers in zip(self.steps, self.setting.depths()):
            self.progress(f"simulating {layers} layers")
            saved.append(step.memory(plan(step)).saved)
        return saved[-1] - saved[0]

    def predicted(
        self,
        name: str,
        plan: Callable[[StreamedStep], ChainPlan],
        growth: int,
        options: tuple[tuple[str, object], ...] = (),
    ) -> Prediction:
        self.progress(f"simulating {name}")
        chosen = plan(self.deepest)
        memory: StepMemory = self.deepest.memory(chosen).deeper(self.missing * growth)
        costs = self.deepest.costs(chosen)
        forward, backward = (self.whole([pair[i] for pair in costs]) for i in (0, 1))
        host = self.bytes_on_host(chosen)
        waiting = sum(self.waiting(host, part.seconds) for part in (forward, backward))
        seconds = forward.seconds + backward.seconds + waiting
        return Prediction(name, memory.peak, seconds, forward + backward, options, host)

    def whole(self, costs: Sequence[Cost]) -> Cost:
        """Compute the cost of all regions of the whole model, from those of the deeper simulated one."""
        return sum(costs, Cost()) + sum(costs[self.added], Cost()) * self.missing

    def bytes_on_host(self, plan: ChainPlan) -> int:
        """Count the bytes of the whole model's layer inputs that wait in host memory."""
        costs = self.deepest.plans.costs
        sizes = [c.handed_on if i in plan.offloaded else 0 for i, c in enumerate(costs)]
        return sum(sizes) + self.missing * sum(sizes[self.added])

    def waiting(self, moved: int, seconds: float) -> float:
        """Compute the seconds that ``moved`` bytes travel longer than the device computes."""
        major = (self.setting.device.capability or (9, 0))[0]
        return max(0.0, moved / HOST_LINK.get(major, HOST_LINK[8]) - seconds)


def plan_of(step: StreamedStep) -> ChainPlan:
    return ChainPlan.default(len(step.plans.costs))


def offloading(step: StreamedStep) -> ChainPlan:
    return plan_of(step).offloading(may_leave(step.plans.costs))


def rounding(step: StreamedStep) -> ChainPlan:
    return plan_of(step).compressing(may_leave(step.plans.costs))


def report_of(setting: Setting, progress: Progress) -> Report:
    """Report a step of the whole model, all layers compiled and simulated. Raises ValueError if nothing
    streams."""
    layers = 0 if setting.stack is None else setting.stack.depth
    progress(f"compiling all {layers} layers" if layers else "compiling")
    step = StreamedStep(setting.step(layers), setting.config)
    progress("simulating the whole step")
    step.report.peak = simulate(*step.report.steps[0])
    return step.report


def signature(costs: Costs) -> tuple:
    """Return the properties by which the costs of two regions in different graphs are compared."""
    worth = tuple((v.bytes, v.seconds) for v in costs.worth_keeping)
    return costs.handed_on, costs.widest, costs.totals, worth
