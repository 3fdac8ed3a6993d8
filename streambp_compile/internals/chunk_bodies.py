"""Chunk bodies compiled by Inductor: one artifact per text and range of sizes.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

from ..passes.ir import Body, canonical_order, hint
from ..passes.kernels.simulated_device import device_type
from ..passes.phases import FIXES_SIZES, SizeFixed, summary
from ..passes.verify import verify_inputs
from . import inductor, kernel_builds, stored_bodies
from .body_inputs import BodyInputs
from .dynamo import NO_DEFECTS, OneAtATime
from .fake_tensors import describe
from .inductor import rewrite
from .kernel_builds import Kernels
from .size_guards import conditions_of, guard_of, places_of

log = logging.getLogger(__name__)
MOST_ARTIFACTS = 8  # of one body: one that still meets other sizes would be compiled for every call
PANEL_COLUMNS_PER_ROW = 8  # a weight with fewer columns per row is multiplied as a whole


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Decompose ``aten.mm`` on a CPU into panels, where few rows meet a wide transposed weight (a head)."""
    wide = hint(weight.shape[1]) >= PANEL_COLUMNS_PER_ROW * hint(rows.shape[0]) and weight.stride(0) == 1
    panels = wide and device_type(rows) == "cpu" and rows.dtype.itemsize >= 4
    return torch.ops.streambp.panels_mm(rows, weight) if panels else NotImplemented


@dataclass(frozen=True)
class Artifact:
    """A compiled body, with Inductor's assumptions on its sizes, such as that 32-bit indices suffice.

    run      a function of the list of inputs
    holds    are the assumptions true of these inputs?
    kernels  those that ``run`` waits for
    """

    run: Callable
    holds: Callable[[Sequence[object]], bool]
    kernels: Kernels


COMPILED: dict[str, list[Artifact]] = {}
"""By the text of a body and its inputs, one artifact per range of sizes. Kept while the process lives, so
that equal bodies of all graphs share one."""


@contextlib.contextmanager
def compiling_apart() -> Iterator[None]:
    """Compile bodies inside as if none were known, and keep none of them."""
    global COMPILED
    before, COMPILED = COMPILED, {}
    try:
        yield
    finally:
        COMPILED = before


class TooManySizes(Exception):
    """A body met sizes for which it has no code, too often to be compiled once more."""


class CompiledBody:
    """A compiled chunk body: runs the first artifact that fits the sizes of a call, or compiles one."""

    def __init__(
        self, body: Body, chunk: int, mode: str | None, tell: Callable[[str], None], store: bool = True
    ):
        self.body, self.chunk, self.mode, self.tell, self.store = body, chunk, mode, tell, store
        self.artifacts = self.compiled({})

    def __call__(self, args: list) -> object:
        artifact = self.fitting(args)
        if artifact is None:
            try:
                artifact = self.compiled_for(args)
            except NO_DEFECTS:
                raise
            except Exception as error:
                return self.uncompiled(args, error)
        return artifact.run(args)

    def fitting(self, args: list) -> Artifact | None:
        return next((a for a in self.artifacts if a.holds(args)), None)

    def compiled_for(self, args: list) -> Artifact:
        """Compile an artifact for the sizes of a call, unless another thread compiled one meanwhile. Modes
        are disabled, so that a memory simulation counts allocations of bodies and none of compiling them."""
        with OneAtATime(), disable_current_modes():
            if (known := self.fitting(args)) is not None:
                return known
            sizes = self.sizes(args)
            if len(self.artifacts) >= MOST_ARTIFACTS:
                raise TooManySizes(f"{MOST_ARTIFACTS} ranges of sizes have code of their own")
            log.debug("compiling a chunk body again, for sizes %s", sizes)
            self.artifacts = self.compiled(sizes)
            return self.artifacts[-1]

    def uncompiled(self, args: list, error: Exception) -> object:
        log.debug("a chunk body runs without compilation", exc_info=True)
        self.tell(
            "The code of a chunk could not be compiled for sizes that it met later "
            f"({summary(error)}). Such chunks run operator by operator: results stay exact, and are "
            "computed more slowly"
        )
        return self.body.graph(*args)

    def compiled(self, sizes: Mapping[object, int]) -> list[Artifact]:
        """Return all artifacts of this body; with ``sizes``, after compiling one for them."""
        with inductor_config.patch(body_options(self.mode)):
            inputs = BodyInputs(self.body, self.chunk, sizes)
            return compile_once(self.body, inputs, again=bool(sizes), store=self.store)

    def wait(self) -> None:
        """Wait until the kernels of its artifacts are built. Raises the errors of their compiler."""
        for artifact in self.artifacts:
            artifact.kernels.wait()

    def sizes(self, args: Sequence[object]) -> dict[object, int]:
        """Read the sizes of a call, by the names that `BodyInputs` gives them."""
        inputs = BodyInputs(self.body, self.chunk)
        places = places_of(inputs.values)
        return {
            name: places[s.node.expr].of(args) for name, s in inputs.symbols.items() if s.node.expr in places
        }


def body_options(mode: str | None) -> dict[str, object]:
    """Return Inductor's options for a mode, without CUDA graphs. A CUDA graph is recorded for fixed sizes and
    addresses, and those of a body change with every chunk."""
    return {**(list_mode_options(mode) if mode else {}), "triton.cudagraphs": False}


def compile_body(
    body: Body,
    chunk: int,
    mode: str | None = None,
    tell: Callable[[str], None] = log.warning,
    store: bool = True,
) -> CompiledBody:
    """Compile a body with Inductor; bodies of the same text on the same inputs share artifacts.

    mode   `torch.compile`'s mode, as Inductor options
    tell   receives a text where sizes of a call have no compiled code
    store  keep compiled code on disk, and look for it there (`stored_bodies`)

    Returns a function of the list of inputs, whose kernels may still be built. Raises if Inductor fixed
    a size that must stay free. Code compiled later, for a call whose sizes no artifact fits, may hold
    for these sizes alone.
    """
    return CompiledBody(body, chunk, mode, tell, store)


def compile_once(body: Body, inputs: BodyInputs, again: bool = False, store: bool = True) -> list[Artifact]:
    """Return the artifacts of a body's text.

    again  compile one more first, for the hints of these inputs
    """
    verify_inputs(inputs.values)
    described = symbols_in_order("|".join(map(describe, inputs.values)))
    text = f"{text_of(body.graph)}|{described}|{inductor_config.save_config_portable()}"
    artifacts = COMPILED.setdefault(text, [])
    if again or not artifacts:
        hints = [hint(s) for s in inputs.symbols.values()]
        on_cpu = kernel_builds.on_cpu(inputs.values)
        key = stored_bodies.key_of(body.graph, text, [*hints, again], on_cpu) if store else None
        artifacts.append(artifact_of(body, inputs, again, key))
    return artifacts


def symbols_in_order(text: str) -> str:
    """Rename sizes in a description of inputs by their order, because unused sizes affect their names."""
    names = dict.fromkeys(re.findall(r"\b[su]\d+\b", text))
    order = {name: f"{name[0]}_{i}" for i, name in enumerate(names)}
    return re.sub(r"\b[su]\d+\b", lambda found: order[found[0]], text)


class Name(str):
    """The name of a node in the text of its graph."""

    __repr__ = str.__str__


def text_of(graph: GraphModule) -> str:
    """Write the operations of a body as text without its nodes' names. Bodies for another length differ only
    in names, aliases, unread values, and the order of operations that do not depend on each other. The code
    itself is returned where the operations do not show everything that a node reads."""
    if any(stored_bodies.is_hidden(n.op, n.target) for n in graph.graph.nodes):
        return graph.code
    names = {n: Name(f"%{i}") for i, n in enumerate(graph.graph.find_nodes(op="placeholder"))}
    count, lines = len(names), list[str]()
    for node in canonical_order(graph.graph):
        if node.target is torch.ops.aten.alias.default:
            names[node] = names[node.args[0]]
        elif node.op != "placeholder":
            given = map_arg((node.args, node.kwargs), names.__getitem__)
            names[node] = Name(f"%{count + len(lines)}")
            lines.append(f"{names[node]} = {node.target} {given}")
    return "\n".join([f"{count} inputs", *lines])


def artifact_of(body: Body, inputs: BodyInputs, again: bool, key: str | None) -> Artifact:
    """Load a body's code from disk, or compile it and, if it has a key, store it."""
    with kernel_builds.built_later(inputs.values) as kernels:
        stored = None if key is None else stored_bodies.read(key, inputs.values)
        if stored is None:
            with contextlib.nullcontext() if key is None else stored_bodies.compiling():
                run = function_of(body, inputs)
            fixed = [k for k, s in inputs.symbols.items() if inputs.env.replace(s.node.expr).is_number]
            if fixed and not again:  # code for one call may hold for its sizes alone
                if FIXES_SIZES.get() and not any(isinstance(name, str) for name in fixed):
                    raise SizeFixed
                raise AssertionError(f"sizes were fixed while compiling a chunk body: {fixed}")
            stored = run, conditions_of(inputs)
            if key is not None:
                stored_bodies.write(key, *stored)
    run, conditions = stored
    kernels.of(run)
    return Artifact(run, guard_of(conditions), kernels)


def function_of(body: Body, inputs: BodyInputs) -> Callable:
    """Compile a body by Inductor to a function of the list of inputs, traced with symbolic sizes."""
    counters["streambp"]["bodies"] += 1
    # A body's sizes are its own, not those of the graph around it.
    with tracing(TracingContext(inputs.mode)):
        with inputs.mode:
            table = {**select_decomp_table(), torch.ops.aten.mm.default: product}
            traced = make_fx(
                body.graph,
                decomposition_table=table,
                tracing_mode="symbolic",
                _allow_non_fake_inputs=True,
            )(*inputs.values)
        examples = [n.meta["val"] for n in traced.graph.nodes if n.op == "placeholder"]
        rewrite(traced)
        # Inductor looks code up by a pickle of a graph and its sizes; torch 2.11 cannot pickle this cache.
        inputs.mode.cache_enabled = False
        inputs.env.fake_tensor_cache.clear()
        return inductor.compile_ours(traced, examples)
