"""``torch.compile(..., backend="streambp")``: from a Dynamo graph to a chain of streamed regions.

    Dynamo graph → inline checkpoint wrappers → find the token axis → split → for each distinct region: AOTAutograd → pipeline → Inductor

Every region is an autograd node of its own, so that the gradients of a layer's weights reach autograd (and its hooks) when the layer
is done. Equal regions share one trace, one analysis and one compilation.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from . import internals
from .config import Config
from .deferred import Deferred
from .passes.ir import CannotStream, Mark, Refusal, bytes_of, hint, is_tensor, shape_of, tensor_operands, value_of
from .passes.normalize import normalize
from .passes.split import Region, Traits, mutated, split
from .passes.spread import Spread
from .pipeline import StreamedRegion, outputs_of, stream, unit
from .report import NotStreamed, RegionReport, Report, StreamHint, mebibytes, warn_refused
from .runtime import Sizes

streambp_ops = torch.ops.streambp
MODE_SWITCHES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_log_api_usage_once")


def streambp(module: GraphModule, example_inputs: Sequence[object], *, mode: str | None = None, options=None) -> Callable:
    """The backend itself, found through the entry point ``torch_dynamo_backends``.

    Raises ValueError for an unknown option or a bad value, and `NotStreamed` under ``strict`` where a region cannot be streamed.
    """
    return Chain(module, example_inputs, Config.of(mode, options)).compiled()


SHORTEST_STREAMED = 8  # tokens; below, a graph for this very length is compiled whole, and nothing is lost


class TooShort(CannotStream):
    """A graph of a fixed, tiny length: nothing to stream, nothing to warn about."""


@dataclass(frozen=True)
class Axis:
    """The token axis of a model: its length, and the marks of every value of the Dynamo graph."""

    length: object
    marks: dict[Node, tuple[Mark, ...]]
    mixing: frozenset[Node]


def fake_of(node: Node):
    return node.meta.get("example_value", node.meta.get("val"))


def inline_checkpoints(module: GraphModule) -> GraphModule:
    """Replace activation-checkpoint wrappers by what they wrap: recomputation is ours."""
    while True:
        wrappers = [n for n in module.graph.nodes if n.target is torch.ops.higher_order.tag_activation_checkpoint]
        if not wrappers:
            module.recompile()
            return module
        for node in wrappers:
            inner = getattr(module, node.args[0].target)
            values: dict[Node, object] = dict(zip((n for n in inner.graph.nodes if n.op == "placeholder"), node.args[1:]))
            with module.graph.inserting_before(node):
                for n in inner.graph.nodes:
                    if n.op == "get_attr":
                        name = f"{node.args[0].target}_{n.target}".replace(".", "_")
                        setattr(module, name, getattr(inner, n.target))
                        values[n] = module.graph.get_attr(name)
                    elif n.op not in ("placeholder", "output"):
                        values[n] = module.graph.node_copy(n, lambda a: values[a])
                    if n.op != "placeholder" and n in values and isinstance(values[n], Node):
                        values[n].meta = dict(n.meta)
            result = outputs_of(inner)
            for user in list(node.users):
                user.replace_all_uses_with(values[result[user.args[1]]])
                module.graph.erase_node(user)
            module.graph.erase_node(node)


class Chain:
    """Compiles one Dynamo graph. The result is a function of the graph's inputs."""

    def __init__(self, module: GraphModule, example_inputs: Sequence[object], config: Config, report: Report | None = None):
        self.config = config
        self.module = inline_checkpoints(module)
        self.placeholders = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        self.fakes = [fake_of(n) if fake_of(n) is not None else v for n, v in zip(self.placeholders, example_inputs)]
        self.report = Report() if report is None else report

    def compiled(self) -> Callable:
        try:
            axis = find_axis(self.module, self.fakes)
        except Exception as error:  # as in CompiledRegion.stream: loud, whole, exact
            internals.log.debug("finding the token axis failed", exc_info=True)
            axis = None
            self.refuse(Refusal("graph", f"its tokens could not be traced: {type(error).__name__}: {str(error).splitlines()[0]}",
                                "Please report this with the model"), None)
        regions = split(self.module.graph, traits_of(self.module.graph, axis), is_switch) if axis else ()
        if not regions:
            regions = whole_graph(self.module.graph)
        postponed: dict[Node, Region] = {}
        if axis:
            if not internals.ends_in_graph_break(self.module):  # what follows a break is traced by Dynamo, which wants real tensors
                regions, postponed = postpone(regions, axis)
            self.hint_at_outputs(regions, axis)
        built: dict[str, CompiledRegion] = {}

        def compiled(region: Region) -> CompiledRegion:
            module, inputs = build_region(self.module, region)
            text = region_text(module, inputs, axis, region)
            if text not in built:
                built[text] = CompiledRegion(module, inputs, region, axis, self.config, self)
            return built[text]

        links = [(compiled(region), region) for region in regions]
        later = {node: (functools.partial(self.outside_tracing, compiled, region), region) for node, region in postponed.items()}
        self.report.add(self.module, [r.report for r, _ in links], axis.length if axis else None)
        internals.trace_artifact("streambp_report", lambda: str(self.report))
        return linked(links, later, self.placeholders, outputs_of(self.module))

    @staticmethod
    def outside_tracing(compiled: Callable, region: Region) -> Callable:
        """Compile a postponed region when it is first read, long after Dynamo has left."""
        with internals.tracing_of(internals.detect_fake_mode([fake_of(n) for n in region.inputs])):
            return compiled(region).call

    def hint_at_outputs(self, regions: Sequence[Region], axis: Axis) -> None:
        """Values of layers that the function returns stay alive at full length: say what they cost and how to be rid of them."""
        returned = set(next(n for n in self.module.graph.nodes if n.op == "output").all_input_nodes)
        kept = [n for r in regions[:-1] for n in r.outputs if n in returned and n in axis.marks]
        wide = [n for n in regions[-1].outputs if n in axis.marks and bytes_of(fake_of(n)) >= 2 * widest_input(regions[-1], axis)]
        if len(kept) > 1:
            cost = sum(bytes_of(fake_of(n)) for n in kept)
            self.hint(f"the compiled function returns {len(kept)} values of its layers, {mebibytes(cost)} that stay alive. If that is a "
                      "KV cache, pass use_cache=False; if hidden states, output_hidden_states=False")
        if wide:
            cost = sum(bytes_of(fake_of(n)) for n in wide)
            self.hint(f"logits leave the compiled function, {mebibytes(cost)} at full length. Compute the loss inside it, and the head "
                      "streams with the loss")

    def hint(self, text: str) -> None:
        self.report.notes.append(f"note: {text}.")
        warnings.warn(f"streambp: {text}.", StreamHint, stacklevel=2)

    def refuse(self, refusal: Refusal, cost: int | None) -> None:
        if self.config.strict:
            raise NotStreamed(str(refusal))
        warn_refused(refusal, cost)


def widest_input(region: Region, axis: Axis) -> int:
    return max((bytes_of(fake_of(n)) for n in region.inputs if n in axis.marks and fake_of(n).dtype.is_floating_point), default=1 << 62)


def postpone(regions: Sequence[Region], axis: Axis) -> tuple[list[Region], dict[Node, Region]]:
    """Take outputs that merely widen a small value (logits beside a loss) out of the last region; each gets a region of its own."""
    last = regions[-1]
    wide = [n for n in last.outputs if n in axis.marks and bytes_of(fake_of(n)) >= 2 * widest_input(last, axis)]
    if not wide or len(wide) == len(last.outputs):
        return list(regions), {}
    kept = tuple(n for n in last.outputs if n not in wide)
    return [*regions[:-1], narrowed(last, kept)], {n: narrowed(last, (n,)) for n in wide}


def narrowed(region: Region, outputs: tuple[Node, ...]) -> Region:
    """The part of a region that some of its outputs need."""
    inside, needed, stack = set(region.nodes), set(), list(outputs)
    while stack:
        node = stack.pop()
        if node in inside and node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
        stack += [n for n in inside - needed if mutated(n) in needed]
    nodes = tuple(n for n in region.nodes if n in needed)
    return Region(nodes, tuple(n for n in region.inputs if any(n in m.all_input_nodes for m in nodes)), outputs)


def is_switch(node: Node) -> bool:
    return getattr(node.target, "__name__", "") in MODE_SWITCHES


def whole_graph(graph: Graph) -> tuple[Region, ...]:
    nodes = tuple(n for n in graph.nodes if n.op not in ("placeholder", "output") and not is_switch(n))
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    returned = next(n for n in graph.nodes if n.op == "output").all_input_nodes
    return (Region(nodes, inputs, tuple(n for n in returned if n in inside)),)


def find_axis(module: GraphModule, fakes: Sequence[object]) -> Axis | None:
    """The dimension of the inputs along which tokens run: the one that reaches the rows of attention; else the widest.

    The whole forward is captured once and every candidate (a dimension of a data input) is spread over it; sizes are never compared.
    """
    captured_for: dict[Node, set[str]] = {}
    made: list[tuple[Node, int]] = []

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: Node):
            before, _ = internals.captured_after(None)
            result = super().run_node(n)
            captured_for[n] = set(internals.captured_after(before)[1])
            if isinstance(result, torch.Tensor) and n.op not in ("output",):
                made.append((n, result))
            return result

    results: list[Node] = []

    def run(*args):
        made.clear()
        Recorder(module).run(*args)
        results[:] = [n for n, _ in made]
        return [t for _, t in made]

    fake_mode = internals.detect_fake_mode(fakes)
    with fake_mode:
        captured = normalize(internals.capture(run, fakes))
    graph = captured.graph
    values = {n: v for n, v in zip(results, outputs_of(captured)) if isinstance(v, Node)}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    candidates = []
    for node, fake in zip(placeholders, fakes):
        if isinstance(fake, torch.Tensor) and not is_parameter(fake):
            candidates += [(node, d) for d, s in enumerate(fake.shape) if hint(s) > 1 and fake.dim() <= 3]
    found: list[tuple[int, int, int, Spread, object]] = []
    for node, dim in candidates:
        if any(dim in spread.marks.get((node, -1), {}) for *_, spread, _ in found):
            continue
        spread = Spread(graph, {node: (Mark(dim),)})
        mixers = sum(1 for n in graph.nodes if mixes(n, spread))
        width = sum(bytes_of(value_of(n)) for n in graph.nodes if is_tensor(n) and spread.of(n)
                    and value_of(n).dtype.is_floating_point)
        if width:
            found.append((mixers, width, shape_of(node)[dim], spread, value_of(node).shape[dim]))
    chosen = preferred(found)
    if chosen is None:
        return None
    *_, spread, length = chosen
    marks = {n: tuple(spread.of(v).values()) for n, v in values.items() if spread.of(v)}
    mixers = {n.meta.get("replaces", n.name) for n in graph.nodes if mixes(n, spread) or n in spread.missing and touches(n, spread)
              and is_tensor(n) and value_of(n).dtype.is_floating_point}
    mixing = frozenset(n for n, names in captured_for.items() if names & mixers)
    return Axis(length, marks, mixing)


def preferred(found: Sequence[tuple]) -> tuple | None:
    """Of (mixers, bytes, rows, …): the most mixers; then, of those that carry about as many bytes, the most rows.

    In a head without attention the batch carries the same values as the tokens do, and a few numbers per sequence besides.
    """
    most = max((f[0] for f in found), default=0)
    mixing = [f for f in found if f[0] == most]
    widest = max((f[1] for f in mixing), default=0)
    return max((f for f in mixing if 2 * f[1] >= widest), key=lambda f: f[2], default=None)


def is_parameter(fake: object) -> bool:
    """A weight, declared or not. Hidden states may be leaves that want gradients too, but they come as ``[B, T, d]``."""
    return isinstance(fake, torch.nn.Parameter) or getattr(fake, "_is_param", False) or (
        isinstance(fake, torch.Tensor) and fake.is_leaf and fake.requires_grad and fake.dtype.is_floating_point and fake.dim() != 3)


def touches(node: Node, spread: Spread) -> bool:
    return any(spread.of(a) for a in tensor_operands(node))


def mixes(node: Node, spread: Spread) -> bool:
    """Does this op let one token see another: attention over rows, a product that contracts keys, a scan along tokens?"""
    signature = spread.signatures.get(node)
    if signature is None or signature.reshape:
        return False
    operands = tensor_operands(node)
    if signature.rows is not None:
        return any(labels[d] == signature.rows for a, labels in zip(operands, signature.operands) for d in spread.of(a))
    if any(labels[d] in signature.reach for a, labels in zip(operands, signature.operands) for d in spread.of(a)):
        return value_of(node).dtype.is_floating_point
    pairs = [a for a in operands if len(spread.of(a)) == 2]
    return bool(pairs) and is_tensor(node) and len(spread.of(node)) == 1 and value_of(node).dtype.is_floating_point and len(operands) > 1


def traits_of(graph: Graph, axis: Axis | None) -> dict[Node, Traits]:
    found = {}
    for node in graph.nodes:
        fake = fake_of(node)
        tensor = isinstance(fake, torch.Tensor)
        plain = fake is None or isinstance(fake, (int, float, bool, torch.SymInt, torch.Size))
        size = bytes_of(fake) if tensor else 0 if plain else -1
        found[node] = Traits(
            size, tensor and fake.requires_grad, node in axis.marks, tensor and fake.dtype.is_floating_point and fake.dim() >= 2,
            node in axis.mixing)
    return found


def build_region(module: GraphModule, region: Region) -> tuple[GraphModule, list[object]]:
    """A module of its own for a region, with the modes (autocast, gradients) that held at its nodes replayed around them."""
    graph = Graph()
    values: dict[Node, Node] = {}
    inputs = []
    for i, node in enumerate(region.inputs):
        if node.op == "get_attr":
            continue
        values[node] = graph.placeholder(f"in_{i}")
        inputs.append(fresh(fake_of(node)))
        values[node].meta["example_value"] = inputs[-1]
    inside, active, replayed = set(region.nodes), [], []

    def replay(wanted: list[Node]) -> None:
        """Close what no longer holds, open what now does."""
        common = 0
        while common < min(len(wanted), len(replayed)) and replayed[common][0] is wanted[common]:
            common += 1
        while len(replayed) > common:
            switch, copy = replayed.pop()
            if "autocast" in switch.target.__name__:
                graph.call_function(torch.amp.autocast_mode._exit_autocast, (copy,))
            else:
                before = next((s.args[0] for s, _ in reversed(replayed) if "grad" in s.target.__name__), True)
                graph.call_function(internals.set_grad_enabled, (before,))
        for switch in wanted[common:]:
            replayed.append((switch, graph.call_function(switch.target, switch.args, switch.kwargs)))

    for node in module.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            active = [s for s in active if s.target.__name__ != name]
            if not node.args[0]:
                active.append(node)
        elif name == "_enter_autocast":
            active.append(node)
        elif name == "_exit_autocast":
            active = [s for s in active if s is not node.args[0]]
        elif node.op == "get_attr" and any(u in inside for u in node.users):
            values[node] = graph.get_attr(node.target)
        elif node in inside:
            if replayed or active:
                replay(active)
            values[node] = graph.node_copy(node, lambda a: values[a])
    replay([])
    graph.output(tuple(values[n] for n in region.outputs))
    return GraphModule(module, graph), inputs


def fresh(fake: object):
    """A leaf of the same description: a region's inputs have no history."""
    if not isinstance(fake, torch.Tensor):
        return fake
    if isinstance(fake, torch.nn.Parameter) or fake.is_leaf:
        return fake
    with fake.fake_mode, torch.no_grad():
        leaf = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
    return leaf.requires_grad_(fake.requires_grad)


def region_text(module: GraphModule, inputs: Sequence[object], axis: Axis | None, region: Region) -> str:
    """Everything that a region's compilation depends on; equal texts, equal artifacts."""
    index: dict[Node, str] = {}
    lines = []
    for node in module.graph.nodes:
        index[node] = f"%{len(index)}"
        args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: index[n])
        target = node.target if node.op in ("get_attr", "call_method") else torch.typename(node.target) + getattr(node.target, "__name__", str(node.target))
        lines.append(f"{index[node]} {node.op} {target if node.op != 'placeholder' else ''} {args if node.op != 'placeholder' else ''}")
    for value, node in zip(inputs, (n for n in region.inputs if n.op != "get_attr")):
        grad = isinstance(value, torch.Tensor) and value.requires_grad
        lines.append(f"{internals.describe(value)} {grad} {axis.marks.get(node) if axis else None}")
    lines.append(f"{[fake_of(n).requires_grad if isinstance(fake_of(n), torch.Tensor) else None for n in region.outputs]}")
    return "\n".join(lines)


class CompiledRegion:
    """One distinct region: traced by AOTAutograd, streamed if the passes can, compiled whole otherwise."""

    def __init__(self, module: GraphModule, inputs: list[object], region: Region, axis: Axis | None, config: Config, chain: Chain):
        self.module, self.region, self.axis, self.config, self.chain = module, region, axis, config, chain
        self.inputs = [n for n in region.inputs if n.op != "get_attr"]
        self.report = RegionReport(module)
        self.streamed: StreamedRegion | None = None
        fake_mode = internals.detect_fake_mode(inputs)
        if not region.nodes:
            self.call = None
            return
        with fake_mode:
            compile_ = internals.aot_autograd(
                fw_compiler=self.compile_forward, bw_compiler=self.compile_backward, inference_compiler=self.compile_inference,
                partition_fn=self.cut, decompositions=internals.decompositions(), keep_inference_input_mutations=True)
            self.call = compile_(module, inputs)

    def seeds(self) -> dict[int, tuple[Mark, ...]]:
        return {i: self.axis.marks[n] for i, n in enumerate(self.inputs) if n in self.axis.marks}

    # What AOTAutograd calls

    def cut(self, joint: GraphModule, joint_inputs, *, num_fwd_outputs: int, **kwargs):
        """AOTAutograd's partition function."""
        self.report.joint = joint
        try:
            self.streamed = self.stream(joint, num_fwd_outputs, len(joint_inputs[1]))
        except TooShort as short:
            self.report.refusal = short.refusal
            return internals.keep_inputs_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
        except CannotStream as refusal:
            self.report.refusal = refusal.refusal
            self.chain.refuse(refusal.refusal, self.whole_cost(joint))
            return internals.keep_inputs_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
        self.report.streamed = self.streamed
        return self.modules(num_fwd_outputs)

    def stream(self, graph_module: GraphModule, forward_outputs: int, tangents: int) -> StreamedRegion:
        if self.axis is None:
            raise CannotStream(Refusal("graph", "no token dimension was found", "Pass token ids or hidden states as tensors with a token dimension"))
        if isinstance(self.axis.length, int) and self.axis.length < SHORTEST_STREAMED:
            raise TooShort(Refusal("region", f"{self.axis.length} tokens are too few to stream", "Nothing is lost"))
        tangent_of = [i for i, n in enumerate(self.region.outputs) if isinstance(fake_of(n), torch.Tensor) and fake_of(n).requires_grad]
        if tangents and len(tangent_of) != tangents:
            raise CannotStream(Refusal("region", f"{tangents} tangents for {len(tangent_of)} differentiable outputs",
                                       "Do not change inputs in place across layers"))
        try:
            return stream(graph_module, self.axis.length, self.seeds(), forward_outputs, tangents, tangent_of,
                          self.config.chunk_size, functools.partial(internals.compile_body, mode=self.config.mode))
        except CannotStream:
            raise
        except Exception as error:  # a defect of ours must cost memory, loudly, and not the run
            internals.log.debug("streaming a region failed", exc_info=True)
            raise CannotStream(Refusal("region", f"streambp failed on it with {type(error).__name__}: {str(error).splitlines()[0]}",
                                       "Please report this with the model's layer")) from error

    def whole_cost(self, graph_module: GraphModule) -> int:
        return max((bytes_of(value_of(n)) for n in graph_module.graph.nodes if is_tensor(n) and n.op == "call_function"), default=0)

    def modules(self, forward_outputs: int) -> tuple[GraphModule, GraphModule]:
        """Forward and backward as graph modules of one call each, in the order of values that AOTAutograd expects."""
        region = self.streamed
        owner = GraphModule({}, Graph())
        outputs = outputs_of(region.joint)
        if region.fused:
            kept = [o for o in outputs[forward_outputs:]]
            saved = list(dict.fromkeys(o for o in kept if isinstance(o, Node) and o not in region.tangents))
            forward = one_call(owner, region.placeholders, run_forward(region, [*outputs[:forward_outputs], *saved]),
                               [*outputs[:forward_outputs], *saved])
            backward = one_call(owner, [*saved, *region.tangents], run_scaled(saved, kept, region.tangents[0]), kept)
            return forward, backward
        symbols = [n for n in region.saved if not is_tensor(n)]
        tensors = [n for n in region.saved if is_tensor(n)]
        forward = one_call(owner, region.placeholders, run_forward(region, [*outputs[:forward_outputs], *tensors, *symbols]),
                           [*outputs[:forward_outputs], *tensors, *symbols])
        given = [*symbols, *tensors, *region.tangents]
        backward = one_call(owner, given, run_backward(region, given), outputs[forward_outputs:])
        return forward, backward

    def compile_forward(self, module: GraphModule, inputs: Sequence[object]) -> Callable:
        return driver_of(module) or internals.compile_graph(module, inputs)

    def compile_backward(self, module: GraphModule, inputs: Sequence[object]) -> Callable:
        return driver_of(module) or internals.compile_graph(module, inputs, is_backward=True)

    def compile_inference(self, module: GraphModule, inputs: Sequence[object]) -> Callable:
        outputs = outputs_of(module)
        try:
            self.streamed = self.stream(module, len(outputs), 0)
        except TooShort as short:
            self.report.refusal = short.refusal
            return internals.compile_graph(module, inputs, is_inference=True)
        except CannotStream as refusal:
            self.report.refusal = refusal.refusal
            self.chain.refuse(refusal.refusal, self.whole_cost(module))
            return internals.compile_graph(module, inputs, is_inference=True)
        self.report.streamed = self.streamed
        return boxed(run_forward(self.streamed, outputs_of(self.streamed.joint)))


def one_call(owner: GraphModule, inputs, function: Callable, outputs) -> GraphModule:
    """A graph module that calls one function, with the meta values that AOTAutograd reads."""
    graph = Graph()
    placeholders = []
    for node in inputs:
        new = graph.placeholder(node.name)
        new.meta = dict(node.meta)
        placeholders.append(new)
    call = graph.call_function(function, tuple(placeholders))
    results = []
    for i, out in enumerate(outputs):
        if not isinstance(out, Node):
            results.append(out)
            continue
        item = graph.call_function(lambda values, index: values[index], (call, i))
        item.meta = dict(out.meta)
        results.append(item)
    graph.output(tuple(results))
    return GraphModule(owner, graph)


def driver_of(module: GraphModule) -> Callable | None:
    """The function behind a module made by `one_call`."""
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "streambp_driver", False):
            return boxed(node.target)
    return None


def boxed(function: Callable) -> Callable:
    """AOTAutograd's boxed convention: one list of arguments, which the callee empties."""

    def call(args: list) -> list:
        taken = list(args)
        args.clear()
        return function.take(taken)

    call._boxed_call = True
    return call


class Driver:
    """A named function over a list of arguments, for a graph module to call."""

    streambp_driver = True

    def __init__(self, name: str, take: Callable[[list], list]):
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__
        self.take = take

    def __call__(self, *args):
        return self.take(list(args))

    def __deepcopy__(self, _memo):
        return self


def run_forward(region: StreamedRegion, outputs: Sequence[object]) -> Driver:
    runner = region.forward.runner
    index = {o: i for i, o in enumerate(region.forward.program.outputs) if isinstance(o, Node)}
    placeholders = region.placeholders

    def take(args: list) -> list:
        inputs = dict(zip(placeholders, args))
        args.clear()
        passed = {n: inputs[n] for n in outputs if n in inputs}
        for tangent in region.tangents if region.fused else ():
            inputs[tangent] = unit(tangent)
        results = runner(inputs)
        return [results[index[o]] if o in index else passed.get(o, o) if isinstance(o, Node) else o for o in outputs]

    return Driver("streambp_forward", take)


def run_scaled(saved: Sequence[Node], outputs: Sequence[object], unscaled: Node) -> Driver:
    """The backward of a fused head: gradients for a unit tangent exist already; scale them unless the tangent is one."""

    def take(args: list) -> list:
        values, tangent = dict(zip(saved, args)), args[-1]
        args.clear()
        if tangent.device.type != "cpu" or tangent.item() != 1:
            for node in saved:
                values[node] = (values[node] * tangent).to(values[node].dtype)
        values[unscaled] = tangent
        gradients = [values[o] if isinstance(o, Node) else o for o in outputs]
        return gradients if internals.graph_is_kept() else sole_owners(gradients)

    return Driver("streambp_scale", take)


def run_backward(region: StreamedRegion, given: Sequence[Node]) -> Driver:
    runner = region.backward.runner
    tangents = region.tangents

    def take(args: list) -> list:
        inputs = dict(zip(given, args))
        args.clear()
        owned = frozenset(n for n in tangents if ours_alone(inputs[n]))
        return sole_owners(runner(inputs, owned))

    return Driver("streambp_backward", take)


# A gradient may be overwritten only if nobody else can see it. Gradients that a streamed backward made for the next one bear a mark;
# any tensor made of them by others (a sum, a view) does not. A hook that keeps one shows as an extra Python reference.

def sole_owners(gradients: list) -> list:
    """Gradients in storage of their own, marked as ours."""
    seen: set[int] = set()
    for i, gradient in enumerate(gradients):
        if not isinstance(gradient, torch.Tensor):
            continue
        if gradient.untyped_storage().data_ptr() in seen:
            gradients[i] = gradient = gradient.clone()
        seen.add(gradient.untyped_storage().data_ptr())
        gradient.streambp_owned = True
    return gradients


def ours_alone(gradient: object) -> bool:
    return getattr(gradient, "streambp_owned", False) and sys.getrefcount(gradient) <= plain_references()


@functools.cache
def plain_references() -> int:
    """Python references to an incoming gradient that no hook keeps: counted once, on a chain of two nodes built like ours."""
    counts = []

    def forward(args: list) -> list:
        return [args[0] * 2]

    def backward(args: list) -> list:
        inputs = dict(enumerate(args))
        args.clear()
        counts.append(counted(inputs[0]))
        gradient = inputs[0] * 2
        return sole_owners([gradient])

    def cut(joint, joint_inputs, *, num_fwd_outputs, **kwargs):
        primals = [n for n in joint.graph.nodes if n.op == "placeholder"]
        outputs = outputs_of(joint)
        owner = GraphModule({}, Graph())
        return (one_call(owner, primals[:1], Driver("calibration_forward", forward), outputs[:1]),
                one_call(owner, primals[1:], Driver("calibration_backward", backward), outputs[1:]))

    graph = Graph()
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 2)),))
    compiled = internals.aot_autograd(fw_compiler=lambda m, _: driver_of(m), bw_compiler=lambda m, _: driver_of(m), partition_fn=cut)(
        GraphModule({}, graph), [torch.ones(2, requires_grad=True)])
    x = torch.ones(2, requires_grad=True)
    with torch.enable_grad():
        (y,) = compiled(compiled(x)[0])
        y.sum().backward()
    return counts[-1]


def counted(gradient: object) -> int:
    return sys.getrefcount(gradient)


def linked(links, later, placeholders: Sequence[Node], outputs: Sequence[object]) -> Callable:
    """The chain as one function: run the regions in order, hand values on, drop each after its last reader.

    later  output → (what compiles its region, that region): returned as a tensor that computes itself when read
    """
    last: dict[Node, int] = {}
    for i, (_, region) in enumerate(links):
        for node in region.inputs:
            last[node] = i
    for node in (*outputs, *(n for _, region in later.values() for n in region.inputs)):
        if isinstance(node, Node):
            last[node] = len(links)
    dropped = [tuple(n for n, at in last.items() if at == i and n.op != "placeholder") for i in range(len(links))]
    ready: dict[Node, Callable] = {}

    def deferred(node: Node, values: dict) -> Deferred:
        compile_region, region = later[node]
        given = [values[n] for n in region.inputs if n.op != "get_attr"]
        grad = torch.is_grad_enabled()

        def compute() -> torch.Tensor:
            with torch.set_grad_enabled(grad):
                if node not in ready:
                    ready[node] = compile_region()
                return ready[node](*given)[0]

        fake = fake_of(node)
        sizes = Sizes({n: values[n] for n in region.inputs}, fake_of)
        return Deferred([sizes(s) for s in fake.shape], fake.dtype, fake.device, compute, grad and fake.requires_grad)

    def call(*args):
        plain_references()
        values: dict[Node, object] = dict(zip(placeholders, args))
        for (compiled, region), gone in zip(links, dropped):
            if compiled.call is not None:
                results = compiled.call(*(values[n] for n in region.inputs if n.op != "get_attr"))
                values.update(zip(region.outputs, results))
                del results
            for node in gone:
                values.pop(node, None)
        return tuple((deferred(o, values) if o in later else values[o]) if isinstance(o, Node) else o for o in outputs)

    return call
