"""Ways to take the same training step: one row each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.on_gpu.stage import Stage
from streambp_compile.backend import Chain
from streambp_compile.config import Config
from streambp_compile.passes.ir import hint
from streambp_compile.reporting.report import Report
from streambp_compile.runtime.memory_simulation import simulate


@dataclass(frozen=True)
class Method:
    """
    title         what its row is called
    checkpointed  every layer is checkpointed
    attention     the kernel that ``scaled_dot_product_attention`` must take on a GPU, a name of
                  ``torch.nn.attention.SDPBackend``; None leaves the choice to torch, or to streambp
    compiler      ``"inductor"``, ``"layers"`` (Inductor, each decoder layer compiled alone) or ``"streambp"``
    options       of streambp
    fused_loss    Liger's fused head and loss
    budget        the share of a layer's activations that torch's partitioner may keep
                  (``torch._functorch.config.activation_memory_budget``), None for its default, all
    """

    title: str
    checkpointed: bool = True
    attention: str | None = None
    compiler: str | None = None
    options: tuple[tuple[str, object], ...] = ()
    fused_loss: bool = False
    budget: float | None = None


CHECKPOINTING, STREAMBP, LIGER = "checkpointing", "streambp", "liger"
CUDNN, FLASH = "CUDNN_ATTENTION", "FLASH_ATTENTION"
METHODS = {
    CHECKPOINTING: Method("checkpointing, cuDNN attention", attention="CUDNN_ATTENTION"),
    STREAMBP: Method("streambp", checkpointed=False, compiler="streambp"),
    "flash": Method("checkpointing, FlashAttention-2", attention="FLASH_ATTENTION"),
    LIGER: Method(
        "checkpointing, cuDNN attention, Liger's fused loss", attention="CUDNN_ATTENTION", fused_loss=True
    ),
    "inductor": Method("Inductor + checkpointing", compiler="inductor"),
    "flash-liger": Method("checkpointing, FlashAttention-2, Liger's loss", attention=FLASH, fused_loss=True),
    "layers-liger": Method(
        "Inductor layer by layer, checkpointing, cuDNN attention, Liger's loss",
        attention=CUDNN,
        compiler="layers",
        fused_loss=True,
    ),
    "kept-liger": Method(
        "Inductor layer by layer, nothing recomputed, cuDNN attention, Liger's loss",
        checkpointed=False,
        attention=CUDNN,
        compiler="layers",
        fused_loss=True,
    ),
}


def method_of(name: str) -> Method:
    """The row of a name.

    ``streambp:memory_budget=40GiB,chunk_size=2048`` is streambp with these options, ``budget-0.5`` is
    Inductor layer by layer with half of torch's activation memory budget.
    """
    if name in METHODS:
        return METHODS[name]
    if name.startswith("budget-"):
        share = float(name.removeprefix("budget-"))
        title = f"Inductor layer by layer, activation_memory_budget {share:g}, cuDNN attention, Liger's loss"
        return Method(title, False, CUDNN, "layers", fused_loss=True, budget=share)
    given = name.removeprefix(f"{STREAMBP}:").split(",")
    pairs = tuple(
        (key, {"True": True, "False": False}.get(value, int(value) if value.isdigit() else value))
        for key, _, value in (option.partition("=") for option in given)
    )
    title = ", ".join([STREAMBP, *(f"{key} {value}" for key, value in pairs)])
    return Method(title, checkpointed=False, compiler="streambp", options=pairs)


class NotHere(Exception):
    """A method that this machine cannot run; the message says what it lacks."""


class Compiled(Exception):
    """Raised in place of a compiled call where nothing runs: compilation is over. ``report`` is streambp's,
    or None."""

    def __init__(self, report: Report | None):
        super().__init__("compiled, not run")
        self.report = report


class Step:
    """Loss and backward of one model by one method; gradients add to what is there.

    report  what streambp made of the model, a ``streambp_compile`` report, or None
    """

    def __init__(self, stage: Stage, method: Method, model: nn.Module):
        self.stage, self.method, self.model = stage, method, model
        self.report = None
        self.loss: Callable = self.fused if method.fused_loss else self.plain
        # Others are told that causality is all there is to a mask, which is their fastest way; streambp gets
        # the call that users write.
        self.unmasked = {} if method.compiler == "streambp" else {"attention_mask": {"full_attention": None}}
        if method.fused_loss:
            self.fused_loss = liger_loss(stage)
        if method.checkpointed:  # by the name that transformers 5 prefers, or the one that all before know
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
                dict(use_reentrant=False)
            )
        self.uncompiled = self.loss
        self.compile()

    def compile(self) -> None:
        """Compile, or compile again for the next length as if it were the first: it gets chunk lengths of its
        own."""
        if self.method.compiler == "streambp":
            torch._dynamo.reset()
            self.loss, self.report = compile_streamed(
                self.stage, self.uncompiled, **dict(self.method.options)
            )
        elif self.method.compiler == "layers":
            backend = functools.partial(inductor, self.stage)  # of its own: graphs are kept by backend
            for layer in self.model.model.layers:
                layer.compile(backend=backend)
        elif self.method.compiler:
            self.loss = torch.compile(self.uncompiled, backend=functools.partial(inductor, self.stage))

    def plain(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False, **self.unmasked).loss

    def fused(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(input_ids=ids, use_cache=False, **self.unmasked).last_hidden_state
        return self.fused_loss(self.model.lm_head.weight, hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def layers_alone(self, ids: torch.Tensor) -> torch.Tensor:
        """A loss without a head, for the time of the layers where logits do not fit."""
        return (
            self.model.model(input_ids=ids, use_cache=False, **self.unmasked).last_hidden_state.float().mean()
        )

    def take(self, ids: torch.Tensor, loss: Callable | None = None) -> None:
        with self.attending(), self.budgeted():
            value = (loss or self.loss)(ids)
            value.backward()

    def budgeted(self):
        """Torch's partitioner reads its budget when the first step compiles."""
        if self.method.budget is None:
            return contextlib.nullcontext()
        import torch._functorch.config

        return torch._functorch.config.patch(activation_memory_budget=self.method.budget)

    def attending(self):
        if self.method.attention is None or self.stage.kind == "cpu":
            return contextlib.nullcontext()
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(getattr(SDPBackend, self.method.attention))

    def predicted(self, ids: torch.Tensor) -> int | None:
        """Bytes that a step will hold above weights and gradients, where nothing runs; None if the method's
        compiler cannot tell."""
        with self.stage.inside():
            if self.method.compiler is None:
                return self.stage.peak(functools.partial(self.take, ids), self.model)
            with contextlib.suppress(Compiled):
                self.loss(ids)
        return None if self.report is None else predicted_by(self.report)

    def chunks(self) -> int | None:
        """Chunks that streambp does in one step, over all regions and sweeps; None for another method."""
        if self.report is None:
            return None
        return sum(
            region.times * -(-hint(region.analysis.length) // chunk) for region, chunk in self.schedules()
        )

    def chunk_lengths(self) -> list[int]:
        """Rows per chunk, of all sweeps of all regions."""
        return sorted({chunk for _, chunk in self.schedules()}) if self.report else []

    def schedules(self) -> Iterator[tuple]:
        for region in self.report.regions:
            for schedule in filter(None, (region.forward, region.backward)):
                for chunk in schedule.chunks:
                    yield region, chunk


def compile_streamed(stage: Stage, loss: Callable, **options) -> tuple[Callable, Report]:
    """A loss compiled by streambp with these options, and the report that its compilation fills in."""
    report = Report()

    def backend(graph, inputs):
        return if_it_runs(stage, Chain(graph, inputs, Config.of(None, options), report).compiled(), report)

    return torch.compile(loss, backend=backend), report


def inductor(stage: Stage, graph, inputs) -> Callable:
    from torch._inductor.compile_fx import compile_fx

    return if_it_runs(stage, compile_fx(graph, inputs))


def if_it_runs(stage: Stage, call: Callable, report: Report | None = None) -> Callable:
    """A compiled call; where nothing runs, the end of the step."""

    def end_of_compilation(*_inputs):
        raise Compiled(report)

    return call if stage.executes else end_of_compilation


def predicted_by(report: Report) -> int:
    """Bytes that the step will hold above weights and gradients, simulated for the sizes at which it was
    compiled."""
    return simulate(*report.steps[-1]).bytes


def liger_loss(stage: Stage):
    """Liger's fused linear cross-entropy: head weight, hidden states ``[rows, d]``, targets ``[rows]`` →
    loss."""
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise NotHere("liger_kernel is not installed") from error
    if stage.kind != "cuda":
        raise NotHere("its kernels need a GPU")
    return LigerFusedLinearCrossEntropyLoss()
