"""Layer inputs that wait for the backward in host memory.

Only values that the forward of a region hands to its backward are copied: the layer's input, and values
kept beside it. On a GPU they go to pinned memory on a stream of its own, and come back while the
backward of later layers runs. On a CPU they go to a file that is mapped into memory, so that the same
plan can be tried without a GPU.
"""

from __future__ import annotations

import itertools
import mmap
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..passes.kernels.simulated_device import device_type
from .places import within

AHEAD = 2  # values that are brought back before the backward asks for them
SMALLEST = 1 << 16  # bytes: below this, a copy costs more than it frees


class Store(Protocol):
    """Memory in which values wait."""

    def put(self, value: torch.Tensor) -> object:
        """Copy a value, and return its place."""

    def get(self, place: object, value: torch.Tensor) -> None:
        """Copy the bytes at a place into a value on the device."""

    def free(self, place: object) -> None:
        """Release a place."""

    def fetch(self, place: object, empty: Callable[[], torch.Tensor]) -> Fetched | None:
        """Begin to copy a value back, if the store can do that while the device computes."""


class Fetched(Protocol):
    def wait(self) -> torch.Tensor:
        """Return the value when it has arrived."""


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """View the memory of a dense value as ``[bytes]``."""
    flat = value.as_strided((value.numel(),), (1,), value.storage_offset())
    return flat.view(torch.uint8)


class MappedFile:
    """Places in a temporary file. Released places are used again."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(prefix="streambp-")
        self.end = 0
        self.unused: dict[int, list[torch.Tensor]] = {}

    def place(self, size: int) -> torch.Tensor:
        """Map bytes of the file into memory."""
        unused = self.unused.setdefault(size, [])
        if unused:
            return unused.pop()
        start, self.end = (
            self.end,
            self.end + -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY,
        )
        self.file.truncate(self.end)
        mapped = mmap.mmap(self.file.fileno(), size, offset=start)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def put(self, value: torch.Tensor) -> torch.Tensor:
        place = self.place(value.nbytes)
        place.copy_(as_bytes(value))
        return place

    def get(self, place: torch.Tensor, value: torch.Tensor) -> None:
        as_bytes(value).copy_(place)

    def free(self, place: torch.Tensor) -> None:
        self.unused.setdefault(place.numel(), []).append(place)

    def fetch(self, place: torch.Tensor, empty: Callable[[], torch.Tensor]) -> None:
        return None  # a copy by the same processor that computes


class PinnedMemory:
    """Pinned host memory of one GPU. Copies run on a stream of their own; released places are used again."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.unused: dict[int, list[torch.Tensor]] = {}

    def put(self, value: torch.Tensor) -> torch.Tensor:
        unused = self.unused.setdefault(value.nbytes, [])
        place = unused.pop() if unused else torch.empty(value.nbytes, dtype=torch.uint8, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(self.stream):
            place.copy_(as_bytes(value), non_blocking=True)
        value.record_stream(self.stream)
        return place

    def get(self, place: torch.Tensor, value: torch.Tensor) -> None:
        torch.cuda.current_stream(value.device).wait_stream(self.stream)
        as_bytes(value).copy_(place, non_blocking=True)

    def free(self, place: torch.Tensor) -> None:
        # The next `put` into this place is copied on the same stream, after every `fetch` from it. A copy by
        # `get` runs on the current stream, which this stream therefore waits for.
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        self.unused.setdefault(place.numel(), []).append(place)

    def fetch(self, place: torch.Tensor, empty: Callable[[], torch.Tensor]) -> InFlight:
        value = empty()  # allocated on the computing stream, which may still read its old contents
        self.stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(self.stream):
            as_bytes(value).copy_(place, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self.stream)
        value.record_stream(self.stream)
        return InFlight(value, arrived)


class InFlight:
    """A value on its way to the device."""

    def __init__(self, value: torch.Tensor, arrived: torch.cuda.Event) -> None:
        self.value, self.arrived = value, arrived

    def wait(self) -> torch.Tensor:
        torch.cuda.current_stream(self.value.device).wait_event(self.arrived)
        return self.value


@dataclass(frozen=True)
class Arrived:
    """A value that was brought back ahead in a simulation."""

    value: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.value


@dataclass(frozen=True)
class Nowhere:
    """A store for simulations on fake tensors, which keeps nothing.

    ahead  values take memory on the device before the backward asks for them, as with `PinnedMemory`
    """

    ahead: bool

    def put(self, value: torch.Tensor) -> None:
        return None

    def get(self, place: None, value: torch.Tensor) -> None:
        return None

    def free(self, place: None) -> None:
        return None

    def fetch(self, place: None, empty: Callable[[], torch.Tensor]) -> Arrived | None:
        return Arrived(empty()) if self.ahead else None


class Offloaded:
    """An offloaded value as autograd keeps it: its place, its store, and the other offloaded values."""

    def __init__(self, value: torch.Tensor, store: Store, order: int, others: Offloading) -> None:
        self.size, self.stride, self.dtype, self.device = (
            value.size(),
            value.stride(),
            value.dtype,
            value.device,
        )
        self.store, self.order, self.others = store, order, others
        self.place = store.put(value)
        self.coming: Fetched | None = None
        weakref.finalize(self, store.free, self.place).atexit = False

    def empty(self) -> torch.Tensor:
        with within(self):
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def fetch(self) -> None:
        """Begin to copy the value back."""
        if self.coming is None:
            self.coming = self.store.fetch(self.place, self.empty)

    def restored(self) -> torch.Tensor:
        """Return the value on its device, and begin to copy back those that the backward reads next. A second
        backward over a kept graph copies it back again."""
        if self.coming is not None:
            value, self.coming = self.coming.wait(), None
        else:
            value = self.empty()
            self.store.get(self.place, value)
        self.others.fetch_before(self.order)
        return value


class Offloading:
    """One forward's values on the host, in the order in which they were sent.

    given    inputs of the forward, which stay where they are
    is_fake  recognises values of a simulation
    """

    def __init__(self, given: Iterable[object], is_fake: Callable[[object], bool]) -> None:
        self.is_fake, self.count = is_fake, itertools.count()
        self.given = weakref.WeakSet(v.untyped_storage() for v in given if isinstance(v, torch.Tensor))
        self.known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.places: weakref.WeakValueDictionary[int, Offloaded] = weakref.WeakValueDictionary()

    def stay(self, value: torch.Tensor) -> None:
        """Keep a value where it is: one on the host already, or alive in any case."""
        self.given.add(value.untyped_storage())

    def leave(self, value: torch.Tensor) -> Offloaded | None:
        """Send a value to the host, unless it stays alive in any case or is small. The same memory is sent
        once, however many layers read it."""
        storage = value.untyped_storage()
        if storage in self.given or not may_leave(value):
            return None
        found = self.known.get(storage)
        if found is None or (found.size, found.stride, found.dtype) != (
            value.size(),
            value.stride(),
            value.dtype,
        ):
            found = Offloaded(value, store_for(value, self.is_fake), next(self.count), self)
            self.known[storage] = found
            self.places[found.order] = found
        return found

    def fetch_before(self, order: int) -> None:
        """Begin to copy back the values sent just before this one, which the backward reads next."""
        for earlier in range(order - 1, order - 1 - AHEAD, -1):
            if earlier in self.places:
                self.places[earlier].fetch()


STORES: dict[torch.device, Store] = {}
"""The host memory of each device, kept while the process lives: allocating it takes longer than a copy."""


def store_for(value: torch.Tensor, is_fake: Callable[[object], bool]) -> Store:
    """Return the store for values of this device, one per device, whose memory is allocated once."""
    if is_fake(value):
        return Nowhere(ahead=device_type(value) == "cuda")
    if value.device not in STORES:
        STORES[value.device] = PinnedMemory(value.device) if value.device.type == "cuda" else MappedFile()
    return STORES[value.device]


def may_leave(value: torch.Tensor) -> bool:
    """Is a value dense, alone in its memory, and large enough?"""
    return (
        value.nbytes >= SMALLEST
        and value.untyped_storage().nbytes() == value.nbytes
        and value.device.type in ("cpu", "cuda")
        and not isinstance(value, torch.nn.Parameter)
    )
