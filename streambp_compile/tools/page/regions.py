"""The regions of a report for the page: sweeps, values, and the result of each pass."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ...passes.ir import (
    HERE,
    READS_KEYS,
    Analysis,
    Binding,
    BindingRole,
    Body,
    Refusal,
    Role,
    Sweep,
    bytes_of,
    hint,
    is_tensor,
    parts_of,
    rank_of,
    value_of,
    where_of,
)
from ...passes.planning.chunk_length import program_cost
from ...pipeline import Schedule, StreamedRegion
from ...reporting.region_report import ROLES, RegionReport, proof, streamed_bytes, whole_bytes
from ...runtime.runner import chunks_of


def region_data(region: RegionReport) -> dict[str, Any]:
    """Describe a region: its name and number of occurrences, its refusal or its sweeps and values."""
    streamed = region.streamed
    return {
        "name": region.name,
        "times": region.times,
        "recomputable": region.recomputable,
        "fused": streamed is not None and streamed.fused,
        "refusal": None if region.refusal is None else refusal_data(region.refusal, region),
        "batch": "" if streamed is None or streamed.batch is None else str(streamed.batch),
        "conditions": [] if streamed is None else [str(c) for c in streamed.analysis.checked],
        "lines": lines_of(region),
        "schedules": [] if streamed is None else list(schedules(streamed)),
        "passes": list(passes(region)),
    }


def refusal_data(refusal: Refusal, region: RegionReport) -> dict[str, Any]:
    """Describe a refusal: its reason, the bytes of the region's largest value at full length, and the
    remedy."""
    nodes = region.joint.graph.nodes if region.joint is not None else ()
    sizes = (bytes_of(value_of(n)) for n in nodes if is_tensor(n) and n.op == "call_function")
    return {
        "op": refusal.op,
        "reason": refusal.reason,
        "remedy": refusal.hint,
        "where": refusal.where,
        "cost": max(sizes, default=0),
    }


def lines_of(region: RegionReport) -> list[str]:
    """List the user's lines that a region comes from, in order."""
    return list(dict.fromkeys(filter(None, map(where_of, region.split.graph.nodes))))


def schedules(region: StreamedRegion) -> Iterator[dict[str, Any]]:
    title = "forward and gradients together" if region.fused else "forward"
    for name, schedule in ((title, region.forward), ("backward", region.backward)):
        if schedule is not None:
            yield {
                "title": name,
                "sweeps": list(sweeps(schedule, region)),
                "streamed": streamed_bytes(schedule, region.analysis),
                "whole": whole_bytes(schedule, region.analysis),
                "wide": [[n.name, bytes_of(value_of(n)), where_of(n)] for n in schedule.program.too_wide],
            }


def sweeps(schedule: Schedule, region: StreamedRegion) -> Iterator[dict[str, Any]]:
    """Yield each sweep: its loop, its kernels, the values at its boundary, and the keys of its chunks."""
    length, program = hint(region.analysis.length), schedule.program
    costs = program_cost(program, region.analysis, schedule.chunks, region.device)
    for sweep, body, chunk, cost in zip(program.sweeps, schedule.bodies, schedule.chunks, costs):
        yield {
            "direction": str(sweep.direction),
            "chunk": chunk,
            "count": -(-length // chunk),
            "ops": len(sweep.nodes),
            "efficiency": cost.efficiency if cost.products else None,
            "kernels": [str(kernel) for kernel in body.kernels],
            "bindings": list(boundary(sweep, body, region.analysis, length)),
            "keys": key_blocks(sweep, body, chunk, length),
        }


def boundary(sweep: Sweep, body: Body, analysis: Analysis, length: int) -> Iterator[list[Any]]:
    """Yield the values at the boundary of a sweep. Each has its role, name, pattern, bytes, the value that
    overwrites it, and the user's line."""
    in_place = {source: out for out, source in sweep.in_place}
    for binding in body.bindings:
        if binding.source is None or not is_tensor(binding.source) or binding.role is BindingRole.WHOLE:
            continue
        taken = in_place[binding.source].name if binding.source in in_place else ""
        pattern = analysis.fact(binding.source).pattern(rank_of(binding.source))
        size = bytes_at(binding, length)
        yield [ROLES[binding.role], binding.name, pattern, size, taken, where_of(binding.source)]


def bytes_at(binding: Binding, length: int) -> int:
    size = bytes_of(value_of(binding.node))
    return size // length if binding.role is BindingRole.CARRY else size


def key_blocks(sweep: Sweep, body: Body, chunk: int, length: int) -> dict[str, Any] | None:
    """List the keys that each chunk of an attention sweep reads, ``[start, stop, first key, last key]``. All
    other keys are pruned. None where a sweep reads no keys."""
    if not any(b.role in READS_KEYS for b in body.bindings):
        return None
    chunks = sorted((c.start, c.stop, c.first_key, c.last_key) for c in chunks_of(sweep, chunk, length))
    read = sum((stop - start) * (last - first) for start, stop, first, last in chunks)
    return {
        "reach": str(sweep.keys),
        "proof": proof(sweep.keys),
        "length": length,
        "chunks": chunks,
        "read": read / length**2,
    }


def passes(region: RegionReport) -> Iterator[dict[str, Any]]:
    """Yield the result of each pass for a region, from the model's graph to chunk bodies."""
    yield code("Dynamo's graph", "The region's part of the model, in torch functions.", region.split.graph)
    if region.joint is not None:
        yield code("Joint graph", "Forward and backward in one, from AOTAutograd.", region.joint.graph)
    streamed = region.streamed
    if streamed is None:
        return
    text = "The joint graph in the spellings that rules know, with the token dimension of each value."
    yield code("Normal form", text, streamed.joint.graph, streamed.analysis)
    text = "Which dimension carries tokens, what becomes of the rows, and how each operand is read."
    yield {"title": "Facts", "text": text, "values": list(values(streamed))}
    text = "Operations assigned to sweeps; chunk lengths and kernels are chosen next."
    lines = [["forward", "", ""], *program_lines(streamed.forward)]
    if streamed.backward is not None:
        lines += [["", "", ""], ["backward", "", ""], *program_lines(streamed.backward)]
    yield {"title": "Sweeps", "text": text, "code": lines}
    for name, schedule in (("forward", streamed.forward), ("backward", streamed.backward)):
        for i, body in enumerate(schedule.bodies if schedule is not None else ()):
            text = f"What runs for one chunk of {schedule.chunks[i]} tokens; Inductor compiles it once."
            title = f"Chunk body, {name} {i + 1}" if len(schedule.bodies) > 1 else f"Chunk body, {name}"
            yield code(title, text, body.graph.graph)


def program_lines(schedule: Schedule) -> list[list[str]]:
    return [[line, "", ""] for line in str(schedule.program).splitlines()]


def code(title: str, text: str, graph: Graph, analysis: Analysis | None = None) -> dict[str, Any]:
    """Write a graph as lines: statement, pattern of its value, user's line."""
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    lines = [
        [statement(node), "" if analysis is None else pattern_of(node, analysis), where_of(node)]
        for node in graph.nodes
        if node.op != "placeholder"
    ]
    return {"title": title, "text": text, "code": [[f"inputs: {', '.join(inputs)}", "", ""], *lines]}


def statement(node: Node) -> str:
    """Write a node as a statement, such as ``mm = aten.mm.default(view, permute)``."""
    arguments = ", ".join([*map(repr, node.args), *(f"{k}={v!r}" for k, v in node.kwargs.items())])
    if node.op == "output":
        return f"return {node.args[0]!r}"
    if node.op == "get_attr":
        return f"{node.name} = self.{node.target}"
    if node.target is operator.getitem:
        return f"{node.name} = {node.args[0]!r}[{node.args[1]!r}]"
    return f"{node.name} = {target_text(node.target)}({arguments})"


def target_text(target: object) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    module = getattr(target, "__module__", "") or ""
    name = getattr(target, "__name__", str(target))
    return name if module in ("", "builtins", "_operator") else f"{module}.{name}"


def pattern_of(node: Node, analysis: Analysis) -> str:
    facts = parts_of(analysis.facts.get(node))
    several = len(facts) > 1
    return " | ".join(
        f.pattern(rank_of(node, i if several else None)) for i, f in enumerate(facts) if f is not None
    )


def values(region: StreamedRegion) -> Iterator[list[Any]]:
    """Yield every value: name, pattern, kind, bytes, how it reads its operands, user's line."""
    analysis = region.analysis
    for node in analysis.facts:
        reads = [
            f"{e.operand.name} {e.role}{'' if e.reach == HERE else f' {e.reach}'}"
            for e in analysis.edges.get(node, ())
            if e.role is not Role.WHOLE
        ]
        size = bytes_of(value_of(node)) if is_tensor(node) else 0
        kind = str(analysis.kinds[node])
        yield [node.name, pattern_of(node, analysis), kind, size, ", ".join(reads), where_of(node)]
