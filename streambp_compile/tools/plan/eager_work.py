"""The work of a step of eager autograd, counted operator by operator on fake tensors."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

from ... import internals
from ...passes.ir import EVERYWHERE, bytes_of
from ...passes.planning.cost_model import BACKWARD, Work
from ...passes.rules import TABLE
from ...passes.rules.facets import CostClass, Form


class EagerWork(internals.TorchDispatchMode):
    """The work of every operator that is called, as one sweep of one chunk.

    tokens  rows of the step, batch included
    """

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens, self.products, self.attention, self.traffic, self.kernels = tokens, [], [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace == "prim" or func is torch.ops.aten._unsafe_view.default:
            return out
        name, row = func.overloadpacket.__name__, TABLE.get(func)
        values = [v for v in tree_leaves((args, kwargs, out)) if isinstance(v, torch.Tensor)]
        if row is not None and row.form in (Form.FUSED_ATTENTION, Form.FUSED_ATTENTION_BACKWARD):
            self.attend(row.form is Form.FUSED_ATTENTION_BACKWARD, args)
        elif row is not None and (row.cost is CostClass.PRODUCT or row.form is Form.GROUPED_PRODUCT):
            self.multiply(values)
        if not name.startswith(("empty", "new_empty")):
            self.kernels += 1
            self.traffic += sum(map(bytes_of, values))
        return out

    def multiply(self, values: list[torch.Tensor]) -> None:
        left, right = [v for v in values[:-1] if v.dim() > 1][-2:]
        depth = left.shape[-1]
        flop = 2.0 * left.numel() * right.shape[-1]
        self.products.append((left.dtype, flop, 0 if depth >= self.tokens else depth))

    def attend(self, backward: bool, args: tuple) -> None:
        query, key, value = args[1:4] if backward else args[:3]
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] / 2
        flop = 2.0 * pairs * (query.shape[3] + value.shape[3]) * (BACKWARD if backward else 1)
        self.attention.append((query.dtype, backward, flop, query.shape[0] * query.shape[1]))

    def work(self) -> Work:
        """Return the work counted so far, with nothing that stays in a cache."""
        products, attention = tuple(self.products), tuple(self.attention)
        return Work(
            self.tokens, products, attention, self.traffic, 0, 0, 0, EVERYWHERE, self.kernels, widest=1 << 40
        )
