"""One setup trained eagerly, with activation checkpointing and streamed: are gradients equal, what streams,
which collectives run, and how much memory does a step take?"""

from __future__ import annotations

import enum
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ..memory import held_in, profiled
from .decoder import VOCABULARY

STREAMING = {"backend": "streambp", "options": {"chunk_size": 16}}
COLLECTIVES = {
    "c10d::allreduce_": "all-reduce",
    "c10d::_allgather_base_": "all-gather",
    "c10d::allgather_": "all-gather",
    "c10d::allgather_into_tensor_coalesced_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::reduce_scatter_": "reduce-scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "c10d::reduce_": "reduce",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "c10d::alltoall_": "all-to-all",
    "c10d::alltoall_base_": "all-to-all",
}


class Way(enum.Enum):
    """How a setup is trained."""

    EAGER = "eager"
    CHECKPOINTED = "checkpointed"
    STREAMED = "streamed"

    def compile(self, function: Callable, **options: object) -> Callable:
        """The function as it is, or compiled if this way is to stream."""
        return streamed(function, **options) if self is Way.STREAMED else function


def streamed(function: Callable, **options: object) -> Callable:
    """``torch.compile`` with this project's backend and short chunks."""
    return torch.compile(function, **STREAMING, **options)


@dataclass(frozen=True)
class Job:
    """A setup that is ready to train.

    step    trains on sequences of so many tokens: forward and backward
    values  what must not depend on the way: gradients, or weights after optimizer steps
    run     the model as it is called, where that is of use
    """

    step: Callable[[int], None]
    values: Callable[[], dict[str, Tensor]]
    run: Callable | None = None


Setup = Callable[[Way], Job]


@dataclass(frozen=True)
class Row:
    """What became of a setup.

    error        largest relative error of a parameter's values against the eager way
    layers       do all layers stream?
    head         does the head stream together with its loss?
    graphs       Dynamo graphs over all lengths
    bodies       chunk bodies compiled over all lengths
    collectives  of one streamed step, by name
    expected     of one eager step
    peak         bytes of a streamed step above what was held before it
    checkpointed the same with activation checkpointing
    notes        every warning, once
    """

    error: float
    layers: bool
    head: bool
    graphs: int
    bodies: int
    collectives: dict[str, int]
    expected: dict[str, int]
    peak: int
    checkpointed: int
    notes: tuple[str, ...]

    def record(self) -> dict:
        return asdict(self)


def measured(
    setup: Setup, lengths: Sequence[int] = (97,), vocabulary: int = VOCABULARY, truth: Setup | None = None
) -> Row:
    """The `Row` of a setup, over sequences of these lengths.

    truth  a setup whose eager values are the right ones as well
    """
    eager, checkpointed = (trained(setup, way, lengths) for way in (Way.EAGER, Way.CHECKPOINTED))
    with reported() as reports, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch._dynamo.reset()
        counters.clear()
        ours = trained(setup, Way.STREAMED, lengths)
    right = [eager] if truth is None else [eager, trained(truth, Way.EAGER, lengths)]
    regions = [r for report in reports for r in report.regions]
    return Row(
        error=max(worst_error(ours.values, each.values) for each in right),
        layers={r.streamed is not None for r in regions if attends(r)} == {True},
        head=any(r.streamed is not None and is_head(r, vocabulary) for r in regions),
        graphs=sum(len(report.split) for report in reports),
        bodies=counters["streambp"]["bodies"],
        collectives=dict(ours.collectives),
        expected=dict(eager.collectives),
        peak=ours.peak,
        checkpointed=checkpointed.peak,
        notes=tuple(
            dict.fromkeys(without_folder(text) for w in caught if is_said_by_us(text := str(w.message)))
        ),
    )


@dataclass(frozen=True)
class Trained:
    values: dict[str, Tensor]
    collectives: Counter
    peak: int


def trained(setup: Setup, way: Way, lengths: Sequence[int]) -> Trained:
    """Train on all lengths, and once more on the first, watched."""
    job = setup(way)
    for length in lengths:
        job.step(length)
    results = profiled(lambda: job.step(lengths[0]))
    found = Counter(COLLECTIVES[e.name()] for e in results.events() if e.name() in COLLECTIVES)
    values = {n: v.detach().clone() for n, v in job.values().items()}
    return Trained(values, found, max(held for _, held in held_in(results)))


class reported:
    """Collects the reports of all that this backend compiles inside."""

    def __enter__(self) -> list:
        from streambp_compile import backend

        self.module, self.before, reports = backend, backend.Report, []

        def report():
            reports.append(self.before())
            return reports[-1]

        backend.Report = report
        return reports

    def __exit__(self, *exception: object) -> None:
        self.module.Report = self.before


def attends(region) -> bool:
    """Has a region attention, as an operator or written out with its log-sum-exps (rings)?"""
    calls = [str(n.target) for n in region.split.graph.nodes if n.op == "call_function"]
    return any("attention" in call or "logsumexp" in call for call in calls)


def is_head(region, vocabulary: int) -> bool:
    """Does a region make logits, none of which leave it?"""
    outputs = next(n for n in region.split.graph.nodes if n.op == "output").all_input_nodes
    leave = any(vocabulary in shape_of(n)[1:] for n in outputs)
    made = [shape_of(n) for n in region.streamed.joint.graph.nodes if "mm" in str(n.target)]
    own = {vocabulary, *(vocabulary // parts for parts in (2, 4))}  # of a process that has a part of it
    return not leave and any(isinstance(size, int) and size in own for shape in made for size in shape)


def without_folder(text: str) -> str:
    """A message, in which files of packages are named by their package."""
    return re.sub(r"\S*/site-packages/", "", text)


def is_said_by_us(text: str) -> bool:
    """Leaves out what only says that the machine is slow."""
    return "streambp" in text and "seconds and is still" not in text


def shape_of(node) -> tuple:
    value = node.meta.get("val", node.meta.get("example_value"))
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def worst_error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest relative error; infinite where names differ."""
    if found.keys() != truth.keys():
        return float("inf")
    return max(((found[n] - v).norm() / v.norm().clamp_min(1e-30)).item() for n, v in truth.items())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a module's parameters by name, whole where they are sharded."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
