"""Ten architectures on fake tensors, and what of their reports no device and no torch version may change.

    python tests/cuda/architectures.py FOLDER     write the structures on a CPU to FOLDER/VERSION/NAME.txt

VERSION is that of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pretend_gpu
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention

from streambp_compile import internals
from streambp_compile.backend import Chain
from streambp_compile.config import Config
from streambp_compile.passes.ir import READS_KEYS, bytes_of, is_tensor, rank_of, value_of
from streambp_compile.pipeline import Schedule
from streambp_compile.reporting.region_report import RegionReport
from streambp_compile.reporting.report import Report

LENGTH = 2048  # tokens
SIZES = dict(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=8192,
    use_cache=False,
    pad_token_id=0,
)
EXPERTS = dict(moe_intermediate_size=128, num_experts_per_tok=2)
LATENT = dict(
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_rope_head_dim=32,
    qk_nope_head_dim=64,
    v_head_dim=64,
    num_key_value_heads=4,
    head_dim=32,
    n_routed_experts=8,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    n_shared_experts=1,
)


@dataclass(frozen=True)
class Architecture:
    """A model and what the report of its training step must say.

    build   makes the model
    keys    the key ranges that its attention is proved to read, each as `Reach` prints it
    kernels the kernels that attend on an A100, by their names in the table; see `kernels_on`
    even    values are as wide as queries
    labels  the name of the argument that holds the targets
    batch   sequences
    dtype   of its weights
    given   further arguments of its forward
    """

    build: Callable[[], nn.Module]
    keys: frozenset[str] = frozenset({"[-inf,0]"})
    kernels: frozenset[str] = frozenset({"flash"})
    even: bool = True
    labels: str = "labels"
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    given: Mapping[str, object] = field(default_factory=lambda: dict(use_cache=False))

    def kernels_on(self, capability: int) -> frozenset[str]:
        """The kernels that attend on a GPU: sm_90 is faster with cuDNN's than with FlashAttention-2."""
        faster = {"flash": "cudnn"} if capability == 90 and self.even else {}
        return frozenset(faster.get(name, name) for name in self.kernels)


def hugging_face(family: str, **settings) -> Callable[[], nn.Module]:
    """A causal language model of a family of transformers, from its configuration."""

    def build() -> nn.Module:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**SIZES, **settings})).train()

    return build


def own(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from benchmarks.architectures import ARCHITECTURES

        return ARCHITECTURES[name]().train()

    return build


def hand_written(name: str, **given) -> Architecture:
    return Architecture(own(name), labels="targets", batch=2, given={}, **given)


QWEN3_8B = Architecture(
    hugging_face(
        "qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=1 << 17,
    )
)  # with two of its layers

NONE: frozenset[str] = frozenset()
WINDOW = "[-255,0]"  # of a window of 256 tokens
ARCHITECTURES = {
    "llama": Architecture(hugging_face("llama")),
    "qwen3": Architecture(hugging_face("qwen3", num_hidden_layers=1), batch=2),
    "gemma3": Architecture(
        hugging_face("gemma3_text", sliding_window=256, layer_types=["sliding_attention", "full_attention"]),
        keys=frozenset({WINDOW, "[-inf,0]"}),
        kernels=frozenset({"flash", "efficient"}),
    ),
    "mistral": Architecture(  # flash takes no mask
        hugging_face("mistral", num_hidden_layers=1, sliding_window=256),
        keys=frozenset({WINDOW}),
        kernels=frozenset({"efficient"}),
    ),
    "gpt-oss": Architecture(  # its sinks are columns of written-out scores
        hugging_face("gpt_oss", sliding_window=256, num_local_experts=4, num_experts_per_tok=2),
        keys=frozenset({WINDOW, "[-inf,0]"}),
        kernels=NONE,
    ),
    "mixture of experts": Architecture(
        hugging_face("qwen3_moe", num_hidden_layers=1, num_experts=8, **EXPERTS)
    ),
    "latent attention": Architecture(hugging_face("deepseek_v3", **EXPERTS, **LATENT), even=False),
    "linear attention": hand_written("linear attention", keys=NONE, kernels=NONE),
    "hand-written": hand_written("nanogpt"),
    "flex attention": hand_written("flex", kernels=NONE),  # a score function: products and a softmax
}


def report_of(architecture: Architecture, device: str, length: int = LENGTH) -> Report:
    """The report of one training step, compiled for ``device``; the step itself is not run."""
    mode, report = FakeTensorMode(allow_non_fake_inputs=True), Report()
    model = pretend_gpu.model_on(mode, architecture.build, architecture.dtype, device)

    def step(ids: torch.Tensor) -> torch.Tensor:
        result = model(ids, **{architecture.labels: ids}, **architecture.given)
        return result if isinstance(result, torch.Tensor) else result.loss

    def backend(graph, inputs):
        Chain(graph, inputs, Config.of(None, None), report).compiled()
        return not_run

    torch._dynamo.reset()
    with mode:
        ids = torch.empty((architecture.batch, length), dtype=torch.int64, device=device)
        try:
            torch.compile(step, backend=backend, fullgraph=True)(ids)
        except Compiled:
            pass
    return report


class Compiled(Exception):
    """The step was compiled; on fake tensors there is nothing to run."""


class NotRun:
    """In place of compiled code."""

    def __call__(self, *args):
        raise Compiled

    def wait(self) -> None:
        """No kernel of it is built."""


not_run = NotRun()


def structure(report: Report) -> str:
    """What a report says of regions, sweeps, roles, proofs and kept values.

    Not in it: names, operators, kernels, and what is chosen for a device: chunk lengths, how many sequences
    of the batch run at a time, and what a step may take of a GPU's free memory.
    """
    notes = (note for note in report.notes if "free on the GPU" not in note)
    times = " ".join(str(i) for i in report.order)
    regions = (line for i, r in enumerate(report.regions) for line in region_lines(i, r))
    return "\n".join([f"regions {times}", *regions, *notes])


def region_lines(index: int, region: RegionReport) -> list[str]:
    head = f"region {index} ×{region.times}{' recomputed' * region.recomputable}"
    if region.refusal is not None:
        return [f"{head} whole: {region.refusal.reason}"]
    if region.streamed is None:
        return [f"{head} nothing to run"]
    lines = [f"{head}{' fused' * region.streamed.fused}"]
    for direction in ("forward", "backward"):
        schedule = getattr(region, direction)
        lines += [] if schedule is None else [f"  {direction}", *schedule_lines(schedule, region)]
    return lines + [f"  checked: {type(c).__name__} {c.band}" for c in region.analysis.conditions]


def schedule_lines(schedule: Schedule, region: RegionReport) -> list[str]:
    lines = []
    for sweep, body in zip(schedule.program.sweeps, schedule.bodies):
        attends = any(b.role in READS_KEYS for b in body.bindings)
        keys = f" keys {sweep.keys}" if attends else ""
        lines.append(f"    {sweep.direction}{keys}, {len(sweep.in_place)} in place")
        crossing = [b for b in body.bindings if b.source is not None and is_tensor(b.source)]
        lines += sorted(f"      {binding_line(b, region)}" for b in crossing)
    return lines


def binding_line(binding, region: RegionReport) -> str:
    value = value_of(binding.source)
    pattern = region.analysis.facts[binding.source].pattern(rank_of(binding.source))
    batch = region.streamed.batch
    turns = batch.turns if batch is not None and binding.source in batch.marks else 1
    size = bytes_of(value) * turns
    return f"{binding.role} {pattern}: {str(value.dtype).removeprefix('torch.')}, {size} bytes"


def key_ranges(report: Report) -> frozenset[str]:
    """The key ranges of all sweeps that attend."""
    schedules = [s for r in report.regions for s in (r.forward, r.backward) if s is not None]
    return frozenset(
        str(sweep.keys)
        for s in schedules
        for sweep, body in zip(s.program.sweeps, s.bodies)
        if any(b.role in READS_KEYS for b in body.bindings)
    )


def kernels(report: Report) -> frozenset[str]:
    """The kernels of all sweeps that attend."""
    schedules = [s for r in report.regions for s in (r.forward, r.backward) if s is not None]
    return frozenset(kernel.name for s in schedules for body in s.bodies for kernel in body.kernels)


def main(folder: Path) -> None:
    """Write the structures of a CPU. Chunk bodies are not compiled: no structure depends on that."""
    internals.compile_body = lambda *_, **__: not_run
    flex_attention._validate_device = lambda *_: None  # no backward on a CPU; ours has one
    folder = folder / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    for name, architecture in ARCHITECTURES.items():
        (folder / f"{name}.txt").write_text(structure(report_of(architecture, "cpu")) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package
    main(Path(sys.argv[1]))
