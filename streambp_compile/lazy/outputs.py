"""Outputs that may have no reader: tensors that are computed when they are first read.

``model(**batch)`` of Hugging Face returns logits beside the loss. As an output of the compiled graph
they would take ``[B, T, V]``, and autograd would pass back a zero gradient of the same size. The backend
returns a `LazyOutput` instead, whose shape, dtype and device are known. Operations on it are recorded
while their result is as wide as logits (slices, a temperature, ``log_softmax``), and computed in one
pass over tokens when the result is small (log-probabilities of labels, an entropy, an argmax, a loss).
Any other operation reads the whole tensor. In every case, values and gradients are those of eager code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_leaves

from .. import internals
from ..internals import DisableTorchFunctionSubclass
from ..passes.ir import bytes_of
from ..passes.rules.forward import Part, is_pointwise, part_of
from .expressions import (
    DUNDERS,
    FAKES,
    NARROW,
    Expression,
    Given,
    LazyRegion,
    Modes,
    Op,
    Source,
    functions,
    mapped,
    ordered,
    recorded,
    sources,
    streamed,
    whole,
)
from .fingerprints import TensorContents
from .loops import is_piece, joined, reads_all_pieces

DESCRIPTIONS = {
    torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__,
    torch.Tensor.device.__get__,
    torch.Tensor.layout.__get__,
    torch.Tensor.ndim.__get__,
    torch.Tensor.is_sparse.__get__,
    torch.Tensor.is_cuda.__get__,
    torch.Tensor.is_leaf.__get__,
    torch.Tensor.is_quantized.__get__,
    torch.Tensor.is_meta.__get__,
    torch.Tensor.is_nested.__get__,
    torch.Tensor.itemsize.__get__,
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.stride,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    torch.Tensor.storage_offset,
    torch.Tensor.is_contiguous,
    torch.Tensor._base.__get__,
}
AS_FUNCTIONS = {torch.Tensor.data.__get__: torch.Tensor.detach, torch.Tensor.__iter__: torch.Tensor.unbind}


WITH_INPUTS = {
    torch.autograd.grad: 1,
    torch.autograd.backward: 5,
    torch.Tensor.backward: 4,
}  # position of the argument that names the tensors to differentiate by


class LazyOutput(torch.Tensor):
    """A tensor that is computed when it is first read; `isinstance` of `torch.Tensor`.

    recorded  holds the expression of its value
    piece     one row block of several that a loop runs over: operations on it wait for the others
    family    lazy outputs that share its memory
    history   its gradient function when it was created: a different one later belongs to a custom
              autograd function which returned it
    """

    @staticmethod
    def __new__(cls, expression: Expression, piece: bool = False, family: list[weakref.ref] | None = None):
        holder = [expression]
        output = (
            Attached.apply(holder, *roots(expression)) if expression.fake.requires_grad else described(holder)
        )
        output.recorded, output.piece = holder, piece
        output.family = [] if family is None else family
        output.family.append(weakref.ref(output))
        output.history = gradient_function(output)
        return output

    @property
    def expression(self) -> Expression:
        return self.recorded[0]

    @property
    def cached(self) -> torch.Tensor | None:
        """The value, if it was computed."""
        return self.expression.cached

    def value(self) -> torch.Tensor:
        """Return the tensor itself, computed once: whole, or in one pass over tokens if it is small."""
        return value_of(self.expression, self.piece)

    @classmethod
    @torch.compiler.disable  # Dynamo breaks at these tensors, and must not trace the recording
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DESCRIPTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for output in tree_leaves((args, kwargs)):
            if isinstance(output, LazyOutput):
                follow_history(output)
        first = args[0] if args and isinstance(args[0], cls) else None
        if first is not None and first.cached is None:
            if func == torch.Tensor.requires_grad.__get__:
                return first.expression.fake.requires_grad
            if func == torch.Tensor.__repr__:
                return (
                    f"LazyOutput(shape={tuple(first.shape)}, dtype={first.dtype}, device={first.device}, not "
                    "computed)"
                )
            if func == torch.Tensor.register_hook and internals.is_fsdp_hook(args[-1]):
                return before_backward(first, args[-1])
        if func in WITH_INPUTS:
            refuse_uncomputed(func, args, kwargs)
        if first is not None and in_place(func):
            return changed(first, func, args, kwargs)
        # Autograd gives results of a custom forward a history of their own, which no expression has.
        result = None if internals.in_custom_forward() else record(func, args, kwargs)
        if result is not None:
            return iter(result) if func == torch.Tensor.__iter__ else result
        args, kwargs = values((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = values((args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        return self.value().detach().__reduce_ex__(protocol)


def refuse_uncomputed(func: Callable, args: tuple, kwargs: dict) -> None:
    """Raise RuntimeError for a gradient by logits that were never computed. A loss of them has streamed, and
    is no function of these tensors."""
    place = WITH_INPUTS[func]
    inputs = kwargs.get("inputs", args[place] if len(args) > place else None)
    for wanted in inputs if isinstance(inputs, (tuple, list)) else (inputs,):
        if isinstance(wanted, LazyOutput) and wanted.cached is None:
            raise RuntimeError(
                f"The gradient of logits of shape {tuple(wanted.shape)} was requested, but these logits "
                "were never computed, because the loss streams from the hidden states. Call "
                "logits.retain_grad() before the loss is computed; logits and gradient then take "
                f"{2 * bytes_of(wanted.expression.fake) / 2**20:.0f} MiB."
            )


def before_backward(output: LazyOutput, hook: Callable) -> object:
    """Register a hook that only announces the backward on all results of an output. The hook does not read
    the gradient, so nothing is computed for it."""
    for source in sources(output.expression):
        source.hooks.append(hook)
    with DisableTorchFunctionSubclass():
        return output.register_hook(hook)


def values(arguments: object) -> object:
    """Replace every LazyOutput in the arguments by its value."""
    return torch.utils._pytree.tree_map_only(LazyOutput, lambda t: t.value(), arguments)


def described(holder: list[Expression]) -> LazyOutput:
    fake = holder[0].fake
    return torch.Tensor._make_wrapper_subclass(
        LazyOutput,
        fake.shape,
        strides=fake.stride(),
        storage_offset=fake.storage_offset(),
        dtype=fake.dtype,
        device=fake.device,
    )


class Attached(torch.autograd.Function):
    """Connects a LazyOutput to the tensors that it depends on. It serves readers that ignore
    `__torch_function__` (custom autograd functions)."""

    @staticmethod
    def forward(ctx, holder: list[Expression], *inputs: torch.Tensor) -> LazyOutput:
        ctx.holder, ctx.inputs = holder, inputs
        return described(holder)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        expression, gradient = ctx.holder[0], values(gradient)

        def gradients() -> tuple[torch.Tensor | None, ...]:
            with torch.enable_grad():
                value = value_of(expression, False)
            return torch.autograd.grad(value, ctx.inputs, gradient, retain_graph=True, allow_unused=True)

        try:
            return None, *gradients()
        except (
            RuntimeError
        ):  # this backward already ran through the value, for another reader, and freed its graph
            for node in ordered([expression]):
                node.cached = None
            return None, *gradients()


class Reattached(torch.autograd.Function):
    """The value of a LazyOutput, with the history that autograd gave the LazyOutput."""

    @staticmethod
    def forward(ctx, output: LazyOutput) -> torch.Tensor:
        return output.value().detach()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def gradient_function(output: LazyOutput) -> object:
    with DisableTorchFunctionSubclass():
        return output.grad_fn


def follow_history(output: LazyOutput) -> None:
    """Read an output that a custom autograd function returned. Its gradient goes through that function, not
    through the expression."""
    history = gradient_function(output)
    if history is not output.history:
        value = Reattached.apply(output)
        output.recorded[0], output.history = Given.of(value), history
        output.recorded[0].cached = value


def roots(expression: Expression) -> list[torch.Tensor]:
    """List the outside tensors that an expression is differentiable by."""
    found: dict[int, torch.Tensor] = {}
    for node in ordered([expression]):
        for tensor in node.tensors():
            if tensor.requires_grad:
                found[id(tensor)] = tensor
    return list(found.values())


def lazy_output(
    region: LazyRegion,
    inputs: tuple,
    exposed: Sequence[bool],
    compute: Callable[[], torch.Tensor],
    sizes: tuple,
    like: torch.Tensor,
) -> LazyOutput:
    """Build the output of a lazy region.

    inputs   arguments of the region: tensors and sizes
    exposed  which of them the caller can write into (weights, not hidden states)
    compute  computes the value, whole
    sizes    its shape
    like     a fake of the same dtype, device and layout
    """
    with FAKES, torch.enable_grad():
        fake = torch.empty(
            sizes,
            dtype=like.dtype,
            device=like.device,
            requires_grad=like.requires_grad and torch.is_grad_enabled(),
        )
        fake = fake.clone()
    tensors = [(v, seen) for v, seen in zip(inputs, exposed) if isinstance(v, torch.Tensor)]
    contents = TensorContents.of([v for v, _ in tensors], [i for i, (_, seen) in enumerate(tensors) if seen])
    return LazyOutput(Source(fake, region, inputs, compute, Modes.now(like.device), contents))


def rows_of(logits: torch.Tensor, dim: int, start: int, stop: int) -> torch.Tensor:
    """Take rows of logits that were handed over in pieces. Operations on lazy ones wait for the others."""
    if not isinstance(logits, LazyOutput):
        return logits.narrow(dim, start, stop - start)
    rows = recorded(torch.narrow, (logits.expression, dim, start, stop - start), {}, logits.device)
    return LazyOutput(rows, True, logits.family)


def value_of(expression: Expression, piece: bool) -> torch.Tensor:
    if expression.cached is None:
        small = NARROW * expression.fake.numel() <= widest(expression)
        waits = piece and not reads_all_pieces(expression)
        expression.cached = (streamed if small and not waits else whole)([expression])[0]
    return expression.cached


def widest(expression: Expression) -> int:
    """Count the elements of the largest logits that an expression depends on; 0 if they exist anyway."""
    return max((s.fake.numel() for s in sources(expression) if s.cached is None), default=0)


def record(function: Callable, args: tuple, kwargs: dict) -> object:
    """Record or compute a function of lazy outputs; None if it must read their values."""
    function = AS_FUNCTIONS.get(function, function)
    if function not in functions():
        return None
    given: list[LazyOutput] = []
    foreign: list[Given] = []

    def expression(leaf: object) -> object:
        if isinstance(leaf, LazyOutput):
            given.append(leaf)
            return leaf.expression
        if isinstance(leaf, torch.Tensor):
            foreign.append(Given.of(leaf))
            return foreign[-1]
        return leaf

    if function is torch.Tensor.__getitem__:
        args = (args[0], by_number(args[1]))
    args, kwargs = mapped((args, kwargs), expression)
    if all(d.cached is not None for d in given):
        return None
    result = recorded(function, args, kwargs, given[0].device)
    if result is None:
        return None
    whole = joined(result) if is_joining(result) else None
    results = [whole or result] if isinstance(result, Expression) else list(result)
    same = next((d for d in given if d.expression is results[0]), None)
    if same is not None:
        return same
    piece = any(d.piece for d in given) and not is_joining(result) or is_piece(results[0])
    view = whole is None and shares_memory(results[0], given[0])  # a joined value is a copy
    width = max(map(widest, results))
    small = all(NARROW * r.fake.numel() <= width for r in results)
    if small and not (piece or view or whole is None and joins_pieces(result)):
        values = streamed(results)
    else:
        keep(foreign, width)
        values = [LazyOutput(r, piece, given[0].family if view else None) for r in results]
    return values[0] if isinstance(result, Expression) else type(result)(values)


def is_joining(result: object) -> bool:
    return isinstance(result, Op) and part_of(result) in (Part.STACK, Part.JOIN)


def joins_pieces(result: object) -> bool:
    """Does a result join all pieces of logits? It waits for what reads it: mostly a sum, in any order."""
    return is_joining(result) and reads_all_pieces(result)


def by_number(index: object) -> object:
    """Convert masks in an index to the numbers of the rows that they pick. A fake tensor could not tell how
    many these are."""
    found: list[object] = []
    for part in index if isinstance(index, tuple) else (index,):
        mask = (
            isinstance(part, torch.Tensor)
            and not isinstance(part, LazyOutput)
            and part.dtype is torch.bool
            and part.dim()
        )
        found += part.nonzero(as_tuple=True) if mask else [part]
    return tuple(found) if isinstance(index, tuple) or len(found) > 1 else found[0]


def shares_memory(result: Expression, operand: LazyOutput) -> bool:
    return result.fake.untyped_storage()._cdata == operand.expression.fake.untyped_storage()._cdata


def keep(foreign: list[Given], elements: int) -> None:
    """Guard tensors of an expression that is computed later against changes in place. They are copied, unless
    that costs as much as logits."""
    for given in foreign:
        given.keep(by_copy=NARROW * given.tensor.numel() <= elements)


def in_place(function: Callable) -> bool:
    name = getattr(function, "__name__", "")
    if name.startswith("__i"):
        return f"__{name[3:]}" in DUNDERS
    return name == "__setitem__" or name.endswith("_") and not name.endswith("__")


def changed(target: LazyOutput, function: Callable, args: tuple, kwargs: dict) -> object:
    """Apply an operation in place: the same object stands for another value from now on. Raises RuntimeError
    in the forward of an autograd function, whose gradient would be that of other logits."""
    if internals.in_custom_forward() and target.expression.fake.requires_grad:
        raise RuntimeError(
            f"A torch.autograd.Function changes logits of shape {tuple(target.shape)} in place, and these "
            "logits are computed when they are read. Return a new tensor from its forward, or call "
            "logits.retain_grad() before."
        )
    name = function.__name__
    plain = f"__{name[3:]}" if name.startswith("__i") else name.rstrip("_")
    unshared = target.cached is None and [r for r in target.family if r() is not None] == [
        weakref.ref(target)
    ]
    unshared = unshared and (
        torch.is_grad_enabled() or not target.expression.fake.requires_grad
    )  # without gradients enabled, gradients ignore such a write
    function_of = getattr(torch.Tensor, plain, None)
    if (
        unshared
        and callable(function_of)
        and not any(isinstance(a, torch.Tensor) and a.requires_grad and a is not target for a in args)
    ):
        result = record(function_of, args, kwargs)
        if isinstance(result, LazyOutput) and result.shape == target.shape and is_changed(result.expression):
            same = result.dtype == target.dtype
            target.recorded[0] = (
                result.expression
                if same
                else recorded(torch.Tensor.to, (result.expression, target.dtype), {}, target.device)
            )
            return target
    family = [d for d in (r() for r in target.family) if d is not None]
    overwritten(family)
    args, kwargs = values((args, kwargs))
    done = function(*args, **kwargs)
    return target if done is target.cached else done


def is_changed(expression: Expression) -> bool:
    """Does an expression have new numbers in every entry? Copies and views do not: a write into them stays
    tied to the old value."""
    return isinstance(expression, Op) and is_pointwise(expression) and part_of(expression) is not Part.COPY


def overwritten(family: list[LazyOutput]) -> None:
    """Read lazy outputs that share memory, as views of one another like those of eager code. Values recorded
    from them earlier keep the old contents."""
    read = whole([d.expression for d in family])
    memory = read[0].untyped_storage()._cdata
    for node in ordered([d.expression for d in family]):
        if isinstance(node.cached, torch.Tensor) and node.cached.untyped_storage()._cdata == memory:
            node.cached = None
    for member, value in zip(family, read):
        member.recorded[0] = Given(member.expression.fake, value)
        member.recorded[0].cached = value
