"""Fake tensors: what a value is, stand-ins for it, and the modes that they need.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..passes.ir import hint


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def is_unbacked(value: object) -> bool:
    """Does a value or its shape depend on data, so that computing it again would make other symbols?"""
    return bool(free_unbacked_symbols(value))


def assert_size(size: int | torch.SymInt, number: int) -> None:
    """Note that a size which depends on data is this number, wherever it is read."""
    torch._check(size == number)


def is_batched(value: torch.Tensor) -> bool:
    """Is this code running inside ``torch.vmap``?"""
    return torch._C._functorch.is_batchedtensor(value)


def describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)}{tuple(value.stride())}{value.dtype}{value.device}"
    return str(value)


def has_symbols(value: object) -> bool:
    """Is a size of a tensor, or a number, a symbol?"""
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(s, (torch.SymInt, torch.SymFloat, torch.SymBool)) for s in sizes)


def parts_of(value: object) -> list[object]:
    """The plain tensors that AOTAutograd makes of a tensor subclass, in its order; any other value is
    itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    return [part for name in value.__tensor_flatten__()[0] for part in parts_of(getattr(value, name))]


def stand_in(fake: object) -> object:
    """A fake tensor of the same description in the mode that is active, with numbers for symbols."""
    if not isinstance(fake, torch.Tensor):
        return hint(fake) if isinstance(fake, torch.SymInt) else fake
    sizes, strides = ([hint(s) for s in part] for part in (fake.shape, fake.stride()))
    return torch.empty_strided(
        sizes, strides, dtype=fake.dtype, device=fake.device, requires_grad=fake.requires_grad
    )


def stand_in_whole(fake: object) -> object:
    """As `stand_in`, a tensor subclass of its own class."""
    if not is_traceable_wrapper_subclass(fake):
        return stand_in(fake)
    names, context = fake.__tensor_flatten__()
    parts = {name: stand_in_whole(getattr(fake, name)) for name in names}
    return (
        type(fake)
        .__tensor_unflatten__(parts, context, fake.shape, fake.stride())
        .requires_grad_(fake.requires_grad)
    )


@contextlib.contextmanager
def faked(like: torch.Tensor):
    """Inside, values are fake as Dynamo's are; with gradients, if the value has them."""
    with enable_python_dispatcher(), like.fake_mode, torch.set_grad_enabled(like.requires_grad):
        yield


def as_these(fakes: Sequence[object]):
    """Inside, what is created is fake as these are: Dynamo hands a backend a mode that is not theirs."""
    modes = (f.fake_mode for f in fakes if isinstance(f, FakeTensor))
    return next(modes, contextlib.nullcontext())


def without_guards(fakes: Sequence[object]):
    """What is computed here was computed by Dynamo already, which has guarded on all that it rests on."""
    mode = detect_fake_mode(fakes)
    env = None if mode is None else mode.shape_env
    return contextlib.nullcontext() if env is None else env.suppress_guards()
