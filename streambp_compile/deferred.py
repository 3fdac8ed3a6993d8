"""Outputs that nobody may read: a tensor that computes itself when it is looked at, and otherwise never exists.

``model(**batch)`` of Hugging Face returns logits beside the loss. As an output of the compiled graph they would take ``[B, T, V]``, and
autograd would hand back a zero gradient of the same size. The backend returns a `Deferred` instead. Its shape, dtype and device are
known; the first operation on it computes it, differentiably, from the hidden states that it widens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .internals import DisableTorchFunctionSubclass

DESCRIPTIONS = {
    torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.layout.__get__,
    torch.Tensor.ndim.__get__, torch.Tensor.is_sparse.__get__, torch.Tensor.is_cuda.__get__, torch.Tensor.is_leaf.__get__,
    torch.Tensor.is_quantized.__get__, torch.Tensor.is_meta.__get__, torch.Tensor.is_nested.__get__, torch.Tensor.itemsize.__get__,
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.element_size,
    torch.Tensor.stride, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__len__, torch.Tensor.storage_offset,
}
CASTS = {torch.Tensor.float: torch.float32, torch.Tensor.double: torch.float64, torch.Tensor.half: torch.float16,
         torch.Tensor.bfloat16: torch.bfloat16}


class Deferred(torch.Tensor):
    """A tensor that is computed when it is first read; `isinstance` of `torch.Tensor`.

    fake     a tensor (fake or real) of the same shape, dtype and device
    compute  makes the value
    """

    @staticmethod
    def __new__(cls, shape, dtype: torch.dtype, device: torch.device, compute: Callable[[], torch.Tensor], wants_grad: bool):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=False)
        made.compute, made.wants_grad, made.made = compute, wants_grad, None
        return made

    def value(self) -> torch.Tensor:
        """The tensor itself, computed once."""
        with DisableTorchFunctionSubclass():
            if self.made is None:
                self.made = self.compute()
                self.compute = None
            return self.made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in DESCRIPTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], cls) else None
        if first is not None and first.made is None:
            if func == torch.Tensor.requires_grad.__get__:
                return first.wants_grad
            if func == torch.Tensor.detach:
                return first.later(first.dtype, lambda t: t.detach(), False)
            if func in CASTS and len(args) == 1:
                return first.later(CASTS[func], lambda t: t.to(CASTS[func]), first.wants_grad)
            if func == torch.Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
                return first.later(args[1], lambda t: t.to(args[1]), first.wants_grad)
            if func == torch.Tensor.__repr__:
                return f"Deferred(shape={tuple(first.shape)}, dtype={first.dtype}, device={first.device}, not computed)"
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda t: t.value(), (args, kwargs))
        return func(*args, **kwargs)

    def later(self, dtype: torch.dtype, then: Callable[[torch.Tensor], torch.Tensor], wants_grad: bool) -> Deferred:
        return Deferred(self.shape, dtype, self.device, lambda: then(self.value()), wants_grad)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda t: t.value(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        return self.value().detach().__reduce_ex__(protocol)
