"""Fake tensors: properties of values, stand-ins for them, and the modes that they need.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from ..passes.ir import hint, written_arguments
from .dtensors import is_sharded, local_of, mesh_of


def is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def is_unbacked(value: object) -> bool:
    """Does a value or its shape depend on data, so that recomputing it would create other symbols?"""
    return bool(free_unbacked_symbols(value))


def assert_size(size: int | torch.SymInt, number: int) -> None:
    """Assert that a size which depends on data equals this number, wherever it is read."""
    torch._check(size == number)


def is_batched(value: torch.Tensor) -> bool:
    """Is this code running inside ``torch.vmap``?"""
    return torch._C._functorch.is_batchedtensor(value)


def describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        placed = f" {value._spec}" if is_sharded(value) else ""
        return f"{tuple(value.shape)}{tuple(value.stride())}{value.dtype}{value.device}{placed}"
    return str(value)


def has_symbols(value: object) -> bool:
    """Is a number, or a size or stride of a tensor, a symbol?"""
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(s, (torch.SymInt, torch.SymFloat, torch.SymBool)) for s in sizes)


def parts_of(value: object) -> list[object]:
    """List the plain tensors that AOTAutograd makes of a tensor subclass, in its order. Any other value is
    itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    return [part for name in value.__tensor_flatten__()[0] for part in parts_of(getattr(value, name))]


def stand_in(fake: object) -> object:
    """Create a fake tensor with the same metadata in the active mode, with numbers for symbols."""
    if not isinstance(fake, torch.Tensor):
        return hint(fake) if isinstance(fake, torch.SymInt) else fake
    sizes, strides = ([hint(s) for s in part] for part in (fake.shape, fake.stride()))
    return torch.empty_strided(
        sizes, strides, dtype=fake.dtype, device=fake.device, requires_grad=fake.requires_grad
    )


def stand_in_whole(fake: object) -> object:
    """Create a stand-in like `stand_in`, but keep the class of a tensor subclass."""
    if not is_traceable_wrapper_subclass(fake):
        return mesh_of(fake) or stand_in(fake)
    names, context = fake.__tensor_flatten__()
    parts = {name: stand_in_whole(getattr(fake, name)) for name in names}
    sizes, strides = (tuple(map(hint, part)) for part in (fake.shape, fake.stride()))
    return (
        type(fake)
        .__tensor_unflatten__(parts, context, torch.Size(sizes), strides)
        .requires_grad_(fake.requires_grad)
    )


@contextlib.contextmanager
def faked(like: torch.Tensor):
    """Enter the fake mode of a value, with gradients if it has them."""
    with enable_python_dispatcher(), like.fake_mode, torch.set_grad_enabled(like.requires_grad):
        yield


def as_these(fakes: Sequence[object]):
    """Return the fake mode of these values as a context. New values inside are fake as these are: Dynamo
    gives a backend a mode that is not theirs."""
    modes = (f.fake_mode for f in map(local_of, fakes) if isinstance(f, FakeTensor))
    return next(modes, contextlib.nullcontext())


def without_guards(fakes: Sequence[object]):
    """Disable guards inside the context. Dynamo has computed the same values already, and has guarded on all
    that they depend on."""
    mode = detect_fake_mode(fakes)
    env = None if mode is None else mode.shape_env
    return contextlib.nullcontext() if env is None else env.suppress_guards()


def as_fake(mode: FakeTensorMode, value: object) -> object:
    """Convert a tensor to a fake of a mode, with numbers for sizes; any other value is itself."""
    if not isinstance(value, torch.Tensor) or is_fake(value):
        return value
    return mode.from_tensor(value, static_shapes=True)


class RealTensorRead(RuntimeError):
    """An operator received a real tensor while a graph was analysed."""


class NothingReal(TorchDispatchMode):
    """Mode for analysis, in which operators get only fake tensors, so that failures change nothing.

    Tensors of the user reach no operator. Other real tensors, which are constants, may be read; only
    those created inside may be written.

    values  tensors of the user
    """

    supports_higher_order_operators = True

    def __init__(self, values: Iterable[object]):
        super().__init__()
        self.of_user = set(storages_of(values))
        self.made: set[int] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        read = set(storages_of(tree_leaves((args, kwargs))))
        if not self.of_user.isdisjoint(read):
            raise RealTensorRead(f"a tensor of the user reached {func} while a graph was analysed")
        written = set(storages_of(tree_leaves(written_arguments(func, args, kwargs)))) if read else set()
        if not written <= self.made:
            raise RealTensorRead(f"{func} writes into a constant while a graph is analysed")
        results = func(*args, **kwargs)
        self.made.update(storages_of(tree_leaves(results)))
        return results


@contextlib.contextmanager
def mode_of(fakes: Sequence[object]) -> Iterator[None]:
    """Enter only the mode of some fakes, for traces that `NothingReal` would change.

    Under `NothingReal`, autograd writes ``weight.data`` as a detached value. Without fakes, the active
    mode is kept.

    Raises `RealTensorRead` if a real tensor is among them.
    """
    if any(True for _ in storages_of(fakes)):
        raise RealTensorRead("a real tensor is to be traced")
    active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    modes = (f.fake_mode for f in map(local_of, fakes) if isinstance(f, FakeTensor))
    own = next(modes, active or detect_fake_mode(fakes))
    with _disable_current_modes(), own or contextlib.nullcontext():
        yield


def storages_of(values: Iterable[object]) -> Iterator[int]:
    """Yield the memory of real tensors among some values."""
    for value in values:
        for part in parts_of(value) if isinstance(value, torch.Tensor) else ():
            is_real = type(part) in (torch.Tensor, torch.nn.Parameter) and part.device.type != "meta"
            if is_real and torch._C._has_storage(part):  # neither sparse nor inside a `torch.func` transform
                yield part.untyped_storage()._cdata
