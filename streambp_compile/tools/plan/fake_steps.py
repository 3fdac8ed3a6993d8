"""One step of a model on fake tensors: streamed by any plan, or by plain checkpointing."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map_only

from ... import internals
from ...backend import Chain
from ...config import Config
from ...dynamo.reading.values import fake_of
from ...memory.chain_plan import ChainPlan
from ...memory.memory_limits import Budget
from ...memory.planned_chain import Links, PlannedChain
from ...passes.ir import is_tensor, outputs_of, value_of
from ...passes.kernels.simulated_device import cpu_stands_for_cuda
from ...passes.phases import summary
from ...passes.planning.chunk_length import program_cost
from ...passes.planning.cost_model import Cost, Work
from ...passes.planning.devices import Device
from ...regions.linked_regions import Cut
from ...reporting.report import Report
from ...runtime.memory_simulation import main_device, simulate
from .eager_work import EagerWork
from .step_memory import StepLedger, StepMemory

# bytes moved per element of a float32 total: zeroed, read and cast to half precision, added to the gradient
HANDED = 16


@contextlib.contextmanager
def simulating(device: Device) -> Iterator[None]:
    """Compile steps, inside the context, only for simulation on a device that need not exist."""
    on_gpu = device.kind == "cuda"
    stands = on_gpu and not torch.cuda.is_available()
    with contextlib.ExitStack() as stack:
        if stands:
            assert device.capability is not None
            stack.enter_context(cpu_stands_for_cuda(device.capability))
        if stands or not on_gpu:
            stack.enter_context(internals.without_code(like_triton=stands))
        stack.enter_context(internals.without_device())
        yield


def fake_device(device: Device) -> str:
    """Choose the device type of fake tensors: that of the device, if this build of torch can create them."""
    return "cuda" if device.kind == "cuda" and torch.cuda.is_available() else "cpu"


def on_device(model: nn.Module, mode, device: str) -> nn.Module:
    """Replace all tensors of a model built on ``meta`` by fake tensors of ``mode`` on a device."""
    made: dict[int, nn.Parameter] = {}
    with mode:
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:  # tied weights stay one
                    made.setdefault(id(weight), nn.Parameter(fake(weight, device), weight.requires_grad))
                    module._parameters[name] = made[id(weight)]
            for name, value in module._buffers.items():
                if value is not None:
                    module._buffers[name] = fake(value, device)
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    setattr(module, name, fake(value, device))
    return model


def fake(value: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


@dataclass(frozen=True)
class FakeStep:
    """A model and its inputs as fake tensors; a call computes the loss.

    rows  tokens of the step, batch included
    """

    mode: internals.FakeTensorMode
    model: nn.Module
    args: tuple
    kwargs: dict
    rows: int

    @staticmethod
    def of(model: nn.Module, args: tuple, kwargs: dict, rows: int, device: str) -> FakeStep:
        mode = internals.FakeTensorMode(allow_non_fake_inputs=True)
        on_device(model, mode, device)
        with mode:
            args, kwargs = tree_map_only(torch.Tensor, lambda v: fake(v, device), (args, kwargs))
        return FakeStep(mode, model, args, kwargs, rows)

    def __call__(self) -> object:
        return loss_of(self.model(*self.args, **self.kwargs))


def loss_of(output: object) -> object:
    """Find the loss in a model's result: ``output.loss``, ``output["loss"]``, a tuple's first value, or
    itself."""
    found = getattr(output, "loss", None)
    if found is None:
        found = output.get("loss") if isinstance(output, dict) else output
    return found[0] if isinstance(found, (tuple, list)) else found


def check_loss(module: GraphModule) -> None:
    """Raise ValueError if the graph of a step does not return one number."""
    results = [fake_of(n) for n in outputs_of(module) if isinstance(n, Node)]
    if len(results) != 1 or results[0] is None or results[0].dim() > 0:
        raise ValueError(
            "The module does not return a loss, which is one number. Return the loss, a mapping with a loss, "
            "or an object with .loss."
        )


@contextlib.contextmanager
def errors_of_models() -> Iterator[None]:
    """Convert errors of a model while it is captured to a ValueError that explains them."""
    try:
        yield
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, ValueError):
            raise inner from None
        raise ValueError(
            f"The step could not be captured as one graph ({summary(error)}). Print "
            "streambp_compile.explain(model, inputs) for all graphs, and remove what breaks them."
        ) from error


class ProbedChain(Chain):
    """A chain that exposes its `PlannedChain`."""

    plans: PlannedChain | None = None

    def planned(self, links: Links, link: Callable, cut: Cut) -> tuple[Links, Callable]:
        self.plans = PlannedChain(links, link, Budget(0), cut.axes, self.placeholders)
        return links, self.plans.call_by(ChainPlan.default(len(links)))


class StreamedStep:
    """A step that streams: compiled once, and simulated by any plan. Raises ValueError if no region of it
    streams."""

    def __init__(self, step: FakeStep, config: Config):
        self.report = Report()
        chains: list[ProbedChain] = []

        def backend(module, inputs):
            check_loss(module)
            chains.append(ProbedChain(module, inputs, config, self.report))
            chains[-1].compiled()
            return lambda *_: (torch.zeros(()),)

        internals.ignore_library_logging()  # this package may have been imported before the libraries
        torch.compiler.reset()
        with step.mode, warnings.catch_warnings(), errors_of_models():
            warnings.simplefilter("ignore")  # the report holds them
            torch.compile(step, backend=backend, fullgraph=True)()
        plans = chains[0].plans if chains else None
        if plans is None or not any(region.streamed for region, _ in plans.links):
            reasons = [str(r.refusal) for r in self.report.regions if r.refusal]
            reason = next(iter(reasons), "No region of its graph has a sequence of tokens")
            raise ValueError(f"No part of this model streams, so there is nothing to plan. {reason}.")
        self.plans, self.inputs = plans, self.report.steps[0][1]
        self.known: dict[ChainPlan, StepMemory] = {}

    def memory(self, plan: ChainPlan) -> StepMemory:
        if plan not in self.known:
            self.known[plan] = self.simulated(plan)
        return self.known[plan]

    def simulated(self, plan: ChainPlan) -> StepMemory:
        ledgers: list[StepLedger] = []

        def counting(device: str) -> StepLedger:
            ledgers.append(StepLedger(device))
            return ledgers[-1]

        simulate(self.plans.call_by(plan), self.inputs, counting=counting)
        return ledgers[0].memory()

    def costs(self, plan: ChainPlan) -> list[tuple[Cost, Cost]]:
        """Estimate the seconds of the forward and of the backward, region by region."""
        return [
            (cost_of(region.streamed, "forward"), cost_of(region.streamed, "backward"))
            for region, _ in self.plans.by(plan)
        ]

    def refusals(self) -> list[str]:
        return [str(r.refusal) for r in self.report.regions if r.refusal is not None]


def cost_of(region, direction: str) -> Cost:
    """Estimate the seconds of one direction of a region; none for an unchunked region."""
    schedule = getattr(region, direction) if region is not None else None
    if schedule is None:
        return Cost()
    device = region.device
    costs = program_cost(schedule.program, region.analysis, schedule.chunks, device)
    handed = sum(value_of(n).numel() for s in schedule.program.sweeps for n in s.sums if is_tensor(n))
    return sum(costs, Cost()) * region.turns + Cost(totals=HANDED * handed / device.bandwidth)


def checkpointed_step(step: FakeStep, device: Device) -> tuple[StepMemory, Cost]:
    """Simulate a step of eager autograd: its memory, and its seconds by the device's fastest attention
    kernel."""
    memory, work = counted_step(step)
    kernels = dict(device.attention) or {"flash": ()}
    costs = [work.cost(step.rows, device, kernel) for kernel in kernels]
    return memory, min(costs, key=lambda cost: cost.seconds)


def counted_step(step: FakeStep) -> tuple[StepMemory, Work]:
    """Simulate a step of eager autograd: its memory and its work."""
    ledger, counted = StepLedger(main_device(list(step.model.parameters()))), EagerWork(step.rows)
    with step.mode:
        for parameter in step.model.parameters():
            ledger.know(parameter)
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                ledger.know(parameter.grad)
        given = [v for v in (*step.args, *step.kwargs.values()) if isinstance(v, torch.Tensor)]
        for value in (*given, *step.model.buffers()):
            ledger.know(value)
        with ledger, counted:
            loss = step()
            ledger.forward_ended()
            loss.backward()
    return ledger.memory(), counted.work()
