"""Functions of picked rows: the proof that no row sees another, and their gradients.

A gradient is traced for three numbers of rows. Sizes that differ between the traces become expressions
of that number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import GraphModule

from ... import internals
from ...passes.ir import Mark
from ...passes.kernels.picked_rows import PICKED_FUNCTIONS, Picked, PickedFunction
from ...passes.token_propagation import Signatures, TokenPropagation
from .any_count import (
    COUNTS,
    NotForAnyCount,
    check_differentiable,
    for_any_count,
    gradients_at,
    most_alive,
)

streambp = torch.ops.streambp


class NotRowByRow(Exception):
    """Raised with the reason why operations on picked rows are no function of single rows."""


def register(found: PickedFunction, fakes: Sequence[torch.Tensor]) -> str:
    """Enter a function into the table under a name of its contents, together with its gradients. One
    gradient function is for operands with rows, another for operands whose gradients are sums over rows.

    fakes  the operands

    Raises `NotRowByRow` if a row of the result depends on other picked rows, or if an operator has no
    gradient.
    """
    described = [f"{tuple(x.shape)}{x.dtype}{x.device}{x.requires_grad}" for x in fakes]
    text = f"{found.module.code}{found.operands}{found.results}{described}"
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    if name not in PICKED_FUNCTIONS:
        found = replace(found, width=width_if_row_by_row(found, fakes))
        try:
            check_differentiable(found.module)
            real = with_gradients(found, fakes)
        except (NotForAnyCount, NotImplementedError) as error:
            raise NotRowByRow(str(error)) from error
        for kind, wanted in (
            ("rows", [i for i in real if found.operands[i].dims]),
            ("sums", [i for i in real if not found.operands[i].dims]),
        ):
            if wanted:
                PICKED_FUNCTIONS[f"{name}_{kind}"] = gradient(found, fakes, wanted)
        PICKED_FUNCTIONS[name] = replace(found, wanted=tuple(real))
    return name


def with_gradients(found: PickedFunction, fakes: Sequence[torch.Tensor]) -> list[int]:
    """Find the operands that want gradients and get some. Operands that are detached inside, or only
    compared, get none."""
    wanted = [i for i, x in enumerate(fakes) if x.requires_grad and x.dtype.is_floating_point]
    with internals.FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        given = [example_of(how, x, COUNTS[-1]) for how, x in zip(found.operands, fakes)]
        given = [x.requires_grad_(i in wanted) for i, x in enumerate(given)]
        result = found.module(COUNTS[-1], *given)[0]
        if not result.requires_grad:
            return []
        grads = torch.autograd.grad(
            result, [given[i] for i in wanted], torch.empty_like(result), allow_unused=True
        )
    return [i for i, grad in zip(wanted, grads) if grad is not None]


def example_of(how: Picked, fake: torch.Tensor, count: int) -> torch.Tensor:
    """Build an operand as the graph of a function reads it, for ``count`` picked rows."""
    shape = [count, *fake.shape[len(how.dims) :]] if how.dims else list(fake.shape)
    return torch.empty([int(s) for s in shape], dtype=fake.dtype, device=fake.device)


def width_if_row_by_row(found: PickedFunction, fakes: Sequence[torch.Tensor]) -> int:
    """Compute the peak memory of a function, in bytes per picked row. Raises `NotRowByRow` where a row of the
    result depends on other picked rows."""
    with internals.FakeTensorMode(allow_non_fake_inputs=True):
        given = [example_of(how, x, COUNTS[-1]) for how, x in zip(found.operands, fakes)]
        table = internals.decompositions()

        def run(*operands: torch.Tensor) -> torch.Tensor:
            return found.module(COUNTS[-1], *operands)[0]

        module = internals.make_fx(run, decomposition_table=table)(*given)
    places = zip(module.graph.find_nodes(op="placeholder"), found.operands)
    marks = {n: (Mark(0),) for n, how in places if how.dims}
    propagation = TokenPropagation(module.graph, marks, Signatures(module.graph))
    for node in propagation.met():
        if node in propagation.missing or propagation.loses(node):
            raise NotRowByRow(f"what {node.target} does to rows is unknown")
        if node in propagation.signatures and not propagation.maps_rows(node):
            raise NotRowByRow(f"{node.target} lets picked rows see one another")
    result = module.graph.find_nodes(op="output")[0].args[0]
    if propagation.of(result) != {0: Mark(0)}:
        raise NotRowByRow("the result has no row for each picked row")
    return most_alive(list(module.graph.nodes)) // COUNTS[-1]


def gradient(found: PickedFunction, fakes: Sequence[torch.Tensor], wanted: Sequence[int]) -> PickedFunction:
    """Build the function for the gradients of some operands. It reads the gradient of the result, and all
    operands."""
    (result,) = found.results
    traces = [traced(found, fakes, wanted, count) for count in COUNTS]
    try:
        module = for_any_count([trace.graph for trace in traces])
    except (NotForAnyCount, ValueError) as error:
        raise NotRowByRow(f"the gradient differs with the number of rows: {error}") from error
    return PickedFunction(
        module,
        (Picked(result.dims), *found.operands),
        tuple(
            Picked(found.operands[i].dims, constant_shape(found.operands[i], fakes[i]), fakes[i].dtype)
            for i in wanted
        ),
        more_alive(traces),
    )


def constant_shape(how: Picked, fake: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of an operand, with zeros for its leading sizes, which the mask has."""
    return (*(0 for _ in how.dims), *map(int, fake.shape[len(how.dims) :]))


def more_alive(traces: Sequence[GraphModule]) -> int:
    """Estimate the bytes that one more row takes at the widest moment. Values without rows (the gradient of
    a weight) are left out."""
    alive = [most_alive(list(trace.graph.nodes)) for trace in traces]
    return max(0, alive[-1] - alive[0]) // (COUNTS[-1] - COUNTS[0])


def traced(
    found: PickedFunction, fakes: Sequence[torch.Tensor], wanted: Sequence[int], count: int
) -> GraphModule:
    """Trace the gradients for ``count`` rows."""
    (result,) = found.results

    def run(grad: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
        return gradients_at(lambda *given: found.module(count, *given)[0], operands, wanted, grad)

    with internals.FakeTensorMode(allow_non_fake_inputs=True):
        shape = [count, *(int(s) for s in result.shape[len(result.dims) :])]
        grad = torch.empty(shape, dtype=result.dtype, device=fakes[0].device)
        operands = [example_of(how, x, count) for how, x in zip(found.operands, fakes)]
        module = internals.make_fx(run, decomposition_table=internals.decompositions())(grad, *operands)
    module.graph.eliminate_dead_code()
    return module


def keep_operands(ctx, inputs: tuple, output: list[torch.Tensor]) -> None:
    operands, ctx.function = inputs
    ctx.save_for_backward(*operands)


def gradients(ctx, grads: list[torch.Tensor]):
    """Compute the gradients of a function of picked rows: one call for rows, and one for sums."""
    mask, *operands = ctx.saved_tensors
    found, given = PICKED_FUNCTIONS[ctx.function], [mask, grads[0], *operands]
    results: list[torch.Tensor | None] = [None] * (len(operands) + 1)
    for kind, call in (("rows", streambp.picked_rows), ("sums", streambp.picked_sums)):
        places = [i for i in found.wanted if bool(found.operands[i].dims) == (kind == "rows")]
        for i, value in zip(places, call(given, f"{ctx.function}_{kind}") if places else ()):
            results[i + 1] = value
    return results, None


torch.library.register_autograd("streambp::picked_rows", gradients, setup_context=keep_operands)
